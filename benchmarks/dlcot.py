"""What DLCoT's pruning saves, and what students make of it: chains of thought about sums (`dlcot_toy.py`).

    # 40 minutes on one core
    python benchmarks/dlcot.py --out runs/dlcot --figure rolljax/recipes/dlcot/dlcot.png

Two comparisons; a finished run in its folder is used as it is.
- Students with random weights learn from raw or from pruned traces.
- Students who know sums of small numbers by one method learn sums of larger ones, by that method (homologous traces)
  or by the other one.

The pipeline is `data.gin`, its model a rule behind a real server (`rule_server.py`), the students' recipe `dlcot.gin`.
Tokens are bytes. Intervals are 95 % t intervals of the mean difference; students of one seed are a pair.
"""

import argparse
import json
import statistics
from pathlib import Path

import dlcot_toy
import numpy as np
from rule_server import RuleServer
from scipy import stats
from trained import heldout, train

from rolljax.data.__main__ import main as pipeline

NUM = 1500
STEPS, KNOW_STEPS, TEACH_STEPS = 300, 300, 100
"""Steps of `dlcot.gin`, of a student who gets to know a method, and of its lessons in larger numbers."""
LESSONS = [
    ("digits", "digits", "raw"),
    ("digits", "digits", "pruned"),
    ("digits", "steps", "raw"),
    ("digits", "steps", "pruned"),
    ("steps", "digits", "raw"),
    ("steps", "steps", "raw"),
]
"""The method that a student knows, the method of the traces, and their kind."""


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: list[dict]) -> Path:
    lines = (json.dumps({k: r[k] for k in ("prompt", "answer", "trace")}) + "\n" for r in records)
    path.write_text("".join(lines))
    return path


def traces(folder: Path, only: str = "") -> dict[str, Path]:
    """Return the files of raw and of pruned traces, with the same questions; make them first if they do not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.jsonl" for name in ("raw", "pruned")}
    if not files["pruned"].is_file():
        source = write(folder / "traces.jsonl", dlcot_toy.records(NUM, 0, only))
        with RuleServer(dlcot_toy.rule) as server:
            command = ["dlcot/data", "--in", str(source), "--out", str(folder / "data")]
            assert pipeline([*command, "--set", f"EndpointConfig.url = '{server.url}'"]) == 0
        pruned = rows(folder / "data" / "data.jsonl")
        known = {r["prompt"] for r in pruned}
        write(files["raw"], [r for r in rows(source) if r["prompt"] in known])
        write(files["pruned"], pruned)
    return files


def student(folder: Path, file: Path, seed: int, steps: int, *settings: str) -> Path:
    """Return the run of a student who learns from a file of traces."""
    named = [f"Questions.path = '{file}'", f"Recipe.seed = {seed}", f"sft/Phase.steps = {steps}"]
    return train("dlcot", folder, *named, *settings)


def from_nothing(out: Path, seeds: int) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return the tokens of raw and pruned traces, and the share of right answers by seed."""
    files = traces(out / "both")
    right: dict[str, list[float]] = {name: [] for name in files}
    for seed in range(seeds):
        for name, file in files.items():
            right[name].append(heldout(student(out / f"{name}_{seed}", file, seed, STEPS)))
            print(f"{name}, seed {seed}: {right[name][-1]:.3f}", flush=True)
    return {name: [len(r["trace"].encode()) for r in rows(file)] for name, file in files.items()}, right


