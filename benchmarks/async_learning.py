r"""Learning against the async ratio: a recipe, algorithms with and without a correction for older samples.

    python benchmarks/async_learning.py --out runs/async --figure docs/async_learning.png
    python benchmarks/async_learning.py --config agents/guess_number --steps 80 --set rl/AdamW.lr=3e-4 \
        --out runs/async_agent

Every run is a process of its own, one after the other; its output goes to a .log next to its folder. A finished run is
used as it is, a stopped one continues. The table gives the mean held-out reward at the end over the seeds, and
the lowest and highest; the figure the rewards by step.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trained import heldout

ROOT = Path(__file__).parents[1]
ALGORITHMS = {"grpo": "", "tis": "Tis", "cispo": "Cispo", "decoupled_ppo": "DecoupledPpo", "topr": "Topr"}
"""Classes; the recipes themselves train with GRPO."""


def run(
    folder: Path, config: str, algorithm: str, ratio: float, seed: int, steps: int, more: Sequence[str] = ()
) -> None:
    summary = folder / "summary.json"
    if summary.exists() and "rl" in json.loads(summary.read_text())["phase_end"]:
        return
    settings = {
        "Recipe.seed": seed,
        "rl/Phase.async_ratio": ratio,
        "rl/Phase.steps": steps,
        "rl/Phase.eval_every": 0,
        "Recipe.save_every": 100_000,
    }
    if ALGORITHMS[algorithm]:
        settings["rl/Phase.algorithm"] = f"@{ALGORITHMS[algorithm]}()"
    bindings = [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]
    bindings += [a for setting in more for a in ("--set", setting)]
    command = [sys.executable, "-m", "rolljax.train", "--gin", config, "--run_dir", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env |= {
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.log").open("a") as log:
        subprocess.run(command + bindings, env=env, check=True, stdout=log, stderr=log)


def rows(folder: Path) -> list[dict]:
    """Return the metrics of a run's RL steps."""
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in every if r["phase"] == "rl"]


def table(out: Path, algorithms: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> str:
    lines = [f"| | {' | '.join(f'{r:g}' for r in ratios)} |", f"|---|{'---|' * len(ratios)}"]
    for name in algorithms:
        cells = []
        for ratio in ratios:
            found = [heldout(out / f"{name}-{ratio:g}-{seed}") for seed in seeds]
            cells.append(f"{sum(found) / len(found):.3f} ({min(found):.3f} - {max(found):.3f})")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(out: Path, figure: Path, algorithms: Sequence[str], ratios: Sequence[float], seeds: Sequence[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    fig, axes = plt.subplots(1, len(algorithms), figsize=(3 * len(algorithms), 3), sharey=True, constrained_layout=True)
    for axis, name in zip(np.atleast_1d(axes), algorithms, strict=True):
        for ratio in ratios:
            rewards = [[r["reward/mean"] for r in rows(out / f"{name}-{ratio:g}-{seed}")] for seed in seeds]
            smooth = [np.convolve(r, np.ones(8) / 8, "valid") for r in rewards]
            (line,) = axis.plot(np.mean(smooth, 0), label=f"{ratio:g}")
            axis.fill_between(
                range(len(smooth[0])), np.min(smooth, 0), np.max(smooth, 0), color=line.get_color(), alpha=0.15, lw=0
            )
        axis.set(title=name, xlabel="RL step", ylim=(0, 1.02))
    np.atleast_1d(axes)[0].set_ylabel("reward of the samples")
    np.atleast_1d(axes)[-1].legend(frameon=False, title="async_ratio")
    fig.savefig(figure, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart", help="a recipe with a phase named rl (default: quickstart)")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--ratios", default="0,1,4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of every run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    algorithms, ratios = args.algorithms.split(","), [float(r) for r in args.ratios.split(",")]
    for seed in range(args.seeds):
        for ratio in ratios:
            for name in algorithms:
                run(args.out / f"{name}-{ratio:g}-{seed}", args.config, name, ratio, seed, args.steps, args.set)
                print(f"{name} {ratio:g} seed {seed}: {heldout(args.out / f'{name}-{ratio:g}-{seed}'):.3f}", flush=True)
    print(table(args.out, algorithms, ratios, range(args.seeds)))
    if args.figure:
        draw(args.out, args.figure, algorithms, ratios, range(args.seeds))


if __name__ == "__main__":
    main()
