"""The checks of environments find what they are there to find: each fault below fails its check and no other."""

import dataclasses
import random

import pytest

from rolljax.envs import checks
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import EnvError
from rolljax.types import Message, Task

SHARED = []


@dataclasses.dataclass(frozen=True)
class Twice(EnvSpec):
    """Say the number, twice in a row; `fault` is what is wrong with it."""

    fault: str = ""
    max_turns: int = 3

    @property
    def name(self):
        return "twice"

    def task(self, index):
        number = index + 1
        if self.fault == "draws":
            number = random.random()
        if self.fault == "hash":
            number = abs(hash(f"task {index}"))
        if self.fault == "one task":
            number = 7
        return Task(self.name, 0 if self.fault == "index" else index, str(number))

    def make(self):
        return TwiceEnv(self)

    def bad_actions(self):
        return ("", "7") if self.fault == "bad action" else ("",)


class TwiceEnv(PureEnv):
    def __init__(self, spec):
        self._spec, self._said = spec, None

    def reset(self, task):
        self._number, self._said, self._turns = task.content, 0, 0
        SHARED.append(task.content)
        role = "assistant" if self._spec.fault == "role" else "user"
        return (Message(role, self._number),)

    def step(self, action):
        fault = self._spec.fault
        if self._said is None and fault != "step after end":
            raise EnvError("step before reset, or after the end")
        self._turns = getattr(self, "_turns", 0) + 1
        number = SHARED[-1] if fault == "shared" else getattr(self, "_number", "")
        right = action == number
        self._said = (self._said or 0) + right
        solved = self._said == (4 if fault == "late" else 2)
        truncated = not solved and self._turns >= (10**9 if fault == "endless" else self._spec.max_turns)
        result = StepResult(
            () if (solved or truncated) and fault != "talks" else (Message("user", "again"),),
            float("nan") if fault == "nan" else float(solved) / (2 if fault == "half" else 1),
            terminated=solved,
            truncated=truncated or (solved and fault == "both"),
            success=solved,
            metrics={"weird_n": float("inf") if fault == "metric" else 0.0},
        )
        if solved or truncated:
            self._said = None
        return result

    def reference_answer(self):
        return "?" if self._spec.fault == "reference" else self._number

    def snapshot(self):
        if self._spec.fault == "no snapshot":
            raise EnvError("not this one")
        if self._spec.fault == "tires":
            self._said = 0
        return super().snapshot()

    def restore(self, state):
        super().restore(state)
        if self._spec.fault == "forgets":
            self._said = 0


FAULTS = {
    "reference": "the reference answer solves",
    "late": "the reference answer solves",
    "nan": "well formed",
    "metric": "well formed",
    "both": "well formed",
    "talks": "well formed",
    "role": "well formed",
    "step after end": "ends are final",
    "index": "tasks are their index",
    "one task": "tasks are their index",
    "draws": "tasks are their index",
    "hash": "same in another process",
    "shared": "side by side",
    "forgets": "snapshots",
    "tires": "snapshots",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check(fault):
    with pytest.raises(EnvError):
        checks.CHECKS[FAULTS[fault]](Twice(fault), 4)


def test_a_bad_action_that_solves_is_found():
    @dataclasses.dataclass(frozen=True)
    class Seven(Twice):
        def task(self, index):
            return Task(self.name, index, "7")

    with pytest.raises(EnvError, match="'7' gets 1"):
        checks.bad_actions_fail(Seven("bad action"), 1)


def test_an_endless_episode_is_found():
    with pytest.raises(EnvError, match="has not ended after"):
        checks.bad_actions_fail(Twice("endless"), 1)


def test_reference_may_be_asked_for_a_reward():
    assert "reward 0.5" in checks.reference_solves(Twice("half"), 3)
    with pytest.raises(EnvError, match=r"the reference answer gets 0\.5"):
        checks.reference_solves(Twice("half"), 3, reward=1.0)


def test_an_environment_without_faults_passes_every_check():
    for name, check in checks.CHECKS.items():
        assert check(Twice(), 4), name


def test_an_environment_without_snapshots_passes_and_says_so():
    assert checks.snapshots_continue(Twice("no snapshot"), 2) == "no snapshots"


def test_without_random_actions_a_random_player_says_what_reference_says_in_other_tasks():
    player, how = checks.random_player(Twice())
    assert how == "reference answers of other tasks"
    assert checks.success_frac(Twice(), [Twice().task(i) for i in range(20)], player) == 0
    same, _ = checks.random_player(Twice("one task"))
    assert checks.success_frac(Twice("one task"), [Twice("one task").task(0)], same) == 1
