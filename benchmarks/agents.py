"""Agents that learn: every multi-turn config for some seeds, and IPA against GRPO where nothing succeeds by chance.

    python benchmarks/agents.py --figure docs/agents.png               # four tasks, 2 seeds each
    # eight doors: GRPO, rollback, parallel
    python benchmarks/agents.py --ipa --figure rolljax/recipes/rome/agent_ipa.png

Each run is a process of its own, one after the other. `--out DIR` keeps the run folders; what is finished there is not
run again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from quickstart import ROOT, run

TASKS = {
    "frozen lake": "frozen_lake",
    "guess a number": "agents/guess_number",
    "key and door": "agents/key_door",
    "calculator (MCP)": "agents/calculator",
}
PARALLEL = "ExpertStarts.mode = 'parallel'"
DOORS = {
    "GRPO": [
        "ipa/Phase.algorithm = @rolljax.trainer.algorithms.grpo.Grpo()",
        "ipa/Phase.start_states = None",
        "Grpo.entropy_coef = 0.02",
    ],
    "IPA, rollback": [],
    "IPA, parallel": [PARALLEL],
    "IPA, rollback, failure -1": ["Ipa.failure = -1.0", "ipa/Phase.steps = 40"],
    "IPA, parallel, failure -1": [PARALLEL, "Ipa.failure = -1.0", "ipa/Phase.steps = 40"],
}

FORM = [
    "KeyDoorChain.num_tasks = 100000",
    "KeyDoorChain.seed = 1000",
    "ipa/Phase.algorithm = @rolljax.trainer.algorithms.sft.Sft()",
    "ipa/Phase.start_states = None",
    "ipa/Phase.steps = 40",
    "ipa/Phase.group_size = 1",
    "ipa/Phase.updates_per_step = 1",
    "ipa/Phase.eval_every = 0",
]
"""Answers of the right form about other doors: what GRPO starts from, which otherwise would not even have the form. IPA
starts from random weights, as its config does."""


def finished(config: str, folder: Path, settings: list[str]) -> dict:
    """Return the summary of a run; run it first unless it is finished."""
    summary = folder / "summary.json"
    s = json.loads(summary.read_text()) if summary.exists() else {}
    return s if s.get("stop_reason") == "all phases done" else run(config, folder, settings)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def heldout(folder: Path, after: int = 0) -> list[tuple[int, float]]:
    """Step behind `after`, and success or reward on held-out tasks."""
    points = [(r["step"] - after, r["heldout/reward_mean"]) for r in rows(folder) if "heldout/reward_mean" in r]
    return [p for p in points if p[0] > 0]


def tasks(out: Path, names: list[str], seeds: int, figure: Path | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3), sharey=True, constrained_layout=True)
    print("| task | seed | warm start | end | turns at the end |\n|---|---|---|---|---|")
    for axis, name in zip(axes if len(names) > 1 else [axes], names, strict=True):
        for seed in range(seeds):
            folder = out / f"{TASKS[name].replace('/', '_')}_{seed}"
            s = finished(TASKS[name], folder, [f"Recipe.seed = {seed}"])
            warm, end = (e["mean"] for e in s["heldout_reward"][-2:])
            first = s["phase_steps"]["warm_start"]
            turns = [r["rollout/turns_n"] for r in rows(folder)[-10:]]
            seen = f"{warm:.3f} | {end:.3f} | {sum(turns) / len(turns):.2f}"
            print(f"| {name} | {seed} | {seen} |", flush=True)
            points = [(0, warm), *heldout(folder, first)]
            axis.plot(*zip(*points, strict=True), "o-", markersize=4, label=f"seed {seed}")
        axis.set(title=name, xlabel="GRPO step", ylim=(-0.02, 1.02))
    fig.axes[0].set_ylabel("held-out reward")
    fig.axes[0].legend(frameon=False)
    if figure:
        fig.savefig(figure, dpi=120)


def form(out: Path) -> Path:
    """Make a folder of weights that answer with a random key."""
    home, folder = out / "form", out / "form_hf"
    finished("agent_ipa", home, FORM)
    command = [sys.executable, "-m", "rolljax.export", "--run", str(home), "--to", str(folder)]
    if not folder.exists():
        subprocess.run(command, check=True, cwd=ROOT)
    return folder


def doors(out: Path, seeds: int, figure: Path | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    print("| run | seed | step 20 | step 40 | end |\n|---|---|---|---|---|")
    for seed in range(seeds):
        for i, (name, settings) in enumerate(DOORS.items()):
            home = out / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            start = [f"Recipe.model = '{form(out)}'"] if name == "GRPO" else []
            s = finished("agent_ipa", home, [f"Recipe.seed = {seed}", *start, *settings])
            points = [(0, s["heldout_reward"][0]["mean"]), *heldout(home)]
            at = dict(points)
            end = s["heldout_reward"][-1]["mean"]
            print(f"| {name} | {seed} | {at[20]:.3f} | {at[40]:.3f} | {end:.3f} |", flush=True)
            style = ("-", "--", ":")[seed % 3]
            axis.plot(*zip(*points, strict=True), color=f"C{i}", ls=style, label="" if seed else name)
    axis.set(xlabel="step", ylabel="success from the first door, held out", ylim=(-0.02, 1.02))
    axis.legend(frameon=False, title="one line for each seed")
    if figure:
        fig.savefig(figure, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ipa", action="store_true")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    if args.ipa:
        doors(out, args.seeds, args.figure)
    else:
        tasks(out, args.tasks, args.seeds, args.figure)


if __name__ == "__main__":
    main()
