"""An update of the policy (GRPO, AdamW, bfloat16 compute): model FLOPs utilization by shape, length, remat and rows.

A batch has one micro-batch of packed rows, each full with one sequence: a prompt of a quarter, an answer of the rest.
FLOPs are those of the model, three times the forward pass; what remat computes again does not count. Where weights,
moments and gradients of a shape do not fit the device, it has fewer layers, and the row says how many. The `repeat` row
says whether updates repeat their bits.
"""

from __future__ import annotations

import dataclasses
import gc
from typing import Any, NamedTuple

from common import Peaks, Piece, main, memory_peak_gib, one_device_mesh, random_weights, same_bits, shapes, timed

REPEATS = 4
COMPILE_S = 22.0
"""Taken for one update."""
SLACK = 0.35
"""Share of the peak that estimates of time assume."""
KERNELS = ("splash", "cudnn", "tokamax", "xla")
"""Implementations of attention; kernels for one kind of device come first."""
BYTES_PER_PARAM, SHARE = 18.0, 0.7
"""float32 weights, two moments and gradients, and their bfloat16 copies; they may take this share of the memory."""


class Work(NamedTuple):
    """One row: the shape's name, tokens of a row, rows of the micro-batch, what the backward pass recomputes.

    attention: an implementation of `rolljax.model.implementations`; 'kernel': the first of `KERNELS` that can run.
    """

    shape: str
    length: int
    rows: int
    remat: str
    attention: str = "kernel"


def work(tiny: bool) -> list[Work]:
    """Return the cases to measure, the most important first."""
    if tiny:
        return [Work("tiny", 64, 2, "full"), Work("tiny", 64, 2, "none", "cudnn")]
    return [
        Work("4B", 8192, 2, "dots", "tokamax"),
        Work("4B", 8192, 2, "dots", "cudnn"),
        Work("4B", 8192, 2, "full"),
        Work("4B", 8192, 2, "full", "tokamax"),
        Work("4B", 8192, 2, "full", "xla"),
        Work("4B", 2048, 8, "full"),
        Work("4B", 8192, 2, "attention"),
        Work("4B", 2048, 2, "none"),
        Work("4B", 2048, 2, "full"),
        Work("4B", 32768, 1, "full"),
        Work("0.6B", 2048, 16, "full"),
        Work("0.6B", 8192, 4, "full"),
        Work("0.6B", 32768, 1, "full"),
        Work("8B", 8192, 2, "full"),
    ]


def flops(model: Any, length: int, rows: int) -> float:
    """Return the flops of one update: forward and backward over causal rows."""
    from rolljax.aot.programs import attention_flops, matmul_params

    tokens = length * rows
    return 3.0 * (2 * matmul_params(model) * tokens + attention_flops(model.cfg, tokens, length / 2))


def estimate(tiny: bool, peaks: Peaks) -> float:
    from rolljax.model.decoder import Model

    total, every = 20.0, shapes(tiny)
    for one in work(tiny):
        model = Model(fitting(every[one.shape], peaks), "bfloat16")
        total += COMPILE_S + (REPEATS + 1) * flops(model, one.length, one.rows) / peaks.bf16_flops / SLACK
    return total + 10.0 * len(every)


def fitting(shape: Any, peaks: Peaks | None) -> Any:
    """Return the shape, with fewer layers if its training state does not fit."""
    from rolljax.model.decoder import Model

    while peaks and shape.num_layers > 1:
        if BYTES_PER_PARAM * Model(shape).num_params() <= SHARE * peaks.memory_bytes:
            break
        shape = dataclasses.replace(shape, num_layers=shape.num_layers - 1)
    return shape


def kernel(shape: Any, length: int) -> str:
    """Return the first of `KERNELS` that can compute rows of `length` tokens here, in bfloat16."""
    import jax.numpy as jnp

    from rolljax.model.implementations import Case, why_not

    case = Case(one_device_mesh().devices.flat[0], jnp.dtype("bfloat16"), length, shape.head_dim)
    return next(name for name in KERNELS if not why_not(name, case))  # type: ignore[arg-type]


