"""Values of rows of tokens by a value model: batches of a few fixed shapes, in a thread separate from the event loop.

A row is padded to a power of two, and each padded length has one program with a fixed number of rows. So the value of a
row is bitwise independent of the other rows in its batch, and few programs are compiled.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.errors import EnvError, InfraError, RolljaxError, boundary
from rolljax.model.attention import packed
from rolljax.model.axes import on_mesh
from rolljax.model.decoder import Params
from rolljax.model.value import ValueModel
from rolljax.trainer.mesh import num_batch_shards, put, replicated, rows

MIN_ROW = 32
"""Smallest padded length of a row, in tokens; every padded length has its own compiled program."""
LINGER_S = 0.002
"""Seconds that a row waits for more rows when the device is idle."""
CPU_BATCH_TOK, DEVICE_BATCH_TOK = 2048, 16_384
"""Default tokens of a batch; few on CPU, so that the activations stay in its caches."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedValue:
    """A frozen value model."""

    model: ValueModel
    params: Params
    """Parameters of one value model, or stacked parameters of `num` models whose mean counts (`num` = 0: one model, not
    stacked)."""
    num: int = 0
    base: Params | None = None
    """The frozen weights of a model with adapters."""
    mean: float = 0.0
    """Mean of the model's values for answers that it was trained with."""
    std: float = 1.0
    """Standard deviation of the model's values for answers that it was trained with."""


class RowScores:
    """Values after the last token of rows. Used from one event loop; the devices are used from one thread.

    Args:
      batch_tok: tokens of a batch, padding included; at least one row for each batch shard of the mesh. None: a default
        for these devices.
    """

    def __init__(self, value: TrainedValue, mesh: Mesh, batch_tok: int | None = None) -> None:
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._value, self._mesh = value, mesh
        self._batch_tok = batch_tok or (CPU_BATCH_TOK if on_cpu else DEVICE_BATCH_TOK)
        self._waiting: dict[int, collections.deque[_Waiting]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-reward-model")
        self._drain: asyncio.Task[None] | None = None
        self.batches = 0

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a row."""
        return self._value.model.trunk.cfg.max_position

    async def score(self, tokens: np.ndarray) -> float:
        """Return the value after the last of `tokens [T]`, without the ids of latent prefixes (`model.prefixes`).

        Raises:
          EnvError: there are none, or too many for the model, or the value is no finite number. InfraError: the devices
            failed.
        """
        tokens = tokens[tokens < self._value.model.trunk.cfg.vocab_size]
        if not 0 < len(tokens) <= self.longest:
            raise EnvError(f"a row of {len(tokens)} tokens; the reward model reads 1 to {self.longest}", stage="reward")
        loop = asyncio.get_running_loop()
        row = _Waiting(np.asarray(tokens, np.int32), loop.create_future())
        self._waiting.setdefault(self.padded(len(tokens)), collections.deque()).append(row)
        if self._drain is None or self._drain.done():
            self._drain = loop.create_task(self._run_all())
        return await row.value

    def padded(self, length: int) -> int:
        """Return the padded length of a row of this many tokens."""
        return max(MIN_ROW, 1 << (length - 1).bit_length())

    def num_rows(self, size: int) -> int:
        """Return the rows of a batch whose rows are padded to `size`."""
        shards = num_batch_shards(self._mesh)
        return shards * max(1, self._batch_tok // (size * shards))

    def compute(self, size: int, batch: Sequence[np.ndarray]) -> list[float]:
        """Compute values of at most `num_rows(size)` rows of at most `size` tokens."""
        tokens = np.zeros((self.num_rows(size), size), np.int32)
        lengths = np.ones(len(tokens), np.int32)
        for i, row in enumerate(batch):
            tokens[i, : len(row)], lengths[i] = row, len(row)
        placed = put(self._mesh, (tokens, lengths), (rows(self._mesh), rows(self._mesh)))
        values = self._program(self._value.params, self._value.base, *placed)
        self.batches += 1
        return np.asarray(values)[: len(batch)].tolist()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _run_all(self) -> None:
        """Run batches until no row waits; the row that waited longest chooses the next length."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(LINGER_S)
        while queues := {size: queue for size, queue in self._waiting.items() if queue}:
            size = min(queues, key=lambda s: queues[s][0].since_s)
            taken: list[_Waiting] = []
            while queues[size] and len(taken) < self.num_rows(size):
                row = queues[size].popleft()
                taken += [row] * (not row.value.done())  # else it was cancelled
            if not taken:
                continue
            work = functools.partial(self.compute, size, [row.tokens for row in taken])
            try:
                with boundary(InfraError, "the reward model"):
                    values = await loop.run_in_executor(self._thread, work)
            except RolljaxError as e:
                for row in taken:
                    row.settle(e)
            else:
                for row, value in zip(taken, values, strict=True):
                    row.settle(value)

    @functools.cached_property
    def _program(self) -> jax.stages.Wrapped:
        """Return the jitted `(params, base, tokens [B, T], lengths [B]) -> values [B]` float32."""
        model, num = self._value.model, self._value.num

        def values(params: Params, base: Params | None, tokens_BT: jax.Array, length_B: jax.Array) -> jax.Array:
            place_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
            segment_ids = (place_BT < length_B[:, None]).astype(jnp.int32)

            def of_one(params: Params) -> jax.Array:
                full = model.full_params(params, base)
                attend = packed(segment_ids, jnp.zeros_like(segment_ids), place_BT, model.trunk.attention)
                hidden = model.trunk.bind(full["trunk"])(tokens_BT, place_BT, attend).hidden
                last = jnp.take_along_axis(hidden, (length_B - 1)[:, None, None], axis=1)[:, 0]
                return model.head(full, last)

            with on_mesh(self._mesh):
                return jax.vmap(of_one)(params).mean(0) if num else of_one(params)

        return jax.jit(values, out_shardings=replicated(self._mesh))


class _Waiting:
    """A row that waits for its value."""

    def __init__(self, tokens: np.ndarray, value: asyncio.Future[float]) -> None:
        self.tokens, self.value, self.since_s = tokens, value, value.get_loop().time()

    def settle(self, result: float | RolljaxError) -> None:
        if self.value.done():
            return
        if isinstance(result, RolljaxError):
            self.value.set_exception(result)
        elif np.isfinite(result):
            self.value.set_result(result)
        else:
            self.value.set_exception(EnvError(f"the reward model says {result}", stage="reward"))
