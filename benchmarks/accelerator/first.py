"""The first minutes on a device: imports, its kind, its measured peaks; a 0.6B shape decodes and trains a step."""

from __future__ import annotations

import gc
import time
from typing import Any

from common import Peaks, Piece, main, random_sampler_weights, random_weights, shapes, timed
from decode import decode_figures, sampler_figures
from update import make_trainer, update_figures

MODULES = (
    "rolljax.model.decoder",
    "rolljax.sampler.client",
    "rolljax.trainer.phase_trainer",
    "rolljax.loop",
    "rolljax.aot.programs",
)
COMPILE_S = 120.0
"""Taken for all programs of this piece."""


def estimate(tiny: bool, peaks: Peaks) -> float:
    return 40.0 + COMPILE_S


def body(piece: Piece) -> None:
    import importlib

    import jax

    for name in MODULES:
        with piece.attempt({"what": "import", "module": name}) as row:
            start = time.perf_counter()
            importlib.import_module(name)
            row["seconds"] = time.perf_counter() - start
    for device in jax.devices():
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        row = {"what": "device", "kind": device.device_kind, "memory_gib": limit and limit / 2**30}
        piece.record(row | {"peaks_known": piece.peaks is not None})
    with piece.attempt({"what": "ceiling", "of": "bf16 matrix product"}) as row:
        row |= matmul_figures(512 if piece.tiny else 8192, piece.peaks)
    with piece.attempt({"what": "ceiling", "of": "device memory"}) as row:
        row |= copy_figures(2**20 if piece.tiny else 2**31, piece.peaks)

    from rolljax.model.decoder import Model

    name, shape = next(iter(shapes(piece.tiny).items()))
    batch, context, steps, requests = (4, 32, 4, 4) if piece.tiny else (64, 512, 16, 16)
    weights = random_sampler_weights(Model(shape, "bfloat16"))
    with piece.attempt({"what": "decode", "shape": name, "batch": batch}) as row:
        row |= decode_figures(
            Model(shape, "bfloat16"), weights, piece.peaks, batch=batch, context=context, attention="auto", steps=steps
        )
    with piece.attempt({"what": "sampler", "shape": name, "requests": requests}) as row:
        row |= sampler_figures(Model(shape, "bfloat16"), weights, requests=requests, prompt=32, answer=16)
    del weights
    gc.collect()
    length, rows = (64, 2) if piece.tiny else (2048, 4)
    with piece.attempt({"what": "update", "shape": name, "length": length, "rows": rows}) as row:
        trainer = make_trainer(shape, length, rows, "full")
        policy = trainer.states.init(random_weights(trainer.model, computed=False)).policy
        _, figures = update_figures(trainer, policy, piece.peaks)
        row |= figures


def matmul_figures(size: int, peaks: Peaks | None) -> dict[str, Any]:
    """Measure the rate of one matrix product of random bfloat16 numbers."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.dot)
    found = timed(lambda: product(a, b), repeats=10)
    rate = 2 * size**3 / found.seconds
    return {"tflop_s": rate / 1e12, "spread": found.spread} | ({"of_peak": rate / peaks.bf16_flops} if peaks else {})


def copy_figures(size: int, peaks: Peaks | None) -> dict[str, Any]:
    """Measure the rate of reading and writing `size` bytes of random numbers."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    found = timed(lambda: add(x), repeats=10)
    rate = 2 * x.nbytes / found.seconds
    return {"gb_s": rate / 1e9, "spread": found.spread} | ({"of_peak": rate / peaks.hbm_bytes_s} if peaks else {})


if __name__ == "__main__":
    main("first", body, estimate)