def make_trainer(shape: Any, length: int, rows: int, remat: str, attention: str = "kernel") -> Any:
    """Return the trainer of a phase of GRPO with that batch shape."""
    from rolljax.model.decoder import Model
    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.batch import PackShape
    from rolljax.trainer.optimizer import AdamW
    from rolljax.trainer.phase_trainer import PhaseTrainer

    attention = kernel(shape, length) if attention == "kernel" else attention
    model = Model(shape, "bfloat16", remat, attention)  # type: ignore[arg-type]
    grpo = Grpo(aggregation="token-mean")
    pack = PackShape(1, rows, length)
    return PhaseTrainer(one_device_mesh(), model, grpo, AdamW(1e-6), pack, steps=100, groups_per_step=rows)


def full_batch(trainer: Any) -> Any:
    """Return a batch on the device, every row full with one sequence of random tokens."""
    import numpy as np

    from rolljax.trainer.batch import Sample
    from rolljax.trainer.mesh import PlacedBatch

    shape, rng = trainer.shape, np.random.default_rng(0)
    sampled = np.arange(shape.row_len // 4, shape.row_len)

    def sample() -> Any:
        tokens = rng.integers(0, trainer.model.cfg.vocab_size, shape.row_len, np.int32)
        logp = np.full(len(sampled), -np.log(trainer.model.cfg.vocab_size), np.float32)
        columns = {"mask": np.ones(len(sampled), bool), "sampler_logp": logp}
        one = Sample(tokens, sampled, np.zeros(len(sampled), np.int64), columns)
        return one.with_columns(advantages=rng.normal(size=len(sampled)).astype(np.float32))

    packed = trainer.pack([[sample()] for _ in range(shape.micro_rows)])
    assert int(packed.batch.num_micro) == 1 and int(packed.batch.num_computed) == packed.batch.tokens.size
    return PlacedBatch(trainer.mesh, packed).on_devices


def update_figures(trainer: Any, policy: Any, peaks: Peaks | None) -> tuple[Any, dict[str, Any]]:
    """Time updates; return the policy's state after them, and the figures."""
    batch = full_batch(trainer)

    def step() -> Any:
        nonlocal policy
        policy, stats = trainer.policy_update(policy, batch, {}, None)
        return stats

    found = timed(step, repeats=REPEATS)
    stats = step()
    work = flops(trainer.model, trainer.shape.row_len, trainer.shape.micro_rows)
    figures = {
        "layers": trainer.model.cfg.num_layers,
        "tok_s": batch.tokens.size / found.seconds,
        "step_s": found.seconds,
        "tflop_s": work / found.seconds / 1e12,
        "spread": found.spread,
        "first_s": found.first_s,
        "finite": bool(stats["optim/finite"]),
        "memory_peak_gib": memory_peak_gib(),
    }
    return policy, figures | ({"mfu": work / found.seconds / peaks.bf16_flops} if peaks else {})


def repeats(shape: Any, length: int, rows: int, attention: str) -> bool:
    """Return whether two updates from the same state give the same weights, bit by bit, the second time."""
    trainer = make_trainer(shape, length, rows, "full", attention)
    batch = full_batch(trainer)

    def two_updates() -> Any:
        policy = trainer.states.init(random_weights(trainer.model, computed=False)).policy
        for _ in range(2):
            policy, _ = trainer.policy_update(policy, batch, {}, None)
        return policy.params

    return same_bits(two_updates(), two_updates())


def body(piece: Piece) -> None:
    name, length, rows = ("tiny", 64, 2) if piece.tiny else ("0.6B", 8192, 4)
    attention = "xla" if piece.tiny else "kernel"
    row = {"what": "repeat", "shape": name, "length": length, "rows": rows, "attention": attention}
    with piece.attempt(row) as row:
        row["same_bits"] = repeats(shapes(piece.tiny)[name], length, rows, attention)
    policy, of = None, None
    for one in work(piece.tiny):
        what = {"what": "update", **one._asdict()}
        if not piece.has_time(what, 2 * COMPILE_S):
            continue
        with piece.attempt(what) as row:
            shape = fitting(shapes(piece.tiny)[one.shape], piece.peaks)
            trainer = make_trainer(shape, one.length, one.rows, one.remat, one.attention)
            row["attention"] = trainer.model.attention
            if of != one.shape or policy is None:
                policy = None
                gc.collect()
                policy, of = trainer.states.init(random_weights(trainer.model, computed=False)).policy, one.shape
            held, policy = policy, None  # an update that fails has given the state up
            policy, figures = update_figures(trainer, held, piece.peaks)
            row |= figures


if __name__ == "__main__":
    main("update", body, estimate)
