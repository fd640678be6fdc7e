"""STAgent's taxonomy, grades and routes."""

import json
import random

import pytest

from rolljax.config import loader
from rolljax.data import attempts
from rolljax.data.pipeline import Pipeline
from rolljax.envs.questions import BOXED
from rolljax.recipes.stagent import stagent
from tests.stages import coin, through


@pytest.mark.slow
def test_tasks_that_can_be_learned_are_the_true_middle_band(tmp_path):
    rng = random.Random(0)
    chances = [1.0] * 80 + [0.0] * 80 + [rng.uniform(0.3, 0.7) for _ in range(80)]
    rng.shuffle(chances)
    records = [{"prompt": f"{i}: seven with {c} ?", "answer": "7", "chance": c} for i, c in enumerate(chances)]
    stages = (attempts.SampleAttempts(k=8), stagent.Learnability(keep_attempts=False))
    rows, ledgers, server = through(tmp_path, *stages, records=records, rule=coin, split_by="route")
    middle = {r["prompt"] for r in records if 0 < r["chance"] < 1}
    found = {r["prompt"] for r in rows}
    assert len(found & middle) >= 0.9 * len(found | middle)
    assert server.num_asked == 8 * 240 and BOXED.split("\n")[1] in next(iter(server.asked)).replace("\\\\", "\\")
    by_route = {name: [r for r in rows if r["route"] == name] for name in ("sft", "rl")}
    assert len(by_route["sft"]) > 3 and all(r["rollouts"]["mu"] >= 0.75 for r in by_route["sft"])
    assert sum(ledgers[1]["dropped"].values()) == 240 - len(rows)


@pytest.mark.parametrize(
    "mu, sigma, route", [(0.9, 0.3, "trivial"), (0.05, 0.2, "noise"), (0.875, 0.33, "sft"), (0.75, 0.46, "rl"), (0.5, 0.5, "rl")]
)  # fmt: skip
def test_routes(mu, sigma, route):
    assert stagent.Learnability().route(mu, sigma) == route


def test_a_taxonomy_is_induced_and_extended_from_what_it_does_not_cover(tmp_path):
    kinds = ("flight", "hotel", "weather")

    def rule(messages, rng):
        text = messages[-1]["content"]
        if text.startswith("Here are"):
            return "\n".join(f"- {k}" for k in kinds[:2]) if "known already" not in text else "1. weather"
        kind = next(k for k in kinds if k in text.split("Request:")[1])
        listed = text.split("Request:")[0]
        primary = kind if f"- {kind}" in listed else "Other"
        said = {"primary": primary, "secondary": [], "constraints": ["cheap"]}
        return f"Let me see {{}}. {json.dumps(said)}" if rng.random() < 0.8 else "{"

    records = [{"prompt": f"{i} about {kinds[i % 3]}"} for i in range(30)]
    rows, (ledger,), _ = through(tmp_path, stagent.Taxonomy(tries=6), records=records, rule=rule)
    assert [r["intent"] for r in rows] == [kinds[i % 3] for i in range(30)]
    assert rows[0]["constraints"] == ["cheap"] and ledger["numbers"] == {
        "other_before_round_1": 10,
        "other_before_round_2": 0,
        "intents": 3,
    }


def test_difficulty_is_graded_and_what_cannot_be_read_is_asked_again(tmp_path):
    def rule(messages, rng):
        value = int(messages[-1]["content"].split("level ")[1].split()[0])
        return json.dumps({"reasons": "{}", "difficulty": value}) if rng.random() < 0.7 else '{"difficulty": 9}'

    records = [{"prompt": f"level {n} ."} for n in (-1, 0, 3, 5)]
    rows, _, _ = through(tmp_path, stagent.GradeDifficulty(tries=9), records=records, rule=rule)
    assert [r["difficulty"] for r in rows] == [-1, 0, 3, 5]


def test_rare_combinations_of_tools_are_repeated(tmp_path):
    tools = [["map"]] * 9 + [["map", "weather"], ["weather", "map"]] + [["pay"]] + [["hotel"]] * 5
    records = [{"prompt": str(i), "tools": t} for i, t in enumerate(tools)]
    rows, (ledger,), _ = through(tmp_path, stagent.RareTools(), records=records)
    counts = {}
    for row in rows:
        name = "+".join(sorted(row["tools"]))
        counts[name] = counts.get(name, 0) + 1
    assert counts == {"map": 9, "map+weather": 5, "pay": 4, "hotel": 5} and ledger["numbers"]["target"] == 5
    assert {r["prompt"] for r in rows} == {r["prompt"] for r in records}


@pytest.mark.parametrize("name", ["stagent/data", "learnability"])
def test_recipes_can_be_read(name):
    found = loader.load([name], root=Pipeline).value
    assert found.labels and all(found.model_of(s) for s in found.stages if s.asks)
