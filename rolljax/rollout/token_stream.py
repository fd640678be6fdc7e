"""What the model sees of an episode: one stream of tokens, which grows by answers and observations."""

from __future__ import annotations

import numpy as np


class TokenStream:
    """The token stream of an episode.

    ids: all tokens of the model's context, int32 `[P]`. new_ids: its last tokens, which no turn has on record yet.
    restarted: the stream has just restarted.
    """

    def __init__(self, opening_ids: np.ndarray) -> None:
        self.ids = self.new_ids = self._opening = opening_ids
        self._exchanges: list[np.ndarray] = []
        self.restarted, self.restarts = False, 0

    def grow(self, answer: np.ndarray, observation: np.ndarray) -> None:
        """Append an answer and the observation that follows it."""
        self._exchanges.append(np.concatenate([answer, observation]))
        self.ids, self.new_ids = np.concatenate([self.ids, answer, observation]), observation
        self.restarted = False

    def drop_oldest(self, limit: int) -> None:
        """Restart with the opening and as many of the last exchanges, at least one, as `limit` tokens hold."""
        if len(self._exchanges) < 2:
            return
        room, kept = limit - len(self._opening), self._exchanges
        while len(kept) > 1 and sum(map(len, kept)) > room:
            kept = kept[1:]
        if len(kept) < len(self._exchanges):
            self._exchanges = kept
            self.ids = self.new_ids = np.concatenate([self._opening, *kept])
            self.restarted, self.restarts = True, self.restarts + 1
