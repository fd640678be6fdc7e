"""Two tasks at once against each alone, and one student of two teachers.

    python benchmarks/two_tasks.py --figure docs/two_tasks.png [--seeds 1]

`configs/two_tasks.gin` jointly, and each of its tasks alone with half of the prompts and updates, which are as many
of its own samples; then `configs/opd_two_teachers.gin`, whose teachers are the two that were trained alone. Printed:
held-out reward by task, at the end, in percent; the figure has it over the steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from trained import train

TASKS = ("spell", "guess")


def runs(folder: Path, seed: int) -> dict[str, Path]:
    """Train on each task alone, on both, and a student of the first two runs."""
    of_seed = f"Recipe.seed = {seed}"
    found = {}
    for task in TASKS:
        alone = [f"Mixture.domains = {{'{task}': @{task}/Domain()}}", "Evaluation.tasks = 128"]
        alone += [f"{phase}/Phase.prompts_per_step = 32" for phase in ("warm_start", "rl")]
        alone += ["warm_start/Phase.updates_per_step = 1", "rl/Phase.updates_per_step = 2"]
        found[task] = train("two_tasks", folder / f"{task}_{seed}", of_seed, *alone)
    found["joint"] = train("two_tasks", folder / f"joint_{seed}", of_seed)
    teachers = [f"{task}/Teacher.policy = '{found[task] / 'hf'}'" for task in TASKS]
    found["student"] = train("opd_two_teachers", folder / f"student_{seed}", of_seed, *teachers)
    return found


def heldout(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the held-out reward by task, with the step of each evaluation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [
        (row["step"], {t: row[f"domain/{t}/heldout_mean"] for t in TASKS if f"domain/{t}/heldout_mean" in row})
        for row in rows
    ]
    return [(step, of) for step, of in found if of]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", help="where the picture goes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", help="a folder that keeps the runs (default: none)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.runs or scratch)
        found = [{arm: heldout(run) for arm, run in runs(folder, s).items()} for s in range(args.seeds)]
    print("| seed | task | alone | jointly | student of both |\n|---|---|---|---|---|")
    for seed, arms in enumerate(found):
        for task in TASKS:
            cells = [f"{arms[arm][-1][1][task]:.1%}" for arm in (task, "joint", "student")]
            print(f"| {seed} | {task} | {' | '.join(cells)} |")
    if args.figure:
        draw(Path(args.figure), found[0])


def draw(path: Path, arms: dict[str, list[tuple[int, dict[str, float]]]]) -> None:
    """Plot held-out reward over the steps, seed 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(9, 3.2), sharey=True)
    for axis, task in zip(axes, TASKS, strict=True):
        for arm, label in ((task, "alone"), ("joint", "jointly"), ("student", "student of both")):
            axis.plot([step for step, _ in arms[arm]], [of[task] for _, of in arms[arm]], "o-", label=label)
        axis.set(title=task, xlabel="step", ylim=(0, 1.02))
    axes[0].set_ylabel("held-out reward")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
