"""PPO on a trained reward model against PPO on the true reward, and what becomes of the true reward when the proxy is
weak.

    python benchmarks/reward_model_ppo.py --out runs/reward_model_ppo \\
        --figure rolljax/recipes/reward_model_ppo/reward_model_ppo.png

Three runs of `reward_model_ppo.gin`, one after the other: as it is; with a reward model of 60 updates instead
of 3200, and a policy that is held less and trained for longer; with the environment's own reward instead. A finished
run in its folder is used as it is, a stopped one continues. The table gives held-out reward, which is the reference
answer in all of them; the figure true and proxy reward by step, and over the distance from the policy that PPO began
with (the curves of arXiv 2210.10760): KL per answer, nats.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def run(folder: Path, settings: dict) -> None:
    bindings = [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]
    command = [sys.executable, "-m", "rolljax.train", "--gin", "reward_model_ppo", "--run_dir", str(folder)]
    env = {"JAX_PLATFORMS": "cpu"} | os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command + bindings, env=env, check=True, stdout=subprocess.DEVNULL)


def rows(folder: Path, phase: str = "rl") -> list[dict]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in every if r["phase"] == phase]


def heldout(folder: Path) -> dict[str, float]:
    """Return the held-out reward by the phase after which it was measured."""
    found = json.loads((folder / "summary.json").read_text())["heldout_reward"]
    return {entry["phase"]: entry["mean"] for entry in found}


def smooth(values: list[float]) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - WINDOW) : i + 1]]]


def table(out: Path) -> str:
    lines = ["| rewarded by | pairs in the right order | true reward before PPO | after | score before | after |"]
    lines.append("|---|---|---|---|---|---|")
    for name in RUNS:
        folder, steps = out / name.replace(" ", "_"), rows(out / name.replace(" ", "_"))
        pairs = [r["preference/accuracy_frac"] for r in rows(folder, "reward_model")][-10:]
        right = f"{sum(pairs) / len(pairs):.2f}" if pairs else "-"
        score = [f"{x:.2f}" for x in (steps[0][SCORE], smooth([r[SCORE] for r in steps])[-1])] if pairs else ["-", "-"]
        reference = heldout(folder)
        lines.append(
            f"| {name} | {right} | {reference['warm_start']:.3f} | {reference['rl']:.3f} | {' | '.join(score)} |"
        )
    return "\n".join(lines)


def draw(out: Path, figure: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    fig, (by_step, by_kl, by_score) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for name, colour in COLOURS.items():
        steps = rows(out / name.replace(" ", "_"))
        reference = smooth([r.get(REFERENCE, r["reward/mean"]) for r in steps])
        kl = smooth([max(r["kl/ref_k1_nat"] * r["rollout/len_tok"], 0.0) for r in steps])
        by_step.plot([r["phase_step"] for r in steps], reference, color=colour, label=f"PPO on {name}")
        by_kl.plot(kl, reference, color=colour, lw=1, marker=".", ms=3)
        if SCORE in steps[0]:
            by_score.plot(kl, smooth([r["reward/mean"] for r in steps]), color=colour, lw=1, marker=".", ms=3)
    by_step.set(xlabel="step of PPO", ylabel="true reward of its answers", ylim=(0, 1))
    by_kl.set(xlabel="KL from the policy it began with, nats per answer", ylabel="true reward", ylim=(0, 1))
    by_score.set(xlabel="KL from the policy it began with, nats per answer", ylabel="proxy: normalised score")
    by_step.legend(frameon=False)
    for ax in (by_step, by_kl, by_score):
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reward_model_ppo"))
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    for name, settings in RUNS.items():
        run(args.out / name.replace(" ", "_"), settings)
    print(table(args.out))
    if args.figure:
        draw(args.out, args.figure)


if __name__ == "__main__":
    main()
