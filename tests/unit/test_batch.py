"""Packing: every token of every sample stands somewhere exactly once, behind exactly its own history."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rolljax.errors import DataError
from rolljax.model.attention import packed_mask
from rolljax.trainer.batch import PackShape, Sample, TokenBatch, num_rows_bound, pack
from rolljax.types import Key, Task, Trajectory, Turn


def sample(rng, prompt, turns, vocab=3):
    """`turns` are (sampled, observed) lengths. A small vocabulary makes siblings share tokens by chance."""
    sampled = np.concatenate([np.zeros(len(prompt), bool), *(np.arange(s + o) < s for s, o in turns)])
    n = len(sampled)
    tokens = rng.integers(0, vocab, n)
    tokens[: len(prompt)] = prompt
    advantage = rng.normal()
    return Sample(
        tokens.astype(np.int32),
        np.where(sampled, rng.choice([0.5, 1.0], n), 0).astype(np.float32),
        np.where(sampled, rng.normal(size=n), 0).astype(np.float32),
        np.where(sampled, advantage, 0).astype(np.float32),
    )


TURNS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3)
GROUPS = st.lists(st.tuples(st.integers(1, 12), st.lists(TURNS, min_size=1, max_size=5)), min_size=1, max_size=5)


def build(layout, seed):
    rng = np.random.default_rng(seed)
    groups = []
    for prompt_len, siblings in layout:
        prompt = rng.integers(0, 3, prompt_len)
        groups.append([sample(rng, prompt, turns) for turns in siblings])
    return groups


def flat(batch):
    """The batch's arrays as rows `[M * B, T]`."""
    return {n: np.asarray(getattr(batch, n)).reshape(-1, batch.tokens.shape[-1]) for n in TokenBatch.ARRAYS}


def record(tokens, weights, logp, advantages):
    return tuple(zip(tokens.tolist(), weights.tolist(), logp.tolist(), advantages.tolist(), strict=True))


def unpacked(rows):
    """All sequences of a batch as records, found by walking `prev` back from the last token of every branch.

    Nothing that is stored may lie beside these walks.
    """
    found, visited = [], np.zeros(rows["tokens"].shape, bool)
    for r in range(len(rows["tokens"])):
        segments, branches, prev = rows["segment_ids"][r], rows["branch_ids"][r], rows["prev"][r]
        for segment, branch in sorted({(s, b) for s, b in zip(segments, branches, strict=True) if s and b}):
            at = int(np.flatnonzero((segments == segment) & (branches == branch))[-1])
            chain = [at]
            while prev[at] != at:
                at = int(prev[at])
                chain.append(at)
            chain = np.array(chain[::-1])
            np.testing.assert_array_equal(rows["positions"][r, chain], np.arange(len(chain)))
            assert set(segments[chain]) == {segment} and set(branches[chain]) <= {0, branch}
            found.append(record(*(rows[n][r, chain] for n in ("tokens", "weights", "sampler_logp", "advantages"))))
            visited[r, chain] = True
    np.testing.assert_array_equal(visited, rows["segment_ids"] > 0)
    return found


