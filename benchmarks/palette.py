"""Reasoning Palette: what latent prefixes do to greedy answers, and to GRPO.

    python benchmarks/palette.py --figure rolljax/recipes/palette/palette.png [--seeds 3]

Each seed has a base model and a file of prefixes (`palette_base.gin`, `rolljax.recipes.palette.latents`). Printed:
pass@8 of greedy answers without prefixes, with latents, and with random vectors of the same norm, before and after the
warm-up, on tasks whose style nothing tells; then GRPO (`palette.gin`) without prefixes, after a warm-up without or with
them, with both schedules, and with random vectors in warm-up and GRPO. Rewards are those of held-out tasks, without
prefixes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trained import train

from rolljax import cli
from rolljax.evaluation.statistics import pass_at_k
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.prefixes import Prefixes, read_prefixes, save_prefixes
from rolljax.recipes.palette import latents
from rolljax.recipes.palette.latents import LatentSpace
from rolljax.recipes.palette.styled_words import STYLES, StyledWords
from rolljax.rollout.episodes import Rollouts
from rolljax.run.initial_weights import start_params
from rolljax.run.preflight import check
from rolljax.run.runtime import Runtime
from rolljax.types import Group

ARMS = {
    "none": ("none", ""),
    "warm-up only": ("guided", ""),
    "linear": ("guided", "linear"),
    "two_phase": ("guided", "two_phase"),
    "linear, random vectors": ("random", "linear"),
}
"""Arms of GRPO: the warm-up, and the schedule of prefixes; empty: no prefixes."""
TASKS, ATTEMPTS = 96, 8


def answers(model: Path, prefixes: Path, length: int = 8) -> dict[str, list[Group]]:
    """Return `ATTEMPTS` answers to each of `TASKS` tasks without a hint, whose styles are equally frequent: greedy,
    greedy with latent prefixes of a length, and sampled at temperature 1."""
    settings = [
        f"Recipe.model = '{model}'",
        f"Recipe.prefixes = '{prefixes}'",
        f"StyledWords.weights = {dict.fromkeys(STYLES, 1.0)}",
        f"Guidance.length = {length}",
        "Guidance.schedule = 'all'",
    ]
    plan = check(cli.load_recipe(["palette"], settings).value)
    params, phase, env = start_params(plan), plan.recipe.phases[0], plan.recipe.env
    with Runtime(plan, lambda: params, 0) as runtime:
        player, guide = runtime.player, runtime.player.guide(phase)

        async def play(rollouts: Rollouts) -> list[Group]:
            how = {"stream": 0, "group_size": ATTEMPTS}
            groups = (rollouts.group(env.task(i), prompt_index=i, **how) for i in range(TASKS))
            return list(await asyncio.gather(*groups))

        greedy, sampled = (player.rollouts(player.policy(temperature)) for temperature in (0.0, 1.0))
        arms = {"greedy": greedy, "greedy, latents": dataclasses.replace(greedy, guide=guide), "sampled": sampled}
        return {name: runtime.clock.run(play(rollouts)) for name, rollouts in arms.items()}


def passed(groups: list[Group]) -> tuple[np.ndarray, list[float]]:
    """Return pass@1 to pass@ATTEMPTS, and the share of answers in each style."""
    right = np.array([sum(t.success for t in g.trajectories) for g in groups])
    curve = [np.mean([pass_at_k(ATTEMPTS, int(n), k) for n in right]) for k in range(1, ATTEMPTS + 1)]
    every = [t for g in groups for t in g.trajectories]
    return np.array(curve), [float(np.mean([t.metrics[f"style_{name}_n"] for t in every])) for name in STYLES]


def heldout(run: Path) -> list[tuple[int, float]]:
    """Return the rewards on held-out tasks by step of GRPO."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["heldout/reward_mean"]) for row in rows if "heldout/reward_mean" in row]


def make_base(folder: Path, seed: int) -> tuple[Path, Path]:
    """Return the base model of a seed and the file of its prefixes; make them first if they do not exist."""
    base = train("palette_base", folder / f"base_{seed}", f"Recipe.seed = {seed}") / "hf"
    file = folder / f"palette_{seed}.safetensors"
    if not file.is_file():
        latents.main(["--model", str(base), "--env", "styled_words", "--to", str(file), "--seed", str(seed)])
    return base, file


def with_random_vectors(file: Path) -> Path:
    """Return a file of as many prefixes of the same norm, whose directions are random."""
    like = read_prefixes(file, Qwen3Config().hidden_size).vectors_ZLD
    vectors = np.repeat(np.random.default_rng(0).normal(size=(len(like), 1, like.shape[2])), like.shape[1], axis=1)
    vectors *= np.linalg.norm(like, axis=2).mean() / np.linalg.norm(vectors, axis=2, keepdims=True)
    path = file.with_name(f"random_{file.name}")
    save_prefixes(path, Prefixes(vectors.astype(np.float32)))
    return path