def of_a_family(out: Path, seeds: int) -> tuple[dict[str, list[float]], dict[tuple[str, str, str], list[float]]]:
    """Return the share of right answers by seed: before the lessons by the method that the students know, about small
    numbers, and after each of `LESSONS`, about larger ones."""
    knows: dict[str, list[float]] = {known: [] for known, *_ in LESSONS}
    right: dict[tuple[str, str, str], list[float]] = {lesson: [] for lesson in LESSONS}
    for seed in range(seeds):
        bases = {}
        for known in knows:
            file = write(out / f"short_{known}.jsonl", dlcot_toy.short(known))
            bases[known] = student(out / f"knows_{known}_{seed}", file, seed, KNOW_STEPS, "Evaluation.tasks = 128")
            knows[known].append(heldout(bases[known]))
        for known, method, kind in LESSONS:
            file, folder = traces(out / method, method)[kind], out / f"knows_{known}_{method}_{kind}_{seed}"
            run = student(folder, file, seed, TEACH_STEPS, f"Recipe.model = '{bases[known] / 'hf'}'")
            right[known, method, kind].append(heldout(run))
            print(f"knows {known}, {method} {kind}, seed {seed}: {heldout(run):.3f}", flush=True)
    return knows, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of students with random weights; 0: only make the traces")
    parser.add_argument("--family_seeds", type=int, default=3, help="of students who know a method")
    parser.add_argument("--out", type=Path, default=Path("runs/dlcot"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out.resolve()
    tokens, right = from_nothing(out, args.seeds)
    if not args.seeds:
        return
    knows, taught = of_a_family(out, args.family_seeds)
    print("\n| traces | tokens | right | by seed |\n|---|---|---|---|")
    for name, values in right.items():
        print(f"| {name} | {statistics.mean(tokens[name]):.0f} | {spread(values)} |")
    print(f"\npruned less raw: {difference(right['pruned'], right['raw'])}")
    print("\n| knows | taught by | traces | right | by seed |\n|---|---|---|---|---|")
    for known, values in knows.items():
        print(f"| {known} | (small numbers) | | {spread(values)} |")
    for lesson, values in taught.items():
        print(f"| {' | '.join(lesson)} | {spread(values)} |")
    same = ("digits", "digits", "raw")
    for other in (("digits", "steps", "raw"), ("steps", "digits", "raw"), ("digits", "digits", "pruned")):
        print(f"\n{same} less {other}: {difference(taught[same], taught[other])}")
    if args.figure:
        draw(tokens, right, taught, args.figure)


def spread(values: list[float]) -> str:
    """Return cells of a table: mean and standard deviation, and the values."""
    by_seed = ", ".join(f"{v:.2f}" for v in values)
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation} | {by_seed}"


def difference(first: list[float], second: list[float]) -> str:
    """Return the mean of first less second, seed by seed, with its 95 % t interval."""
    by_seed = np.subtract(first, second)
    half = stats.t.ppf(0.975, len(by_seed) - 1) * stats.sem(by_seed)
    return f"{by_seed.mean():+.3f} ({by_seed.mean() - half:+.3f} to {by_seed.mean() + half:+.3f})"


def draw(tokens: dict, right: dict, taught: dict, figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, middle, last) = plt.subplots(1, 3, figsize=(12, 3.6), width_ratios=[3, 2, 5], constrained_layout=True)
    bins = range(50, max(tokens["raw"]) + 10, 10)
    for name, lengths in tokens.items():
        left.hist(lengths, bins=bins, alpha=0.6, label=f"{name}: mean {statistics.mean(lengths):.0f}")
    left.set(xlabel="tokens of a trace", ylabel="traces", title="before and after pruning")
    left.margins(y=0.3)
    left.legend(frameon=False)
    arms = {f"{known},\n{method}\n{kind}": values for (known, method, kind), values in taught.items()}
    for ax, found in ((middle, right), (last, arms)):
        for i, values in enumerate(found.values()):
            ax.bar(i, statistics.mean(values), width=0.6, alpha=0.6)
            ax.plot([i] * len(values), values, "ko", markersize=3)
        ax.set(xticks=range(len(found)), xticklabels=list(found), ylim=(0, 1))
    middle.set(title="from random weights", ylabel="right, held out (dots: seeds)")
    last.set(title="students who know a method (above), taught by traces (below)")
    fig.savefig(figure, dpi=110)


if __name__ == "__main__":
    main()
