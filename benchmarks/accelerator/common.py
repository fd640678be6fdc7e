"""Shared parts of all pieces: the command line, the JSON file, timing, the peaks of devices, model shapes, random
weights.

A piece is a script with a `body` and an `estimate` that calls `main`. Its JSON is rewritten after every row, so that a
piece that is stopped at its limit leaves the rows that it has measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]  # rolljax need not be installed
OUT = ROOT / "build" / "accelerator"
LIMIT_S = 480.0
"""Longest time of a piece, unless `--limit` says another."""
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "flax", "optax", "numpy", "tokamax", "torch", "triton")
"""Packages whose versions are written down where they are installed."""


# ---- devices --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peaks of one device, as its maker states them.

    name: how tables call it. bf16_flops: of dense matrix products, per second. hbm_bytes_s: bytes of device memory per
    second. memory_bytes: device memory.
    """

    name: str
    bf16_flops: float
    hbm_bytes_s: float
    memory_bytes: float


GPUS = (
    Peaks("H200", 989.4e12, 4.8e12, 141e9),
    Peaks("H100", 989.4e12, 3.35e12, 80e9),
    Peaks("A100", 312e12, 2.039e12, 80e9),
)
"""NVIDIA's data sheets, of the SXM form."""
TPUS = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
"""JAX's name of a TPU, and its name in `rolljax.aot.chips`."""
PLANNED = GPUS[1]
"""`--estimate` prints times for this device: the slowest that must keep the limit."""


def peaks_of(kind: str) -> Peaks | None:
    """Return the peaks of a device by JAX's name for it; None if they are unknown, as for CPUs."""
    from rolljax.aot.chips import CHIPS

    if kind in TPUS:
        chip = CHIPS[TPUS[kind]]
        return Peaks(chip.name, chip.bf16_flops, chip.hbm_bytes_s, chip.usable_hbm_bytes)
    return next((gpu for gpu in GPUS if gpu.name in kind), None)


# ---- a piece --------------------------------------------------------------------------------------------------------


class Piece:
    """The figures of one piece, and the file that they are written to.

    Args:
      name: of the piece and its file. out: the folder. tiny: sizes for a dry run on a CPU. limit_s: its longest time.
    """

    def __init__(self, name: str, out: Path, *, tiny: bool, limit_s: float = LIMIT_S) -> None:
        import jax

        self.name, self.tiny, self.path, self.limit_s = name, tiny, out / f"{name}.json", limit_s
        self.start = time.perf_counter()
        device = jax.devices()[0]
        self.platform: str = device.platform
        self.peaks = peaks_of(device.device_kind)
        self.content: dict[str, Any] = {
            "piece": name,
            "tiny": tiny,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": f"{jax.device_count()} x {device.device_kind}",
            "versions": versions(),
            "seconds": 0.0,
            "done": False,
            "failed": None,
            "figures": [],
        }
        self.write()

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.perf_counter() - self.start)

    def record(self, row: dict[str, Any]) -> None:
        """Append a row to the figures, print it, and write the file."""
        self.content["figures"].append(row)
        self.write()
        print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)

    def has_time(self, row: dict[str, Any], needs_s: float) -> bool:
        """Return whether about `needs_s` seconds are left until the limit; if not, record `row` as left out."""
        if self.left_s >= needs_s:
            return True
        self.record(row | {"failed": f"left out: about {needs_s:.0f} s needed, {self.left_s:.0f} s left"})
        return False

    @contextlib.contextmanager
    def attempt(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Record `row` with what the block adds to it. An exception is written into the row and the piece
        continues: as `cannot` where rolljax refuses the setting on this device, else as `failed`."""
        from rolljax.errors import ConfigError

        row = dict(row)
        try:
            yield row
        except ConfigError as error:
            row["cannot"] = str(error)
        except Exception as error:  # border: whatever a compiler, a driver or a library says
            first = next(iter(str(error).strip().splitlines()), "")
            row["failed"] = f"{type(error).__name__}: {first}"[:300]
            traceback.print_exc()
        self.record(row)
        gc.collect()

    def write(self, **changes: Any) -> None:
        """Write the file as a whole."""
        self.content |= {"seconds": round(time.perf_counter() - self.start, 1), **changes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self.path)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_done(path: Path, *, tiny: bool) -> bool:
    """Return whether a file holds a complete piece with sizes of that kind."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return bool(content["done"]) and content["tiny"] == tiny


def main(
    name: str, body: Callable[[Piece], None], estimate: Callable[[bool, Peaks], float], *, is_timed: bool = True
) -> None:
    """Run one piece from the command line.

    Args:
      body: measures and records. estimate: seconds that the piece takes, from its sizes and a device's peaks.
      is_timed: False: only what is computed counts, so compilers for GPUs need not try which kernels are fastest, which
        takes most of their time.
    """
    parser = argparse.ArgumentParser(prog=f"python benchmarks/accelerator/{name}.py")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files")
    parser.add_argument("--tiny", action="store_true", help="sizes for a dry run on a CPU")
    parser.add_argument("--again", action="store_true", help="measure again what is done")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that it may take")
    parser.add_argument("--estimate", action="store_true", help="print the seconds that it will take, and stop")
    args = parser.parse_args()
    if args.estimate:
        print(f"{name}: about {estimate(args.tiny, PLANNED):.0f} s on one {PLANNED.name}")
        return
    if is_done(args.out / f"{name}.json", tiny=args.tiny) and not args.again:
        print(f"{name}: done already ({args.out / f'{name}.json'}); --again measures it again")
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((args.out / "compiled").resolve()))
    if not is_timed:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    if args.tiny:  # tiny programs take longer to compile than to run
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # pieces have programs in common
    piece = Piece(name, args.out, tiny=args.tiny, limit_s=args.limit)
    print(f"== {name} on {piece.content['device']}", flush=True)
    try:
        body(piece)
    except BaseException as error:
        piece.write(failed=f"{type(error).__name__}: {error}"[:2000])
        raise
    failed = sum("failed" in row for row in piece.content["figures"])
    nothing = failed == len(piece.content["figures"])
    piece.write(done=not nothing, failed="every row failed" if nothing else None)
    print(f"== {name}: {len(piece.content['figures'])} rows, {failed} failed, {piece.content['seconds']} s", flush=True)