def vectors_of(file: Path, kind: str) -> Path:
    """Return the file of prefixes for a kind of warm-up and what follows it."""
    return with_random_vectors(file) if kind == "random" else file


def warm_up(folder: Path, base: Path, file: Path, kind: str, seed: int) -> Path:
    """Return the folder of the model after the warm-up.

    kind: what guides it: latents (`guided`), random vectors (`random`) or nothing (`none`).
    """
    settings = [f"Recipe.model = '{base}'", f"Recipe.prefixes = '{vectors_of(file, kind)}'", f"Recipe.seed = {seed}"]
    settings += ["Guidance.length = 0"] * (kind == "none")
    return train("palette_warm_up", folder / f"warm_up_{kind}_{seed}", *settings) / "hf"


def reinforce(folder: Path, model: Path, file: Path, arm: str, seed: int) -> Path:
    """Return the run of GRPO of an arm."""
    kind, schedule = ARMS[arm]
    settings = [f"Recipe.model = '{model}'", f"Recipe.prefixes = '{vectors_of(file, kind)}'", f"Recipe.seed = {seed}"]
    settings += ["rl/Phase.eval_every = 5"]
    settings += [f"Guidance.schedule = '{schedule}'"] if schedule else ["Guidance.length = 0"]
    return train("palette", folder / f"{arm.replace(' ', '_').replace(',', '')}_{seed}", *settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", help="where the picture goes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", help="a folder that keeps the runs (default: none)")
    args = parser.parse_args()
    curves: dict[tuple[str, str], list[np.ndarray]] = {}
    rewards: dict[str, list[list[tuple[int, float]]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.runs or scratch)
        print("| seed | model | answers | pass@1 | pass@8 | letters, capitals, digits |\n|---|---|---|---|---|---|")
        for seed in range(args.seeds):
            base, file = make_base(folder, seed)
            guided = warm_up(folder, base, file, "guided", seed)
            for name, model in (("base", base), ("warm-up", guided)):
                found = answers(model, file)
                found["greedy, random vectors"] = answers(model, with_random_vectors(file))["greedy, latents"]
                for said, groups in found.items():
                    curve, styles = passed(groups)
                    curves.setdefault((name, said), []).append(curve)
                    shares = ", ".join(f"{share:.2f}" for share in styles)
                    print(f"| {seed} | {name} | {said} | {curve[0]:.3f} | {curve[-1]:.3f} | {shares} |", flush=True)
        print("\n| seed | " + " | ".join(ARMS) + " |\n|---" + "|---" * len(ARMS) + "|")
        for seed in range(args.seeds):
            base, file = make_base(folder, seed)
            for arm in ARMS:
                model = warm_up(folder, base, file, ARMS[arm][0], seed)
                rewards[arm].append(heldout(reinforce(folder, model, file, arm, seed)))
            print(f"| {seed} | " + " | ".join(f"{rewards[arm][-1][-1][1]:.3f}" for arm in ARMS) + " |", flush=True)
        if args.figure:
            draw(Path(args.figure), make_base(folder, 0)[0], curves, rewards)


def draw(
    path: Path,
    base: Path,
    curves: dict[tuple[str, str], list[np.ndarray]],
    rewards: dict[str, list[list[tuple[int, float]]]],
) -> None:
    """Plot the latents of answers by style, pass@k of the base models, and rewards of GRPO; thin lines are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    spec = StyledWords()
    means = latents.mean_embeddings(base, latents.embedding(base), spec, 2000)
    z = latents.fit(means, LatentSpace()).encode(means)
    places = (z - z.mean(0)) @ np.linalg.svd(z - z.mean(0), full_matrices=False)[2][:2].T
    styles = np.array([spec.category(spec.task(i)) for i in range(len(z))])
    for name in STYLES:
        left.scatter(*places[styles == name].T, s=2, label=name)
    left.set(title="latents of answers, two main directions")
    left.legend(markerscale=4)

    def lines(axes: Any, color: str, label: str, x: Sequence[int], seeds: Sequence[Sequence[float]]) -> None:
        for y in seeds:
            axes.plot(x, y, color=color, lw=0.7, alpha=0.4)
        axes.plot(x, np.mean(seeds, axis=0), color=color, marker=".", label=label)

    for i, ((model, said), seeds) in enumerate(curves.items()):
        if model == "base":
            lines(middle, f"C{i}", said, range(1, ATTEMPTS + 1), seeds)
    middle.set(title="pass@k of the base model", xlabel="k", ylim=(0, 1))
    middle.legend(loc="lower right")
    for i, (arm, runs) in enumerate(rewards.items()):
        lines(right, f"C{i}", arm, [step for step, _ in runs[0]], [[mean for _, mean in run] for run in runs])
    right.set(title="held-out reward, without prefixes", xlabel="step of GRPO", ylim=(0, 1))
    right.legend(loc="center right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
