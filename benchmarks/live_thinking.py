"""LiveThinking on sums: what the length band does to the length of answers and to their accuracy, with and without it.

    python benchmarks/live_thinking.py --figure rolljax/recipes/live_thinking/live_thinking.png [--seeds 1]

`live_thinking.gin` twice for each seed: as it is, and with the band's weight at 0. Both imitate the same
answers first, from the same seed. Length and accuracy are those of one answer to each of the held-out tasks, before
GRPO and after it; the curves are those of the training steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
ARMS = {"band": 0.5, "no band": 0.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--figure", help="write a picture of the curves there")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", help="keep the runs in that folder, and continue the runs in it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.runs or scratch)
        found = {(arm, seed): run(folder, arm, seed) for seed in range(args.seeds) for arm in ARMS}
        print("| run | length before | after | ratio | accuracy before | after | ratio |\n|" + "---|" * 7)
        for (arm, seed), path in found.items():
            (l0, a0), (l1, a1) = heldout(path, "rft"), heldout(path, "rl")
            print(f"| {arm}, seed {seed} | {l0:.1f} | {l1:.1f} | {l1 / l0:.2f} | {a0:.3f} | {a1:.3f} | {a1 / a0:.2f} |")
        if args.figure:
            draw(found, args.figure)
    return 0


def run(folder, arm, seed):
    """Run an arm unless its run exists; return its folder."""
    path = folder / f"{arm.replace(' ', '_')}_{seed}"
    if not (path / "summary.json").is_file():
        weights = f"Sum.weights = {{'right': 1.0, 'length': {ARMS[arm]}}}"
        argv = ["--gin", "live_thinking", "--run_dir", str(path), "--quiet"]
        argv += ["--set", weights, "--set", f"Recipe.seed = {seed}"]
        subprocess.run([sys.executable, "-m", "rolljax.train", *argv], check=True, cwd=ROOT, env=os.environ)
    return path


def heldout(path, name):
    """Return mean tokens and accuracy of the held-out answers at the end of a phase."""
    every = [json.loads(line) for line in (path / "rollouts" / f"heldout_{name}.jsonl").read_text().splitlines()]
    tokens = [sum(len(turn["tokens"]) for turn in t["turns"]) for t in every]
    return float(np.mean(tokens)), float(np.mean([t["success"] for t in every]))


def draw(found, file):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    colors = dict(zip(ARMS, ("tab:blue", "tab:orange"), strict=True))
    for (arm, seed), path in found.items():
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["phase"] == "rl"]
        for axis, name in zip(axes, ("rollout/len_tok", "reward/success_frac"), strict=True):
            values = [row[name] for row in rows]
            axis.plot(values, color=colors[arm], alpha=0.8, label=None if seed else arm)
    axes[0].axhspan(0.25 * 76, 0.5 * 76, color="tab:green", alpha=0.15, label="the band")
    axes[0].set(title="tokens of an answer", xlabel="step of GRPO", ylim=(0, None))
    axes[1].set(title="right answers", xlabel="step of GRPO", ylim=(0, 1.05))
    axes[0].legend()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