# ---- timing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timing:
    """first_s: the first call, with what it compiles. seconds: the median of the others. spread: between their
    quartiles, as a share of the median."""

    first_s: float
    seconds: float
    spread: float


def timed(call: Callable[[], Any], *, repeats: int, least_s: float = 0.0) -> Timing:
    """Time a function that returns arrays, each call until they are there. The second call is not counted either:
    tokamax has its programs compiled twice.

    Args:
      least_s: repeat for at least so long.
    """
    import jax

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    first, times = once(), []
    once()
    while len(times) < repeats or sum(times) < least_s:
        times.append(once())
    middle = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 2 else (middle, middle, middle)
    return Timing(first, middle, (high - low) / middle)


def memory_peak_gib() -> float | None:
    """Return the peak device memory of this process, GiB; None if the device does not report it."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 2**30, 2)


# ---- models ---------------------------------------------------------------------------------------------------------


def shapes(tiny: bool) -> dict[str, Any]:
    """Return Qwen3's shapes by size; for a dry run one tiny shape instead."""
    from rolljax.model.families.qwen3 import Qwen3Config

    if tiny:
        return {"tiny": Qwen3Config(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16)}
    rest = {"vocab_size": 151_936, "head_dim": 128, "num_kv_heads": 8, "rope_theta": 1e6, "max_position": 40_960}
    return {
        "0.6B": Qwen3Config(num_layers=28, hidden_size=1024, num_heads=16, ffn_size=3072, **rest),
        "4B": Qwen3Config(num_layers=36, hidden_size=2560, num_heads=32, ffn_size=9728, **rest),
        "8B": Qwen3Config(num_layers=36, hidden_size=4096, num_heads=32, ffn_size=12288, tie_embeddings=False, **rest),
    }


def one_device_mesh() -> Any:
    """Return the mesh of the first device."""
    import jax

    from rolljax.trainer.mesh import MeshSpec

    return MeshSpec().build(jax.devices()[:1])


def random_weights(model: Any, *, seed: int = 0, computed: bool = True) -> Any:
    """Make random weights of a plain decoder, leaf by leaf, so that no second copy is ever in memory.

    Args:
      computed: matrices in the model's compute dtype, as in the sampler; False: all float32, as in the trainer.
    """
    import jax
    import jax.numpy as jnp

    abstract = model.abstract()
    like = jax.eval_shape(model.computed, abstract) if computed else abstract
    names = model.axes()
    flat, tree = jax.tree.flatten(like)
    axes = jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(flat))

    def one(key: Any, x: Any, axis_names: tuple[str, ...]) -> Any:
        if sum(name != "layers" for name in axis_names) < 2:  # scales of norms
            return jnp.ones(x.shape, x.dtype)
        make = jax.jit(lambda k: (jax.random.normal(k, x.shape, jnp.bfloat16) * model.cfg.init_std).astype(x.dtype))
        return make(key)

    return jax.tree.unflatten(tree, [one(*args) for args in zip(keys, flat, axes, strict=True)])


def random_sampler_weights(model: Any) -> Any:
    """Make random weights as a sampler on this device has them."""
    import jax

    from rolljax.trainer.publish import lies_apart

    form = (lambda x: model.apart(model.sampled(x))) if lies_apart(one_device_mesh()) else model.sampled
    return jax.jit(form, donate_argnums=0)(random_weights(model))


def same_bits(first: Any, *others: Any) -> bool:
    """Return whether pytrees of arrays are equal in every number."""
    import jax
    import jax.numpy as jnp

    equal = [jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b, equal_nan=True)), first, one) for one in others]
    return all(jax.tree.leaves(equal))


def weight_bytes(model: Any) -> float:
    """Return the bytes of the weights that a decode step reads: all matrices as the sampler has them, without an
    embedding that is not the output matrix."""
    import jax
    import jax.numpy as jnp

    from rolljax.aot.programs import matmul_params

    itemsize = jnp.dtype(model.dtype).itemsize
    sampled = jax.tree.leaves(jax.eval_shape(lambda x: model.sampled(model.computed(x)), model.abstract()))
    return matmul_params(model) * itemsize - (itemsize - 1) * sum(x.size for x in sampled if x.dtype == jnp.int8)


def kv_bytes(model: Any) -> float:
    """Return the bytes of the keys and values of one token, all layers."""
    import jax.numpy as jnp

    cfg = model.cfg
    return 2.0 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * jnp.dtype(model.dtype).itemsize
