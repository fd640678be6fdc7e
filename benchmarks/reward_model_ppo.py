"""PPO on a trained reward model against PPO on the true reward, and what becomes of the true reward when the proxy is
weak.

    # an hour on two cores
    python benchmarks/reward_model_ppo.py --out runs/reward_model_ppo \\
        --figure rolljax/recipes/reward_model_ppo/reward_model_ppo.png

Three runs of `reward_model_ppo.gin` for each seed, one after the other: as it is; with a reward model of 60 updates
instead of 3200, and a policy that is held less and trained for longer; with the environment's own reward instead. A
finished run in its folder is used as it is. The table gives held-out reward, which is the reference answer in all of
them: mean over seeds, lowest and highest; the figure true and proxy reward of every run by step, and over the distance
from the policy that PPO began with (the curves of arXiv 2210.10760): KL per answer, nats.
"""

import argparse
import json
import statistics
from pathlib import Path

from trained import train

ONE_PHASE_LESS = "[@warm_start/recipe.Phase(), @rl/recipe.Phase()]"
RUNS = {
    "proxy": {},
    "weak proxy": {
        "reward_model/recipe.Phase.steps": 60,
        "reward_model/recipe.Phase.prompts_per_step": 64,
        "reward_model/recipe.Phase.group_size": 8,
        "reward_model/recipe.Phase.updates_per_step": 1,
        "reward_model/critic.Critic.epochs": 1,
        "reward_model/critic.Critic.optimizer": "@score/optimizer.AdamW()",
        "score/optimizer.AdamW.lr": 1e-3,
        "score/optimizer.AdamW.schedule": "'constant'",
        "rl/recipe.Phase.steps": 120,
        "kl.KlReward.coef": 0.02,
    },
    "reference": {"Recipe.reward": None, "rl/Critic.model": None, "Recipe.phases": ONE_PHASE_LESS},
}
COLOURS = {"proxy": "tab:blue", "weak proxy": "tab:red", "reference": "tab:green"}
REFERENCE, SCORE = "rewards/part/environment", "rewards/part/reward_model"
WINDOW = 5
"""Steps that a point of a curve is the mean of."""


def rows(folder: Path, phase: str = "rl") -> list[dict]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in every if r["phase"] == phase]


def heldout(folder: Path) -> dict[str, float]:
    """Return the held-out reward by the phase after which it was measured."""
    found = json.loads((folder / "summary.json").read_text())["heldout_reward"]
    return {entry["phase"]: entry["mean"] for entry in found}


def smooth(values: list[float]) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - WINDOW) : i + 1]]]


def figures(folder: Path) -> list[float | None]:
    """Return a run's cells of the table."""
    steps, reference = rows(folder), heldout(folder)
    pairs = [r["preference/accuracy_frac"] for r in rows(folder, "reward_model")][-10:]
    score = [steps[0][SCORE], smooth([r[SCORE] for r in steps])[-1]] if pairs else [None, None]
    return [statistics.mean(pairs) if pairs else None, reference["warm_start"], reference["rl"], *score]


def table(runs: dict[str, list[Path]]) -> str:
    lines = ["| rewarded by | pairs in the right order | true reward before PPO | after | score before | after |"]
    lines.append("|---|---|---|---|---|---|")
    for name, folders in runs.items():
        columns = list(zip(*map(figures, folders), strict=True))
        cell = lambda x: "-" if None in x else f"{statistics.mean(x):.2f} ({min(x):.2f} to {max(x):.2f})"  # noqa: E731
        lines.append(f"| {name} | {' | '.join(map(cell, columns))} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[Path]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig, (by_step, by_kl, by_score) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name, folders in runs.items():
        for number, folder in enumerate(folders):
            steps, look = rows(folder), {"color": COLOURS[name], "lw": 1}
            reference = smooth([r.get(REFERENCE, r["reward/mean"]) for r in steps])
            kl = smooth([max(r["kl/ref_k1_nat"] * r["rollout/len_tok"], 0.0) for r in steps])
            label = None if number else f"PPO on {name}"
            by_step.plot([r["phase_step"] for r in steps], reference, label=label, **look)
            by_kl.plot(kl, reference, marker=".", ms=3, **look)
            if SCORE in steps[0]:
                by_score.plot(kl, smooth([r["reward/mean"] for r in steps]), marker=".", ms=3, **look)
    by_step.set(xlabel="step of PPO", ylabel="true reward of its answers", ylim=(0, 1))
    by_kl.set(xlabel="KL from the policy it began with, nats per answer", ylabel="true reward", ylim=(0, 1))
    by_score.set(xlabel="KL from the policy it began with, nats per answer", ylabel="proxy: normalised score")
    by_step.legend(frameon=False)
    for ax in (by_step, by_kl, by_score):
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/reward_model_ppo"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    runs: dict[str, list[Path]] = {name: [] for name in RUNS}
    for seed in range(args.seeds):
        for name, settings in RUNS.items():
            bindings = [f"{key} = {value}" for key, value in {"Recipe.seed": seed, **settings}.items()]
            folder = args.out / f"{name.replace(' ', '_')}-{seed}"
            runs[name].append(train("reward_model_ppo", folder, *bindings))
            print(f"{name}, seed {seed}: {heldout(folder)}", flush=True)
    print(table(runs))
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
