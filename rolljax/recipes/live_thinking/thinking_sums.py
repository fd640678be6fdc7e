"""Sums whose recorded answers think for longer than needed, and of which only half are helpful.

A question names two numbers and a unit. Thinking repeats the same step four to ten times. The answer is right if it
holds the sum after `Answer:`, and helpful if it closes with a line that has the unit asked for (`rules.Answer` checks
the same in a run):

{"question": "4+3 pens?", "sum": "7", "unit": "pens", "answer": "<think>4+3=7. 4+3=7. </think>\\nAnswer: 7\\n7 pens."}
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from rolljax.envs.data.answers import find

UNITS = ("pens", "cups", "eggs", "hats", "keys", "bags", "figs", "nuts")
LARGEST = 5
HELD_OUT = 96
CLOSING = re.compile(r"\n\d+ ([a-z]+)\.$")


def tasks(seed: int = 0) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    """Return rows to learn from, two for each task, and rows of other tasks to evaluate on: every pair of numbers with
    every unit is a task of one of them, in random order. Of the two recorded answers to a task one is helpful."""
    rng = random.Random(seed)
    numbers = range(LARGEST + 1)
    found = [(a, b, unit) for a in numbers for b in numbers for unit in UNITS]
    rng.shuffle(found)
    training = [_row(rng, *task, closes) for task in found[HELD_OUT:] for closes in (True, False)]
    return training, [_row(rng, *task, True) for task in found[:HELD_OUT]]


def _row(rng: random.Random, a: int, b: int, unit: str, closes: bool) -> dict[str, Any]:
    thinking = f"{a}+{b}={a + b}. " * rng.randint(4, 10)
    answer = f"<think>{thinking}</think>\nAnswer: {a + b}" + f"\n{a + b} {unit}." * closes
    return {"question": f"{a}+{b} {unit}?", "sum": str(a + b), "unit": unit, "answer": answer}


def right(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """Return 1 if the sum stands after `Answer:`, else 0; a `Questions.reward`."""
    return float(find(answer, "Answer: {answer}") == record["sum"])


def helpful(record: dict[str, Any], answer: str) -> float:
    """Return 1 if the answer closes with a line that has the unit asked for, else 0."""
    closing = CLOSING.search(answer)
    return float(closing is not None and closing.group(1) == record["unit"])


def right_and_helpful(record: dict[str, Any], answer: str) -> float:
    """Return 1 if an attempt of the teacher is worth imitating, else 0; a `SampleAttempts.score`."""
    return right("", answer, record) * helpful(record, answer)
