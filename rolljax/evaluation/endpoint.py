"""Evaluation of a model on an OpenAI-compatible server (`chat_models.client`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rolljax.chat_models.base import ChatTooLong, seed_of
from rolljax.chat_models.client import Endpoint, EndpointConfig, the_only_model
from rolljax.chat_models.completion import Reply
from rolljax.concurrency.waits import Sleeper
from rolljax.envs.pool import Episode, Pool
from rolljax.errors import ConfigError, RolljaxError
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.rewards.scoring import Scoring
from rolljax.rollout.builder import TokenStream, TrajectoryBuilder
from rolljax.rollout.episodes import EpisodeCounts, EpisodeRollouts, RolloutConfig
from rolljax.rollout.start_states import Start
from rolljax.types import Completion, Message, Sampled


@dataclasses.dataclass(frozen=True, eq=False)
class EndpointRollouts(EpisodeRollouts):
    """Episodes played by a model on a server. Requests hold messages, not tokens: the server applies its chat
    template."""

    pool: Pool
    endpoint: Endpoint
    fields: Mapping[str, Any]
    """Fields added to every request."""
    seed: int
    """Seed of the run; every request gets its own seed, derived from its address."""
    cfg: RolloutConfig = RolloutConfig()
    thinking: bool = False
    """Whether to put a server's `reasoning_content` before its answer, between <think> and </think> (see
    `Benchmark`)."""
    tally: EpisodeCounts = dataclasses.field(default_factory=EpisodeCounts)
    scoring: Scoring | None = None

    async def run_episode(self, episode: Episode, builder: TrajectoryBuilder, start: Start | None) -> None:
        assert start is None
        said, record, key = list(episode.initial_messages), TokenRecord(), builder.key
        for turn in range(self.pool.spec.max_turns):
            seed = seed_of(f"{self.seed}/{key.stream}/{key.prompt_index}/{key.sibling}/{turn}")
            try:
                reply = await self.endpoint.chat(said, {**self.fields, "seed": seed})
            except ChatTooLong as e:
                builder.truncate("context", str(e))
                return
            if self.thinking and reply.thinking:
                reply = dataclasses.replace(reply, text=f"<think>{reply.thinking}</think>{reply.text}")
            answer = record.add(reply)
            with builder.waiting_for_env():
                result = self.checked_form(reply.text, await episode.step(reply.text))
            builder.add(record.stream, answer, reply.text, result, 1.0)
            builder.metrics["endpoint_tok"] = builder.metrics.get("endpoint_tok", 0.0) + reply.tokens
            if self.ended(builder, answer, result):
                return
            said += [Message("assistant", reply.text), *result.messages]
        builder.truncate("turns", f"{self.pool.spec.max_turns} turns are over")


class TokenRecord:
    """Return the token stream of an episode if the server sends it; else empty."""

    def __init__(self) -> None:
        self.stream = TokenStream(np.zeros(0, np.int32))
        self._so_far: tuple[int, ...] = ()

    def add(self, reply: Reply) -> Completion:
        """Return the answer as a completion; `stream` then holds the new part before it."""
        before, prompt = self._so_far, reply.prompt_ids
        goes_on = prompt[: len(before)] == before
        self.stream.new_ids = np.array(prompt[len(before) :] if goes_on else prompt, np.int32)
        self.stream.restarted = bool(before) and not goes_on
        self._so_far = prompt + reply.token_ids
        tokens, num = np.array(reply.token_ids, np.int32), len(reply.token_ids)
        logp = np.array(reply.sampler_logp or [0.0] * num, np.float32)
        sampled = Sampled.of(tokens, logp, np.zeros(num, np.int32))
        return Completion(sampled, reply.finish_reason, sample_s=reply.seconds)


class EndpointModel:
    """A model on an OpenAI-compatible server.

    Args:
      key: bearer token. It is kept nowhere.
    """

    version = 0

    def __init__(self, cfg: EndpointConfig, key: str = "") -> None:
        cfg = the_only_model(cfg, key)
        self.endpoint = Endpoint(cfg, key)
        self.name = f"{cfg.model} at {cfg.base}"
        request = dict(cfg.request)
        self.identity: dict[str, Any] = {"kind": "endpoint", "url": cfg.base, "model": cfg.model, "request": request}
        self.identity |= {"completions": True} if cfg.completions else {}

    def __enter__(self) -> EndpointModel:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def rollouts(
        self, benchmark: Benchmark, pool: Pool, attempts: Attempts, scoring: Scoring | None = None
    ) -> EpisodeRollouts:
        if benchmark.agent is not None:
            raise ConfigError("talks to a model of this process", setting="Recipe.agent", remedy="name the --model")
        fields: dict[str, Any] = {"temperature": attempts.temperature, "max_tokens": benchmark.max_answer_tok}
        unusual = {"top_p": (attempts.top_p, 1.0), "top_k": (attempts.top_k, 0), "min_p": (attempts.min_p, 0.0)}
        fields |= {name: value for name, (value, neutral) in unusual.items() if value != neutral}
        thinking = benchmark.thinking
        return EndpointRollouts(
            pool, self.endpoint, fields, attempts.seed, benchmark.rollout, thinking, scoring=scoring
        )

    def counts(self) -> Mapping[str, int]:
        return self.endpoint.counts()

    def fatal(self) -> RolljaxError | None:
        return self.endpoint.fatal

    def inboxes(self) -> tuple[Sleeper, ...]:
        return ()

    async def close(self) -> None:
        await self.endpoint.close()
