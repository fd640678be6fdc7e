"""A model in memory that answers: `rolljax.load(...).generate(...)`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rolljax.concurrency.event_loop import EventLoop, Stopped
from rolljax.errors import ConfigError
from rolljax.library.separate_thread import run_apart
from rolljax.sampler.client import Sampler
from rolljax.types import Message, SamplingParams

if TYPE_CHECKING:
    from rolljax.chat_models.base import ChatModel
    from rolljax.model.decoder import Params
    from rolljax.sampler.engine import Engine
    from rolljax.serving.schema import ServedModel

Prompt = str | Sequence[Mapping[str, str] | Message]
"""A text, or a conversation: messages with `role` and `content`."""
DEADLINE_S = 3600.0
"""Longest that one call of `generate` may take."""


@dataclasses.dataclass(frozen=True)
class ModelAnswer:
    """The model's answer to one prompt; `str(answer)` is its text."""

    text: str
    tokens: np.ndarray = dataclasses.field(repr=False)
    """Sampled tokens, `[T]`, including the token that ended the answer."""
    logprobs: np.ndarray = dataclasses.field(repr=False)
    """Log-probs of the sampled tokens under the sampling distribution, `[T]`."""
    finish_reason: str
    """`stop`, or `length` if a limit cut the answer."""

    def __str__(self) -> str:
        return self.text


class LoadedModel:
    """A model with its tokenizer and an engine that samples from it. Use it as a context manager, or `close` it: it
    holds device memory and a thread.

    Args:
      engine, params, version, served: the result of `rolljax.serve.load`.
    """

    def __init__(self, engine: Engine, params: Params, version: int, served: ServedModel) -> None:
        self.name, self.version = served.name, version
        self._served = served
        self._sampler = Sampler(engine, params, version, vocabulary=served.vocabulary, longest_prompt=0)
        self._draws = itertools.count()
        self._closed = False

    def __repr__(self) -> str:
        return f"LoadedModel({self.name!r}, context of {self._served.max_context} tokens)"

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as `transformers` has it."""
        return self._served.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        raw: bool = False,
    ) -> list[ModelAnswer]:
        """Return an answer for each prompt, in their order.

        Prompts of one call are sampled together, so batch them for speed. Duplicate prompts are sampled independently.

        Args:
          prompts: one or several. A text is rendered as a user message by the chat template, if there is one.
          max_tokens: of an answer. temperature: 0 is greedy. top_p, top_k, stop: see `SamplingParams`.
          seed: equal seeds give equal answers; None: new ones with each call.
          raw: texts are continued as they are, without the chat template.

        Raises:
          SamplerError: a prompt leaves no room in the context. KeyboardInterrupt: it was interrupted.
        """
        if self._closed:
            raise ConfigError("is closed", setting="LoadedModel", remedy="load it again")
        each = [prompts] if _is_one(prompts) else list(prompts)
        ids = [self._prompt_ids(prompt, raw) for prompt in each]  # type: ignore[arg-type]
        params = SamplingParams(temperature, max_tokens, self._served.stop_ids, tuple(stop), top_k, top_p)
        stream = next(self._draws) if seed is None else seed

        async def all_of_them(loop: EventLoop) -> list[ModelAnswer]:
            waiting = asyncio.gather(*(self._answer(prompt, params, (stream, i)) for i, prompt in enumerate(ids)))
            return await loop.within(waiting, "the answers", DEADLINE_S)

        def work(told_to_stop: Any) -> list[ModelAnswer]:
            with contextlib.closing(EventLoop(told_to_stop)) as loop:
                return loop.run(all_of_them(loop))

        try:
            return run_apart(work)
        except Stopped:
            raise KeyboardInterrupt from None

    def chat_model(self) -> ChatModel:
        """Return this model as a chat model, for judges and data pipelines. It is called from an event loop, and treats
        a seed as `generate` does; closing it leaves this model open.

        Raises:
          ConfigError: there is no chat template.
        """
        from rolljax.chat_models.local import SamplerChat

        if self._served.chat is None:
            raise ConfigError("has no chat template", setting="LoadedModel", remedy="load a model that has one")
        return SamplerChat(self._sampler, self._served.chat, self._served.max_context, lambda seed: (seed, 0))

    async def _answer(self, prompt: np.ndarray, params: SamplingParams, address: tuple[int, int]) -> ModelAnswer:
        done = await self._sampler.generate(prompt, params, address)
        text = self._served.vocabulary.text(done.tokens, prompt)
        return ModelAnswer(text, done.tokens, done.sampler_logp, done.finish_reason)

    def _prompt_ids(self, prompt: Prompt, raw: bool) -> np.ndarray:
        """Return the ids `[P]` of a text or a conversation."""
        chat = self._served.chat
        if isinstance(prompt, str) and (raw or chat is None):
            return np.array(self._served.vocabulary.encode(prompt, special=True), np.int32)
        if chat is None:
            raise ConfigError(
                "is a conversation, and this model has no chat template", setting="prompts", remedy="give it as a text"
            )
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return chat.prompt_ids([m if isinstance(m, Message) else Message(m["role"], m["content"]) for m in said])

    def close(self) -> None:
        """Free the weights, the cache and the thread."""
        self._closed = True
        self._sampler.close()


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether the argument is one prompt: a text, or messages."""
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], (Mapping, Message)))
