"""Segment rewards (arXiv 2411.00809) against the same algorithms with a reward for the whole answer.

    python benchmarks/segments.py --figure docs/segments.png      # three minutes on two cores

An answer of `toys.Span` has 16 symbols, of which four in a row decide; all others are style that the policy had before.
Segments come from the implicit reward of a policy that knows the span. The control is a policy that differs from the
start by as much at random places: its segments say nothing. Printed: the share of the span that is right, how far the
style has moved from its start (KL, nat a token), and which share of the tokens that were kept belongs to the span.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import toys
from rich.console import Console
from rich.table import Table

from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.segment_reward import SegmentDpo, SegmentPpo, SegmentReward, SegmentRft
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW

SEEDS, STEPS = 10, 60
CRITIC = Critic(epochs=4, optimizer=AdamW(lr=20.0, eps=1.0))
PAIRS: dict[str, tuple[Algorithm, Algorithm, float]] = {
    "GRPO": (Grpo(), SegmentReward(scorer="teacher"), 10.0),
    "PPO": (Ppo(critic=CRITIC), SegmentPpo(critic=CRITIC, scorer="teacher"), 10.0),
    "rejection tuning": (Rft(), SegmentRft(scorer="teacher"), 3.0),
    "DPO": (Dpo(), SegmentDpo(scorer="teacher"), 3.0),
}
"""An algorithm, the same with segments, and the rate of both."""
ARMS = {"whole answer": (False, True), "segments": (True, True), "segments at random": (True, False)}
"""Whether there are segments, and whether they say something."""


def learned(pair: str, arm: str, *, seeds: int = SEEDS, steps: int = STEPS) -> toys.History:
    """Train one arm of a pair."""
    (plain, segmented, lr), (in_segments, informed) = PAIRS[pair], ARMS[arm]
    algorithm = segmented if in_segments else plain
    return toys.train(functools.partial(toys.Span, informed=informed), algorithm, seeds=seeds, steps=steps, lr=lr)


def precision(pair: str, arm: str, *, seeds: int = SEEDS) -> float:
    """Return the share of the span in the tokens that train, at the first step; of all tokens if there are no
    segments."""
    in_segments, informed = ARMS[arm]
    found = []
    for seed in range(seeds):
        toy = toys.Span(seed, informed=informed)
        kept = np.ones((toy.samples, toy.rows), bool)
        if in_segments:
            algorithm = PAIRS[pair][1]
            table = toy.start()
            e = toys.read(algorithm, toy, toy.play(table, 0), table, table, None).episodes
            kept = algorithm.agreeing(e, np.where(e.rewards > e.rewards.mean(), 1, -1))  # type: ignore[attr-defined]
        found.append(kept[:, toy.span].sum() / max(kept.sum(), 1))
    return float(np.mean(found))


def draw(path: Path, runs: Mapping[str, Mapping[str, toys.History]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, len(runs), figsize=(13, 5.4), sharex=True, layout="constrained")
    for column, (pair, arms) in enumerate(runs.items()):
        for axis, name in zip(axes[:, column], ("right", "drift"), strict=True):
            for arm, history in arms.items():
                curve = history.measured[name]
                axis.plot(curve.mean(0), label=arm)
                axis.fill_between(range(curve.shape[1]), curve.min(0), curve.max(0), alpha=0.12)
        axes[0, column].set(title=pair, ylabel="right symbols of the span" if not column else "")
        axes[1, column].set(xlabel="step", ylabel="drift of the style (nat)" if not column else "")
    axes[0, 0].legend(fontsize=8)
    fig.savefig(path, dpi=110)


def main() -> None:
    args = toys.arguments(__doc__, SEEDS)
    runs = {pair: {arm: learned(pair, arm, seeds=args.seeds) for arm in ARMS} for pair in PAIRS}
    table = Table("", "", "right, mean of the steps", "right, end", "drift, end", "span in kept tokens")
    for pair, arms in runs.items():
        for arm, history in arms.items():
            right, drift = history.measured["right"], history.measured["drift"][:, -1]
            cells = [toys.spread(x, 3) for x in (right.mean(1), right[:, -1], drift)]
            table.add_row(pair, arm, *cells, f"{precision(pair, arm, seeds=args.seeds):.2f}")
    Console(width=140).print(table)
    if args.figure:
        draw(args.figure, runs)


if __name__ == "__main__":
    main()
