"""Eight environments of GEM, learned by PPO, GRPO, REINFORCE and ReBN with the same budget.

    python benchmarks/gem.py --out runs/gem --figure rolljax/recipes/gem/gem.png      # an hour and a half on two cores

Each environment and seed has one warm start, from which all four algorithms begin: 60 steps of 128 episodes. Every run
is a process of its own; a finished run is used as it is. The table gives the held-out reward at the end, mean over
seeds, lowest and highest.
"""

import argparse
import json
from pathlib import Path

from trained import train

GAME, QUESTION = 0.9, 1.0
"""Discounts of a turn, as in GEM: of games, and of questions with one answer."""


def rg(family: str, config: str = "{}") -> list[str]:
    return [
        "Recipe.env = @rolljax.envs.adapters.reasoning_gym.ReasoningGym()",
        f"ReasoningGym.family = '{family}'",
        f"ReasoningGym.config = {config}",
    ]


def game(path: str, *settings: str) -> list[str]:
    return [f"Recipe.env = @rolljax.envs.games.{path}()", *settings]


ENVIRONMENTS = {
    "game:GuessTheNumber-v0-easy": (GAME, []),
    "game:Mastermind-v0-easy": (
        GAME,
        game(
            "mastermind.Mastermind",
            "Mastermind.length = 3",
            "Mastermind.max_turns = 10",
            "Evaluation.held_out_frac = 0.3",  # of 216 codes
            "Evaluation.tasks = 50",
        ),
    ),
    "game:Sokoban-v0-easy, one box": (
        GAME,
        game(
            "sokoban.Sokoban",
            "Sokoban.size = 6",
            "Sokoban.distance = 1",
            "Sokoban.max_turns = 6",
            "SamplerConfig.max_context = 512",
            "recipe.Phase.row_len = 512",
        ),
    ),
    "rg:spell_backward": (QUESTION, rg("spell_backward", "{'min_word_len': 4, 'max_word_len': 4}")),
    "rg:gcd": (QUESTION, rg("gcd", "{'min_numbers': 2, 'max_numbers': 2, 'min_value': 1, 'max_value': 60}")),
    "rg:chain_sum": (
        QUESTION,
        rg("chain_sum", "{'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 2}"),
    ),
    "rg:simple_equations": (QUESTION, rg("simple_equations", "{'min_terms': 2, 'max_terms': 2, 'max_value': 20}")),
    "rg:count_bits": (QUESTION, [*rg("count_bits", "{'max_n': 1023}"), "Evaluation.held_out_frac = 0.3"]),
}
"""GEM's id: discount and settings. Games have our short observations; questions are reasoning-gym's, made small."""
ALGORITHMS = {
    "PPO": [
        "rl/Phase.algorithm = @rolljax.trainer.algorithms.ppo.Ppo()",
        "Critic.warmup_steps = 5",
        "Critic.optimizer = @value/rolljax.trainer.optimizer.AdamW()",
        "value/AdamW.lr = 1e-3",
    ],
    "GRPO": ["rl/Phase.algorithm = @rolljax.trainer.algorithms.grpo.Grpo()"],
    "REINFORCE": [
        "rl/Phase.algorithm = @rolljax.trainer.algorithms.turn_reinforce.TurnReinforce()",
        "TurnReinforce.gamma = {gamma}",
    ],
    "ReBN": ["ReBn.gamma = {gamma}"],
}


def runs(out: Path, name: str, seed: int) -> dict[str, Path]:
    """Train the algorithms on an environment; return their run folders."""
    gamma, env = ENVIRONMENTS[name]
    short = name.split(":")[1].split("-")[0].lower()
    common = [*env, f"Recipe.seed = {seed}", "Recipe.save_every = 1000", "Recipe.rollouts_every = 1000"]
    start = train("gem", out / f"{short}-start-{seed}", *common, "Recipe.phases = [@warm_start/recipe.Phase()]")
    from_there = [f"Recipe.model = '{start / 'hf'}'", "Recipe.phases = [@rl/recipe.Phase()]"]
    return {
        algorithm: train(
            "gem",
            out / f"{short}-{algorithm.lower()}-{seed}",
            *common,
            *from_there,
            *(s.format(gamma=gamma) for s in settings),
        )
        for algorithm, settings in ALGORITHMS.items()
    }


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return steps of RL and held-out rewards, from the start of the phase to its end."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [(r["phase_step"], r["heldout/reward_mean"]) for r in rows if "heldout/reward_mean" in r]
    means = [e["mean"] for e in json.loads((folder / "summary.json").read_text())["heldout_reward"]]
    return sorted({0: means[0], **dict(points), len(rows): means[-1]}.items())


def table(found: dict[str, list[dict[str, list[tuple[int, float]]]]]) -> str:
    lines = [f"| environment | start | {' | '.join(ALGORITHMS)} |", f"|---|---|{'---|' * len(ALGORITHMS)}"]
    for name, seeds in found.items():
        cells = [f"{sum(s['GRPO'][0][1] for s in seeds) / len(seeds):.2f}"]
        for algorithm in ALGORITHMS:
            ends = [s[algorithm][-1][1] for s in seeds]
            cells.append(f"{sum(ends) / len(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, list[tuple[int, float]]]]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    fig, axes = plt.subplots(2, 4, figsize=(13, 5.5), sharey=True, sharex=True, constrained_layout=True)
    for axis, (name, seeds) in zip(axes.flat, found.items(), strict=False):
        for algorithm in ALGORITHMS:
            steps = [x for x, _ in seeds[0][algorithm]]
            values = np.array([[y for _, y in s[algorithm]] for s in seeds])
            (line,) = axis.plot(steps, values.mean(0), "o-", markersize=3, label=algorithm)
            axis.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, lw=0)
        axis.set(title=name, ylim=(0, 1.02))
    for axis in axes[1]:
        axis.set_xlabel("step of 128 episodes")
    for axis in axes[:, 0]:
        axis.set_ylabel("held-out reward")
    axes[0, 0].legend(frameon=False)
    fig.savefig(figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, list[tuple[int, float]]]]] = {name: [] for name in args.environments}
    for seed in range(args.seeds):
        for name in args.environments:
            found[name].append({a: curve(folder) for a, folder in runs(args.out, name, seed).items()})
            ends = "  ".join(f"{a} {c[-1][1]:.3f}" for a, c in found[name][-1].items())
            print(f"{name} seed {seed}: start {found[name][-1]['GRPO'][0][1]:.3f}  {ends}", flush=True)
    print(table(found))
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
