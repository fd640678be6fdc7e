"""Complementary RL: an actor with a bank of experiences, against controls.

    python benchmarks/complementary.py FOLDER [--seeds 3] [--figure rolljax/recipes/complementary/bank.png]
    python benchmarks/complementary.py FOLDER --rare [--seeds 3]

Arms of each seed, all from the same warm starts:

- `trained`: actor and extractor are trained by turns;
- `untrained`: the extractor writes, and is not trained (rate 1e-9);
- `none`: no bank;
- `shift, trained` and `shift, static`: the keys of all rooms change after `trained`; both continue, or the actor alone,
  with the last bank.

Printed by round: success in training of the episodes with and without an experience; the
share of the bank that is right; held-out success without experiences. A run that was stopped continues.

`--rare` asks what an actor learns by heart where success is rare: a door needs three keys (one answer of 64), and an
experience says the first ones. Arms: a bank that says two keys of every room and does not change; one that the
extractor fills, which reads how many of an answer's keys turned; none.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.recipes.complementary.bank import Bank, banks_of
from rolljax.recipes.complementary.experience import PART
from rolljax.recipes.complementary.extraction import RETURN_SOLVED
from rolljax.recipes.complementary.key_rules import TURNED, KeyRules, all_but_one
from rolljax.recipes.complementary.later_uses import LaterUses
from rolljax.recipes.complementary.operations import Add
from rolljax.recipes.complementary.training import STEPS_PER_ROUND, actor_settings, together, warm_starts
from rolljax.storage.run_reader import RunReader
from rolljax.trainer.kl import KlLoss

ROUNDS, UNTRAINED_ROUNDS, SHIFT_ROUNDS = 24, 12, 9
RARE, RARE_ROUNDS = KeyRules(keys=3, rooms=8), 50
RARE_ARMS = ("given bank", "own bank", "no bank")
RARE_SIZES: dict[str, object] = {"Recipe.max_answer_tok": 6 * RARE.keys, "SamplerConfig.max_context": 96}
RARE_EPISODES = {"Extraction.right": TURNED, "Extraction.return_failed": RETURN_SOLVED, "Extraction.solved": 0.3}
"""Made-up episodes of the extractor's warm start: it writes down the keys that turned, whether the door opened or
not."""
NEW_RULE = 1
UNTRAINED_LR = 1e-9
LEVEL = 0.9
"""Success of the acceptance: the first round in which an arm reaches it is printed."""


def keys_of(rooms: KeyRules) -> Mapping[str, str]:
    """Return the key of each room; of several all but the last."""
    found = {}
    for task in map(rooms.task, range(rooms.rooms)):
        env = rooms.make()
        opening = env.reset(task)[-1].content
        found[opening] = all_but_one(env.reference_answer())
    return found


def right_share(bank: Bank, keys: Mapping[str, str]) -> float:
    """Return the share of a bank's experiences that name a room and its key."""
    right = [keys.get(e.title) == e.content for e in bank.experiences]
    return float(np.mean(right)) if right else 0.0


def by_round(run: Run, rounds: int) -> dict[str, list[float]]:
    """Return the success of each round: `shown` an experience, `alone`, and `held_out` without one."""
    found: dict[str, list[float]] = {"shown": [], "alone": [], "held_out": []}
    rows = RunReader(run.path).rows()
    held_out = {row["step"]: row["heldout/reward_mean"] for row in rows if "heldout/reward_mean" in row}
    for round_ in range(rounds):
        steps = range(round_ * STEPS_PER_ROUND + 1, (round_ + 1) * STEPS_PER_ROUND + 1)
        episodes = [t for step in steps for t in run.trajectories(step)]
        for name, wanted in (("shown", True), ("alone", False)):
            kept = [t.success for t in episodes if bool(t.reward_parts.get(PART)) == wanted]
            found[name].append(float(np.mean(kept)) if kept else float("nan"))
        found["held_out"].append(held_out.get(steps[-1], float("nan")))
    return found


def play(folder: Path, starts: Path, seed: int) -> dict[str, dict[str, list[float]]]:
    """Train all arms of a seed; return their rounds."""
    actor, extractor = (starts / name / "hf" for name in ("start", "extractor_start"))
    found = {}
    for arm, rounds, lr in (("trained", ROUNDS, None), ("untrained", UNTRAINED_ROUNDS, UNTRAINED_LR)):
        runs = together(folder / arm, actor, extractor, rounds, seed=seed, lr=lr)
        found[arm] = with_bank(folder / arm, runs[0], rounds + 1, keys_of(KeyRules()))
    settings = actor_settings(actor, None, seed, 0)
    steps = STEPS_PER_ROUND * (ROUNDS + 1)
    alone = train(
        "complementary/actor", set={**settings, "rl/Phase.steps": steps}, run_dir=folder / "none", progress=False
    )
    found["none"] = by_round(alone, ROUNDS + 1)
    last = banks_of(folder / "trained" / "bank.jsonl")[-1]
    after = [folder / "trained" / name / "hf" for name in ("actor", "extractor")]
    shifted = folder / "shift_trained"
    runs = together(shifted, after[0], after[1], SHIFT_ROUNDS, seed=seed, rule=NEW_RULE, first=last)
    found["shift, trained"] = with_bank(shifted, runs[0], SHIFT_ROUNDS + 1, keys_of(KeyRules(rule=NEW_RULE)))
    static = folder / "shift_static"
    static.mkdir(parents=True, exist_ok=True)
    if not (static / "bank.jsonl").exists():
        Bank(0, last.experiences, last.added).append_to(static / "bank.jsonl")
    settings = actor_settings(after[0], static / "bank.jsonl", seed, NEW_RULE)
    steps = STEPS_PER_ROUND * (SHIFT_ROUNDS + 1)
    run = train(
        "complementary/actor", set={**settings, "rl/Phase.steps": steps}, run_dir=static / "actor", progress=False
    )
    found["shift, static"] = with_bank(static, run, SHIFT_ROUNDS + 1, keys_of(KeyRules(rule=NEW_RULE)))
    return found


