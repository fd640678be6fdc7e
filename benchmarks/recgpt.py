"""RecGPT in small: what alignment and self-training do to the answers of a policy, and what its tags do for retrieval.

    # about 15 CPU minutes
    python benchmarks/recgpt.py --runs runs/recgpt --figure rolljax/recipes/recgpt/recgpt.png

Three seeds of `rolljax.recipes.recgpt.self_training`: the policy of recgpt.gin after its reference answers (base) and
after GRPO (aligned), then trained on those of its own answers that the judge passed (self-trained), and, as a control,
on all of them. Printed are the judge's pass rates on new users, with greedy answers; tags are asked for with the
interests that the policy named itself. Then HR@30 of collaboration alone (beta 1), of tags alone (beta 0) and of the
fusion (beta 0.5), with users that the towers never saw and the tags of the self-trained policy; and how often the new
topic is the predicted tag, before and after the user's newest two events ("refresh").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from rich.console import Console
from rich.table import Table

import rolljax
from rolljax.recipes.recgpt import retrieval, self_training
from rolljax.recipes.recgpt import users as recgpt
from rolljax.recipes.recgpt.judge import RULE_JUDGE, pass_rate
from rolljax.recipes.recgpt.metrics import hit_rate

K, BETAS = 30, {"collaboration alone": 1.0, "tags alone": 0.0, "fusion": 0.5}
TASKS = ("interest", "tag", "explanation")
BASE_STEP = 100
"""Steps of recgpt.gin's warm start."""
Users = list[dict[str, Any]]


def said(model: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the greedy answer to each question."""
    return [a.text for a in model.generate([row["question"] for row in rows], temperature=0.0, max_tokens=24)]


def predict(model: Any, users: Users) -> list[str]:
    """Return the first tag for each user, from the interests that the policy names first."""
    interests = said(model, list(recgpt.interest_questions(users)))
    answers = said(model, list(recgpt.tag_questions(users, interests)))
    return [(recgpt.named(answer) or [""])[0] for answer in answers]


def rates(model: Any, users: Users, items: Users) -> dict[str, float]:
    """Return the judge's pass rate of each task."""
    first = list(recgpt.interest_questions(users))
    interests = said(model, first)
    second, third = list(recgpt.tag_questions(users, interests)), list(recgpt.explanation_questions(users, items))
    answers = (interests, said(model, second), said(model, third))
    asked = ([row["question"] for row in rows] for rows in (first, second, third))
    return {t: pass_rate(RULE_JUDGE, q, a) for t, q, a in zip(TASKS, asked, answers, strict=True)}


def stale(users: Users) -> Users:
    """Return the users without their newest two events."""
    return [dict(user) | {"events": user["events"][:-2]} for user in users]


def retrieve(model: Any, seed: int, test: Users, items: Users, num_train: int = 4000) -> dict[str, Any]:
    """Return the hit rates, and the recall of the new topic before and after the refresh."""
    known = recgpt.synthetic_users(num_train, items, seed=3000 + seed)
    log = retrieval.UserLog.of(known, items, [user["answer"] for user in known])
    towers = retrieval.train(retrieval.TowerConfig(), log, seed)
    tags = predict(model, test)
    asked = retrieval.UserLog.of(test, items, tags)
    hits = {name: hit_rate(retrieval.ranks(towers, asked, beta).tolist(), K) for name, beta in BETAS.items()}
    moved = [i for i, user in enumerate(test) if user["shift"]]
    before = predict(model, stale(test))
    recall = {
        name: statistics.mean(float(found[i] == test[i]["answer"]) for i in moved)
        for name, found in (("before the shift", before), ("after one refresh", tags))
    }
    return {"hits": hits, "recall": recall}


def study(folder: Path, seed: int, num_users: int, num_test: int) -> dict[str, Any]:
    """Train and measure one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    items = recgpt.synthetic_items()
    test = recgpt.synthetic_users(num_test, items, seed=2000 + seed)
    aligned = self_training.align(folder, seed)
    asked = self_training.unlabelled(folder, num_users, seed)
    self_training.own_answers(aligned, asked, folder / "answers", seed=seed)
    kept = self_training.passed(folder / "answers", folder / "passed", RULE_JUDGE)
    runs = {
        "self-trained": self_training.imitate(folder / "self_trained", aligned, folder / "passed", seed),
        "without a judge": self_training.imitate(folder / "control", aligned, folder / "answers", seed),
    }
    found: dict[str, Any] = {"rates": {}, "kept": kept.stages["01_judge_filter"]["num_out"]}
    found["answers"] = kept.stages["01_judge_filter"]["num_in"]
    for name, source, step in (("base", aligned, BASE_STEP), ("aligned", aligned, None)):
        with rolljax.load(source, step=step) as model:
            found["rates"][name] = rates(model, test, items)
    for name, source in runs.items():
        with rolljax.load(source) as model:
            found["rates"][name] = rates(model, test, items)
            if name == "self-trained":
                found |= retrieve(model, seed, test, items)
    return found


def spread(values: Sequence[float]) -> str:
    """Return the mean, and the lowest and highest value."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(found: Sequence[Mapping[str, Any]], path: str) -> None:
    """Plot pass rates by stage, and HR@30: means as bars, seeds as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), gridspec_kw={"width_ratios": [2, 1]})
    stages = list(found[0]["rates"])
    for i, stage in enumerate(stages):
        values = np.array([[f["rates"][stage][task] for task in TASKS] for f in found])
        at = np.arange(len(TASKS)) + (i - 1.5) * 0.2
        left.bar(at, values.mean(0), width=0.18, label=stage, alpha=0.7)
        for row in values:
            left.plot(at, row, "k.", markersize=4)
    left.set(xticks=range(len(TASKS)), xticklabels=TASKS, ylabel="pass rate (rule as judge)", ylim=(0, 1.25))
    left.legend(frameon=False, ncols=2)
    for i, name in enumerate(BETAS):
        values = [f["hits"][name] for f in found]
        right.bar(i, statistics.mean(values), width=0.6, alpha=0.7)
        right.plot([i] * len(values), values, "k.", markersize=4)
    right.set(xticks=range(len(BETAS)), xticklabels=["collab.", "tags", "fusion"], ylabel=f"HR@{K}", ylim=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Train, measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs; finished ones are used again")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, default=300, help="users without labels")
    parser.add_argument("--test", type=int, default=500, help="new users to measure with")
    parser.add_argument("--figure", help="write the picture here")
    args = parser.parse_args(argv)
    found = [study(args.runs / f"seed_{seed}", seed, args.users, args.test) for seed in range(args.seeds)]
    (args.runs / "result.json").write_text(json.dumps(found, indent=1))
    console = Console(width=120)
    table = Table("policy", *TASKS, title="pass rates: mean (lowest to highest seed)")
    for stage in found[0]["rates"]:
        table.add_row(stage, *(spread([f["rates"][stage][task] for f in found]) for task in TASKS))
    console.print(table)
    table = Table("retrieval", f"HR@{K}")
    for name in BETAS:
        table.add_row(name, spread([f["hits"][name] for f in found]))
    console.print(table)
    for name in found[0]["recall"]:
        console.print(f"new topic predicted {name}: {spread([f['recall'][name] for f in found])}")
    console.print("own answers that passed:", ", ".join(f"{f['kept']} of {f['answers']}" for f in found))
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
