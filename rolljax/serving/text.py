"""Convert sampled tokens to the fields of OpenAI's answers: log-probs, token names, offsets."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

import numpy as np

from rolljax.model.vocabulary import Ids, Vocabulary
from rolljax.types import Sampled

UNLIKELY = -9999.0
"""Log-prob of a token outside the sampling distribution, as in OpenAI's API; JSON has no -inf."""
REPLACEMENT = "\ufffd"


def logprobs_of(sampled: Sampled, raw: bool) -> tuple[list[float], np.ndarray]:
    """Return log-probs `[T]` and those of the alternatives `[T, n]`.

    raw: of the model's own distribution instead of the sampled one.
    """
    logp, top = (
        (sampled.model_logp, sampled.top_model_logp) if raw else (sampled.sampler_logp, sampled.top_sampler_logp)
    )
    return np.maximum(logp, UNLIKELY).tolist(), np.maximum(top, UNLIKELY)


def chat_logprobs(
    vocabulary: Vocabulary, sampled: Sampled, raw: bool, name: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """Return `logprobs` of a chat choice. name: names a token; default: the vocabulary's."""
    logp, top = logprobs_of(sampled, raw)
    name = name or vocabulary.name

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": name(token), "bytes": list(vocabulary.raw(token)), "logprob": value}

    content = [
        entry(token, value) | {"top_logprobs": [entry(*pair) for pair in zip(ids, values, strict=True)]}
        for token, value, ids, values in zip(
            sampled.tokens.tolist(), logp, sampled.top_ids.tolist(), top.tolist(), strict=True
        )
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a completions choice, as its tokens come. `text_offset`: characters before the token.

    Args:
      prompt_ids `[P]`: the prompt before the answer.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_ids: np.ndarray) -> None:
        self._vocabulary, self._prompt_ids = vocabulary, prompt_ids
        self._begin(0, prompt_ids)

    def prompt(self, logp: np.ndarray, text: str) -> dict[str, Any]:
        """Return the entries of the prompt, echoed as `text`: the first token has no log-prob, and there are no
        alternatives."""
        values: list[float | None] = np.maximum(logp, UNLIKELY).tolist()
        ids = self._prompt_ids.tolist()
        self._begin(0, [])
        entries = self._entries(ids, [None, *values[1:]], [None] * len(ids))
        self._begin(len(text), self._prompt_ids)
        return entries

    def sampled(self, sampled: Sampled, raw: bool) -> dict[str, Any]:
        """Return the entries of sampled tokens: the alternatives of each, with the token itself among them."""
        logp, top = logprobs_of(sampled, raw)
        tokens, name = sampled.tokens.tolist(), self._vocabulary.name
        alternatives: list[dict[str, float] | None] = [
            dict(zip(map(name, ids), values, strict=True)) | {name(token): value}
            for token, value, ids, values in zip(tokens, logp, sampled.top_ids.tolist(), top.tolist(), strict=True)
        ]
        return self._entries(tokens, list(logp), alternatives)

    def _entries(
        self, tokens: list[int], logp: list[float | None], top: list[dict[str, float] | None]
    ) -> dict[str, Any]:
        offsets = [self._advance(self._decoder.bytes_of(t)) for t in tokens]
        names = [self._vocabulary.name(t) for t in tokens]
        return {"tokens": names, "token_logprobs": logp, "top_logprobs": top, "text_offset": offsets}

    def _begin(self, offset: int, behind: Ids) -> None:
        self._offset, self._decoder = offset, self._vocabulary.decoder(behind)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _advance(self, raw: bytes) -> int:
        """Return the offset of a token of these bytes; one that continues a character has the offset of its start."""
        unfinished = bool(self._utf8.getstate()[0])
        first = self._utf8.decode(raw[:1])
        broken_off = unfinished and first.startswith(REPLACEMENT)
        offset = self._offset + broken_off
        self._offset += len(first) + len(self._utf8.decode(raw[1:]))
        return offset
