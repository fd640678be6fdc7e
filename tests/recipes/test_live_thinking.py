"""LiveThinking: its tasks, its rejection sampling, and what its reward pays for."""

import asyncio
import json

import numpy as np
import pytest

from rolljax.config import loader
from rolljax.data.pipeline import Pipeline
from rolljax.envs.data.rows import find_files
from rolljax.recipe import Recipe
from rolljax.recipes.live_thinking.thinking_sums import helpful, right, right_and_helpful, tasks
from rolljax.rewards.base import RewardContext
from rolljax.types import Key, Trajectory, Turn
from tests.stages import through

ROW = {"question": "4+3 pens?", "sum": "7", "unit": "pens"}


def shipped(name):
    return [json.loads(line) for line in find_files(name, "x")[0].read_text().splitlines()]


def test_the_shipped_tasks_are_those_of_the_code():
    training, held_out = tasks()
    assert shipped("thinking_sums.jsonl") == training and shipped("held_out_sums.jsonl") == held_out
    assert not {r["question"] for r in training} & {r["question"] for r in held_out}
    assert all(right("", r["answer"], r) for r in training)
    assert sum(helpful(r, r["answer"]) for r in training) == len(training) / 2


def test_the_shipped_answers_are_right_and_helpful():
    kept, held_out = shipped("kept_sums.jsonl"), {r["question"] for r in shipped("held_out_sums.jsonl")}
    assert len(kept) > 100 and not held_out & {r["question"] for r in kept}
    for row in kept:
        assert right_and_helpful(row, row["answer"]) and row["ref_tok"] == len(row["answer"]) + 1  # bytes and the end


def test_the_teacher_s_wrong_and_unhelpful_answers_are_thrown_away(tmp_path):
    """The shipped pipeline, its teacher a rule behind a real server."""
    said = iter(
        [
            "<think>4+3=7. 4+3=7. 4+3=7. </think>\nAnswer: 7\n7 pens.",
            "<think>4+3=7. 4+3=7. </think>\nAnswer: 7\n7 pens.",
            "<think>4+3=8. </think>\nAnswer: 8\n8 pens.",
            "<think>4+3=7. </think>\nAnswer: 7",
            "<think>4+3=7. </think>\nAnswer: 7\n7 hats.",
            *["Answer: 1"] * 3,
        ]
    )
    setup = loader.load(["live_thinking/data"], {}, root=Pipeline).value
    recorded = [ROW | {"answer": "recorded"}] * 2
    rows, ledgers, _ = through(
        tmp_path, *setup.stages, records=recorded, rule=lambda *_: next(said), key=setup.key, concurrency=1
    )
    assert [r["answer"] for r in rows] == ["<think>4+3=7. 4+3=7. </think>\nAnswer: 7\n7 pens."]
    assert ledgers[2]["counts"] == {"attempts": 8, "attempts_good": 2, "attempts_kept": 1}


@pytest.mark.parametrize(
    ("text", "tokens", "value"),
    [
        ("Answer: {sum}\n{sum} {unit}.", 0.5, 2.0),  # within the band
        ("Answer: {sum}\n{sum} {unit}.", 1.0, 1.5 + 0.5 * (1 - 0.4 / 0.75)),
        ("Answer: {sum}", 0.5, 1.5),  # not helpful
        ("Answer: {sum}\n{sum} geese.", 0.5, 1.5),  # another unit than was asked for
        ("Answer: 77\n77 {unit}.", 0.5, 0.5),  # wrong: its length is worth nothing
    ],
)
def test_the_reward_of_the_recipe(text, tokens, value):
    recipe = loader.load(["live_thinking"], {}, root=Recipe).value
    task, row = recipe.env.task(0), recipe.env.record(0) | {"ref_tok": 80}
    ref = recipe.env.record(0)["ref_tok"]
    answer = text.format(**row)
    reward = recipe.env.reward("", answer, row)
    ids = np.arange(round(tokens * ref))
    turn = Turn(ids[:0], ids, np.zeros(len(ids)), ids, "stop", reward, answer)
    trajectory = Trajectory(Key(0, 0, 0), task, (turn,), reward, {"right": reward}, reward == 1, "ok")

    async def scored():
        scorer = recipe.reward.open(RewardContext(recipe.env))
        try:
            return await scorer.score(task, trajectory)
        finally:
            await scorer.close()

    found = asyncio.run(scored())
    assert found.value == pytest.approx(value, abs=0.01) and found.success == (reward == 1)
