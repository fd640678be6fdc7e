"""Episodes: what was sampled, padded; nothing else, and nothing lost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.trainer.batch import Sample
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Key, Task, Trajectory, Turn
from tests.synthetic import groups_of


def turn(prompt, tokens, *, logp=None, version=0, reward=0.0, text="", weight=1.0, finish="stop"):
    n = len(tokens)
    logp = np.zeros(n) if logp is None else logp
    return Turn(
        np.array(prompt, np.int32),
        np.array(tokens, np.int32),
        np.array(logp, np.float32),
        np.full(n, version, np.int32),
        finish,
        reward,
        text,
        weight,
    )


def trajectory(*turns, reward=0.0, success=False, status="ok", env="e"):
    return Trajectory(Key(0, 0, 0), Task(env, 0, "x"), turns, reward, {}, success, status)


def test_ragged_turns_and_groups():
    first = trajectory(
        turn([1, 2], [3, 4, 5], logp=[-1, -2, -3], reward=0.5, text="a"),
        turn([6], [7], logp=[-4], reward=0.25, text="b", weight=0.0),
        reward=0.75,
        success=True,
    )
    second = trajectory(turn([1, 2], [8], logp=[-5], reward=-1.0, text="c", finish="length"), reward=-1.0, env="f")
    third = trajectory(
        turn([9], [1, 2], logp=[-6, -7]),
        turn([3], []),
        turn([4], [5, 6], logp=[-8, -9], reward=2.0, text="d", weight=0.5),
        reward=2.0,
    )
    e = Episodes.of([[first, second], [third]], limit_tok=16, step=3)
    assert (e.num, e.limit_tok, e.step) == (3, 16, 3)
    np.testing.assert_array_equal(e.mask, [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(e.turns, [[0, 0, 0, 1], [0, -1, -1, -1], [0, 0, 2, 2]])
    np.testing.assert_array_equal(e.sampler_logp, [[-1, -2, -3, -4], [-5, 0, 0, 0], [-6, -7, -8, -9]])
    np.testing.assert_array_equal(e.rewards, [0.75, -1, 2])
    np.testing.assert_array_equal(e.groups, [0, 0, 1])
    np.testing.assert_array_equal(e.turn_rewards, [[0.5, 0.25, 0], [-1, 0, 0], [0, 0, 2]])
    np.testing.assert_array_equal(e.turn_weights, [[1, 0, 0], [1, 0, 0], [1, 1, 0.5]])
    np.testing.assert_array_equal(e.num_turns, [2, 1, 3])
    np.testing.assert_array_equal(e.lengths, [4, 1, 4])
    np.testing.assert_array_equal(e.truncated, [False, True, False])
    np.testing.assert_array_equal(e.success, [True, False, False])
    assert e.texts == ("a\nb", "c", "\n\nd") and e.domains == ("e", "f", "e")
    assert not e.expert.any()
    assert e.mask.dtype == e.expert.dtype == e.truncated.dtype == e.success.dtype == bool
    assert e.rewards.dtype == e.turn_rewards.dtype == e.sampler_logp.dtype == np.float64
    assert e.groups.dtype == e.turns.dtype == e.num_turns.dtype == np.int64


def test_truncated_is_whose_answer_was_cut():
    """At any turn. An episode that the environment ended after its last turn has whole answers."""
    whole = trajectory(turn([1], [2]), turn([3], [4]), status="truncated")
    cut = [
        trajectory(turn([1], [2], finish=reason), turn([3], [4])) for reason in ("length", "context", "abort", "stop")
    ]
    e = Episodes.of([[whole, *cut]], limit_tok=8)
    np.testing.assert_array_equal(e.truncated, [False, True, True, True, False])


def test_replayed_tokens_are_told_from_sampled_ones():
    mixed = trajectory(turn([1], [2, 3], version=-1), turn([4], [5], version=0), turn([6], [7, 8], version=12))
    reference = trajectory(turn([1], [2], version=-1))
    e = Episodes.of([[mixed, reference]], limit_tok=8)
    np.testing.assert_array_equal(e.expert, [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])

    part = turn([1], [2, 3, 4])
    half = trajectory(dataclasses.replace(part, versions=np.array([-1, 0, -1], np.int32)))
    np.testing.assert_array_equal(Episodes.of([[half]], limit_tok=8).expert, [[1, 0, 1]])


def test_states_are_equal_where_the_policy_was_told_the_same():
    a = trajectory(turn([1, 2], [3]), turn([7, 7], [4]), turn([1, 2], [5]))
    b = trajectory(turn([1, 2], [9]), turn([7], [4]), turn([7, 7], [4]))
    e = Episodes.of([[a, b], [trajectory(turn([1, 2], [3]))]], limit_tok=8)
    assert e.states.dtype == np.int64 and e.states.shape == (3, 3)
    start, door, near = e.states[0, 0], e.states[0, 1], e.states[1, 1]
    assert e.states.tolist() == [[start, door, start], [start, near, door], [start, 0, 0]]
    assert len({start, door, near, 0}) == 4


def test_states_do_not_depend_on_the_process_or_on_the_integers_width():
    """States are equal in every process, so that a continued run compares them as before."""
    for kind in (np.int32, np.int64, np.uint8):
        told = dataclasses.replace(turn([], [1]), prompt_ids=np.arange(5).astype(kind))
        assert Episodes.of([[trajectory(told)]], limit_tok=1).states.tolist() == [[1324111104438731327]]


def test_states_differ_for_different_prompts():
    rng = np.random.default_rng(0)
    prompts = {tuple(rng.integers(0, 4, rng.integers(1, 6)).tolist()) for _ in range(500)}
    e = Episodes.of([[trajectory(*(turn(p, [1]) for p in prompts))]], limit_tok=1)
    assert len(set(e.states[0].tolist())) == len(prompts) > 200


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_columns_stand_as_in_the_packed_samples(seed, num_groups, group_size, max_turns):
    """Credit speaks of the n-th sampled token, and packing finds it: both count tokens alike."""
    groups = groups_of(np.random.default_rng(seed), num_groups, group_size, max_turns)
    e = Episodes.of(groups, limit_tok=16)
    every = [t for group in groups for t in group]
    assert e.num == len(every) and e.mask.shape[1] == max(t.num_sampled_tok for t in every)
    assert e.groups.tolist() == [g for g in range(num_groups) for _ in range(group_size)]
    for n, t in enumerate(every):
        s = Sample.of(t)
        length = int(e.lengths[n])
        assert length == len(s.indices) == t.num_sampled_tok and e.mask[n, :length].all()
        np.testing.assert_array_equal(e.turns[n, :length], s.turns)
        np.testing.assert_array_equal(e.sampler_logp[n, :length], s.columns["sampler_logp"])
        assert (e.turns[n, length:] == -1).all() and not e.sampler_logp[n, length:].any()
        np.testing.assert_allclose(e.turn_rewards[n].sum(), t.reward)
        assert not e.turn_rewards[n, len(t.turns) :].any() and not e.turn_weights[n, len(t.turns) :].any()


def test_nothing_makes_empty_episodes():
    e = Episodes.of([], limit_tok=4)
    assert e.num == 0 and e.texts == () and e.mask.shape[0] == e.turn_rewards.shape[0] == 0
    assert e.lengths.shape == (0,) and not e.mask.any()


def test_what_nobody_asked_for_is_not_there():
    e = Episodes.of([[trajectory(turn([1], [2]))]], limit_tok=4)
    for name in ("trainer_logp", "entropy", "ref_logp", "scorer_logp", "teacher_logp", "values", "waad", "fai"):
        with pytest.raises(ValueError, match=f"credit uses {name}, but needs"):
            e.required(name)
    assert dataclasses.replace(e, values=np.ones((1, 1, 1))).required("values").shape == (1, 1, 1)
