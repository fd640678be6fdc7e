"""Selection of the trajectories that take part in a step."""

import dataclasses

import pytest

from rolljax.errors import ConfigError
from rolljax.metrics import MetricsReport
from rolljax.rollout.filters import FilterConfig, GroupFilters
from rolljax.run.step_metrics import add_faults
from rolljax.types import Fault, Group, Key, Task
from tests.synthetic import trajectory


@pytest.fixture
def made():
    """Return `made(rewards)`: a group of one-turn trajectories of 5 tokens."""
    import numpy as np

    rng = np.random.default_rng(0)

    def group(*rewards, index=0):
        ts = [trajectory(rng, index, s, np.arange(3), [(0, 5)], reward=r) for s, r in enumerate(rewards)]
        return Group(Task("toy", index, str(index)), index, tuple(ts))

    return group


def filter_groups(groups, cfg=None):
    filters = GroupFilters(cfg or FilterConfig(), {})
    return filters.step(groups, [filters.group(g) for g in groups])


def faults_of(groups):
    add_faults(report := MetricsReport(), groups)
    return report.row()


def failing(group, *which, kind="infra"):
    ts = tuple(
        dataclasses.replace(t, status="failed", fault=Fault(kind, "step", "gone")) if i in which else t
        for i, t in enumerate(group.trajectories)
    )
    return dataclasses.replace(group, trajectories=ts)


def siblings(groups):
    return [[t.key.sibling for t in g] for g in groups]


def test_of_eight_three_lost_ones_are_left_out_and_five_end_the_step(made):
    group = made(*[1.0, 0.0] * 4)
    assert siblings(filter_groups([failing(group, 0, 3, 5)])) == [[1, 2, 4, 6, 7]]
    assert filter_groups([failing(group, 0, 1, 2, 3, 5)]) == []
    assert siblings(filter_groups([failing(group, 0, 1, 2, 3, 5)], FilterConfig(max_failed_frac=1.0))) == [[4, 6, 7]]


def test_loops_are_left_out_and_never_end_a_step(made):
    group = made(*[1.0, 0.0] * 4)
    assert siblings(filter_groups([failing(group, 0, 1, 2, 3, 5, kind="agent")])) == [[4, 6, 7]]


def test_a_demonstration_takes_part_beside_the_group_it_is_for(made):
    group, alone = made(0, 0, index=0), made(1, 0, index=1)
    shown = made(0, 0, 0, index=0).trajectories[2]
    groups = [
        dataclasses.replace(group, demonstration=shown),
        failing(dataclasses.replace(alone, demonstration=shown), 0),
    ]
    assert siblings(filter_groups(groups)) == [[0, 1, 2]]


def test_a_group_needs_two_unless_it_is_one(made):
    groups = [failing(made(1, 0), 0), made(1, 0, index=1), made(1, index=2)]
    assert siblings(filter_groups(groups)) == [[0, 1], [0]]


@pytest.mark.parametrize("do, rewards", [("alarm", [1, 0]), ("zero", [0, 0]), ("drop", None)])
def test_tampering(made, do, rewards):
    group = made(1.0, 0.0, 1.0)
    first, *rest = group.trajectories
    group = dataclasses.replace(group, trajectories=(dataclasses.replace(first, metrics={"tamper_n": 2.0}), *rest))
    assert faults_of([group])["faults/tampered_n"] == 1
    (left,) = filter_groups([group], FilterConfig(tampering=do))
    if do == "drop":
        assert siblings([left]) == [[1, 2]]
    else:
        assert [t.reward for t in left[:2]] == rewards and left[0].success == (do == "alarm")
        assert sum(turn.reward for turn in left[0].turns) == rewards[0]


def test_very_long_failures_may_be_left_out(made):
    group = made(1.0, -1.0, -1.0)
    short = dataclasses.replace(group.trajectories[2].turns[0], tokens=group.trajectories[2].turns[0].tokens[:2])
    ts = (*group.trajectories[:2], dataclasses.replace(group.trajectories[2], turns=(short,)))
    group = dataclasses.replace(group, trajectories=ts)
    assert siblings(filter_groups([group], FilterConfig(drop_failures_over_tok=4))) == [[0, 2]]


def test_faults_are_counted_by_kind(made):
    groups = [failing(made(1, 0, 1), 0), failing(made(1, 0), 1, kind="env")]
    limit = dataclasses.replace(
        groups[0].trajectories[1], status="truncated", fault=Fault("limit", "turns", ""), attempts=3
    )
    ts = (groups[0].trajectories[0], limit, groups[0].trajectories[2])
    groups[0] = dataclasses.replace(groups[0], trajectories=ts, cancelled=2)
    assert faults_of(groups) == {
        "faults/infra_n": 1,
        "faults/env_n": 1,
        "faults/agent_n": 0,
        "faults/limit_n": 1,
        "faults/set_aside_n": 0,
        "faults/retried_n": 2,
        "faults/looped_n": 0,
        "faults/tampered_n": 0,
        "rollout/cancelled_n": 2,
    }
    looped = dataclasses.replace(limit, loops=2)
    assert faults_of([dataclasses.replace(groups[0], trajectories=(looped,))])["faults/looped_n"] == 2
    aside = dataclasses.replace(limit, status="failed", fault=Fault("env", "set_aside", ""))
    row = faults_of([dataclasses.replace(groups[0], trajectories=(aside,))])
    assert row["faults/set_aside_n"] == row["faults/env_n"] == 1


def test_settings_that_cannot_work_are_refused():
    for settings in ({"max_failed_frac": 1.5}, {"drop_failures_over_tok": -1}):
        with pytest.raises(ConfigError):
            FilterConfig(**settings)


def test_keys_stay(made):
    (left,) = filter_groups([made(1.0, 0.0)])
    assert [t.key for t in left] == [Key(0, 0, 0), Key(0, 0, 1)]
