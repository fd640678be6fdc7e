"""From sampled tokens to what OpenAI's answers hold: text that never takes anything back, log-probs, token names.

Text of a stream is shown only when no later token can change it: an unfinished UTF-8 character and what might become a
stop text are held back. All pieces together are the text of the answer that is not streamed. (One exception: tokenizers
that fall back to bytes, as Llama 2's, turn runs of bytes that are no UTF-8 into U+FFFD, also what was shown of them.)
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolljax.types import Sampled

UNLIKELY = -9999.0
"""OpenAI's log-prob for what JSON cannot write: a token that was cut from the law."""
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one growing answer, up to the first stop text.

    Args:
      decode: text of token ids. stops: texts the answer ends before.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._longest = max(map(len, stops), default=0)
        self._ids: list[int] = []
        self._start = self._read = (
            0  # ids[start:read] are context, so that decoding ids[start:] reads as the whole does
        )
        self._known = 0  # characters of that window that are in `_text`
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def shown(self) -> str:
        """All the text that was returned so far."""
        return self._text[: self._shown]

    def add(self, ids: Sequence[int], *, last: bool) -> str:
        """Take more tokens; returns the text that can be shown now, all of it if these are the last."""
        if self.stopped:
            return ""
        searched = max(0, len(self._text) - self._longest + 1)
        self._ids += ids
        self._extend(last)
        found = [i for i in (self._text.find(s, searched) for s in self._stops) if i >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(self._text) - (0 if last else self._held())
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _extend(self, last: bool) -> None:
        """Add to `_text` what later tokens cannot change."""
        if last:
            whole = self._decode(self._ids)
            if whole.startswith(self._text):
                self._text = whole
                return
        window = self._decode(self._ids[self._start :])
        sure = window if last else window.rstrip(REPLACEMENT)
        self._text += sure[self._known :]
        self._known = max(self._known, len(sure))
        if len(sure) == len(window):
            self._start, self._read = self._read, len(self._ids)
            self._known = len(self._decode(self._ids[self._start :]))

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        for n in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(len(s) > n and self._text.endswith(s[:n]) for s in self._stops):
                return n
        return 0


class Vocabulary:
    """Names and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import decoders, pre_tokenizers

        self._tokenizer = tokenizer
        self._specials = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        core = getattr(tokenizer, "backend_tokenizer", None)
        self._of_char: dict[str, int] = {}
        if core is not None and isinstance(core.decoder, decoders.ByteLevel):
            # GPT-2's table: printable bytes stand for themselves, the others follow from U+0100 on
            printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
            others = [b for b in range(256) if b not in printable]
            self._of_char = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
            assert set(self._of_char) == set(pre_tokenizers.ByteLevel.alphabet())

    @functools.lru_cache(maxsize=65536)  # noqa: B019  # one vocabulary lives as long as its server
    def raw(self, token: int) -> bytes:
        """What a token adds to the UTF-8 text; special tokens are spelled out, unknown ids are empty."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._of_char and all(c in self._of_char for c in piece) and token not in self._specials:
            return bytes(self._of_char[c] for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    @functools.lru_cache(maxsize=65536)  # noqa: B019
    def name(self, token: int) -> str:
        """A token's text; `bytes:\\xe2\\x82` where it is part of a character, `token_id:N` where it has none."""
        raw = self.raw(token)
        try:
            return raw.decode() if raw else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def shown(self, token: int) -> bytes:
        """Bytes of a token in texts, where special tokens are left out."""
        return b"" if token in self._specials else self.raw(token)


def laws(sampled: Sampled, raw: bool) -> tuple[list[float], np.ndarray]:
    """Log-probs `[T]` and those of the alternatives `[T, n]`, of the model's own law or of the one sampled from."""
    logp, top = (
        (sampled.model_logp, sampled.top_model_logp) if raw else (sampled.sampler_logp, sampled.top_sampler_logp)
    )
    return np.maximum(logp, UNLIKELY).tolist(), np.maximum(top, UNLIKELY)


def chat_logprobs(vocabulary: Vocabulary, sampled: Sampled, raw: bool) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    logp, top = laws(sampled, raw)

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": vocabulary.name(token), "bytes": list(vocabulary.raw(token)), "logprob": value}

    content = [
        entry(token, value) | {"top_logprobs": [entry(*pair) for pair in zip(ids, values, strict=True)]}
        for token, value, ids, values in zip(
            sampled.tokens.tolist(), logp, sampled.top_ids.tolist(), top.tolist(), strict=True
        )
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a completions choice, piece by piece. `text_offset`: characters before the token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, ids: np.ndarray, logp: np.ndarray) -> dict[str, Any]:
        """Entries of an echoed prompt: the first token has no log-prob, and there are no alternatives."""
        values: list[float | None] = np.maximum(logp, UNLIKELY).tolist()
        return self._entries(ids.tolist(), [None, *values[1:]], [None] * len(ids))

    def sampled(self, sampled: Sampled, raw: bool) -> dict[str, Any]:
        """Entries of sampled tokens: the alternatives of each, and the token itself among them."""
        logp, top = laws(sampled, raw)
        tokens, name = sampled.tokens.tolist(), self._vocabulary.name
        alternatives: list[dict[str, float] | None] = [
            dict(zip(map(name, ids), values, strict=True)) | {name(token): value}
            for token, value, ids, values in zip(tokens, logp, sampled.top_ids.tolist(), top.tolist(), strict=True)
        ]
        return self._entries(tokens, list(logp), alternatives)

    def _entries(
        self, tokens: list[int], logp: list[float | None], top: list[dict[str, float] | None]
    ) -> dict[str, Any]:
        offsets = [self._advance(self._vocabulary.shown(t)) for t in tokens]
        names = [self._vocabulary.name(t) for t in tokens]
        return {"tokens": names, "token_logprobs": logp, "top_logprobs": top, "text_offset": offsets}

    def _advance(self, raw: bytes) -> int:
        """Offset of a token of these bytes. One that goes on with a character stands where the character begins."""
        unfinished = bool(self._decoder.getstate()[0])
        first = self._decoder.decode(raw[:1])
        broken_off = unfinished and first.startswith(REPLACEMENT)
        offset = self._offset + broken_off
        self._offset += len(first) + len(self._decoder.decode(raw[1:]))
        return offset
