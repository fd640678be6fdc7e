"""A chat model of this process: a Hugging Face folder with rolljax's own sampler, without a server in between.

The same request gets the same answer as from `python -m rolljax.serve` with that folder: the template, the limits and
the randomness of a seed are the same.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModelConfig, ChatTooLong
from rolljax.envs.text import clean
from rolljax.errors import ConfigError, InfraError, SamplerError
from rolljax.model import hf
from rolljax.model.axes import MESH_AXES, PARAM_RULES, SLOT_AXES, spec
from rolljax.model.decoder import DecoderConfig, Dtype, Model, Params
from rolljax.model.files import folder_digest
from rolljax.model.folder import folder_remedy
from rolljax.model.tokenizer import Chat, load_tokenizer
from rolljax.sampler.client import Sampler, SamplerClient
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.types import Message, SamplingParams

Address = tuple[int, ...]
WHOLE = {**PARAM_RULES, "embed": (), "expert_embed": ()}
"""Sharding rules of a sampler's weights: full on every batch shard, except for experts."""


@dataclasses.dataclass(frozen=True)
class LocalModel(ChatModelConfig):
    """A chat model in this process. Equal settings share one: it is loaded when the first opens it, and freed when the
    last has closed it."""

    path: str
    """A Hugging Face folder with a chat template, or a run folder: then its result, `hf/`."""
    sampler: SamplerConfig = SamplerConfig(slots=32, max_context=2048, prefix_match="any")
    """Slots, context and programs of its engine."""
    dtype: Dtype | None = None
    """Compute dtype; None: float32 on CPU, otherwise bfloat16."""
    devices: tuple[int, ...] = ()
    """Numbers of this process's devices to use; empty: all of them, next to anything else on them."""

    @property
    def folder(self) -> Path:
        """Return where the weights are.

        Raises:
          ConfigError: there are none.
        """
        inner = Path(self.path) / "hf"
        folder = inner if (inner / "config.json").is_file() else Path(self.path)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                "is neither a Hugging Face folder nor a run folder with a result",
                setting="LocalModel.path",
                value=self.path,
                remedy=folder_remedy(self.path),
            )
        return folder

    @property
    def identity(self) -> str:
        return f"{self.folder.resolve().name} {folder_digest(self.folder)}"

    def check(self) -> None:
        self.check_shape(hf.read_config(self.folder))
        self.mesh()

    def open(self) -> LocalChat:
        return LocalChat(self)

    def mesh(self) -> Mesh:
        """Return the mesh over which the engine splits weights and slots.

        Raises:
          ConfigError: there is no such device, or they do not divide.
        """
        there = jax.local_devices()
        if wrong := [i for i in self.devices if not 0 <= i < len(there)] or len(set(self.devices)) < len(self.devices):
            raise ConfigError(
                f"names devices that are not there, or one twice ({wrong})",
                setting="LocalModel.devices",
                value=self.devices,
                remedy=f"numbers from 0 to {len(there) - 1}",
            )
        own = [there[i] for i in self.devices] or there
        mesh = self.sampler.mesh(Mesh(np.array(own).reshape(-1, *[1] * (len(MESH_AXES) - 1)), MESH_AXES), own)
        self.sampler.check_shards(int(np.prod([mesh.shape[axis] for axis in SLOT_AXES])))
        return mesh

    def check_shape(self, cfg: DecoderConfig) -> None:
        """Raise `ConfigError` for a context that the model does not have."""
        if self.sampler.max_context > cfg.max_position:
            raise ConfigError(
                f"is more than the model's {cfg.max_position} positions",
                setting="SamplerConfig.max_context",
                value=self.sampler.max_context,
                remedy=f"at most {cfg.max_position}",
            )


