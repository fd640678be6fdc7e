"""Answers that take no thought: the table, what is read out of a prompt, and which wins are holes."""

import dataclasses

import pytest

from rolljax.envs import checks, constants
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import EnvError
from rolljax.types import Message, Task

PROMPT = """Sort these: 3, -12.5 and 700.
1. first
- second
Say `left` or "right", go up, down or stay, [a] or **b**.
Answer yes or no."""


def test_the_table():
    texts = set(constants.CONSTANTS.values())
    assert len(texts) >= 80 and {"", " ", "0", "nan", "inf", "yes", "no", "[]", "{}", "9" * 4000} <= texts


def test_what_a_prompt_names():
    found = constants.from_prompt(PROMPT)
    assert found["the prompt"] == PROMPT and found["its last line"] == "Answer yes or no."
    assert found["its largest number"] == "700" and found["its smallest number"] == "-12.5"
    options = {"left", "right", "up", "down", "stay", "yes", "no", "first", "second", "a", "b"}
    assert options <= set(found.values()), options - set(found.values())
    assert constants.from_prompt("") == {"the prompt": "", "its first line": "", "its last line": ""}


@pytest.mark.parametrize(
    "answer, reference, equal",
    [
        ("Yes.", "yes", True),
        ("1,000.0", "1000", True),
        ("0.0", "0", True),
        ("-1", "1", False),
        ("nan", "1", False),
        ("", "", True),
        ("", "0", False),
        ("a, b", "A b", True),
        ("[1, 2]", "[2, 1]", False),
        ("?", "!", False),
    ],
)
def test_same(answer, reference, equal):
    assert constants.same(answer, reference) is equal


@dataclasses.dataclass(frozen=True)
class Parity(EnvSpec):
    """Whether the task's number is odd. taken: what else the scorer takes for right; paid: what earns most of it."""

    taken: str = "yes"
    paid: str = ""
    name = "parity"

    def task(self, index):
        return Task("parity", index, f"Is {index} odd? yes or no")

    def make(self):
        return Question(self)


class Question(PureEnv):
    def __init__(self, spec):
        self._spec = spec

    def reset(self, task):
        self._right = "yes" if task.index % 2 else "no"
        return (Message("user", task.content),)

    def step(self, action):
        solved = action in (self._right, self._spec.taken if self._spec.taken != "yes" else self._right)
        reward = 1.0 if solved else 0.9 * (bool(self._spec.paid) and action == self._spec.paid)
        return StepResult((), reward, terminated=True, success=solved)

    def reference_answer(self):
        return self._right


def test_half_of_yes_or_no_is_honest():
    found = checks.constant_wins(Parity(), 30)
    assert found.hole is None and found.pays is None
    assert (found.best.share, found.best.reference) == (0.5, 0.5)
    assert "50%" in checks.no_constant_wins(Parity(), 30)


@pytest.mark.parametrize("taken", ["nan", "", "[]", "x" * 8000, "Is 3 odd? yes or no"])
def test_an_answer_that_wins_without_being_reference_is_a_hole(taken):
    spec = Parity(taken)
    if taken in constants.CONSTANTS.values():
        with pytest.raises(EnvError, match="without being the reference answer"):
            checks.no_constant_wins(spec, 30)
    else:  # the prompt of one task in thirty: luck
        assert checks.constant_wins(spec, 30).hole is None


def test_what_pays_without_being_right_is_told():
    found = checks.constant_wins(Parity(paid="None"), 20)
    assert found.hole is None and found.pays.name == "'None'" and "earns 0.90" in str(found)


def test_luck():
    assert constants.at_least(0, 30, 0.5) == pytest.approx(1)
    assert constants.at_least(30, 30, 0.5) == pytest.approx(0.5**30)
    assert constants.at_least(20, 30, 0.5) == pytest.approx(0.0493685733)
