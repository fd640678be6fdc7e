"""What two papers say their credit does, on problems of seconds: a table and docs/effects.png.

    python benchmarks/effects.py --figure docs/effects.png      # two minutes on two cores

rhythm: attention-rhythm credit (arXiv 2510.13554) amplifies the top 40 % of an answer's tokens; its controls amplify
any 40 %, or the bottom 40 %. The tokens are those that influence later ones (global), that look back further than their
neighbours (local), or both (coupled). The model is a transformer of one or two layers that looks back at its plan
(`plan_task.py`).
mixture: Lite PPO (arXiv 2508.08221) against GRPO as its paper has it, where nine prompts of ten are easy and short and
one is hard and long (`toys.Prompts`), and each of Lite PPO's two tricks alone.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import plan_task
import toys
from rich.console import Console
from rich.table import Table

from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.lite_ppo import LitePpo
from rolljax.trainer.attention_stats import AttentionMaps

SEEDS = 5
MAPS = AttentionMaps(waad_window=5, fai_low=1, fai_high=plan_task.LENGTH)
"""Answers have ten tokens here, not thousands."""
PAPER: dict[str, Any] = {"aggregation": "seq-mean-token-mean", "filter": None}
"""GRPO's (arXiv 2402.03300, eq. 3): mean over answers of the mean over their tokens; groups without signal stay."""
RHYTHM = AttentionRhythm(rhythm="global", maps=MAPS, clip_low=None, clip_high=None, **PAPER)
RHYTHMS = {
    "top 40 %": RHYTHM,
    "any 40 %": dataclasses.replace(RHYTHM, pick="random"),
    "bottom 40 %": dataclasses.replace(RHYTHM, pick="bottom"),
    "none (GRPO)": dataclasses.replace(RHYTHM, amplify=1.0),
    "local, top 40 %": dataclasses.replace(RHYTHM, rhythm="local"),
    "local, bottom 40 %": dataclasses.replace(RHYTHM, rhythm="local", pick="bottom"),
    "coupled": dataclasses.replace(RHYTHM, rhythm="coupled"),
}
SHOWN = ("top 40 %", "any 40 %", "bottom 40 %", "none (GRPO)", "coupled")
"""Arms that the figure shows."""
MIXTURE = {
    "GRPO": Grpo(**PAPER),
    "deviation of the batch only": LitePpo(aggregation="seq-mean-token-mean"),
    "mean over tokens only": Grpo(aggregation="token-mean", filter=None),
    "Lite PPO": LitePpo(aggregation="token-mean"),
}


def rhythm(
    names: tuple[str, ...] = tuple(RHYTHMS), *, layers: int = 1, seeds: int = SEEDS, steps: int = 30
) -> plan_task.History:
    """Run `RHYTHMS`, in the order of `names`."""
    return plan_task.train([RHYTHMS[n] for n in names], MAPS, layers=layers, seeds=seeds, steps=steps, lr=0.05)


def mixture(
    names: tuple[str, ...] = tuple(MIXTURE), *, seeds: int = SEEDS, steps: int = 100, long: bool = True
) -> dict[str, toys.History]:
    """Run `MIXTURE`. long: hard prompts ask for 16 symbols and easy ones for 2; otherwise all for 3."""

    def make(seed: int) -> toys.Prompts:
        if long:
            return toys.Prompts(seed, hard_rate=0.2, length=16, easy_length=2)
        return toys.Prompts(seed, hard_rate=0.2)

    return {n: toys.train(make, MIXTURE[n], seeds=seeds, steps=steps, lr=10) for n in names}


def variance_ratio(base: toys.History, other: toys.History, *, relative: bool = False) -> np.ndarray:
    """Return the variance of `base`'s gradient norm over the steps divided by the other's, by seed `[S]`.

    relative: of the norm over its mean, which no learning rate can change.
    """
    norms = [h.grad_norms / h.grad_norms.mean(1, keepdims=True) if relative else h.grad_norms for h in (base, other)]
    return norms[0].var(1) / norms[1].var(1)


def rhythm_table(found: plan_task.History) -> Table:
    table = Table("amplified", "success, mean of the steps", "at the end", "factor of the plan")
    for name, speed, curve, factors in zip(RHYTHMS, found.speed, found.success, found.factors, strict=True):
        table.add_row(name, toys.spread(speed), toys.spread(curve[:, -1]), f"{factors[plan_task.PLAN]:.2f}")
    return table


def mixture_table(found: Mapping[str, toys.History]) -> Table:
    table = Table("", "variance, GRPO / this", "of norm over mean", "hard prompts", "easy prompts")
    for name, h in found.items():
        ratios = [toys.spread(variance_ratio(found["GRPO"], h, relative=r)) for r in (False, True)]
        table.add_row(name, *ratios, *[toys.spread(h.measured[m][:, -1]) for m in ("hard", "easy")])
    return table


def draw(path: Path, rhythms: plan_task.History, runs: Mapping[str, toys.History]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for name, curves in zip(RHYTHMS, rhythms.success, strict=True):
        if name not in SHOWN:
            continue
        left.plot(curves.mean(0), "--" if name.startswith("none") else "-", label=name)
        left.fill_between(range(curves.shape[1]), curves.min(0), curves.max(0), alpha=0.15)
    left.set(title="attention rhythm: what is amplified", xlabel="step", ylabel="probability of the right plan")
    for name in ("GRPO", "Lite PPO"):
        norms = runs[name].grad_norms
        middle.plot(norms[0] / norms[0].mean(), label=name, linewidth=1)
    middle.set(title="gradient norm over its mean, seed 0", xlabel="step")
    for name, h in runs.items():
        right.plot(h.measured["hard"].mean(0), label=name)
    right.set(title="hard prompts", xlabel="step", ylabel="success")
    for axis in (left, middle, right):
        axis.legend(fontsize=8)
    fig.savefig(path, dpi=110)


def main() -> None:
    args = toys.arguments(__doc__, SEEDS)
    console = Console(width=120)
    rhythms, runs = rhythm(seeds=args.seeds), mixture(seeds=args.seeds)
    console.print(rhythm_table(rhythms), "with two layers", rhythm_table(rhythm(layers=2, seeds=args.seeds)))
    console.print(mixture_table(runs))
    console.print("the same where all answers are equally long", mixture_table(mixture(seeds=args.seeds, long=False)))
    if args.figure:
        draw(args.figure, rhythms, runs)


if __name__ == "__main__":
    main()
