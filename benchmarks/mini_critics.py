"""AsyPPO (arXiv 2510.01656) against its parts: how many critics, on which data, before or after the advantages, and its
two masks, each alone and with everything else equal.

    python benchmarks/mini_critics.py --figure docs/mini_critics.png      # five minutes on two cores

Two problems of `toys.py`: `Worth`, where prompts are worth more or less and rewards are noisy, and `Ladder`, where
prompts are of four difficulties, rewards are 0 or 1, and critics are too small to tell the prompts apart.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import toys
from rich.console import Console
from rich.table import Table

from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW

SEEDS, STEPS = 20, 60
PROBLEMS = {"worth": toys.Worth, "ladder": functools.partial(toys.Ladder, cells=4)}
CRITIC = functools.partial(Critic, epochs=4, optimizer=AdamW(lr=20.0, eps=1.0))
"""Tables of values, trained by nearly plain gradient descent, four passes over a step's answers."""
SAME: dict[str, Any] = {
    name: getattr(AsyPpo(), name) for name in ("entropy_coef", "value_lam", "whiten", "aggregation")
}
"""The settings of AsyPPO that PPO has too."""
ARMS: dict[str, Algorithm] = {
    "one critic, fitted after": Ppo(critic=CRITIC(num=1), **SAME),
    "one critic, fitted first": Ppo(critic=CRITIC(num=1, first=True), **SAME),
    "two, all data": Ppo(critic=CRITIC(num=2, first=True, shard="all"), **SAME),
    "two, disjoint responses": AsyPpo(critic=CRITIC(num=2, first=True), mask_frac=0, entropy_mask_frac=0),
    "two, disjoint prompts": AsyPpo(critic=CRITIC(num=2, first=True, shard="prompt"), mask_frac=0, entropy_mask_frac=0),
    "two, advantage mask": AsyPpo(critic=CRITIC(num=2, first=True), entropy_mask_frac=0),
    "two, entropy filter": AsyPpo(critic=CRITIC(num=2, first=True), mask_frac=0),
    "AsyPPO": AsyPpo(critic=CRITIC(num=2, first=True)),
}


def learned(problem: str, arm: str, *, seeds: int = SEEDS) -> np.ndarray:
    """Return the share of right answers, mean over the steps, by seed `[S]`."""
    return toys.train(PROBLEMS[problem], ARMS[arm], seeds=seeds, steps=STEPS, lr=10).measured["right"].mean(1)


def error(values: np.ndarray) -> float:
    """Return the standard error of the mean over seeds."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def draw(path: Path, found: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(found), figsize=(12, 3.4), sharey=True, layout="constrained")
    for axis, (problem, arms) in zip(axes, found.items(), strict=True):
        errors = [error(x) for x in arms.values()]
        axis.errorbar([x.mean() for x in arms.values()], range(len(arms)), xerr=errors, fmt="o", capsize=3)
        axis.set(title=problem, xlabel="right answers, mean over training", yticks=range(len(arms)), yticklabels=arms)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    fig.savefig(path, dpi=110)


def main() -> None:
    args = toys.arguments(__doc__, SEEDS)
    found = {problem: {arm: learned(problem, arm, seeds=args.seeds) for arm in ARMS} for problem in PROBLEMS}
    table = Table("", *(f"{problem}: mean, standard error" for problem in found))
    for arm in ARMS:
        values = [found[problem][arm] for problem in found]
        table.add_row(arm, *(f"{x.mean():.3f} ± {error(x):.3f}" for x in values))
    Console(width=120).print(table)
    if args.figure:
        draw(args.figure, found)


if __name__ == "__main__":
    main()