@given(GROUPS, st.integers(0, 2**32 - 1), st.integers(0, 40), st.sampled_from([1, 2, 3]))
def test_every_sample_is_found_exactly_once(layout, seed, spare, micro_rows):
    groups = build(layout, seed)
    samples = [s for g in groups for s in g]
    row_len = max(len(s.tokens) for s in samples) + spare
    shape = PackShape(-(-len(samples) // micro_rows), micro_rows, row_len)
    batch = pack(groups, shape, 0.7)
    rows = flat(batch)
    want = [record(s.tokens, s.weights, s.sampler_logp, s.advantages) for s in samples]
    assert sorted(unpacked(rows)) == sorted(want)

    assert rows["weights"].sum() == pytest.approx(sum(float(s.weights.sum()) for s in samples))
    assert batch.num_tokens == pytest.approx(rows["weights"].sum())
    assert batch.num_sequences == len(samples) and batch.temperature == np.float32(0.7)
    empty = rows["segment_ids"] == 0
    for name in ("tokens", "weights", "advantages", "sampler_logp", "branch_ids", "positions"):
        assert not rows[name][empty].any(), name
    used_rows = np.flatnonzero((~empty).any(1))
    assert batch.num_micro == used_rows[-1] // micro_rows + 1


@given(GROUPS, st.integers(0, 2**32 - 1), st.sampled_from([39, 100]))  # 39: the longest that GROUPS makes
def test_every_token_sees_exactly_its_own_history(layout, seed, row_len):
    rows = flat(pack(build(layout, seed), PackShape(1, 25, row_len), 1.0))
    mask = np.asarray(packed_mask(rows["segment_ids"], rows["branch_ids"]))
    for r, t in zip(*np.nonzero(rows["segment_ids"]), strict=True):
        chain, at = {int(t)}, int(t)
        while rows["prev"][r, at] != at:
            at = int(rows["prev"][r, at])
            chain.add(at)
        assert set(np.flatnonzero(mask[r, t]).tolist()) == chain


def test_a_shared_prompt_is_stored_once():
    rng = np.random.default_rng(0)
    group = [sample(rng, np.arange(10, 20), [(2, 0)], vocab=1000) for _ in range(4)]
    rows = flat(pack([group], PackShape(1, 1, 18), 1.0))
    assert (rows["segment_ids"] > 0).all() and (rows["branch_ids"] == 0).sum() == 10
    first_own = rows["branch_ids"][0].searchsorted(np.arange(1, 5))
    np.testing.assert_array_equal(rows["prev"][0, first_own], [9] * 4)


def test_siblings_that_do_not_fit_take_the_prompt_along():
    rng = np.random.default_rng(0)
    group = [sample(rng, np.arange(10, 20), [(4, 0)], vocab=1000) for _ in range(3)]
    rows = flat(pack([group], PackShape(1, 3, 18), 1.0))
    assert [(row > 0).sum() for row in rows["segment_ids"]] == [18, 14, 0]
    np.testing.assert_array_equal(rows["tokens"][1, :10], np.arange(10, 20))


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 120),
    st.integers(0, 2**32 - 1),
)
def test_the_bound_on_rows_is_never_exceeded(num_groups, group_size, prompt_tok, response_tok, spare, seed):
    row_len = prompt_tok + response_tok + spare
    rng = np.random.default_rng(seed)
    extremes = rng.choice([0, 0.5, 1.0], 3)  # how often lengths are short, longest, or anything
    assume(extremes.sum() > 0)

    def length(most):
        return int(rng.choice([1, most, rng.integers(1, most + 1)], p=extremes / extremes.sum()))

    groups = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 100, length(prompt_tok))
        groups.append([sample(rng, prompt, [(length(response_tok), 0)], 100) for _ in range(group_size)])
    bound = num_rows_bound(num_groups, group_size, prompt_tok, response_tok, row_len)
    pack(groups, PackShape(bound, 1, row_len), 1.0)
    assert bound <= num_groups * group_size


@given(st.integers(1, 6), st.integers(1, 9), st.integers(2, 40), st.integers(0, 80), st.integers(0, 2**32 - 1))
def test_the_bound_holds_where_prompts_eat_into_the_answers_room(num_groups, group_size, context, spare, seed):
    """Multi-turn phases bound the response by `context - 1`: any split of the context into prompt and rest must fit."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 100, rng.integers(1, context))
        most = context - len(prompt)
        groups.append([sample(rng, prompt, [(rng.integers(1, most + 1), 0)], 100) for _ in range(group_size)])
    bound = num_rows_bound(num_groups, group_size, 1, context - 1, context + spare)
    pack(groups, PackShape(bound, 1, context + spare), 1.0)


def test_a_sequence_longer_than_a_row_is_refused():
    group = [sample(np.random.default_rng(0), np.arange(5), [(6, 0)])]
    with pytest.raises(DataError, match="11 tokens is longer than a row of 10"):
        pack([group], PackShape(4, 4, 10), 1.0)


def test_a_trajectory_without_a_prompt_token_is_refused():
    group = [sample(np.random.default_rng(0), np.arange(0), [(3, 0)])]
    with pytest.raises(DataError, match="at least one prompt token"):
        pack([group], PackShape(1, 1, 10), 1.0)


def test_siblings_of_different_prompts_are_refused():
    rng = np.random.default_rng(0)
    group = [sample(rng, np.array([p, 1]), [(3, 0)]) for p in (7, 8)]
    with pytest.raises(DataError, match="at least one prompt token"):
        pack([group], PackShape(1, 2, 10), 1.0)


def test_too_few_rows_are_an_error_not_a_loss():
    groups = [[sample(np.random.default_rng(i), np.arange(5), [(5, 0)])] for i in range(3)]
    with pytest.raises(DataError, match="more than 2 rows of 10 tokens"):
        pack(groups, PackShape(1, 2, 10), 1.0)


def test_a_sample_of_a_trajectory_weights_what_was_sampled():
    def turn(prompt, tokens):
        n = len(tokens)
        logp = -np.arange(1, n + 1, dtype=np.float32)
        return Turn(
            np.array(prompt, np.int32), np.array(tokens, np.int32), logp, np.zeros(n, np.int32), "stop", 0.0, ""
        )

    trajectory = Trajectory(
        Key(0, 0, 0, 0), Task("e", 0, "x"), (turn([1, 2, 3], [4, 5]), turn([6], [7])), 1.0, {}, True, "ok"
    )
    got = Sample.of(trajectory, -0.5)
    assert got.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert got.weights.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert got.sampler_logp.tolist() == [0, 0, 0, -1, -2, 0, -1]
    assert got.advantages.tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5]
    assert got.tokens.dtype == np.int32 and got.weights.dtype == got.sampler_logp.dtype == np.float32
