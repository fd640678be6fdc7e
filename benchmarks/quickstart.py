"""Run a config for several seeds, and its control, as a user would; print a table and draw the curves.

    python benchmarks/quickstart.py                                  # quickstart, 3 seeds and the control
    python benchmarks/quickstart.py --config frozen_lake --seeds 2 --no_control

Each run is a process of its own, one after the other. `--out DIR` keeps the run folders, `--figure FILE` the picture.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(config: str, folder: Path, settings: list[str]) -> dict:
    command = [sys.executable, "-m", "rolljax.train", "--gin", config, "--run_dir", str(folder), "--fresh"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    start = time.perf_counter()
    subprocess.run(command + [a for s in settings for a in ("--set", s)], env=env, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    return summary | {"process_s": time.perf_counter() - start}


def draw(folders: dict[str, Path], figure: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(8, 4), constrained_layout=True)
    for name, folder in folders.items():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        heldout = json.loads((folder / "summary.json").read_text())["heldout_reward"]
        first = next(r["step"] for r in rows if "tput/sample_tok_s" in r)
        rl = [r for r in rows if r["step"] >= first]
        smooth = [sum(r["reward/mean"] for r in rl[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(rl))]
        style = {"color": "0.5", "linestyle": "--"} if name == "control" else {}
        (line,) = axis.plot([r["step"] - first + 1 for r in rl], smooth, label=name, **style)
        points = [(r["step"] - first + 1, r["heldout/reward_mean"]) for r in rl if "heldout/reward_mean" in r]
        points = [(0, heldout[1]["mean"]), *points, (len(rl), heldout[-1]["mean"])]
        axis.plot(*zip(*points, strict=True), "o", color=line.get_color(), markersize=5)
    axis.set(xlabel="GRPO step", ylabel="reward", ylim=(-0.02, 1.02), title=title)
    axis.legend(frameon=False, loc="lower right", title="lines: samples, dots: held out")
    fig.savefig(figure, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no_control", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    runs = {f"seed {s}": [f"Recipe.seed = {s}"] for s in range(args.seeds)}
    if not args.no_control:
        same = ["PermutedGrpo.aggregation = token-mean", "PermutedGrpo.drop_degenerate = True"]
        runs["control"] = ["rl/Phase.algorithm = @permuted.PermutedGrpo()", *same]
    folders, lines = {}, []
    for name, settings in runs.items():
        folders[name] = out / name.replace(" ", "_")
        s = run(args.config, folders[name], settings)
        h = {e["phase"]: e["mean"] for e in s["heldout_reward"]}
        phases = list(s["phase_steps"])
        line = "  ".join(f"{p} {h[p]:.3f} ({s['phase_steps'][p]} steps, {s['phase_wall_s'][p]:.0f} s)" for p in phases)
        lines.append(f"{name:8}  start {h['start']:.3f}  {line}  all of the process {s['process_s']:.0f} s")
        print(lines[-1], flush=True)
    print(f"\n{args.config}: held-out reward after each phase\n" + "\n".join(lines))
    if args.figure:
        draw(folders, args.figure, f"{args.config}: held-out and sampled reward")


if __name__ == "__main__":
    main()
