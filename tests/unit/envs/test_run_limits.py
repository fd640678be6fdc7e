"""Time-outs of programs by task, by the rule of RollPacker and its own examples."""

import dataclasses

import pytest

from rolljax.envs import run_limits
from rolljax.envs.base import Action, StepResult
from rolljax.envs.code_problems import CodeProblems
from rolljax.envs.pool.episode_runner import EpisodeRunner
from rolljax.envs.run_limits import RUN_S, AdaptiveTimeout, RunLimits
from rolljax.envs.tools.env import ToolEnv
from rolljax.errors import ConfigError
from rolljax.types import Task
from tests.unit.envs.test_tools_env import TOOLS, Log

A, B = Task("code", 0, "a"), Task("code", 1, "b")


def took(seconds, success=True):
    return StepResult((), float(success), terminated=True, success=success, metrics={RUN_S: seconds})


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0.5, 2), (4, 6), (30, 30)])
def test_time_limits_follow_the_longest_correct_run(longest_s, limit_s):
    limits = RunLimits(AdaptiveTimeout(), 30)
    assert limits.limit_s(A) == 30
    limits.learn(A, took(20, success=False))
    assert limits.limit_s(A) == 30
    for seconds in (longest_s, longest_s / 2):
        limits.learn(A, took(seconds))
    assert limits.limit_s(A) == limit_s and limits.limit_s(B) == 30


def test_what_says_no_time_teaches_nothing():
    limits = RunLimits(AdaptiveTimeout(), 30)
    limits.learn(A, dataclasses.replace(took(1), metrics={}))
    assert limits.state() == {} and limits.limit_s(A) == 30


def test_time_limits_continue_from_their_saved_state():
    limits, again = RunLimits(AdaptiveTimeout(), 30), RunLimits(AdaptiveTimeout(), 30)
    limits.learn(A, took(4))
    again.restore(limits.state())
    limits.learn(B, took(5))
    assert (again.limit_s(A), again.limit_s(B)) == (6, 30)


def test_only_max_tasks_tasks_are_remembered(monkeypatch):
    monkeypatch.setattr(run_limits, "MAX_TASKS", 2)
    limits = RunLimits(AdaptiveTimeout(), 30)
    tasks = [Task("code", i, str(i)) for i in range(3)]
    for task in (*tasks, tasks[1]):
        limits.learn(task, took(4))
    assert [limits.limit_s(task) for task in tasks] == [30, 6, 6]


def test_a_least_time_beyond_the_longest_is_refused(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match=r"AdaptiveTimeout\.low_s") as e:
        CodeProblems(str(path), timeout_s=2, adaptive_timeout=AdaptiveTimeout())
    assert "timeout_s" in e.value.remedy
    assert CodeProblems(str(path)).run_limits() is None


class Heard(Log):
    def run_limits(self):
        return RunLimits(AdaptiveTimeout(), 9)


def test_time_limits_pass_through_tools_to_the_inner_environment():
    spec = ToolEnv(inner=Heard(), tools=TOOLS)
    assert spec.run_limits().limit_s(A) == 9
    runner = EpisodeRunner(spec, 10_000)
    runner.call("reset", Task("log", 0, "0"))
    inner = runner._env._inner
    for limit in (None, 3.0):
        runner.call("step", Action("said", limit))
        assert inner.run_limit_s == limit
