"""Train actor and extractor by turns: `python -m rolljax.recipes.complementary.training FOLDER`.

Stopped, the same command continues. The folder has the runs of both, of their warm starts, and `bank.jsonl`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.recipes.complementary.bank import Bank
from rolljax.recipes.complementary.later_uses import LaterUses, train_to

STEPS_PER_ROUND = 4
PROMPTS_PER_STEP = 16
CAPACITY = 32
"""Experiences of the bank: one for each room. What is not written again makes room for what is."""


def warm_starts(folder: Path) -> None:
    """Train the warm starts of both policies, `folder/start` and `folder/extractor_start`."""
    for name in ("start", "extractor_start"):
        train(f"complementary/{name}", run_dir=folder / name, progress=False)


def actor_settings(model: Path, bank: Path | None, seed: int, rule: int) -> dict[str, object]:
    """Return the settings of an actor. model: the folder that it starts from. bank: its file; None: no bank."""
    return {
        "Recipe.model": str(model),
        "Recipe.seed": seed,
        "KeyRules.rule": rule,
        "WithExperience.bank": str(bank or ""),
        "WithExperience.shown": "half" if bank else "none",
        "WithExperience.prompts_per_round": STEPS_PER_ROUND * PROMPTS_PER_STEP,
        "rl/Phase.prompts_per_step": PROMPTS_PER_STEP,
    }


def together(
    folder: Path,
    actor: Path,
    extractor: Path,
    rounds: int,
    *,
    seed: int = 0,
    rule: int = 0,
    lr: float | None = None,
    first: Bank | None = None,
    rewards: LaterUses | None = None,
    of_actor: Mapping[str, object] | None = None,
    of_extractor: Mapping[str, object] | None = None,
) -> tuple[Run, Run]:
    """Train actor and extractor; return their runs. Each round is one step of the extractor and `STEPS_PER_ROUND` of
    the actor, which begins with one round more.

    Args:
      actor, extractor: the models that they start from. rule: seed of the rooms' keys. lr: the extractor's learning
        rate; None: its config's. first: the bank of the actor's first round; None: an empty one. rewards: the
        extractor's, whose `settings` are set here. of_actor, of_extractor: more settings of their runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run, bank = folder / "actor", folder / "bank.jsonl"
    if first is not None and not bank.exists():
        dataclasses.replace(first, round=0).append_to(bank)
    settings = actor_settings(actor, bank, seed, rule) | dict(of_actor or {})
    train_to("complementary/actor", run, settings, STEPS_PER_ROUND)
    trained = train(
        "complementary/extractor",
        set={
            "Recipe.model": str(extractor),
            "Recipe.seed": seed,
            "Recipe.reward": dataclasses.replace(rewards or LaterUses(capacity=CAPACITY), settings=settings),
            "Extraction.run": str(run),
            "Extraction.bank": str(bank),
            "Extraction.steps_per_round": STEPS_PER_ROUND,
            "Extraction.seed": seed,
            "KeyRules.rule": rule,
            "rl/Phase.steps": rounds,
            **({} if lr is None else {"AdamW.lr": lr}),
            **(of_extractor or {}),
        },
        run_dir=folder / "extractor",
        progress=False,
    )
    return Run(run), trained


def main() -> None:
    """Train in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=29, help="after the first, which has no experiences")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warm_starts(args.folder)
    actor, extractor = (args.folder / name / "hf" for name in ("start", "extractor_start"))
    together(args.folder, actor, extractor, args.rounds, seed=args.seed)


if __name__ == "__main__":
    main()
