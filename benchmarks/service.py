"""Measure what several policies over one base cost: `python benchmarks/service.py`.

Eight adapters in shared batches against one adapter with the same tokens, for training and for sampling. Ratios of one
run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.model.decoder import Model, Params
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.lora import Lora, LoraSlots, SlottedAdapters
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import SLOT_AXES, MeshSpec
from rolljax.trainer.slots import Adam, Example, SlotTrainer
from rolljax.types import SamplingParams

NUM, RANK, ROWS, TOKENS = 8, 16, 32, 120


def seconds(run: Callable[[], None], times: int) -> float:
    """Return the median of several runs, after one that compiles."""
    run()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def training(model: Model, base: Params, slots: LoraSlots, times: int) -> float:
    """Return the seconds of a step of all policies: losses and gradients of `ROWS` examples, and each one's update."""
    trainer = SlotTrainer(MeshSpec().build(), model, base, slots, 128)
    states = trainer.empty()
    for k in range(slots.num):
        states = trainer.put(states, k, trainer.new_policy(Lora(RANK, slots.alpha), k))
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.integers(0, model.cfg.vocab_size, shape).astype(np.int32)  # noqa: E731
    ones = np.ones((TOKENS, 1), np.float32)
    examples = [Example(i % slots.num, "cross_entropy", draw(TOKENS), draw((TOKENS, 1)), ones) for i in range(ROWS)]

    def step() -> None:
        nonlocal states
        states, _ = trainer.forward_backward(states, examples)
        for k in range(slots.num):
            states, _ = trainer.optimizer_step(states, k, Adam())

    return seconds(step, times)


def sampling(model: Model, base: Params, slots: LoraSlots, times: int) -> float:
    """Return the seconds of `ROWS` answers of 64 tokens."""
    wide = jax.tree.map(lambda x: 0.01 * jnp.ones(x.shape, x.dtype), model.abstract())
    settings = SamplerConfig(slots=ROWS, max_context=128)
    params = SlottedAdapters(base, wide, jnp.ones(slots.num))
    sampler = Sampler(Engine(model, settings, MeshSpec().build(), SLOT_AXES), params, 0, longest_prompt=0)
    prompts, given = np.random.default_rng(0).integers(0, 256, (ROWS, 16)), SamplingParams(max_tokens=64)

    async def answers() -> None:
        pending = [sampler.submit(p, given, (i,), adapter=i % slots.num) for i, p in enumerate(prompts)]
        for one in pending:
            await one.completion

    try:
        return seconds(lambda: asyncio.run(answers()), times)
    finally:
        sampler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    cfg = Qwen3Config(
        hidden_size=args.hidden, num_layers=args.layers, num_heads=8, num_kv_heads=4, head_dim=args.hidden // 8,
        ffn_size=3 * args.hidden, vocab_size=2048,
    )  # fmt: skip
    row: dict[str, float] = {}
    for num in (1, NUM):
        slots = LoraSlots(num=num, rank=RANK)
        model = Model(cfg, lora=slots.lora)
        base = jax.jit(lambda model=model: model.plain.init(0))()
        row[f"train_{num}_s"] = training(model, base, slots, args.times)
        row[f"sample_{num}_s"] = sampling(model, base, slots, args.times)
    row |= {f"{what}_ratio": row[f"{what}_{NUM}_s"] / row[f"{what}_1_s"] for what in ("train", "sample")}
    print(json.dumps({name: round(x, 4) for name, x in row.items()}))


if __name__ == "__main__":
    main()
