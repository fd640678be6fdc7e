"""The mitigation study of Beyond Safe Answers on an artificial model of 115k parameters: a table for its README.

    # about 6 CPU minutes
    python benchmarks/bsa.py --runs runs/bsa

For each of three seeds a model learns the habits of `rolljax.recipes.bsa.artificial`, and the study
(`rolljax.recipes.bsa.mitigation`) evaluates it in every arm, judged by a rule that knows the words.
The words are invented and the habits are taught: this shows that the study finds them, and nothing about real
models.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rolljax.library.verbs import train
from rolljax.recipes.bsa import artificial, mitigation
from rolljax.recipes.bsa.bsa import Bsa


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def one(folder: Path, seed: int, num_items: int) -> dict[str, dict[str, float]]:
    """Train the model of one seed, and study it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, counts = artificial.items(num_items, seed)
    settings = {"Records.path": str(folder / "habits.jsonl"), "Recipe.seed": seed}
    if not (folder / "habits.jsonl").exists():
        write(folder / "habits.jsonl", artificial.habits(3000, seed))
    model = train("bsa/artificial", set=settings, run_dir=folder / "model", progress=False)
    sft = folder / "safe.jsonl"
    if not sft.exists():
        write(sft, artificial.safety_examples(600, seed))
    cfg = mitigation.Mitigation(
        str(model.path / "hf"),
        Bsa(write(folder / "items.jsonl", rows), max_answer_tok=64, counts=counts),
        (artificial.JUDGE,),
        artificial.RULES,
        sft=str(sft),
        max_context=192,
        seed=seed,
    )
    return mitigation.study(cfg, folder / "study")


def main() -> None:
    """Study all seeds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for models and evaluations; continues them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--items", type=int, default=100, help="in the proportions of the benchmark")
    args = parser.parse_args()
    found = [one(args.runs / f"seed_{seed}", seed, args.items) for seed in range(args.seeds)]
    print(mitigation.table(found).markdown())


if __name__ == "__main__":
    main()
