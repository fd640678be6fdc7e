"""Bytes of log-probs, entropies and their gradients over a large vocabulary: whole logits against `trainer.vocab`.

Compiles, on CPU and for TPUs that are not there, the gradient of a weighted sum of log-probs (entropies come beside
them) with respect to hidden states [T, D] in bfloat16 and a head [V, D]; nothing runs. "storage" is what the program
must hold in any case: hidden states, head, and the gradients of both.

python benchmarks/vocab_memory.py                          the table: CPU, v5e, v5p
python benchmarks/vocab_memory.py --only cpu --json out.json
python benchmarks/vocab_memory.py --speed                  runs them on this machine, at a smaller size,
                                                           and blocks for half and a quarter of the tokens
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.aot import chips
from rolljax.trainer import vocab

TOPOLOGIES = {"cpu": "", "v5e": "v5e:2x4", "v5p": "v5p:2x2x1"}
TOKENS, HIDDEN, VOCAB = 8192, 1024, 151_936
Read = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def whole(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute log-probs and entropies from all logits at once."""
    logits = jnp.einsum("td,vd->tv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logp, targets[:, None], -1)[:, 0]
    return chosen, jax.lax.stop_gradient(-jnp.sum(jnp.exp(logp) * logp, -1))


def sampled(share: float) -> Read:
    """Return the way by which a share of the tokens is scored, the others being a prompt or results of tools."""

    def read(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        scored = jnp.arange(len(targets)) >= (1 - share) * len(targets)
        logp, entropy = vocab.token_logp(hidden[None], head, targets[None], scored=scored[None])
        return logp[0], entropy[0]

    return read


WAYS: dict[str, Read] = {"whole": whole, "blocks": vocab.token_logp}
SHARES = {"half": sampled(0.5), "quarter": sampled(0.25)}
"""Ways that `--speed` times too, where all logits do not fit one block: blocks, for a share of the tokens."""


def gradient(read: Read) -> Any:
    """Return a function from `(hidden, head, targets, weights)` to `((d_hidden, d_head), (logp, entropy))`."""

    def loss(hidden, head, targets, weights):
        logp, entropy = read(hidden, head, targets)
        return jnp.sum(weights * logp), (logp, entropy)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@dataclasses.dataclass(frozen=True)
class Figure:
    """Bytes of one compiled program on one device."""

    device: str
    head: str
    """Dtype of the head."""
    way: str
    storage: int
    held: int
    """At the peak: the compiler's own peak, or the sum of arguments, outputs and temporaries where that is more."""
    compile_s: float

    @property
    def ratio(self) -> float:
        return self.held / self.storage


def arguments(tokens: int, dim: int, size: int, head: str, sharding: NamedSharding | None) -> list:
    shapes = ((tokens, dim), "bfloat16"), ((size, dim), head), ((tokens,), "int32"), ((tokens,), "float32")
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]


def measure(device: str, head: str, way: str) -> Figure | None:
    """Compile for a device; None if the compiler refuses the program for its size."""
    sharding = None
    if TOPOLOGIES[device]:
        sharding = NamedSharding(Mesh(np.array(chips.devices(TOPOLOGIES[device])[:1]), "x"), PartitionSpec())
    args = arguments(TOKENS, HIDDEN, VOCAB, head, sharding)
    start = time.perf_counter()
    try:
        memory = gradient(WAYS[way]).lower(*args).compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    storage = 2 * sum(x.size * x.dtype.itemsize for x in args[:2])
    held = max(total - memory.alias_size_in_bytes, memory.peak_memory_in_bytes)
    return Figure(device, head, way, storage, held, time.perf_counter() - start)


def table(devices: list[str], heads: list[str], ways: list[str]) -> list[Figure]:
    figures = []
    print(f"T = {TOKENS}, D = {HIDDEN}, V = {VOCAB}", flush=True)
    print("device  head      way     storage MiB  held MiB  ratio  compile s", flush=True)
    for device in devices:
        for head in heads:
            for way in ways:
                figure = measure(device, head, way)
                if figure is None:
                    print(f"{device:6}  {head:8}  {way:6}  does not fit the device", flush=True)
                    continue
                figures.append(figure)
                print(
                    f"{device:6}  {head:8}  {way:6}  {figure.storage / 2**20:11.0f}  {figure.held / 2**20:8.0f}  "
                    f"{figure.ratio:5.2f}  {figure.compile_s:9.1f}",
                    flush=True,
                )
    return figures


def speed(tokens: int, dim: int, size: int, dtype: str, repeats: int) -> None:
    """Time all ways on this machine, alternating; print the least of `repeats`, wall and CPU time."""
    rng = np.random.default_rng(0)
    args = (
        jnp.asarray(rng.normal(size=(tokens, dim)), dtype),
        jnp.asarray(rng.normal(size=(size, dim)) / dim**0.5, jnp.float32),
        jnp.asarray(rng.integers(0, size, tokens)),
        jnp.asarray(rng.normal(size=tokens), jnp.float32),
    )
    ways = WAYS if 4 * tokens * size <= vocab.BLOCK_BYTES else WAYS | SHARES
    programs = {way: gradient(read).lower(*args).compile() for way, read in ways.items()}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in programs}
    for _ in range(repeats + 1):
        for way, program in programs.items():
            start = time.perf_counter(), time.process_time()
            jax.block_until_ready(program(*args))
            times[way].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    for way, seconds in times.items():
        wall, used = np.min(seconds[1:], axis=0) * 1e3
        print(f"{tokens:6} {dim:5} {size:7}  {dtype:8}  {way:7}  {wall:8.1f}  {used:12.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(TOPOLOGIES), help="default: all of them")
    parser.add_argument("--head", action="append", choices=["bfloat16", "float32"], help="its dtype; default: both")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: both")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--speed", action="store_true", help="run instead of compiling only")
    args = parser.parse_args()
    if args.speed:
        print("     T     D       V  hidden    way       wall ms  processor ms")
        for tokens, dim, size, repeats in ((4096, 64, 512, 30), (4096, 256, 512, 20), (2048, 256, 32768, 4)):
            for dtype in ("float32", "bfloat16"):
                speed(tokens, dim, size, dtype, repeats)
        return
    figures = table(args.only or list(TOPOLOGIES), args.head or ["bfloat16", "float32"], args.way or list(WAYS))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(f) for f in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
