"""The verbs `play` and `validate`, as a user runs them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rolljax
from rolljax.envs.games.guess_number import GuessNumber

ROOT = Path(rolljax.__file__).parents[1]
BROKEN = """
import dataclasses, time
from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.errors import EnvError
from rolljax.types import Message, Task

@dataclasses.dataclass(frozen=True)
class Slow(EnvSpec):
    '''Grades for a while, as a sandbox does.'''
    name = "slow"
    def task(self, index): return Task("slow", index, f"{index}?")
    def make(self): return SlowEnv()

class SlowEnv(Env):
    def reset(self, task):
        self.content, self.over = task.content, False
        return (Message("user", task.content),)
    def step(self, action):
        if self.over:
            raise EnvError("over")
        time.sleep(0.05)
        self.over = True
        solved = action == self.reference_answer()
        return StepResult((), float(solved), terminated=True, success=solved)
    def reference_answer(self): return f"yes {self.content}"

@dataclasses.dataclass(frozen=True)
class Open(EnvSpec):
    '''Rewards what cannot be looked up: it has no reference answers.'''
    name = "open"
    def task(self, index): return Task("open", index, f"a poem of {index} words")
    def make(self): return OpenEnv()

class OpenEnv(Env):
    def reset(self, task):
        self.wanted = task.index
        return (Message("user", task.content),)
    def step(self, action):
        solved = len(action.split()) == self.wanted + 3
        return StepResult((), float(solved), terminated=True, success=solved)
    def reference_answer(self): raise EnvError("open has no recorded answers")

@dataclasses.dataclass(frozen=True)
class Broken(EnvSpec):
    '''Anything solves it, twice; the second task cannot be reset.'''
    name = "broken"
    def task(self, index): return Task("broken", index, str(index))
    def make(self): return BrokenEnv()

class BrokenEnv(Env):
    def reset(self, task):
        if task.index == 1:
            raise KeyError("second")
        return (Message("user", "\\x1b[31m[red]?"),)
    def step(self, action): return StepResult((), 1.0, terminated=True, success=True)
    def reference_answer(self): return "x"

@dataclasses.dataclass(frozen=True)
class Hollow(EnvSpec):
    '''Compares numbers as a distance that is not too large: that of nan is not.'''
    name = "hollow"
    def task(self, index): return Task("hollow", index, f"{index} + 1")
    def make(self): return HollowEnv()

class HollowEnv(Env):
    def reset(self, task):
        self.right, self.over = task.index + 1, False
        return (Message("user", task.content),)
    def step(self, action):
        if self.over:
            raise EnvError("over")
        self.over = True
        try:
            solved = not abs(float(action) - self.right) > 0.1
        except ValueError:
            solved = False
        return StepResult((), float(solved), terminated=True, success=solved)
    def reference_answer(self): return str(self.right)
"""


def run(verb, *args, typed=""):
    return subprocess.run(
        [sys.executable, "-m", f"rolljax.{verb}", *args],
        input=typed,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(BROKEN)
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{old}"
    yield "own.Broken"
    os.environ["PYTHONPATH"] = old


def test_a_person_plays():
    spec = GuessNumber(largest=10, max_turns=4)
    four = next(i for i in range(1000) if spec.task(i).content.startswith("4 "))
    said = ("play", "guess_number(largest=10, max_turns=4)", "--task", str(four))
    done = run(*said, typed="9\nx\n4\n")
    assert done.returncode == 0 and "1-10?" in done.stdout and "lower" in done.stdout
    assert "turn 2 of 4: illegal_n 1" in done.stdout and "turn 3 of 4: reward 1" in done.stdout
    assert done.stdout.splitlines()[-1] == "solved: 3 turns, reward 1"
    assert run(*said, typed="1\n1\n1\n1\n4\n").stdout.splitlines()[-1] == "cut: 4 turns, reward 0"


def test_the_end_of_input_ends_the_game():
    done = run("play", "sokoban#5", typed="left\n")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "left after 1 turns, reward 0"
    assert "@" in done.stdout and "turn 1 of 20" in done.stdout


def test_the_scripted_player_is_watched():
    done = run("play", "house", "--scripted")
    assert done.returncode == 0 and "> go to" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("solved: ") and done.stdout.endswith("reward 1\n")


def test_what_an_environment_shows_cannot_steer_the_terminal(broken):
    done = run("play", broken, "--scripted")
    assert done.returncode == 0 and "\x1b[31m" not in done.stdout and "\\x1b[31m[red]?" in done.stdout


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["play", "sokobann"], 2, "did you mean sokoban"),
        (["play", "sokoban", "--task", "-1"], 2, "--task"),
        (["validate", "sokoban", "--tasks", "0"], 2, "--tasks"),
        (["validate", "house(things=99)"], 2, "House.things"),
        (["validate", "sokoban", "--seconds", "0"], 2, "--seconds"),
    ],
    ids=str,
)
def test_what_cannot_be_played_is_one_message(args, code, said):
    done = run(*args)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr


def test_an_environment_that_raises_ends_play_with_its_owner(broken):
    done = run("play", broken, "--task", "1")
    assert done.returncode == 3 and done.stderr.startswith("env error: broken, task 1: KeyError"), done.stderr


def test_a_sound_environment_is_valid():
    done = run("validate", "sokoban", "--tasks", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fail" not in done.stdout.replace("bad actions fail", "") and "random legal actions" in done.stdout
    assert "steps/s" in done.stdout


def test_a_slow_environment_is_checked_within_its_time(broken):
    """All of it would take minutes: 40 tasks by a hundred answers."""
    start = time.monotonic()
    done = run("validate", "own.Slow", "--tasks", "40", "--seconds", "8")
    said = " ".join(done.stdout.replace("│", " ").split())
    assert done.returncode == 0 and time.monotonic() - start < 40, done.stdout
    assert "of 40 tasks: no time for the other" in said and "not tried: " in said
    assert "checks had no time for all 40 tasks in 8 s: give them more with --seconds" in said


def test_an_easy_environment_is_valid_with_a_warning():
    done = run("validate", "mastermind(length=1, digits=2)", "--tasks", "10")
    assert done.returncode == 0 and "warn" in done.stdout


def test_an_environment_without_reference_answers_is_not_failed_for_it(broken):
    done = run("validate", "own.Open", "--tasks", "3")
    lines = [line for line in done.stdout.splitlines() if "not tried: open has no recorded answers" in line]
    assert done.returncode == 0 and len(lines) == 8, done.stdout + done.stderr
    assert "3 of 3 different" in done.stdout
    assert "empty answers" in done.stdout and "steps/s" in done.stdout


def test_a_broken_environment_is_not_valid(broken):
    done = run("validate", broken, "--tasks", "1")
    assert done.returncode == 3 and done.stderr == "env error: broken fails 3 of the checks\n", done.stdout
    done = run("validate", broken, "--tasks", "3")
    assert done.returncode == 3 and "KeyError: 'second'" in done.stdout and "Traceback" not in done.stderr


def test_an_environment_that_a_constant_answer_solves_is_not_valid(broken):
    done = run("validate", "own.Hollow", "--tasks", "30")
    assert done.returncode == 3 and done.stderr == "env error: hollow fails 1 of the checks\n", done.stdout
    assert "'nan' solves 100% without being the reference answer" in " ".join(done.stdout.replace("│", " ").split())
