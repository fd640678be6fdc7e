"""RecGPT in small: tags of a policy, fused with collaborative retrieval, on synthetic users whose interest shifts.

    python -m rolljax.train --gin recgpt --run_dir runs/recgpt
    # two minutes on two cores
    python benchmarks/recgpt.py --run runs/recgpt --figure rolljax/recipes/recgpt/recgpt.png

The policy of `recgpt.gin` reads the tags of what each user touched and predicts the next one: before and after
the user's newest two events ("refresh"). Printed are HR@30 of collaboration alone (beta 1), of tags alone (beta 0) and
of the fusion, each with users that the towers never saw; and how often the new topic is among the predicted tags.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import numpy as np
import tag_retrieval
from rich.console import Console
from rich.table import Table

import rolljax
from rolljax.recipes.recgpt import users as recgpt
from rolljax.recipes.recgpt.metrics import hit_rate

K, BETAS = 30, (0.0, 0.25, 0.5, 0.75, 1.0)
Users = list[dict[str, Any]]


def predict(model: Any, users: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first tag that the policy predicts for each user."""
    questions = [question["question"] for question in recgpt.tag_questions(users)]
    answers = model.generate(questions, temperature=0.0, max_tokens=6)
    return [answer.text.split(",")[0].strip().lower() for answer in answers]


def stale(users: Sequence[Mapping[str, Any]]) -> Users:
    """Return the users without their newest two events."""
    return [dict(user) | {"events": user["events"][:-2]} for user in users]


def measure(model: Any, *, num_train: int = 4000, num_test: int = 1000, seed: int = 1) -> dict[str, Any]:
    """Hit rates by beta and by whether the interest shifted, and recall of the topic before and after the refresh."""
    items = recgpt.synthetic_items()
    known = recgpt.synthetic_users(num_train, items, seed=seed)
    test = recgpt.synthetic_users(num_test, items, seed=seed + 1)
    towers = tag_retrieval.train(
        tag_retrieval.Retrieval(), tag_retrieval.Log.of(known, items, [user["answer"] for user in known]), seed
    )
    tags = predict(model, test)
    log = tag_retrieval.Log.of(test, items, tags)
    shifted = np.array([user["shift"] for user in test])
    rates = {}
    for beta in BETAS:
        found = tag_retrieval.ranks(towers, log, beta)
        parts = {"all": found, "steady": found[~shifted], "shifted": found[shifted]}
        rates[beta] = {name: hit_rate(part.tolist(), K) for name, part in parts.items()}
    before = predict(model, stale(test))
    moved = [i for i, user in enumerate(test) if user["shift"]]
    recall = {
        name: float(np.mean([said[i] == test[i]["answer"] for i in moved]))
        for name, said in (("before the shift", before), ("after one refresh", tags))
    }
    compressed = recgpt.write_history(recgpt.compress(test))
    shorter = sum(len(user["history"]) for user in compressed) / sum(len(json.dumps(u["events"])) for u in test)
    return {"rates": rates, "recall": recall, "history": shorter}


def draw(found: Mapping[str, Any], path: str) -> None:
    """Plot HR@30 over beta, and the recall of the new topic."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), gridspec_kw={"width_ratios": [2, 1]})
    for name in ("all", "steady", "shifted"):
        left.plot(BETAS, [found["rates"][b][name] for b in BETAS], marker="o", label=f"{name} users")
    left.set(xlabel="beta: tags alone 0, collaboration alone 1", ylabel=f"HR@{K}", ylim=(0, 1))
    left.legend(frameon=False)
    right.bar(list(found["recall"]), list(found["recall"].values()), width=0.5)
    right.set(ylabel="new topic predicted", ylim=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="run folder of rolljax/recipes/recgpt/recgpt.gin")
    parser.add_argument("--figure", help="write the picture here")
    args = parser.parse_args(argv)
    with rolljax.load(args.run) as model:
        found = measure(model)
    table = Table("users", *(f"beta {b:g}" for b in BETAS), title=f"HR@{K}")
    for name in ("all", "steady", "shifted"):
        table.add_row(name, *(f"{found['rates'][b][name]:.3f}" for b in BETAS))
    console = Console()
    console.print(table)
    console.print({name: round(x, 3) for name, x in found["recall"].items()})
    console.print(f"compressed histories have {found['history']:.0%} of the characters of their events")
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
