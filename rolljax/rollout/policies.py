"""Who answers in an environment: the model through the sampler, or the environment's own scripted player."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rolljax.envs.pool import Episode
from rolljax.errors import DataError
from rolljax.model.tokenizer import Chat
from rolljax.sampler.client import Sampler
from rolljax.types import EVAL_STREAM, Completion, Key, Sampled, SamplingParams

EXPERT = -1
"""Policy version of tokens that no policy sampled."""
EVALUATION_FIRST = -1
"""Priority of requests of evaluations; those of training have their prompt index, which is 0 or more."""


class Policy(Protocol):
    """Whoever answers."""

    async def act(self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int) -> Completion:
        """The tokens that follow `prompt_ids [P]`, the whole stream of the episode so far."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerPolicy:
    """The model, through the sampler; randomness is addressed by run seed, key and turn. Requests of groups that began
    earlier are served first, those of evaluations before all."""

    sampler: Sampler
    params: SamplingParams
    seed: int
    may_ask: asyncio.Event | None = None
    """Requests wait until it is set."""
    domains: Mapping[str, SamplingParams] = dataclasses.field(default_factory=dict)
    """Sampling parameters of the domains of a mixture that differ from `params`, by domain."""

    async def act(self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int) -> Completion:
        address = (self.seed % 2**31, key.stream, key.prompt_index, key.sibling, turn)
        if self.may_ask:
            await self.may_ask.wait()
        priority = EVALUATION_FIRST if key.stream == EVAL_STREAM else key.prompt_index
        params = self.domains.get(episode.domain, self.params)
        return await self.sampler.generate(prompt_ids, params, address, priority=priority)


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedPolicy:
    """The environment's own answers, as tokens; their log-probs are 0 and their version is -1."""

    chat: Chat
    max_answer_tok: int
    """A longer answer is an error, and its trajectory lost."""
    pairs: bool = False
    """Every second sibling gives the rejected answer instead of the reference answer."""

    async def act(self, prompt_ids: np.ndarray, episode: Episode, key: Key, turn: int) -> Completion:
        text = await (episode.rejected() if self.pairs and key.sibling % 2 else episode.reference_answer())
        return expert(self.chat.answer_ids(text), self.max_answer_tok)


def expert(tokens: np.ndarray, max_answer_tok: int) -> Completion:
    """An answer that was given, not sampled.

    Raises:
      DataError: it is longer than an answer may be.
    """
    if len(tokens) > max_answer_tok:
        raise DataError(f"an answer of {len(tokens)} tokens, Recipe.max_answer_tok is {max_answer_tok}")
    n = len(tokens)
    return Completion(Sampled.of(tokens, np.zeros(n, np.float32), np.full(n, EXPERT, np.int32)), "stop")
