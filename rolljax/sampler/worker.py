"""An `Engine` together with what it works on, called with host data alone.

Weights, decode state and logits lie on the devices and stay here; a prefill's logits are named by a ticket. So on a
mesh of several processes each has a worker, and repeats the calls of the first in their order (`LOCKSTEP_CALLS`).
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from rolljax.model.decoder import Params
from rolljax.sampler.arrays import DecodeState, Inserts, PrefillChunks, ResultTokens
from rolljax.sampler.engine import Engine

LOCKSTEP_CALLS = ("init", "prefill", "insert", "release", "generate", "score", "sleep")
"""Methods that all processes of a mesh must call in one order. Arguments and tickets are the same on all of them."""


class EngineWorker:
    """The engine of one process, with its part of weights, decode state and logits.

    What is returned on the device is not waited for. Call `set_params` and `init` first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._params: Params | None = None
        self._state: DecodeState | None = None
        self._logits: dict[int, jax.Array] = {}
        self._prefilling: jax.Array | None = None  # of the last prefill, until somebody has waited for it
        self._num_tickets = 0

    @property
    def params(self) -> Params:
        """The weights in use; None before the first are set, and from `sleep` until the next are set."""
        return self._params

    def set_params(self, params: Params) -> None:
        """Use other weights from the next program on: as the engine wants them (see `trainer.publish`)."""
        self._params = params

    def init(self) -> None:
        """Make an empty decode state: no slot is active."""
        self._state = self.engine.init_decode_state()

    def sleep(self) -> None:
        """Free the memory of the weights and the decode state. To wake up, call `set_params` and `init`."""
        self.wait()
        self._params = self._state = self._prefilling = None

    def prefill(self, chunks: PrefillChunks, *, read: int) -> int:
        """Write chunks of prompts into the cache (see `Engine.prefill`).

        Returns:
          The ticket of the logits after each chunk. They are kept until `release`.
        """
        self._state, logits = self.engine.prefill(self._params, self._started(), chunks, read=read)
        ticket = self._num_tickets
        self._num_tickets += 1
        self._logits[ticket] = self._prefilling = logits
        return ticket

    def insert(self, ticket: int, inserts: Inserts, *, truncate: bool = False, top: bool = False) -> ResultTokens:
        """Fill slots from the logits of a prefill and draw their first tokens (see `Engine.insert`)."""
        logits = self._logits[ticket]
        self._state, result = self.engine.insert(self._started(), logits, inserts, truncate=truncate, top=top)
        return result

    def release(self, tickets: Iterable[int]) -> None:
        """Drop the logits of these prefills, which are not inserted any more."""
        for ticket in tickets:
            del self._logits[ticket]

    def generate(
        self, table_SW: np.ndarray, slot_S: np.ndarray, *, truncate: bool = False, top: bool = False
    ) -> ResultTokens:
        """Up to `steps_per_dispatch` decode steps of some slots (see `Engine.generate`)."""
        self._state, result = self.engine.generate(
            self._params, self._started(), table_SW, slot_S, truncate=truncate, top=top
        )
        return result

    def score(self, tokens_BT: np.ndarray) -> jax.Array:
        """Model log-prob of every token given those before it, `[B, T]`; the first column is 0."""
        return self.engine.score(self._params, tokens_BT)

    def wait_prefills(self) -> None:
        """Wait until every prefill that was started is done."""
        jax.block_until_ready(self._prefilling)
        self._prefilling = None

    def wait(self) -> None:
        """Wait until every program that was started on the decode state is done."""
        jax.block_until_ready(self._started())

    def _started(self) -> DecodeState:
        assert self._state is not None, "init was not called"
        return self._state