class _Loaded:
    """Weights, tokenizer and sampler of a folder, and the number of its holders."""

    def __init__(self, cfg: LocalModel) -> None:
        mesh, folder = cfg.mesh(), cfg.folder
        shape, self.holders = hf.read_config(folder), 0
        cfg.check_shape(shape)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        dtype: Dtype = cfg.dtype or ("float32" if on_cpu else "bfloat16")
        model = Model(shape, dtype, int8_sampler=cfg.sampler.quantization == "int8")
        self.chat = Chat(load_tokenizer(str(folder)))
        engine = Engine(model, cfg.sampler, mesh, SLOT_AXES)
        params = hf.load(folder, model, _shardings(model, mesh), computed=True)
        self.sampler = Sampler(engine, model.sampled(params), 0, vocabulary=self.chat.vocabulary, longest_prompt=0)


def _shardings(model: Model, mesh: Mesh) -> Params:
    return jax.tree.map(
        lambda names: NamedSharding(mesh, spec(names, WHOLE, mesh)),
        model.axes(),
        is_leaf=lambda x: isinstance(x, tuple),
    )


_lock = threading.Lock()
_loaded: dict[LocalModel, _Loaded] = {}


def request_address(seed: int) -> Address:
    """Return the noise address that a server uses for a request with this seed (`serving.generation`)."""
    seed %= 2**62
    return (1, seed >> 31, seed & (2**31 - 1), 0)


class SamplerChat:
    """A chat model on an open sampler; the opener of the sampler closes it. It may be called from any event loop.

    Args:
      chat: tokenizer and chat template. max_context: most tokens of prompt and answer. address: makes the noise address
        from the seed of a question.
    """

    def __init__(
        self, sampler: SamplerClient, chat: Chat, max_context: int, address: Callable[[int], Address] = request_address
    ) -> None:
        self._sampler: SamplerClient | None = sampler
        self._chat, self._max_context, self._address = chat, max_context, address
        self._counts: collections.Counter[str] = collections.Counter()

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """See `ChatModel.ask`."""
        sampler = self._sampler
        if sampler is None:
            raise InfraError("the chat model is closed", stage="chat")
        self._counts["requests"] += 1
        prompt = await asyncio.to_thread(self._prompt_ids, messages)
        params = SamplingParams(how.temperature, min(how.max_tok, self._max_context), self._chat.stop_ids)
        try:
            done = await sampler.generate(prompt, params, self._address(how.seed))
        except SamplerError as e:
            self._counts["sampler"] += 1
            raise InfraError(str(e), stage="chat") from e
        self._counts["answers"] += 1
        text = clean(self._chat.text(done.tokens, prompt))
        return ChatAnswer(text, "stop" if done.finish_reason == "stop" else "length", len(done.tokens))

    def _prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of a conversation with the header of the model's answer.

        Raises:
          ChatTooLong: the messages leave no room for an answer. InfraError: the chat template refuses the conversation.
        """
        context = self._max_context
        if self._chat.vocabulary.exceeds("".join(m.content for m in messages), context):
            raise ChatTooLong(f"more than the {context} tokens of the context")
        try:
            ids = self._chat.conversation_ids([{"role": m.role, "content": m.content} for m in messages])
        except ConfigError as e:
            raise InfraError(f"the chat template refuses the conversation: {e}", stage="chat") from e
        if not 0 < len(ids) < context:
            raise ChatTooLong(f"{len(ids)} tokens in a context of {context}")
        return ids

    def counts(self) -> Mapping[str, int]:
        """Return the number of requests, answers, and refusals of the sampler."""
        return self._counts

    async def close(self) -> None:
        """Release the sampler."""
        self._sampler = None


class LocalChat(SamplerChat):
    """An open chat model of this process; models with equal settings share their weights."""

    def __init__(self, cfg: LocalModel) -> None:
        self.cfg = cfg
        with _lock:
            if cfg not in _loaded:
                _loaded[cfg] = _Loaded(cfg)
            self._model: _Loaded | None = _loaded[cfg]
            self._model.holders += 1
        super().__init__(self._model.sampler, self._model.chat, cfg.sampler.max_context)

    async def close(self) -> None:
        """Release the weights; the last holder frees them."""
        await super().close()
        model, self._model = self._model, None
        if model is None:
            return
        with _lock:
            model.holders -= 1
            if model.holders:
                return
            del _loaded[self.cfg]
        await asyncio.to_thread(model.sampler.close)
