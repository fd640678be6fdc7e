"""The speed of every kernel: attention of one layer, forward and backward; attention of a decode step over pages.

These rows decide what 'auto' takes (docs/scaling.md); `numerics.py` says which kernels are right. `cannot` is the
reason why an implementation does not run here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import unittest.mock
from collections.abc import Iterable, Mapping
from typing import Any

from common import Peaks, Piece, main, one_device_mesh, timed
from numerics import decoder, heads_of, packed_rows, paths, with_gradients

LENGTHS, HEADS = (8192, 2048, 32_768), {"4B": 32, "0.6B": 16}
BATCHES, CONTEXTS, PAGES, STEPS = (64, 256, 16), (1024, 4096), (64, 16), 8
"""Rows, tokens of context and of a page, the most important first; decode steps of a dispatch."""
VARIANTS: tuple[dict[str, int], ...] = (
    {"GPU_WARPS": 8},
    {"GPU_WARPS": 2},
    {"GPU_STAGES": 3},
    {"GPU_STAGES": 4},
    {"GPU_TOKENS_PER_BLOCK": 128},
    {"GPU_SPLITS": 1},
    {"GPU_SPLITS": 8},
)
"""Constants of Triton's kernel (`rolljax.sampler.kernels`) in place of its own."""
COMPILE_S = 4.0
"""Taken for one program."""
SLACK = 0.2
"""Share of the peaks that estimates of time assume: of XLA's attention, the slowest."""


def estimate(tiny: bool, peaks: Peaks) -> float:
    """Return seconds; every implementation of attention is counted as if it ran."""
    if tiny:
        return 5.0
    flops = sum(4 * 7 * heads * 128 * T * T / 2 for T in LENGTHS for heads in HEADS.values())  # 7 products, 4 calls
    kv = sum(batch * context * 4096 * 10 * 3 for batch in BATCHES for context in CONTEXTS)
    programs = 3 * len(LENGTHS) * len(HEADS) + 2 * len(BATCHES) * len(CONTEXTS) * len(PAGES) + len(VARIANTS)
    return 20 + COMPILE_S * programs + 3 * flops / peaks.bf16_flops / SLACK + kv / peaks.hbm_bytes_s / SLACK


def body(piece: Piece) -> None:
    sizes = ((2,), (32,), (16,)) if piece.tiny else (BATCHES, CONTEXTS, PAGES)
    paged_speed(piece, list(itertools.product(*sizes)))
    for constants in VARIANTS if piece.platform == "gpu" else ():
        paged_speed(piece, [(BATCHES[0], CONTEXTS[0], PAGES[0])], constants)
    attention_speed(piece)


def paged_speed(
    piece: Piece, sizes: Iterable[tuple[int, int, int]], constants: Mapping[str, int] | None = None
) -> None:
    """Time a decode step's attention in one layer, in a dispatch of 8 steps, copies included.

    Args:
      sizes: rows, tokens of context and of a page. constants: of Triton's kernel, which alone is timed then.
    """
    import jax
    import jax.numpy as jnp

    from rolljax.sampler import kernels
    from rolljax.sampler.kv import PageTable

    model = decoder(piece.tiny, "bfloat16")
    cfg = model.cfg
    for batch, context, page in sizes:
        width = context // page + 1
        row = {"what": "paged decode speed", "batch": batch, "context": context, "page": page, **(constants or {})}
        table = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
        length = jnp.full(batch, context, jnp.int32)
        q, k, v = (
            jnp.ones((batch, 1, n, cfg.head_dim), jnp.bfloat16)
            for n in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
        )
        for named, _, path in paths(piece, row, model, batch, width, page):
            if (constants and named["implementation"] != "triton") or not piece.has_time(named, 15):
                continue

            def steps(pool: Any, path: Any = path, args: Any = (table, length, q, k, v), width: int = width) -> Any:
                table, length, q, k, v = args
                reading, cache = path.open(pool, PageTable(table, length), STEPS, width)
                counts = jnp.ones_like(length)

                def one(i: Any, state: Any) -> Any:
                    mixed, cache = path.attend(reading, i, counts)(q + state[0], k, v, state[1], 0)
                    return mixed, cache

                mixed, cache = jax.lax.fori_loop(0, STEPS, one, (jnp.zeros_like(q), cache))
                return path.close(pool, reading, cache, counts * STEPS), mixed

            with piece.attempt(named) as named, contextlib.ExitStack() as patches:
                for name, value in (constants or {}).items():
                    patches.enter_context(unittest.mock.patch.object(kernels, name, value))
                program = jax.jit(steps, donate_argnums=0)
                pool = jnp.zeros(path.pool_shape(batch * width), path.pool_dtype)

                def again(program: Any = program) -> Any:
                    nonlocal pool
                    pool, mixed = program(pool)
                    return mixed

                took = timed(again, repeats=5, least_s=0.1)
                named |= {"seconds": took.seconds / STEPS, "spread": took.spread}
                if piece.peaks:
                    moved = batch * context * cfg.num_kv_heads * cfg.head_dim * 4
                    named["of_peak"] = moved * STEPS / took.seconds / piece.peaks.hbm_bytes_s
                pool = None


def attention_speed(piece: Piece) -> None:
    """Time one layer, forward and backward, one row."""
    from rolljax.errors import ConfigError
    from rolljax.model import attention
    from rolljax.model.axes import on_mesh
    from rolljax.model.implementations import NAMES, implementation

    lengths, shapes = ((256,), {"tiny": 4}) if piece.tiny else (LENGTHS, HEADS)
    kv_heads, size, mesh = (2, 16, one_device_mesh()) if piece.tiny else (8, 128, one_device_mesh())
    for length in lengths:
        segment, branch, position, real = packed_rows(length, 4)
        for shape, heads in shapes.items():
            qkv = heads_of(length, heads, kv_heads, size, "bfloat16")
            for name in NAMES:
                row = {"what": "attention speed", "shape": shape, "length": length, "implementation": name}
                if name == "splash" and piece.platform == "cpu":
                    continue
                try:
                    implementation(name, mesh, qkv[0].shape, "bfloat16")
                except ConfigError as reason:
                    piece.record(row | {"cannot": reason.message})
                    continue
                if not piece.has_time(row, 20):
                    continue

                def mixed(q: Any, k: Any, v: Any, name: Any = name, ids: Any = (segment, branch, position)) -> Any:
                    return attention.packed(*ids, name)(q, k, v, None, 0)[0]

                with piece.attempt(row) as row, on_mesh(mesh):
                    compiled = with_gradients(mixed, real[..., None, None]).lower(*qkv).compile()
                    row["temporary_gib"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
                    took = timed(functools.partial(compiled, *qkv), repeats=3, least_s=0.1)
                    row |= {"seconds": took.seconds, "spread": took.spread}
                    if piece.peaks:  # 7 products of the scores' size, half of them seen
                        row["of_peak"] = 7 * heads * size * length**2 / took.seconds / piece.peaks.bf16_flops


if __name__ == "__main__":
    main("kernels", body, estimate)
