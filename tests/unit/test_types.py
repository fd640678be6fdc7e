"""Trajectories and groups, written and read again."""

import dataclasses
import json
import struct

import numpy as np
import pytest

from rolljax.types import Alternatives, Expert, Fault, Group, Key, Task, Trajectory, Turn


def exactly(value):
    """Return a value that is equal for equal bits, types and shapes, and for nothing else."""
    if dataclasses.is_dataclass(value):
        return type(value), [exactly(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, dict):
        return {name: exactly(x) for name, x in value.items()}
    return (type(value), [exactly(x) for x in value]) if isinstance(value, tuple) else (type(value), value)


def turn(rng, size, **changes):
    logp = -rng.exponential(2.0, size).astype(np.float32)
    prompt, tokens = (rng.integers(0, 2**31, n).astype(np.int32) for n in (size + 1, size))
    versions = rng.integers(-1, 9, size).astype(np.int32)
    return dataclasses.replace(
        Turn(prompt, tokens, logp, versions, "stop", float(rng.normal()), 'said "x"\n\u2028\ud7ff'), **changes
    )


def trajectory(rng, sibling, *turns, **changes):
    task = Task("toy", 2**60, "wörter\0")
    made = Trajectory(Key(1, 7, sibling), task, turns, 0.1 + 0.2, {"score": 1 / 3}, True, "ok", metrics={"n": 5e-324})
    return dataclasses.replace(made, **changes)


@pytest.fixture
def group():
    """Return a group with everything that can be in one."""
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, -np.inf, -0.0, 1e-45, -3.4028235e38], np.float32)
    members = (
        trajectory(
            rng, 0, turn(rng, 5, sampler_logp=odd), turn(rng, 3, restart=True, weight=0.1, finish_reason="abort")
        ),
        trajectory(rng, 1, turn(rng, 0), status="truncated", fault=Fault("limit", "turns", "over")),
        trajectory(
            rng, 2, status="failed", fault=Fault("infra", "step", "gone", True), reward=float("nan"), attempts=3
        ),
        trajectory(rng, 3, turn(rng, 2), expert=Expert("0f", 9), observation_hashes=("a", "b"), loops=2, env_s=1e-3),
        trajectory(rng, 5, turn(rng, 1), observation_hashes=(), sample_s=0.1, success=False),
    )
    return Group(members[0].task, 7, members, 2, trajectory(rng, 6, turn(rng, 4, weight=4.0)))


def test_a_group_that_was_written_is_read_to_the_bit(group):
    assert exactly(Group.from_json(json.loads(json.dumps(group.to_json())))) == exactly(group)
    alone = dataclasses.replace(group, demonstration=None, trajectories=())
    assert exactly(Group.from_json(json.loads(json.dumps(alone.to_json())))) == exactly(alone)


def test_a_trajectory_is_read_back_exactly(group):
    for t in group.trajectories:
        record = json.loads(json.dumps(t.to_json()))
        assert record["schema"] == 1 and exactly(Trajectory.from_json(record)) == exactly(t)


def test_the_experts_of_tokens_are_not_written(group):
    first, *rest = group.trajectories
    chosen = dataclasses.replace(first.turns[0], experts=np.zeros((5, 2, 4), np.int8))
    routed = dataclasses.replace(
        group, trajectories=(dataclasses.replace(first, turns=(chosen, first.turns[1])), *rest)
    )
    record = json.loads(json.dumps(routed.to_json()))
    assert "experts" not in record["trajectories"][0]["turns"][0]
    assert exactly(Group.from_json(record)) == exactly(group)


def test_alternatives_are_written_and_read_to_the_bit(group):
    first, *_ = group.trajectories
    n = len(first.turns[0].tokens)
    logp = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    logp[0, 1] = np.finfo(np.float32).min
    shown = dataclasses.replace(
        first.turns[0], alternatives=Alternatives(np.arange(2 * n, dtype=np.int32).reshape(n, 2), logp)
    )
    t = dataclasses.replace(first, turns=(shown, first.turns[1]))
    record = json.loads(json.dumps(t.to_json()))
    assert exactly(Trajectory.from_json(record)) == exactly(t)
    json.dumps(record["turns"][0]["alternatives"], allow_nan=False)


def test_a_change_of_one_bit_is_a_change(group):
    """Of what these tests compare."""
    first, *rest = group.trajectories
    logp = np.nextafter(first.turns[1].sampler_logp, np.float32(0))
    other = dataclasses.replace(first.turns[1], sampler_logp=logp)
    changed = dataclasses.replace(first, turns=(first.turns[0], other))
    assert exactly(dataclasses.replace(group, trajectories=(changed, *rest))) != exactly(group)
