"""Coding problems, graded in real sandboxes: right, wrong, broken and hostile programs."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rolljax.envs import checks
from rolljax.envs.code_problems import CodeProblems
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.run_limits import AdaptiveTimeout
from rolljax.errors import EnvError
from rolljax.rollout.episodes import Rollouts, ScriptedPolicy
from rolljax.sandbox import available
from rolljax.types import Completion, Key, Sampled

needs_sandbox = pytest.mark.skipif(available() != "", reason=f"no sandbox: {available()}")
DATA = Path(__file__).parents[1] / "data"
MBPP = CodeProblems(str(DATA / "code_problems_mbpp.jsonl"))
HUMANEVAL = [
    {
        "task_id": "own/0",
        "prompt": "from typing import List\n\n\ndef running_max(numbers: List[int]) -> List[int]:\n"
        '    """The largest number so far, for each place.\n    >>> running_max([1, 3, 2])\n    [1, 3, 3]\n    """\n',
        "entry_point": "running_max",
        "canonical_solution": "    found = []\n    for n in numbers:\n        found.append(max(n, *found[-1:]) if found else n)\n"
        "    return found\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 3, 2]) == [1, 3, 3]\n"
        "    assert candidate([]) == []\n    assert candidate([-5, -7, 0]) == [-5, -5, 0]\n",
    },
    {
        "task_id": "own/1",
        "prompt": "import math\n\n\ndef scaled(x):\n    return 10 * x\n\n\ndef root_of_scaled(x: float) -> float:\n"
        '    """The root of `scaled(x)`."""\n',
        "entry_point": "root_of_scaled",
        "canonical_solution": "    return math.sqrt(scaled(x))\n",
        "test": "def check(candidate):\n    for x in (0, 1.5, 4):\n        assert abs(candidate(x) ** 2 - scaled(x)) < 1e-6\n",
    },
]


@pytest.fixture(scope="module")
def humaneval(tmp_path_factory):
    path = tmp_path_factory.mktemp("problems") / "humaneval.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in HUMANEVAL))
    return CodeProblems(str(path))


def answer(spec, index, text):
    env = spec.make()
    env.reset(spec.task(index))
    result = env.step(env.reference_answer() if text is None else text)
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("")
    return result


@needs_sandbox
def test_recorded_solutions_pass(humaneval):
    for spec in (MBPP, humaneval):
        for index in range(len(spec.problems())):
            result = answer(spec, index, None)
            assert result.success and result.reward == 1 and result.terminated, spec.problems()[index].id
            assert result.metrics["tests_passed_frac"] == 1


@needs_sandbox
@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_contract_of_environments(name):
    checks.CHECKS[name](MBPP, 2)


@needs_sandbox
def test_bodies_and_whole_functions(humaneval):
    assert answer(humaneval, 1, "    return math.sqrt(scaled(x))").success
    assert answer(humaneval, 1, "return math.sqrt(scaled(x))").success
    assert answer(humaneval, 1, "```python\ndef root_of_scaled(x):\n    return (10 * x) ** 0.5\n```").success
    assert not answer(humaneval, 1, "def scaled(x):\n    return 0\n\ndef root_of_scaled(x):\n    return 0.0").success


@needs_sandbox
def test_half_right_is_a_metric_not_a_reward():
    result = answer(MBPP, 1, "def second_largest(numbers):\n    return sorted(set(numbers))[-2]")
    assert result.reward == 0 and not result.success and result.metrics["tests_passed_frac"] == pytest.approx(2 / 3)


EQUAL = """
class E(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __getitem__(self, name): return self
    def __iter__(self): return iter([])
    def __sub__(self, other): return 0
def running_max(numbers): return E()
"""
PATCHED = """
import builtins, sys, os
builtins.AssertionError = ValueError
sys.exit = os._exit = lambda *_: None
def running_max(numbers):
    frame = sys._getframe()
    while frame:
        frame.f_globals["check"] = lambda *_: None
        frame = frame.f_back
    os.write(1, b'{"passed": true, "num_passed": 3, "num_tests": 3, "reason": "passed", "detail": ""}')
    return [0]
"""


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "",
        "prose, not code",
        "def running_max(numbers:",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "def running_max(numbers):\n    import os\n    os._exit(0)",
        "def running_max(numbers):\n    return running_max(numbers)",
        "def running_max(numbers):\n    return [0] * 10**10",
        EQUAL,
        PATCHED,
        "x" * 200_000,
    ],
    ids=lambda p: p[:15],
)
def test_a_wrong_solution_gets_no_reward(humaneval, program):
    result = answer(humaneval, 0, f"```python\n{program}\n```" if program else "")
    assert result.terminated and result.reward == 0 and not result.success


@needs_sandbox
def test_a_program_that_hangs_is_stopped(humaneval):
    spec = CodeProblems(humaneval.path, timeout_s=2.0)
    result = answer(spec, 0, "def running_max(numbers):\n    while True:\n        pass")
    assert result.reward == 0 and result.metrics["timeouts_n"] == 1


ENDLESS = "def second_largest(numbers):\n    while True:\n        pass"


class Endless:
    """A policy whose programs never end."""

    def __init__(self, chat):
        self.tokens = chat.answer_ids(ENDLESS)

    async def act(self, prompt_ids, episode, key, turn, min_version=0):
        size = len(self.tokens)
        return Completion(Sampled.of(self.tokens, np.zeros(size, np.float32), np.zeros(size, np.int32)), "stop")


@needs_sandbox
@pytest.mark.parametrize("where", ["thread", "process"])
def test_where_right_answers_are_quick_a_program_that_hangs_is_cut_soon(chat, where):
    """Both in threads and in processes, the action carries the time-out, and the reply the program's run time."""
    spec = CodeProblems(MBPP.path, timeout_s=100.0, adaptive_timeout=AdaptiveTimeout(low_s=1.0))
    pool, limits = EnvPool(PoolConfig(where=where, workers=1, step_s=120.0), spec), spec.run_limits()
    task = spec.task(1)

    def play(policy, draw):
        rollouts = Rollouts(pool, chat, policy, 1, 4000, 1000, run_limits=limits)
        return rollouts.trajectory(task, Key(0, draw, 0))

    async def both():
        return await play(ScriptedPolicy(chat, 1000), 0), await play(Endless(chat), 1)

    try:
        assert limits.limit_s(task) == 100
        right, wrong = asyncio.run(both())
    finally:
        pool.close()
    assert right.success and right.metrics["timeouts_n"] == right.metrics["early_timeouts_n"] == 0
    assert limits.state() == {task.id: right.metrics["run_s"]}
    assert limits.limit_s(task) == max(1.0, 1.5 * right.metrics["run_s"]) < 50
    assert (wrong.status, wrong.reward) == ("ok", 0)
    assert wrong.metrics["timeouts_n"] == wrong.metrics["early_timeouts_n"] == 1
    assert limits.limit_s(task) <= wrong.metrics["run_s"] < 100


def test_without_isolation_when_asked_for_by_name():
    spec = CodeProblems(MBPP.path, sandbox="none")
    assert answer(spec, 0, None).success and not answer(spec, 0, "def count_vowels(word):\n    return 0").success


@needs_sandbox
def test_a_machine_that_cannot_isolate_refuses_and_says_what_to_do():
    """In a user namespace that forbids further ones, like a container without the right to create them."""
    code = (
        "import sys\nfrom rolljax.envs.code_problems import CodeProblems\n"
        "spec = CodeProblems(sys.argv[1])\nspec.make().reset(spec.task(0))\n"
    )
    caged = ["bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/", "--cap-drop", "ALL"]
    done = subprocess.run([*caged, sys.executable, "-c", code, MBPP.path], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "ConfigError" in done.stderr and "fix:" in done.stderr, done.stderr
