"""Train actor and extractor by turns: `python -m rolljax.recipes.complementary.training FOLDER`.

Stopped, the same command continues. The folder has the runs of both, of their warm starts, and `bank.jsonl`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.recipes.complementary.later_uses import LaterUses

STEPS_PER_ROUND = 4
PROMPTS_PER_STEP = 16


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
    folder: Path, starts: Path, rounds: int, *, seed: int = 0, rule: int = 0, actor: Path | None = None
) -> tuple[Run, Run]:
    """Train actor and extractor; return their runs. Each round is one step of the extractor and `STEPS_PER_ROUND` of
    the actor, which begins with one round more, without experiences.

    Args:
      starts: the folder of `warm_starts`. rule: seed of the rooms' keys. actor: the model that the actor starts from;
        None: the warm start's.
    """
    run, bank = folder / "actor", folder / "bank.jsonl"
    settings = actor_settings(actor or starts / "start" / "hf", bank, seed, rule)
    train("complementary/actor", set={**settings, "rl/Phase.steps": STEPS_PER_ROUND}, run_dir=run, progress=False)
    extractor = train(
        "complementary/extractor",
        set={
            "Recipe.model": str(starts / "extractor_start" / "hf"),
            "Recipe.seed": seed,
            "Recipe.reward": LaterUses(settings=settings),
            "Extraction.run": str(run),
            "Extraction.bank": str(bank),
            "Extraction.steps_per_round": STEPS_PER_ROUND,
            "Extraction.seed": seed,
            "KeyRules.rule": rule,
            "rl/Phase.steps": rounds,
        },
        run_dir=folder / "extractor",
        progress=False,
    )
    return Run(run), extractor


def main() -> None:
    """Train in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=19, help="after the first, which has no experiences")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warm_starts(args.folder)
    together(args.folder, args.folder, args.rounds, seed=args.seed)


if __name__ == "__main__":
    main()
