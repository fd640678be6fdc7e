"""Splits by content and the position of the task stream."""

import itertools
import json
import sys

import pytest

from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.task_order import Shuffled, shuffled
from rolljax.envs.tasks import TaskStream, first_tasks, held_out, is_held_out
from rolljax.errors import DataError

# 200 questions in all, so that the same question comes up at many indices
TINY = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})


def take(stream, n):
    return [next(stream) for _ in range(n)]


def test_splits_share_no_question():
    train = take(TaskStream(TINY, 0, 0.2), 2000)
    heldout = held_out(TINY, 20, 0.2)
    train_ids = {t.id for t in train}
    assert len(train_ids) < 200, "the family is not tiny, so this test shows nothing"
    assert train_ids.isdisjoint(t.id for t in heldout)
    assert {t.content for t in train}.isdisjoint(t.content for t in heldout)
    assert not any(is_held_out(t, 0.2) for t in train) and all(is_held_out(t, 0.2) for t in heldout)


def test_held_out_tasks_are_distinct_and_stable():
    tasks = held_out(TINY, 20, 0.2)
    assert len({t.id for t in tasks}) == 20
    assert [t.index for t in tasks] == sorted(t.index for t in tasks)
    assert held_out(TINY, 20, 0.2) == tasks and held_out(TINY, 7, 0.2) == tasks[:7]


def test_all_tasks_of_a_small_family_are_found():
    every = first_tasks(TINY, 1000)
    assert 50 < len(every) < 1000 and len({t.id for t in every}) == len(every)
    assert first_tasks(TINY, 5) == every[:5] and first_tasks(TINY, 20, 0.2) == held_out(TINY, 20, 0.2)
    assert first_tasks(TINY, 1000, 0.2) == [t for t in every if is_held_out(t, 0.2)]
    with pytest.raises(DataError, match="no held-out task"):
        first_tasks(TINY, 10, 1e-9)


def test_the_share_held_out_is_about_what_was_asked():
    spec = ReasoningGym("chain_sum")
    share = sum(is_held_out(spec.task(i), 0.3) for i in range(1000)) / 1000
    assert 0.25 < share < 0.35


def test_a_family_that_is_too_small_is_an_error():
    with pytest.raises(DataError, match=r"chain_sum has only \d+ different held-out tasks .* 150 were asked for"):
        held_out(TINY, 150, 0.5)


def test_the_order_depends_on_the_seed_alone():
    first, again, other = (take(TaskStream(TINY, seed, 0.1), 300) for seed in (7, 7, 8))
    assert first == again and first != other
    assert [t.index for t in first] != sorted(t.index for t in first)


@pytest.mark.parametrize("num", [1, 2, 3, 100, 65_536, 65_537, 70_000, 1_000_000])
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_without_grain_the_order_is_grains(num, seed):
    """Also over the end of an order that is short, and with the positions of the other."""
    arguments, length = (num, seed, lambda i: i, lambda i: i % 3 < 2), min(30 * num, 250)
    ours, grains = Shuffled(*arguments), shuffled(*arguments)
    assert type(grains).__module__.startswith("grain")
    assert [*itertools.islice(ours, length)] == [*itertools.islice(grains, length)]
    state = grains.get_state()
    assert ours.get_state() == state
    ours.set_state(json.loads(json.dumps({"next_index": 5 * num + num // 2})))
    grains.set_state(ours.get_state())
    assert [*itertools.islice(ours, length)] == [*itertools.islice(grains, length)]


def test_a_stream_goes_on_on_a_machine_without_grain(monkeypatch):
    stream = TaskStream(TINY, 3, 0.1)
    take(stream, 20)
    position, wanted = stream.state(), take(stream, 50)
    monkeypatch.setitem(sys.modules, "grain", None)
    elsewhere = TaskStream(TINY, 3, 0.1)
    elsewhere.restore(position)
    assert take(elsewhere, 50) == wanted and json.loads(position).keys() == json.loads(elsewhere.state()).keys()


@pytest.mark.parametrize("done", [0, 1, 137])
def test_a_restored_stream_goes_on_exactly(done):
    whole = take(TaskStream(TINY, 3, 0.1), done + 200)
    stream = TaskStream(TINY, 3, 0.1)
    take(stream, done)
    position = stream.state()
    assert isinstance(json.loads(position), dict)
    take(stream, 50)

    fresh = TaskStream(TINY, 3, 0.1)
    fresh.restore(position)
    assert take(fresh, 200) == whole[done:]
    stream.restore(position)
    assert take(stream, 200) == whole[done:]


def test_reading_the_position_does_not_move_the_stream():
    watched, plain = TaskStream(TINY, 1, 0.1), TaskStream(TINY, 1, 0.1)
    got = []
    for _ in range(20):
        watched.state()
        got.append(next(watched))
    assert got == take(plain, 20)
