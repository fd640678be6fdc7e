"""DDK against uniform shares: the student's gap to its teacher by domain, after the same number of tokens.

    python benchmarks/ddk.py --figure rolljax/recipes/ddk/ddk.png [--seeds 3]

The teacher is `ddk_teacher.gin`; the student `ddk.gin` twice for each seed, with the shares of DDK and
with equal ones (`Scheduled`). All answers are of one length, so that equal steps are equal tokens. Printed: the largest
ratio of perplexities, student over teacher, over the domains, on held-out tasks after the last step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from trained import train

DOMAINS = ("a", "b", "c", "d")
ARMS = ("ddk", "uniform")
STEPS, EVERY = 60, 5


def student(folder: Path, teacher: Path, arm: str, seed: int) -> list[dict[str, float]]:
    """Distil one arm; return its metrics rows.

    One more step is trained, whose row has the perplexities after step `STEPS`.
    """
    settings = [
        f"Distill.teacher = '{teacher / 'hf'}'",
        f"Recipe.seed = {seed}",
        f"distill/Phase.steps = {STEPS + 1}",
    ]
    if arm == "ddk":
        settings.append(f"Ddk.every = {EVERY}")
    else:
        settings += [
            "distill/Phase.mixture = @uniform/Scheduled()",
            f"uniform/Scheduled.at = {{0: {dict.fromkeys(DOMAINS, 1.0)}}}",
            f"uniform/Scheduled.every = {EVERY}",
            "uniform/Scheduled.tasks = 40",
        ]
    run = train("ddk", folder / f"{arm}_{seed}", *settings)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "distill"]


def of(rows: list[dict[str, float]], name: str) -> np.ndarray:
    """Return a metric of every domain, `[domains, steps]`."""
    return np.array([[row[f"domain/{d}/{name}"] for row in rows] for d in DOMAINS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", help="where the picture goes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", help="a folder that keeps the runs (default: none)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.runs or scratch)
        teacher = train("ddk_teacher", folder / "teacher")
        found = {(arm, s): student(folder, teacher, arm, s) for s in range(args.seeds) for arm in ARMS}
    worst = {key: of(rows, "perplexity_ratio")[:, -1].max() for key, rows in found.items()}
    print("| seed | first worst ratio | uniform | DDK | better by |\n|---|---|---|---|---|")
    gains = []
    for s in range(args.seeds):
        first = of(found["ddk", s], "perplexity_ratio")[:, 0].max()
        uniform, ddk = worst["uniform", s], worst["ddk", s]
        gains.append(1 - ddk / uniform)
        print(f"| {s} | {first:.2f} | {uniform:.3f} | {ddk:.3f} | {gains[-1]:.1%} |")
    print(f"mean: better by {np.mean(gains):.1%}")
    if args.figure:
        draw(Path(args.figure), found)


def draw(path: Path, found: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """Plot shares and ratios by step, seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    for arm, style in zip(ARMS, ("-", ":"), strict=True):
        rows = found[arm, 0]
        steps = np.arange(len(rows))
        for i, name in enumerate(DOMAINS):
            left.plot(steps, of(rows, "share_frac")[i], style, color=f"C{i}", label=f"{name}, {arm}")
            right.plot(steps, of(rows, "perplexity_ratio")[i], style, color=f"C{i}")
    left.set(xlabel="step of the distillation", ylabel="share of the step")
    right.set(xlabel="step of the distillation", ylabel="perplexity, student / teacher", yscale="log")
    right.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    right.minorticks_off()
    left.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
