"""Does RL on what a policy can learn need fewer steps than RL on everything? A table and a figure.

    # ten minutes on one core
    python benchmarks/stagent.py --figure rolljax/recipes/stagent/stagent.png

Tasks of known difficulty: one that always has the same answer (right after the seed SFT), three letters to write
backward (the middle band), three letters whose answer is drawn at random (never right). A seed policy is trained for a
short while, eight attempts at each task are played (`rolljax.eval`), `learnability.gin` keeps what can be
learned, and `stagent.gin` trains on that, and on a pool drawn uniformly. Compared is the success at tasks of
the middle band, as they are sampled.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from quickstart import ROOT, run

from rolljax.types import Trajectory

WIDTH = 10
"""Steps that a point of a curve is the mean of."""
LETTERS = "abcdefghijklmnop"
KINDS = {"easy": 0.45, "middle": 0.15, "hopeless": 0.40}
SEED_GIN = """
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.model.families import qwen3
from rolljax.trainer import optimizer
from rolljax.trainer.algorithms import sft
include 'stagent.gin'
recipe.Recipe.model = @qwen3.Qwen3Config()
qwen3.Qwen3Config.init_std = 0.1
recipe.Recipe.phases = [@warm_start/recipe.Phase()]
warm_start/recipe.Phase.name = 'warm_start'
warm_start/recipe.Phase.algorithm = @sft.Sft()
warm_start/recipe.Phase.temperature = 0.7
warm_start/recipe.Phase.steps = 100
warm_start/recipe.Phase.prompts_per_step = 64
# a third of these tasks are easy: it ends where about half of the others come out right
warm_start/recipe.Phase.eval_every = 5
warm_start/recipe.Phase.stop_at_reward = 0.6
recipe.Evaluation.tasks = 64
warm_start/recipe.Phase.optimizer = @warm_start/optimizer.Muon()
warm_start/optimizer.Muon.lr = 2e-2
"""


def tasks(num: int, seed: int, kinds: dict[str, float] = KINDS) -> list[dict[str, str]]:
    """Return distinct tasks, with kinds in the given proportions."""
    rng, found = random.Random(seed), {}
    while len(found) < num:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        word = "".join(rng.choices(LETTERS, k=3))
        if kind == "easy":
            word = str(rng.randrange(100_000))
        prompt = {"easy": "yes ", "middle": "back ", "hopeless": "what "}[kind] + word
        answer = {"easy": "yes", "middle": word[::-1], "hopeless": "".join(rng.choices(LETTERS, k=3))}[kind]
        found.setdefault(prompt, {"prompt": prompt, "answer": answer, "kind": kind})
    return list(found.values())


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def verb(*words: str) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-m", *words], env=env, check=True, stdout=subprocess.DEVNULL)


def success(folder: Path, kind_of: dict[str, str]) -> dict[str, list[float | None]]:
    """Share of right samples at every step, by kind."""
    found: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
    for path in sorted((folder / "rollouts").glob("step_*.jsonl"), key=lambda p: int(p.stem.split("_")[1])):
        right: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for t in map(Trajectory.from_json, record.get("trajectories", [record])):
                right[kind_of[t.task.content]].append(t.success)
        for kind in KINDS:
            found[kind].append(statistics.mean(right[kind]) if right[kind] else None)
    return found


def smooth(values: list[float | None]) -> list[float]:
    """Average over the last few steps that have a value."""
    out: list[float] = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - WIDTH + 1) : i + 1] if v is not None]
        out.append(statistics.mean(near) if near else float("nan"))
    return out


def first_at(values: list[float], target: float) -> int | None:
    return next((i + 1 for i, v in enumerate(values) if i + 1 >= WIDTH and v >= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--warm", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num", type=int, default=1500)
    parser.add_argument("--target", type=float, default=0.7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    rows = tasks(args.num, 0)
    kind_of = {r["prompt"]: r["kind"] for r in rows}
    everything = write(out / "tasks.jsonl", rows)
    seed_rows = tasks(2000, 1, {"easy": 0.3, "middle": 0.7})
    seed_set = write(out / "seed.jsonl", [r for r in seed_rows if r["prompt"] not in kind_of])
    (out / "seed.gin").write_text(SEED_GIN)
    run(str(out / "seed.gin"), out / "seed", [f"Questions.path = {seed_set}", f"warm_start/Phase.steps = {args.warm}"])
    env = f"questions(path='{everything}', prompt='{{question}}', answer_in='full')"
    played = ["--tasks", str(args.num), "--attempts", "8", "--max_answer_tok", "8", "--to", str(out / "attempts")]
    verb("rolljax.eval", "--model", str(out / "seed" / "hf"), "--env", env, *played, "--max_context", "64")
    paths = f"FromRollouts.paths = ['{out / 'attempts' / 'answers.jsonl'}']"
    routed = out / "routed"
    verb("rolljax.data", "learnability", "--in", str(everything), "--out", str(routed), "--set", paths, "--fresh")
    kept = [json.loads(line) for line in (routed / "data.jsonl").read_text().splitlines()]
    middle = {p for p, kind in kind_of.items() if kind == "middle"}
    learnable = {r["prompt"] for r in kept}
    both = len(learnable & middle)
    told = (
        f"{both / len(learnable):.1%} of them are of the band, and {both / len(middle):.1%} of the band are among them"
    )
    print(f"{len(rows)} tasks, {len(middle)} of the middle band; learnable {len(learnable)}: {told}", flush=True)
    curves: dict[str, list[dict[str, list[float | None]]]] = {"uniform": [], "learnable": []}
    for seed in range(args.seeds):
        for name, path in (("uniform", everything), ("learnable", routed / "data.jsonl")):
            settings = [f"Recipe.model = {out / 'seed' / 'hf'}", f"Questions.path = {path}", f"Recipe.seed = {seed}"]
            run("stagent", out / f"{name}_{seed}", [*settings, f"rl/Phase.steps = {args.steps}"])
            curves[name].append(success(out / f"{name}_{seed}", kind_of))
            step = first_at(smooth(curves[name][-1]["middle"]), args.target)
            reached = f"at step {step}" if step else f"not within {args.steps} steps"
            print(f"{name} seed {seed}: {args.target:.0%} of the middle band {reached}", flush=True)
    (out / "result.json").write_text(json.dumps(curves))
    if args.figure:
        draw(curves, kept, args.target, args.figure)


def draw(curves: dict, kept: list[dict], target: float, figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for name, color in (("uniform", "0.5"), ("learnable", "tab:blue")):
        for i, found in enumerate(curves[name]):
            left.plot(smooth(found["middle"]), color=color, label=name if not i else None)
    left.axhline(target, color="k", linewidth=0.5, linestyle=":")
    left.set(xlabel="GRPO step", ylabel="success", ylim=(0, 1), title="tasks of the middle band")
    left.legend(frameon=False)
    for kind, style in (("easy", ":"), ("middle", "-"), ("hopeless", "--")):
        right.plot(smooth(curves["uniform"][0][kind]), style, color="0.4", label=kind)
    right.set(xlabel="GRPO step", ylim=(0, 1.02), title="uniform data, by difficulty")
    right.legend(frameon=False)
    fig.savefig(figure, dpi=120)


if __name__ == "__main__":
    main()