def rare_starts(folder: Path) -> tuple[Path, Path]:
    """Train the warm starts of actor and extractor of `--rare`; return their models."""
    rooms = {"KeyRules.keys": RARE.keys, "KeyRules.rooms": RARE.rooms, "Muon.schedule": "linear"}
    own = {
        "start": {**RARE_SIZES, "sft/Phase.steps": 120},
        "extractor_start": {**RARE_EPISODES, "KeyRules.fixed": False, "sft/Phase.steps": 240},
    }
    runs = (train(f"complementary/{n}", set=rooms | own[n], run_dir=folder / f"rare_{n}", progress=False) for n in own)
    actor, extractor = (run.path / "hf" for run in runs)
    return actor, extractor


def play_rare(
    folder: Path, starts: tuple[Path, Path], seed: int, arms: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Train an actor with a bank that says the first keys of every door, one whose extractor fills the bank, and one
    without a bank. The keys follow from the seed."""
    rooms: dict[str, object] = {"KeyRules.keys": RARE.keys, "KeyRules.rooms": RARE.rooms}
    of_actor = rooms | RARE_SIZES | {"AdamW.lr": 1e-3, "Grpo.kl": KlLoss(coef=0.02, estimator="full")}
    keys, found = keys_of(dataclasses.replace(RARE, rule=seed)), {}
    for arm in arms:
        own, bank = folder / arm, folder / arm / "bank.jsonl"
        own.mkdir(parents=True, exist_ok=True)
        if arm == "own bank":
            run, _ = together(
                own,
                *starts,
                RARE_ROUNDS - 1,
                seed=seed,
                rule=seed,
                rewards=LaterUses(capacity=RARE.rooms, one_per_title=True),
                of_actor=of_actor,
                of_extractor=rooms | {"ExtractorCispo.train_unused": False, "rl/Phase.temperature": 0.6},
            )
        else:
            if arm == "given bank" and not bank.exists():
                given = Bank()
                for task in map(RARE.task, range(RARE.rooms)):
                    opening = RARE.make().reset(task)[-1].content
                    given, _ = given.applied(Add(opening, keys[opening]), task.id)
                given.append_to(bank)
            settings = actor_settings(starts[0], bank if arm == "given bank" else None, seed, seed) | of_actor
            settings |= {"rl/Phase.steps": STEPS_PER_ROUND * RARE_ROUNDS}
            run = train("complementary/actor", set=settings, run_dir=own / "actor", progress=False)
        found[arm] = by_round(run, RARE_ROUNDS) if arm == "no bank" else with_bank(own, run, RARE_ROUNDS, keys)
    return found


def with_bank(folder: Path, run: Run, rounds: int, keys: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the rounds of an arm with a bank, with the share of it that is right."""
    banks = {bank.round: bank for bank in banks_of(folder / "bank.jsonl")}
    latest, shares = Bank(), []
    for round_ in range(rounds):
        latest = banks.get(round_, latest)
        shares.append(right_share(latest, keys))
    return {**by_round(run, rounds), "right": shares}


def draw(path: Path, seeds: Sequence[Mapping[str, Mapping[str, Sequence[float]]]]) -> None:
    """Draw the success of the episodes that were shown an experience, before and after the shift."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    colors = {"trained": "tab:blue", "untrained": "tab:orange", "none": "tab:gray"}
    colors |= {"shift, trained": "tab:blue", "shift, static": "tab:red"}
    for arm, color in colors.items():
        axis = axes[int(arm.startswith("shift"))]
        for i, seed in enumerate(seeds):
            y = seed[arm]["alone" if arm == "none" else "shown"]
            label = {"none": "no bank"}.get(arm, arm.removeprefix("shift, ") + " extractor") if i == 0 else None
            axis.plot(np.arange(1, len(y) + 1) * STEPS_PER_ROUND, y, color=color, label=label, alpha=0.8)
    for axis, title in zip(axes, ("from the start", "after all keys have changed"), strict=True):
        axis.set(title=title, xlabel="steps of the actor", ylim=(0, 1.02))
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("success with an experience")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run every seed, and print and draw what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, help="one seed alone")
    parser.add_argument("--rare", action="store_true", help="what an actor learns by heart where success is rare")
    parser.add_argument("--arm", choices=RARE_ARMS, help="one arm of --rare alone")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    seeds = [args.only] if args.only is not None else range(args.seeds)
    if args.rare:
        starts, own = rare_starts(args.folder), [args.arm] if args.arm else RARE_ARMS
        found = [play_rare(args.folder / f"rare_{seed}", starts, seed, own) for seed in seeds]
    else:
        warm_starts(args.folder)
        found = [play(args.folder / f"seed_{seed}", args.folder, seed) for seed in seeds]
    for seed, arms in zip(seeds, found, strict=True):
        for arm, table in arms.items():
            for name, values in table.items():
                print(f"seed {seed}  {arm:15} {name:9}", *(f"{v:.2f}" for v in values))
            shown = table["alone" if arm in ("none", "no bank") else "shown"]
            reached = next((i + 1 for i, v in enumerate(shown) if v >= LEVEL), None)
            print(f"seed {seed}  {arm:15} reaches {LEVEL} in round {reached}")
    if args.figure:
        draw(args.figure, found)


if __name__ == "__main__":
    main()
