"""Rules of ROLL, RollPacker and RollArt for batches, time-outs, devices and staleness, by their own examples."""

import pytest

from rolljax.envs.tasks import split_by_share
from rolljax.errors import ConfigError
from rolljax.rollout.group_buffer import Admission, GroupBuffer
from rolljax.sampler.planner import TensorPlanner
from rolljax.sandbox.timeouts import AdaptiveTimeout


@pytest.mark.parametrize(("total", "sizes"), [(10, [4, 3, 3]), (7, [3, 2, 2]), (0, [0, 0, 0]), (1, [1, 0, 0])])
def test_a_batch_of_several_domains(total, sizes):
    assert split_by_share(total, [0.4, 0.3, 0.3]) == sizes


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0.5, 2), (4, 6), (30, 30)])
def test_time_outs_follow_the_longest_correct_run(longest_s, limit_s):
    timeout = AdaptiveTimeout()
    assert timeout.limit_s("a") == 30
    timeout.correct("a", longest_s)
    timeout.correct("a", longest_s / 2)
    assert timeout.limit_s("a") == limit_s and timeout.limit_s("b") == 30


def test_a_time_out_is_a_range():
    with pytest.raises(ConfigError, match=r"AdaptiveTimeout\.high_s"):
        AdaptiveTimeout(low_s=5, high_s=4)


@pytest.mark.parametrize(
    ("preemptions", "tensor"), [([100, 106], 8), ([100, 104], 4), ([0, 0, 0, 0], 2), ([0, 0, 0], 4), ([0, 3], 8)]
)
def test_the_planner_follows_preemptions(preemptions, tensor):
    planner = TensorPlanner(4, most=8)
    assert [planner.after_round(n) for n in preemptions][-1] == tensor


def test_the_planner_stays_within_one_host():
    planner = TensorPlanner(8, most=8)
    assert [planner.after_round(n) for n in (1, 10, 100)] == [8, 8, 8]
    planner = TensorPlanner(1, most=8)
    assert [planner.after_round(0) for _ in range(9)] == [1] * 9


def test_staleness_counts_from_the_start():
    """With a ratio of 1 a group of version 0 is let go before the step at version 2, and one of version 2 may be trained
    at version 3, however long it took."""
    buffer = GroupBuffer(Admission(1, num_steps=9, async_ratio=1, late="drop"))
    first, second = buffer.start(0), buffer.start(0)
    buffer.finished(second.draw)
    assert buffer.take(0) == [second]
    assert buffer.expire(1) == []
    third = buffer.start(1)
    buffer.finished(third.draw)
    assert buffer.take(1) == [third]
    assert buffer.expire(2) == [first]  # it began at version 0
    fourth, fifth = buffer.start(2), buffer.start(2)
    buffer.finished(fifth.draw)
    assert buffer.take(2) == [fifth]
    assert [e.age(3) for e in buffer] == [1] and buffer.expire(3) == []
    buffer.finished(fourth.draw)
    assert buffer.take(3) == [fourth]  # as old as it may be, and before any younger one
