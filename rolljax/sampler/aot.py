"""Compile the sampler's programs for TPUs that are not there, and report what the TPU compiler says of them.

libtpu compiles for a topology ("v5e:2x4") on any x86 Linux machine: `pip install 'rolljax[tpu]'`. It proves that the
programs compile with their kernels, that they fit the chip's memory, and that the KV pool is updated in place; not how
fast they are, nor what they compute. `benchmarks/aot_sampler.py` is the command, `docs/tpu.md` the page.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.errors import ConfigError
from rolljax.model.decoder import Model, Params
from rolljax.sampler.engine import Engine, Inserts, Pieces, SamplerConfig

USABLE_HBM_GIB = {"v4": 15.25, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
"""What the compiler lets a program use, per JAX device (v4 and tpu7x: half a chip)."""
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # these two only keep libtpu from complaining; the topology is named in the call
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process on this machine is refused
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What the TPU compiler says of one program; memory is per device."""

    topology: str
    program: str
    compile_s: float
    peak_gib: float
    temp_gib: float
    """What the peak has beyond arguments and outputs."""
    pool_gib: float
    """0 where a program has no KV pool."""
    usable_hbm_gib: float
    pool_aliased: bool
    """Whether the pool that comes out is the buffer that went in."""
    kernels: int
    """Calls of Pallas kernels in the compiled program."""

    @property
    def peak_share(self) -> float:
        """Of the usable HBM."""
        return self.peak_gib / self.usable_hbm_gib

    @property
    def temp_share(self) -> float:
        """Of the pool."""
        return self.temp_gib / self.pool_gib if self.pool_gib else 0.0


def devices(topology: str) -> list[jax.Device]:
    """The devices of a TPU topology, to compile for. This process itself computes on CPU.

    Raises:
      ConfigError: libtpu is not installed, the name is unknown, or this process holds an accelerator already.
    """
    bad = lambda message, remedy: ConfigError(message, setting="topology", value=topology, remedy=remedy)  # noqa: E731
    if topology.partition(":")[0] not in USABLE_HBM_GIB:
        raise bad("names no TPU known here", f"one of {', '.join(USABLE_HBM_GIB)}, then its shape: v5e:2x4, v5p:2x2x2")
    if importlib.util.find_spec("libtpu") is None:
        raise bad("needs the TPU compiler, libtpu is not installed", "pip install 'rolljax[tpu]'")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise bad("is compiled for on CPU, but this process runs on an accelerator", "set JAX_PLATFORMS=cpu")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)
    except Exception as error:  # libtpu's own errors have no common class
        raise bad(f"is refused by libtpu: {_first_line(error)}", "a shape in whole hosts, such as v5e:2x4") from error


def compile_sampler(
    topology: str,
    model: Model,
    cfg: SamplerConfig,
    mesh: Mesh,
    batch_axes: tuple[str, ...],
    params: Params,
    publish: Callable[[Params], Params],
    trained: Params,
) -> Iterator[Program]:
    """Compile decode, prefill (the longest piece), insert and weight sync, one after the other.

    Args:
      mesh: over `devices(topology)`. params: shapes, dtypes and shardings of the sampler's weights.
      publish: the jitted copy from the trainer's weights to the sampler's; trained: like `params`, of the trainer's.

    Raises:
      ConfigError: a program does not fit the chip.
    """
    engine = Engine(model, cfg, mesh, batch_axes)
    state = _place(jax.eval_shape(engine.init_decode_state), engine.state_shardings())
    rows = state.token.sharding
    like = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), tree)  # noqa: E731
    piece, width = cfg.pieces[-1], cfg.pages_per_sequence
    pieces = like(Pieces.empty(cfg.rows(piece, engine.num_shards) * engine.num_shards, piece, width))
    table, slots = like(np.zeros((cfg.slots, width), np.int32)), like(np.zeros(cfg.slots, np.int32))
    vocab = NamedSharding(mesh, PartitionSpec(batch_axes, "tensor" if "tensor" in mesh.shape else None))
    logits = jax.ShapeDtypeStruct((len(pieces.count), model.cfg.vocab_size), jnp.float32, sharding=vocab)
    pool_bytes = int(np.prod(state.pool.sharding.shard_shape(state.pool.shape))) * state.pool.dtype.itemsize

    def compile_one(name: str, pool_bytes: int, program: Any, *args: Any) -> Program:
        start = time.perf_counter()
        try:
            compiled = program.lower(*args).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ConfigError(
                f"makes the {name} program too large for {topology}: {_first_line(error)}",
                setting="SamplerConfig.pages",
                value=cfg.num_pages,
                remedy="fewer pages or slots, a shorter prefill_chunk, or more devices in MeshSpec.tensor",
            ) from error
        memory = compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return Program(
            topology=topology,
            program=name,
            compile_s=time.perf_counter() - start,
            peak_gib=memory.peak_memory_in_bytes / 2**30,
            temp_gib=max(memory.temp_size_in_bytes, memory.peak_memory_in_bytes - held) / 2**30,
            pool_gib=pool_bytes / 2**30,
            usable_hbm_gib=USABLE_HBM_GIB[topology.partition(":")[0]],
            pool_aliased=memory.alias_size_in_bytes >= pool_bytes,
            kernels=compiled.as_text().count('custom_call_target="tpu_custom_call"'),
        )

    yield compile_one("decode", pool_bytes, engine._generate, params, state, table, slots, False, False)
    yield compile_one("prefill", pool_bytes, engine._prefill, params, state, pieces, width)
    yield compile_one("insert", pool_bytes, engine._insert, state, logits, like(Inserts.empty(cfg.slots)), False, False)
    yield compile_one("sync", 0, publish, trained)


def _place(shapes: Any, shardings: Any) -> Any:
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, shapes, shardings)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
