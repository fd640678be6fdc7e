"""Drafts: what followed the last tokens of a sequence when they last occurred. Speculation without a draft model.

Siblings of a group, earlier answers to the same prompt, and the prompt itself repeat each other for long stretches
(prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding; DAS, arXiv:2511.13841). All recent texts
lie in one ring of tokens. For every length in `MATCHES` a table leads from the hash of that many tokens to the place
where they last ended. The longest match decides. A match of 32 tokens mostly lies in the same prompt, so texts need no
names. All of it is arrays: a call costs about the same for one sequence as for fifty.
"""

from __future__ import annotations

import dataclasses

import numpy as np

MATCHES = (4, 8, 16, 32)
"""Numbers of last tokens that are looked up. Each is twice the one before, for `_hashes`."""
CONTEXT = MATCHES[-1]
"""Tokens in front of a new part of a text, so that its first tokens are found, too."""
_BITS = 20
ROOM = 1 << _BITS
"""Tokens in the ring, and entries of each table."""
_NONE = -1
_MULTIPLIER = 0x9E3779B97F4A7C15
_MAX_LEFT = 255


def context(tokens: np.ndarray) -> np.ndarray:
    """Return the last `CONTEXT` tokens of a text, with -1 before its beginning."""
    last = tokens[-CONTEXT:]
    return np.concatenate([np.full(CONTEXT - len(last), _NONE, np.int32), last])


@dataclasses.dataclass(frozen=True)
class Drafts:
    """Guesses of the next tokens of R sequences."""

    tokens: np.ndarray
    """`[R, most]`."""
    count: np.ndarray
    """`[R]` how many of them hold; 0: nothing fits."""
    match: np.ndarray
    """`[R]` index in `MATCHES` of the tokens that they follow."""


class DraftIndex:
    """An index of recent texts.

    Args:
      most: tokens of a draft.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._ring = np.full(ROOM, _NONE, np.int32)
        self._left = np.zeros(ROOM, np.uint8)
        """For each place, the tokens that follow it in its text, at most `_MAX_LEFT`."""
        self._places = np.zeros((len(MATCHES), ROOM), np.int32)
        self._end = 0
        self.accepted = np.full(len(MATCHES), 0.5)
        """Share of drafted tokens that were right lately, by the length of the match."""

    def add(self, text: np.ndarray) -> None:
        """Add a text, or a new part of one.

        Args:
          text: `[n]`, of which the first `CONTEXT` tokens only lead to the others (see `context`).
        """
        text = text[-ROOM:]
        n = len(text)
        if n <= CONTEXT:
            return
        places = (self._end + np.arange(n)) % ROOM
        self._end = (self._end + n) % ROOM
        self._ring[places] = text
        self._left[places] = np.minimum(np.arange(n - 1, -1, -1), _MAX_LEFT)
        leading = places[CONTEXT - 1 : -1]  # all that something follows; of equal hashes the newest stays
        for table, hashes in zip(self._places, _hashes(text), strict=True):
            table[hashes[CONTEXT - 1 : -1]] = leading

    def find(self, tails_RC: np.ndarray) -> Drafts:
        """Find a draft for each of R sequences from their last tokens (`context` of each)."""
        R = len(tails_RC)
        count_R, match_R, place_R = np.zeros(R, np.int32), np.zeros(R, np.int32), np.zeros(R, np.int64)
        for i, (length, hashes) in enumerate(zip(MATCHES, _hashes(tails_RC), strict=True)):
            places = self._places[i, hashes[:, -1]]
            before = self._ring[(places[:, None] - np.arange(length - 1, -1, -1)) % ROOM]
            left = np.minimum(self._left[places], self.most)
            found = (left > 0) & (before == tails_RC[:, -length:]).all(1)
            count_R[found], match_R[found], place_R[found] = left[found], i, places[found]
        following = self._ring[(place_R[:, None] + 1 + np.arange(self.most)) % ROOM]
        return Drafts(np.maximum(following, 0), count_R, match_R)

    def propose(self, tails_RC: np.ndarray, room_R: np.ndarray, cost: float) -> Drafts | None:
        """Return drafts for R sequences; None if they promise less than a step that checks them costs.

        Args:
          tails_RC: `context` of each. room_R: maximum tokens of each draft.
          cost: decode steps that take the time of a step that checks drafts.
        """
        found = self.find(tails_RC)
        found = dataclasses.replace(found, count=np.minimum(found.count, room_R))
        if 1 + (found.count * self.accepted[found.match]).mean() >= cost:
            return found
        if found.count.any():  # what is not tried is not learned: texts may become more alike
            self.accepted += 0.002 * (1 - self.accepted)
        return None

    def learn(self, drafts: Drafts, sampled_R: np.ndarray) -> int:
        """Note how good drafts were; return the number of their tokens that were sampled.

        sampled_R: tokens that each sequence got.
        """
        right = np.minimum(sampled_R - 1, drafts.count)
        for match in range(len(MATCHES)):
            tried = (drafts.match == match) & (drafts.count > 0)
            if tried.any():
                share = right[tried].sum() / drafts.count[tried].sum()
                self.accepted[match] += 0.1 * (share - self.accepted[match])
        return int(right[drafts.count > 0].sum())


def _hashes(tokens: np.ndarray) -> list[np.ndarray]:
    """Return for each length of `MATCHES` the hash of that many tokens up to each one, below `ROOM`; where fewer
    precede, it is of these."""
    value: np.ndarray = (tokens.astype(np.int64) + 2).astype(np.uint64) * np.uint64(_MULTIPLIER)
    value ^= value >> np.uint64(31)
    found, length = [], 1
    while length < MATCHES[-1]:
        shifted = np.zeros_like(value)
        shifted[..., length:] = value[..., :-length]
        value = value + shifted * np.uint64(pow(_MULTIPLIER, length, 1 << 64))
        length *= 2
        if length in MATCHES:
            found.append((value * np.uint64(_MULTIPLIER) >> np.uint64(64 - _BITS)).astype(np.int64))
    return found
