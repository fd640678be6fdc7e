"""Rewards to advantages, against hand-computed numbers and per-sequence loops."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rolljax.trainer.credit.estimators import (
    GroupStats,
    RunningMoments,
    at_last,
    batch_return_normalised,
    critic_shards,
    critic_spread,
    discounted,
    discounted_outcomes,
    explained_variance,
    gae,
    highest,
    left_aligned,
    lowest,
    normalise,
    put_back,
    same_state_normalised,
    share,
    spread,
    spread_turns,
    turn_returns,
    whiten,
)

R = np.array([1, 0, 0, 1, 0, 0, 0, 1.0])
PAIR = np.repeat([0, 1], 4)
CLOSE = {"rtol": 0, "atol": 1.01e-6}  # hand-computed numbers are given to six places

sizes = st.tuples(st.integers(1, 5), st.integers(1, 9))
finite = st.floats(-100, 100)


@st.composite
def ragged(draw, *fields):
    """Generate (mask, one float array per field), NaN wherever the mask is False; holes anywhere, rows may be empty."""
    shape = draw(sizes)
    mask = draw(hnp.arrays(bool, shape))
    return mask, *(np.where(mask, draw(hnp.arrays(np.float64, shape, elements=f)), np.nan) for f in fields)


@st.composite
def grouped(draw):
    groups = draw(hnp.arrays(np.int64, st.integers(1, 12), elements=st.integers(-3, 3)))
    return draw(hnp.arrays(np.float64, groups.shape, elements=finite)), groups


@st.composite
def episodes_of_turns(draw):
    """Generate (values [N, K], num_turns [N]) with NaN beyond the turns."""
    n, k = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    turns = draw(hnp.arrays(np.int64, n, elements=st.integers(0, k)))
    values = draw(hnp.arrays(np.float64, (n, k), elements=finite))
    return np.where(np.arange(k) < turns[:, None], values, np.nan), turns


# ---- normalise


def test_grpo():
    want = [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, -0.499999, 1.499997]
    np.testing.assert_allclose(normalise(R, PAIR), want, **CLOSE)
    np.testing.assert_allclose(normalise(np.array([1] * 7 + [0.0])), [0.353552] * 7 + [-2.474867], **CLOSE)


def test_dr_grpo():
    want = [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]
    np.testing.assert_array_equal(normalise(R, PAIR, std="none"), want)


def test_rloo():
    want = [0.666667, -0.666667, -0.666667, 0.666667, -0.333333, -0.333333, -0.333333, 1.0]
    np.testing.assert_allclose(normalise(R, PAIR, mean="leave_one_out", std="none"), want, **CLOSE)


def test_reinforce_plus_plus():
    want = np.where(R > 0, 1.207612, -0.724567)
    np.testing.assert_allclose(normalise(R, PAIR, mean="batch", std="batch"), want, **CLOSE)


def test_lite_ppo():
    assert GroupStats(np.zeros(8)).std(R)[0] == pytest.approx(0.517549, abs=1e-6)
    want = [0.96609, -0.96609, -0.96609, 0.96609, -0.483045, -0.483045, -0.483045, 1.449135]
    np.testing.assert_allclose(normalise(R, PAIR, std="batch"), want, **CLOSE)


def test_lite_ppo_leaves_an_easy_group_small():
    easy = np.array([1] * 7 + [0.0])
    past = RunningMoments(2.0, 0.0, 0.25)
    assert past.std == 0.5
    scaled = normalise(easy, mean="group", std="running", running=past)
    np.testing.assert_allclose(scaled, [0.25] * 7 + [-1.75], atol=1e-5)
    assert abs(scaled).max() < abs(normalise(easy)).max()


def test_episode_part_of_gigpo():
    signs = np.array([1, -1, 1, -1.0])
    np.testing.assert_allclose(normalise(np.array([1, 0, 1, 0.0])), 0.866024 * signs, **CLOSE)
    np.testing.assert_array_equal(normalise(np.array([1, 0, 1, 0.0]), std="none"), 0.5 * signs)


def test_raft_plus_plus_has_neither_mean_nor_std():
    got = normalise(R, PAIR, mean="none", std="none")
    np.testing.assert_array_equal(got, R)
    assert got is not R


@pytest.mark.parametrize("mean", ["group", "leave_one_out"])
@pytest.mark.parametrize("std", ["none", "group", "batch"])
def test_groups_of_one_get_nothing(mean, std):
    np.testing.assert_array_equal(normalise(np.array([3.0, -1.0, 7.0]), np.array([4, 2, 9]), mean=mean, std=std), 0)


@pytest.mark.parametrize("mean", ["group", "batch", "leave_one_out"])
def test_equal_rewards_are_exactly_zero(mean):
    np.testing.assert_array_equal(normalise(np.full(7, 0.1), np.array([0, 0, 0, 1, 1, 2, 2]), mean=mean), 0)


def test_nothing_is_divided_by_a_spread_of_zero():
    values = np.array([0.3, 0.1 + 0.2, 5.0])  # the first two are equal up to rounding
    got = normalise(values, np.array([0, 0, 1]), mean="none", std="group")
    np.testing.assert_array_equal(got, values)
    centred = normalise(values, np.array([0, 0, 1]), mean="batch", std="group")
    np.testing.assert_allclose(centred, values - values.mean())
    np.testing.assert_array_equal(
        normalise(values, mean="none", std="running", running=RunningMoments(1.0, 2.0)), values
    )


def naive_normalise(values, groups, mean, std, ddof, eps):
    out = []
    for v, g in zip(values, groups, strict=True):
        own = [x for x, h in zip(values, groups, strict=True) if h == g]
        over = {"group": own, "leave_one_out": own, "batch": values}
        centre = math.fsum(over[mean]) / len(over[mean]) if mean != "none" else 0.0
        centred = v - centre
        if mean == "leave_one_out" and len(own) > 1:
            centred = v - (math.fsum(own) - v) / (len(own) - 1)
        if std != "none":
            some = over[std]
            middle = math.fsum(some) / len(some)
            scale = math.sqrt(math.fsum((x - middle) ** 2 for x in some) / max(len(some) - ddof, 1))
            if max(some) - min(some) > 1e-12 * max(map(abs, some)):
                centred /= scale + eps
        out.append(centred)
    return out


@given(
    grouped(),
    st.sampled_from(["none", "batch", "group", "leave_one_out"]),
    st.sampled_from(["none", "batch", "group"]),
    st.sampled_from([0, 1]),
    st.sampled_from([1e-6, 0.1]),
)
def test_normalise_is_the_loop(case, mean, std, ddof, eps):
    values, groups = case
    before = values.copy()
    got = normalise(values, groups, mean=mean, std=std, ddof=ddof, eps=eps)
    want = naive_normalise(values.tolist(), groups.tolist(), mean, std, ddof, eps)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(values, before)


@given(grouped(), st.randoms(use_true_random=False))
def test_order_of_trajectories_does_not_matter(case, random):
    values, groups = case
    order = list(range(len(values)))
    random.shuffle(order)
    np.testing.assert_allclose(
        normalise(values, groups)[order], normalise(values[order], groups[order]), rtol=1e-6, atol=1e-7
    )


@given(grouped(), st.floats(-10, 10), st.sampled_from([0.5, 2.0, 8.0]))
def test_shift_and_scale_change_nothing_where_rewards_spread(case, shift, factor):
    values, groups = case
    spread_N = GroupStats(groups).std(values)
    wide = spread_N > 0.1
    got = normalise(values * factor + shift, groups)
    np.testing.assert_allclose(got[wide], normalise(values, groups)[wide], rtol=1e-3, atol=1e-4)


def test_running_statistics():
    past = RunningMoments().add([1.0, 2.0]).add(np.array([[4.0], [9.0]]))
    assert (past.count, past.mean) == (4.0, 4.0) and past.std == pytest.approx(statistics.stdev([1, 2, 4, 9]))
    got = normalise(np.array([5.0, 3.0]), mean="running", std="running", running=past)
    np.testing.assert_allclose(got, np.array([1.0, -1.0]) / (past.std + 1e-6))
    assert RunningMoments().std == RunningMoments().add([3.0]).std == 0.0
    assert past.add([]) == past


@given(st.lists(st.lists(finite, max_size=6), max_size=5))
def test_running_in_parts_is_the_whole(parts):
    past = RunningMoments()
    for part in parts:
        past = past.add(part)
    flat = [x for part in parts for x in part]
    assert past.count == len(flat)
    if flat:
        assert past.mean == pytest.approx(statistics.fmean(flat), abs=1e-9)
    if len(flat) > 1:
        assert past.std == pytest.approx(np.std(flat, ddof=1), abs=1e-6)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="mean is one of"):
        normalise(R, mean="median")
    with pytest.raises(ValueError, match="std is one of"):
        normalise(R, std="leave_one_out")
    with pytest.raises(ValueError, match="needs `running`"):
        normalise(R, std="running")
    with pytest.raises(ValueError, match="by is one of"):
        critic_shards(PAIR, 2, by="token")
    with pytest.raises(ValueError, match="num_critics"):
        critic_shards(PAIR, 0)
    with pytest.raises(ValueError, match="share"):
        lowest(np.zeros((1, 1)), np.ones((1, 1)), 20)


def test_no_trajectories():
    assert normalise(np.zeros(0), np.zeros(0, np.int64)).shape == (0,)


@given(grouped())
def test_statistics_within_groups(case):
    values, ids = case
    groups = GroupStats(ids)
    seen = {}
    for n, g in enumerate(ids):
        own = values[ids == g]
        assert groups.size_N[n] == len(own) and groups.sibling()[n] == seen.get(g, 0)
        seen[g] = seen.get(g, 0) + 1
        assert groups.low(values)[n] == own.min() and groups.high(values)[n] == own.max()
        assert groups.sum(values)[n] == pytest.approx(own.sum(), abs=1e-9)
        assert own.min() <= groups.mean(values)[n] <= own.max()
        assert groups.flat(values)[n] == (own.max() - own.min() <= 1e-12 * abs(own).max())


# ---- spreading


@given(ragged(finite), st.data())
def test_spread_and_last(case, data):
    mask, _ = case
    values = data.draw(hnp.arrays(np.float64, len(mask), elements=finite))
    everywhere, last = spread(values, mask), at_last(values, mask)
    for n, row in enumerate(mask):
        tokens = np.flatnonzero(row)
        want, end = np.zeros(len(row)), np.zeros(len(row))
        want[tokens] = values[n]
        end[tokens[-1:]] = values[n]
        np.testing.assert_array_equal(everywhere[n], want)
        np.testing.assert_array_equal(last[n], end)


def test_spread_turns():
    values = np.array([[1.0, 2.0, np.nan], [3.0, np.nan, np.nan], [4.0, 5.0, 6.0]])
    turns = np.array([[0, 0, 1, -1], [0, -1, -1, -1], [2, 1, 0, -1]])
    mask = np.array([[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(spread_turns(values, turns, mask), [[1, 0, 2, 0], [3, 0, 0, 0], [6, 5, 4, 0]])
    np.testing.assert_array_equal(spread_turns(np.zeros((3, 0)), np.full((3, 4), -1), mask), np.zeros((3, 4)))


@given(ragged(finite))
def test_left_aligned_there_and_back(case):
    mask, x = case
    order, valid, (moved,) = left_aligned(mask, x)
    np.testing.assert_array_equal(valid.sum(1), mask.sum(1))
    for n, row in enumerate(mask):
        np.testing.assert_array_equal(moved[n][valid[n]], x[n][row])
        assert valid[n, : row.sum()].all()
    np.testing.assert_array_equal(put_back(moved, order), np.where(mask, x, 0.0))


# ---- returns


def test_step_returns():
    np.testing.assert_allclose(turn_returns(np.array([[0, 0, 1.0]]), np.array([3]), 0.95), [[0.9025, 0.95, 1]])


def test_chunk_returns():
    got = discounted_outcomes(np.array([1.0, -1.0, 2.0, 5.0]), np.array([3, 3, 1, 0]), 0.95)
    want = [[0.9025, 0.95, 1], [-0.9025, -0.95, -1], [2, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_array_equal(discounted_outcomes(np.ones(2), np.array([2, 1]), 0.0), [[0, 1], [1, 0]])


def naive_discounted(rewards, gamma):
    return [math.fsum(gamma**j * r for j, r in enumerate(rewards[t:])) for t in range(len(rewards))]


@given(ragged(finite), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_discounted_is_the_loop(case, gamma):
    mask, rewards = case
    got = discounted(rewards, mask, gamma)
    for n, row in enumerate(mask):
        np.testing.assert_allclose(got[n][row], naive_discounted(rewards[n][row].tolist(), gamma), atol=1e-9)
        assert not got[n][~row].any()


@given(episodes_of_turns(), st.sampled_from([0.0, 0.9, 1.0]))
def test_turn_returns_is_the_loop(case, gamma):
    rewards, turns = case
    got = turn_returns(rewards, turns, gamma)
    for n, k in enumerate(turns):
        np.testing.assert_allclose(got[n, :k], naive_discounted(rewards[n, :k].tolist(), gamma), atol=1e-9)
        assert not got[n, k:].any()


@given(st.lists(st.tuples(finite, st.integers(0, 5)), min_size=1, max_size=4), st.sampled_from([0.5, 0.95, 1.0]))
def test_chunk_returns_are_turn_returns_of_a_reward_at_the_end(case, gamma):
    rewards, turns = np.array([r for r, _ in case]), np.array([k for _, k in case])
    at_end = np.where(np.arange(max(turns.max(), 1)) == turns[:, None] - 1, rewards[:, None], 0.0)
    want = turn_returns(at_end, turns, gamma)[:, : turns.max()]
    np.testing.assert_allclose(discounted_outcomes(rewards, turns, gamma), want, atol=1e-9)


# ---- generalised advantage estimation


def test_gae():
    a, ret = gae(np.array([[0, 0, 0, 1.0]]), np.array([[0.2, 0.4, 0.5, 0.8]]), np.ones((1, 4)), 1.0, 0.95)
    np.testing.assert_allclose(a, [[0.737225, 0.5655, 0.49, 0.2]], **CLOSE)
    np.testing.assert_allclose(ret, [[0.937225, 0.9655, 0.99, 1]], **CLOSE)


def test_gae_of_the_mean_of_two_critics():
    values = np.array([[[0.2, 0.5, 0.9, 0.4, 0.1]], [[0.4, 0.5, 0.5, 0.6, 0.2]]])
    mask = np.ones((1, 5), bool)
    mean, std = critic_spread(values)
    np.testing.assert_allclose(mean, [[0.3, 0.5, 0.7, 0.5, 0.15]], atol=1e-12)
    np.testing.assert_allclose(std, [[0.1, 0, 0.2, 0.1, 0.05]], atol=1e-12)
    agreed, noisy = lowest(std, mask, 0.2), highest(std, mask, 0.2)
    np.testing.assert_array_equal(np.flatnonzero(agreed), [1])
    np.testing.assert_array_equal(np.flatnonzero(noisy), [2])
    a, _ = gae(np.array([[0, 0, 0, 0, 1.0]]), mean, mask, 1.0, 0.95)
    np.testing.assert_allclose(a, [[0.601749, 0.422894, 0.234625, 0.4575, 0.85]], **CLOSE)
    assert np.where(agreed, 0, a).sum() / 5 == pytest.approx(0.428775, abs=1e-6)


def naive_gae(rewards, values, gamma, lam):
    advantages = [0.0] * len(rewards)
    for t in range(len(rewards)):
        for j in range(t, len(rewards)):
            after = values[j + 1] if j + 1 < len(values) else 0.0
            advantages[t] += (gamma * lam) ** (j - t) * (rewards[j] + gamma * after - values[j])
    return advantages


@given(ragged(finite, finite), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_loop_over_the_tokens_that_count(case, gamma, lam):
    mask, rewards, values = case
    a, ret = gae(rewards, values, mask, gamma, lam)
    for n, row in enumerate(mask):
        r, v = rewards[n][row].tolist(), values[n][row].tolist()
        np.testing.assert_allclose(a[n][row], naive_gae(r, v, gamma, lam), atol=1e-8)
        np.testing.assert_allclose(ret[n][row], np.add(a[n][row], v), atol=1e-9)
        assert not a[n][~row].any() and not ret[n][~row].any()


@given(ragged(finite, finite), st.sampled_from([0.9, 1.0]))
def test_gae_with_lambda_one_is_return_less_value(case, gamma):
    mask, rewards, values = case
    a, ret = gae(rewards, values, mask, gamma, 1.0)
    np.testing.assert_allclose(ret, discounted(rewards, mask, gamma), atol=1e-8)
    np.testing.assert_allclose(a[mask], (ret - values)[mask], atol=1e-8)


# ---- batch statistics


@given(ragged(finite), st.sampled_from([0, 1]), st.booleans())
def test_whiten(case, ddof, shift):
    mask, a = case
    got = whiten(a, mask, ddof=ddof, shift=shift)
    assert not got[~mask].any()
    values = a[mask]
    if len(values) <= 1:
        np.testing.assert_array_equal(got[mask], values)
        return
    want = (values - values.mean()) / math.sqrt(values.var(ddof=ddof) + 1e-8) + (0 if shift else values.mean())
    np.testing.assert_allclose(got[mask], want, atol=1e-7)
    if values.std() > 0.1:
        assert got[mask].std(ddof=ddof) == pytest.approx(1, abs=1e-5)


def test_return_batch_normalisation():
    returns = turn_returns(np.array([[0, 0, 1], [0, -0.1, np.nan]]), np.array([3, 2]), 0.9)
    np.testing.assert_allclose(returns, [[0.81, 0.9, 1], [-0.09, -0.1, 0]], atol=1e-12)
    flat = returns.ravel()[:5]
    assert flat.mean() == pytest.approx(0.504) and flat.std() == pytest.approx(0.492772, abs=1e-6)
    got = batch_return_normalised(np.where(returns == 0, np.nan, returns), np.array([3, 2]))
    np.testing.assert_allclose(got, [[0.620977, 0.803617, 1.006551], [-1.205426, -1.22572, 0]], **CLOSE)


@given(episodes_of_turns())
def test_return_batch_normalisation_takes_each_turn_once(case):
    returns, turns = case
    got = batch_return_normalised(returns, turns)
    mask = np.arange(returns.shape[1]) < turns[:, None]
    values = returns[mask]
    assert not got[~mask].any()
    if values.size and np.ptp(values) > 1e-3:
        np.testing.assert_allclose(got[mask], (values - values.mean()) / (values.std() + 1e-9), atol=1e-6)
    else:
        assert np.isfinite(got).all()


def test_equal_returns_give_exactly_zero():
    np.testing.assert_array_equal(batch_return_normalised(np.full((3, 3), 0.1), np.array([3, 1, 2])), 0)


def test_same_state_groups():
    """Two groups; only turns of one group that began in the same state are compared."""
    states = np.array([[7, 8, 0], [7, 9, 8], [7, 8, 0]])
    returns = np.array([[1.0, 2.0, np.nan], [0.0, 5.0, 6.0], [9.0, 9.0, np.nan]])
    turns, groups = np.array([2, 3, 2]), np.array([0, 0, 1])
    got = same_state_normalised(returns, states, turns, groups, std=False)
    np.testing.assert_allclose(got, [[0.5, -2.0, 0], [-0.5, 0, 2.0], [0, 0, 0]])
    scaled = same_state_normalised(returns, states, turns, groups)
    half = math.sqrt(0.5)
    np.testing.assert_allclose(scaled, [[half, -half, 0], [-half, 0, half], [0, 0, 0]], atol=2e-6)


@given(episodes_of_turns(), st.data(), st.booleans())
def test_same_state_is_the_loop(case, data, std):
    returns, turns = case
    hashes = st.sampled_from([-(2**63), 5, 2**63 - 1])
    states = data.draw(hnp.arrays(np.int64, returns.shape, elements=hashes))
    groups = data.draw(hnp.arrays(np.int64, len(turns), elements=st.integers(0, 1)))
    got = same_state_normalised(returns, states, turns, groups, std=std)
    places = [(n, k) for n, count in enumerate(turns) for k in range(count)]
    for n, k in places:
        same = [returns[i, j] for i, j in places if groups[i] == groups[n] and states[i, j] == states[n, k]]
        want = returns[n, k] - np.mean(same)
        if std and len(same) > 1 and np.ptp(same) > 1e-12 * np.abs(same).max():
            want /= np.std(same, ddof=1) + 1e-6
        assert got[n, k] == pytest.approx(want, abs=1e-6)
    assert not got[np.arange(returns.shape[1]) >= turns[:, None]].any()


# ---- critics


def test_critics_that_agree_have_no_spread():
    values = np.broadcast_to(np.array([[0.1, 0.7, 1e-9]]), (3, 1, 3))
    mean, std = critic_spread(values)
    np.testing.assert_array_equal(std, 0)
    np.testing.assert_array_equal(mean, values[0])


@given(ragged(st.sampled_from([0.0, 0.1, 0.2, -3.0])), st.floats(0, 1))
def test_lowest_and_highest_take_an_exact_count(case, frac):
    mask, values = case
    for choose, sign in ((lowest, 1), (highest, -1)):
        got = choose(values, mask, frac)
        places = list(zip(*np.nonzero(mask), strict=True))
        ranked = sorted(range(len(places)), key=lambda i: (sign * values[places[i]], i))
        want = np.zeros(mask.shape, bool)
        for i in ranked[: math.floor(frac * len(places) + 1e-9)]:
            want[places[i]] = True
        np.testing.assert_array_equal(got, want)


def test_many_zeros_do_not_take_all():
    std = np.zeros((2, 50))
    assert lowest(std, np.ones((2, 50)), 0.2).sum() == 20
    np.testing.assert_array_equal(np.flatnonzero(lowest(std, np.ones((2, 50)), 0.2)), range(20))


def test_share_is_the_number_meant():
    assert int(0.29 * 100) == 28 and share(0.29, 100) == 29 and share(0.4, 6) == 2 and share(0.0, 9) == 0


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 9))
def test_shards_deal_siblings_evenly(group_sizes, critics, step):
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)
    got = critic_shards(groups, critics, "response", step)
    assert ((got >= 0) & (got < critics)).all()
    for g in range(len(group_sizes)):
        counts = np.bincount(got[groups == g], minlength=critics)
        assert counts.max() - counts.min() <= 1
    whole = critic_shards(groups, critics, "prompt", step)
    assert all(len(set(whole[groups == g])) == 1 for g in range(len(group_sizes)))
    firsts = [whole[groups == g][0] for g in range(len(group_sizes))]
    assert np.ptp(np.bincount(firsts, minlength=critics)) <= 1
    for by in ("response", "prompt"):  # over `critics` steps everyone gets every trajectory once
        rounds = np.stack([critic_shards(groups, critics, by, step + s) for s in range(critics)])
        np.testing.assert_array_equal(np.sort(rounds, axis=0), np.arange(critics)[:, None] + 0 * rounds)


@given(ragged(finite, finite))
def test_explained_variance(case):
    mask, values, returns = case
    got = explained_variance(values, returns, mask)
    if mask.sum() < 2 or np.ptp(returns[mask]) < 1e-3:
        assert got <= 1
        return
    want = 1 - np.var(returns[mask] - values[mask]) / np.var(returns[mask])
    assert got == pytest.approx(want, rel=1e-6)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(np.full(mask.shape, 3.0), returns, mask) == pytest.approx(0, abs=1e-6)


def test_explained_variance_of_nothing():
    assert explained_variance(np.ones((1, 3)), np.full((1, 3), 0.1), np.ones((1, 3))) == 0
    assert explained_variance(np.ones((1, 3)), np.ones((1, 3)), np.zeros((1, 3))) == 0


# ---- what holds for all of them


@given(ragged(finite, finite))
def test_what_stands_outside_the_mask_never_matters(case):
    mask, a, b = case
    zero_a, zero_b = np.nan_to_num(a), np.nan_to_num(b)

    def results(x, y):
        return [
            discounted(x, mask, 0.9),
            *gae(x, y, mask, 0.9, 0.95),
            whiten(x, mask),
            lowest(x, mask, 0.4),
            highest(x, mask, 0.4),
            np.array(explained_variance(x, y, mask)),
        ]

    before = a.copy(), b.copy()
    for got, want in zip(results(a, b), results(zero_a, zero_b), strict=True):
        assert got.shape == want.shape and np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(before, (a, b))


def test_float32_and_integer_inputs_are_computed_in_float64():
    mask = np.ones((1, 3), np.float32)
    rewards = np.array([[0, 0, 0.1]], np.float32)
    for got in (discounted(rewards, mask, 1.0), *gae(rewards, rewards, mask, 1.0, 1.0), whiten(rewards, mask)):
        assert got.dtype == np.float64
    assert normalise(np.array([1, 0])).dtype == spread(np.array([1]), mask).dtype == np.float64
