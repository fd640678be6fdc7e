"""Decode and prefill: tokens per second and share of the roofline, by shape, batch and attention path.

Decoding is bound by memory: a step must read all weights once, and the keys and values of every row's context. The
roofline's time is these bytes over the peak bandwidth. `weights int8` is `SamplerConfig.quantization`. Prefill is bound
by arithmetic: its share is of peak FLOP/s. Weights are random, the cache is filled with random keys and values.
`sampler` rows go the whole way: requests, scheduler, pages, host.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import time
import typing
from typing import Any

from common import (
    Peaks,
    Piece,
    kv_bytes,
    main,
    memory_peak_gib,
    one_device_mesh,
    random_sampler_weights,
    shapes,
    timed,
    weight_bytes,
)

ORDER = ("4B", "0.6B", "8B")
"""Of the shapes, the most important first."""
BATCHES, CONTEXT = (64, 256, 1, 16), 512
STEPS, REPEATS = 16, 6
"""Decode steps of a dispatch, and dispatches that are timed."""
CHUNKS = (2048, 8192)
"""Tokens of a prompt that are prefilled at once."""
COMPILE_S = 9.0
"""Taken for one program."""
SLACK = 0.5
"""Share of the peaks that estimates of time assume."""


def sizes(tiny: bool) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    """Return batches, context, decode steps of a dispatch, chunks."""
    return ((4,), 32, 4, (64,)) if tiny else (BATCHES, CONTEXT, STEPS, CHUNKS)


def estimate(tiny: bool, peaks: Peaks) -> float:
    from rolljax.aot.programs import matmul_params
    from rolljax.model.decoder import Model

    batches, context, steps, chunks = sizes(tiny)
    total = 20.0
    for shape in shapes(tiny).values():
        model = Model(shape, "bfloat16")
        for batch in batches:
            step = (weight_bytes(model) + batch * context * kv_bytes(model)) / peaks.hbm_bytes_s
            total += 2 * (COMPILE_S + (REPEATS + 1) * steps * step / SLACK)
        for chunk in chunks:  # by two kernels
            total += 2 * (COMPILE_S + REPEATS * 2 * matmul_params(model) * chunk / peaks.bf16_flops / SLACK)
    return total + 6 * COMPILE_S  # the whole way


def random_pool(pool: Any, dtype: str) -> Any:
    """Return a KV pool of that shape and type with random contents. dtype: type of its numbers."""
    import jax
    import jax.numpy as jnp

    def make() -> Any:
        values = jax.random.uniform(jax.random.key(0), pool.shape, jnp.dtype(dtype), -1.0, 1.0)
        return values if pool.dtype == values.dtype else jax.lax.bitcast_convert_type(values, pool.dtype)

    return jax.jit(make)()


def decode_figures(
    model: Any, weights: Any, peaks: Peaks | None, *, batch: int, context: int, attention: str, steps: int
) -> dict[str, Any]:
    """Decode `REPEATS` dispatches of all rows, from a cache of `context` tokens.

    Raises:
      ConfigError: that attention path cannot run here.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import BATCH_AXES

    longest = context + steps * (REPEATS + 3)
    cfg = SamplerConfig(
        slots=batch,
        max_context=longest,
        page_size=64,
        pages=batch * (-(-longest // 64)) + 1,
        steps_per_dispatch=steps,
        attention=attention,  # type: ignore[arg-type]
        quantization="int8" if model.int8_sampler else "none",
    )
    engine = Engine(model, cfg, one_device_mesh(), BATCH_AXES)
    state = engine.init_decode_state()
    filled = {
        "pool": random_pool(state.pool, model.dtype),
        "position": jnp.full(batch, context, jnp.int32),
        "remaining": jnp.full(batch, longest, jnp.int32),
        "key": jnp.arange(2 * batch, dtype=jnp.uint32).reshape(batch, 2),
    }
    placed = {name: jax.device_put(x, getattr(state, name).sharding) for name, x in filled.items()}
    state = dataclasses.replace(state, **placed)
    width = engine.width(longest)
    table = np.arange(batch * cfg.pages_per_sequence, dtype=np.int32).reshape(batch, -1)[:, :width]
    slots = np.arange(batch, dtype=np.int32)

    def dispatch() -> Any:
        nonlocal state
        state, out = engine.generate(weights, state, table, slots)
        return out.tokens, state.position

    found = timed(dispatch, repeats=REPEATS)
    assert int(state.position[0]) == context + steps * (REPEATS + 2), "not every step was taken"
    mean = context + steps * (2 + REPEATS / 2)  # of the timed dispatches
    step_s = found.seconds / steps
    figures = {
        "tok_s": batch / step_s,
        "step_ms": 1e3 * step_s,
        "spread": found.spread,
        "first_s": found.first_s,
        "memory_peak_gib": memory_peak_gib(),
    }
    if peaks:
        limit_s = (weight_bytes(model) + batch * mean * kv_bytes(model)) / peaks.hbm_bytes_s
        figures |= {"of_roofline": limit_s / step_s}
    return figures


def prefill_figures(model: Any, weights: Any, peaks: Peaks | None, *, chunk: int, attention: str) -> dict[str, Any]:
    """Prefill one prompt of `chunk` tokens at once. attention: see `SamplerConfig`; not 'dense': by the device's kernel
    if it has one."""
    import numpy as np

    from rolljax.aot.programs import attention_flops, matmul_params
    from rolljax.sampler.arrays import PrefillChunks
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import BATCH_AXES

    cfg = SamplerConfig(
        slots=4,
        max_context=chunk,
        page_size=64,
        prefill_chunk=chunk,
        attention=attention,  # type: ignore[arg-type]
    )
    engine = Engine(model, cfg, one_device_mesh(), BATCH_AXES)
    state = engine.init_decode_state()
    chunks = PrefillChunks.empty(1, chunk, cfg.pages_per_sequence)
    chunks = dataclasses.replace(
        chunks,
        tokens=np.random.default_rng(0).integers(0, model.cfg.vocab_size, (1, chunk), np.int32),
        count=np.full(1, chunk, np.int32),
        table=np.arange(cfg.pages_per_sequence, dtype=np.int32)[None],
    )

    def prefill() -> Any:
        nonlocal state
        state, logits = engine.prefill(weights, state, chunks, read=0)
        return logits

    found = timed(prefill, repeats=REPEATS)
    head = model.cfg.vocab_size * model.cfg.hidden_size
    flops = 2 * (matmul_params(model) - head) * chunk + 2 * head + attention_flops(model.cfg, chunk, chunk / 2)
    figures = {"tok_s": chunk / found.seconds, "spread": found.spread, "first_s": found.first_s}
    return figures | ({"of_peak": flops / found.seconds / peaks.bf16_flops} if peaks else {})


def sampler_figures(model: Any, weights: Any, *, requests: int, prompt: int, answer: int) -> dict[str, Any]:
    """Sample `requests` answers at once through `Sampler`, the second time: programs are compiled then."""
    import numpy as np

    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.sampler.weights import Snapshot
    from rolljax.trainer.mesh import BATCH_AXES
    from rolljax.types import SamplingParams

    cfg = SamplerConfig(slots=requests, max_context=prompt + answer, page_size=64, steps_per_dispatch=16)
    sampler = Sampler(Engine(model, cfg, one_device_mesh(), BATCH_AXES), weights, 0, longest_prompt=0)
    prompts = np.random.default_rng(0).integers(0, model.cfg.vocab_size, (requests, prompt), np.int32)
    how = SamplingParams(1.0, answer)

    async def everything(seed: int) -> list[Any]:
        return await asyncio.gather(*(sampler.generate(p, how, (seed, i)) for i, p in enumerate(prompts)))

    try:
        start = time.perf_counter()
        asyncio.run(everything(0))
        first_s = time.perf_counter() - start
        sampler.prepare(Snapshot(1, weights))
        sampler.swap(1)  # nothing is left in the prefix cache
        before, start = sampler.stats, time.perf_counter()
        done = asyncio.run(everything(1))
        seconds, after = time.perf_counter() - start, sampler.stats
    finally:
        sampler.close()
    tokens = sum(len(c.tokens) for c in done)
    return {
        "tok_s": tokens / seconds,
        "host_frac": (after.host_s - before.host_s) / seconds,
        "busy_slots": (after.busy_slot_steps - before.busy_slot_steps) / (after.slot_steps - before.slot_steps),
        "first_s": first_s,
    }


def body(piece: Piece) -> None:
    from rolljax.model.decoder import Model
    from rolljax.sampler.kernels import Name

    batches, context, steps, chunks = sizes(piece.tiny)
    every = shapes(piece.tiny)
    for name in ORDER if not piece.tiny else every:
        model = Model(every[name], "bfloat16")
        weights = random_sampler_weights(model)
        for attention in ("auto", *typing.get_args(Name)):
            for batch in batches:
                what = {"what": "decode", "shape": name, "batch": batch, "context": context, "attention": attention}
                if piece.has_time(what, 2 * COMPILE_S):
                    with piece.attempt(what) as row:
                        row |= decode_figures(
                            model, weights, piece.peaks, batch=batch, context=context, attention=attention, steps=steps
                        )
        for chunk, attention in itertools.product(chunks, ("auto", "dense")):
            what = {"what": "prefill", "shape": name, "tokens": chunk, "attention": attention}
            if piece.has_time(what, 2 * COMPILE_S):
                with piece.attempt(what) as row:
                    row |= prefill_figures(model, weights, piece.peaks, chunk=chunk, attention=attention)
        if name in ("0.6B", "tiny"):
            for requests in batches[:2]:
                prompt, answer = (32, 16) if piece.tiny else (128, 256)
                what = {"what": "sampler", "shape": name, "requests": requests, "prompt": prompt, "answer": answer}
                if piece.has_time(what, 4 * COMPILE_S):
                    with piece.attempt(what) as row:
                        row |= sampler_figures(model, weights, requests=requests, prompt=prompt, answer=answer)
        del weights
        gc.collect()
        model = dataclasses.replace(model, int8_sampler=True)
        weights = random_sampler_weights(model)
        for batch in batches[:2]:
            what = {"what": "decode", "shape": name, "batch": batch, "context": context, "weights": "int8"}
            if piece.has_time(what, 2 * COMPILE_S):
                with piece.attempt(what) as row:
                    row |= decode_figures(
                        model, weights, piece.peaks, batch=batch, context=context, attention="auto", steps=steps
                    )
        del weights
        gc.collect()


if __name__ == "__main__":
    main("decode", body, estimate)
