"""An engine on a mesh of several processes: one of them decides, and the others start the same programs in its order.

Weights, decode state and logits lie on the mesh, so that every process has its part of them and none is sent: only what
the scheduler made on the host travels, page tables and tokens.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rolljax.model.decoder import Model, Params
from rolljax.sampler.engine import DecodeState, Engine, Inserts, Pieces, ResultTokens
from rolljax.sampler.settings import SamplerConfig

Turn = Callable[[str, Any], contextlib.AbstractContextManager[None]]


class LeadingEngine(Engine):
    """The engine of the process that decides.

    Args:
      turn: around every program; tells the others its name and what `FollowingEngine.do` needs (`cluster.Leader.turn`).
    """

    def __init__(self, model: Model, cfg: SamplerConfig, mesh: Mesh, batch_axes: tuple[str, ...], turn: Turn) -> None:
        super().__init__(model, cfg, mesh, batch_axes)
        self._turn = turn
        self._num_logits = 0
        self._numbers: dict[int, int] = {}
        """Of the logits that are still held here, by `id`."""
        self._dropped: collections.deque[int] = collections.deque()

    def init_decode_state(self) -> DecodeState:
        with self._turn("decode_state", {}):
            return super().init_decode_state()

    def prefill(
        self, params: Params, state: DecodeState, pieces: Pieces, *, read: int
    ) -> tuple[DecodeState, jax.Array]:
        number = self._num_logits
        self._num_logits += 1
        what = {"number": number, "dropped": self._take_dropped(), "pieces": pieces, "read": read}
        with self._turn("prefill", what):
            state, logits = super().prefill(params, state, pieces, read=read)
        self._numbers[id(logits)] = number
        weakref.finalize(logits, self._drop, id(logits))
        return state, logits

    def insert(
        self, state: DecodeState, logits_RV: jax.Array, inserts: Inserts, *, truncate: bool = False, top: bool = False
    ) -> tuple[DecodeState, ResultTokens]:
        what = {"number": self._numbers[id(logits_RV)], "inserts": inserts, "truncate": truncate, "top": top}
        with self._turn("insert", what):
            return super().insert(state, logits_RV, inserts, truncate=truncate, top=top)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> tuple[DecodeState, ResultTokens]:
        with self._turn("generate", {"table_SW": table_SW, "slot_S": slot_S, "truncate": truncate, "top": top}):
            return super().generate(params, state, table_SW, slot_S, truncate=truncate, top=top)

    def score(self, params: Params, tokens_BT: np.ndarray) -> jax.Array:
        with self._turn("score", {"tokens_BT": tokens_BT}):
            return super().score(params, tokens_BT)

    def _drop(self, key: int) -> None:
        self._dropped.append(self._numbers.pop(key))

    def _take_dropped(self) -> list[int]:
        """The logits that nobody here has any more since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


class FollowingEngine:
    """The engine of another process, with weights, state and logits of its own.

    `params` are set by whoever publishes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.params: Params | None = None
        self._state: Any = None
        self._logits: dict[int, jax.Array] = {}

    def do(self, kind: str, what: dict[str, Any]) -> None:
        """Start the program that a `LeadingEngine` has named."""
        getattr(self, f"_{kind}")(**what)

    def _decode_state(self) -> None:
        self._state = self._engine.init_decode_state()

    def _prefill(self, number: int, dropped: list[int], pieces: Pieces, read: int) -> None:
        for n in dropped:
            del self._logits[n]
        self._state, self._logits[number] = self._engine.prefill(self.params, self._state, pieces, read=read)

    def _insert(self, number: int, **what: Any) -> None:
        self._state, _ = self._engine.insert(self._state, self._logits[number], **what)

    def _generate(self, **what: Any) -> None:
        self._state, _ = self._engine.generate(self.params, self._state, **what)

    def _score(self, **what: Any) -> None:
        self._engine.score(self.params, **what)
