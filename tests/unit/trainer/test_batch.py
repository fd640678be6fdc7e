"""Packing: every token of every sample stands somewhere exactly once, behind exactly its own history."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rolljax.errors import DataError
from rolljax.model.attention import packed_mask
from rolljax.trainer import batch as batch_module
from rolljax.trainer.aggregation import Aggregation, token_scales
from rolljax.trainer.algorithms.base import Needs
from rolljax.trainer.batch import ARRAYS, SCALARS, PackShape, Sample, TokenBatch, num_rows_bound, pack
from rolljax.types import Key, Task, Trajectory, Turn

COLUMNS = ("sampler_logp", "advantages", "returns", "old_values_C")


def sample(rng, prompt, turns, vocab=3):
    """Return a sample. turns: (sampled, observed) lengths. A small vocabulary makes siblings share tokens by chance."""
    sampled = np.concatenate([np.zeros(len(prompt), bool), *(np.arange(s + o) < s for s, o in turns)])
    tokens = rng.integers(0, vocab, len(sampled))
    tokens[: len(prompt)] = prompt
    at = np.flatnonzero(sampled)
    n = len(at)
    columns = {name: rng.normal(size=(n, 2) if name.endswith("_C") else n).astype(np.float32) for name in COLUMNS}
    columns["mask"] = rng.random(n) < rng.choice([0.0, 0.7, 1.0], p=[0.1, 0.4, 0.5])
    return Sample(tokens.astype(np.int32), at, np.repeat(np.arange(len(turns)), [s for s, _ in turns]), columns)


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
    """Return the batch's arrays as rows `[M * B, T]` or `[M * B, T, C]`."""
    return {n: np.asarray(a).reshape(-1, *a.shape[2:]) for n, a in batch.arrays().items()}


RECORDED = ("tokens", "scale", *COLUMNS)


def record(arrays, turns):
    """Return a sequence as one comparable value: all fields of every token, with its turn (-1: not sampled)."""
    return tuple(map(tuple, np.column_stack([*(arrays[n] for n in RECORDED), turns]).tolist()))


def unpacked(rows):
    """Return all sequences of a batch as records, found by walking `prev` back from the last token of every branch.

    Every stored token must be on one of these walks, and within a row every trajectory and turn has its own number.
    """
    found, visited = [], np.zeros(rows["tokens"].shape, bool)
    for r in range(len(rows["tokens"])):
        segments, branches, prev = rows["segment_ids"][r], rows["branch_ids"][r], rows["prev"][r]
        seen_sequences, seen_chunks = set(), set()
        for segment, branch in sorted({(s, b) for s, b in zip(segments, branches, strict=True) if s and b}):
            at = int(np.flatnonzero((segments == segment) & (branches == branch))[-1])
            chain = [at]
            while prev[at] != at:
                at = int(prev[at])
                chain.append(at)
            chain = np.array(chain[::-1])
            np.testing.assert_array_equal(rows["positions"][r, chain], np.arange(len(chain)))
            assert set(segments[chain]) == {segment} and set(branches[chain]) <= {0, branch}
            sequence, chunk = rows["sequence_ids"][r, chain], rows["turn_ids"][r, chain]
            np.testing.assert_array_equal(sequence > 0, chunk > 0)
            (own,) = set(sequence[sequence > 0].tolist())
            chunks = set(chunk[chunk > 0].tolist())
            assert own not in seen_sequences and not chunks & seen_chunks
            seen_sequences.add(own)
            seen_chunks |= chunks
            turns = np.where(chunk > 0, np.searchsorted(sorted(chunks), chunk), -1)
            found.append(record({n: rows[n][r, chain] for n in RECORDED}, turns))
            visited[r, chain] = True
    np.testing.assert_array_equal(visited, rows["segment_ids"] > 0)
    return found


def expected(groups, aggregation, limit_tok):
    """Return records of the samples themselves."""
    records = []
    masks, turns = ([[x(s) for s in g] for g in groups] for x in (lambda s: s.mask, lambda s: s.turns))
    scales = token_scales(masks, aggregation, limit_tok, turns)
    for s, scale in zip((s for g in groups for s in g), (x for g in scales for x in g), strict=True):
        turns = np.full(len(s.tokens), -1)
        turns[s.indices] = s.turns
        arrays = {"tokens": s.tokens}
        for name, values in {**{n: s.columns[n] for n in COLUMNS}, "scale": scale}.items():
            arrays[name] = np.zeros((len(s.tokens), *np.shape(values)[1:]), np.float32)
            arrays[name][s.indices] = values
        records.append(record(arrays, turns))
    return records


@given(
    GROUPS,
    st.integers(0, 2**32 - 1),
    st.integers(0, 40),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(Aggregation.__args__),
)
def test_every_sample_is_found_exactly_once(layout, seed, spare, micro_rows, aggregation):
    groups = build(layout, seed)
    samples = [s for g in groups for s in g]
    row_len = max(len(s.tokens) for s in samples) + spare
    shape = PackShape(-(-len(samples) // micro_rows), micro_rows, row_len)
    packed = pack(groups, shape, 0.7, aggregation=aggregation, limit_tok=5, kl_coef=0.25)
    batch, rows = packed.batch, flat(packed.batch)
    assert sorted(unpacked(rows)) == sorted(expected(groups, aggregation, 5))

    assert batch.num_tokens == sum(s.mask.sum() for s in samples) == (rows["scale"] > 0).sum()
    assert batch.num_sequences == sum(s.mask.any() for s in samples)
    assert (batch.temperature, batch.kl_coef) == (np.float32(0.7), np.float32(0.25))
    empty = rows["segment_ids"] == 0
    np.testing.assert_array_equal(rows["prev"][empty], np.nonzero(empty)[1])
    for name in ARRAYS:
        if name in rows and name != "prev":
            assert not rows[name][empty].any(), name
    used_rows = np.flatnonzero((~empty).any(1))
    assert batch.num_micro == used_rows[-1] // micro_rows + 1


@given(GROUPS, st.integers(0, 2**32 - 1), st.integers(0, 40), st.booleans())
def test_what_rows_say_is_read_back_in_the_order_of_the_samples(layout, seed, spare, whole):
    groups = build(layout, seed)
    longest = max(sum(len(s.tokens) for s in g) if whole else max(len(s.tokens) for s in g) for g in groups)
    packed = pack(groups, PackShape(9, 3, longest + spare), 1.0, unsplit_groups=whole)
    samples = [s for g in groups for s in g]
    assert [len(g) for g in packed.indices] == [len(g) for g in groups]
    for name in ("tokens", "sampler_logp"):
        want = [s.tokens[s.indices] if name == "tokens" else s.columns[name] for s in samples]
        for got, values in zip(packed.unpack(getattr(packed.batch, name)), want, strict=True):
            np.testing.assert_array_equal(got, values)


@given(GROUPS, st.integers(0, 2**32 - 1), st.sampled_from([39, 100]))  # 39: the longest that GROUPS makes
def test_every_token_sees_exactly_its_own_history(layout, seed, row_len):
    rows = flat(pack(build(layout, seed), PackShape(1, 25, row_len), 1.0).batch)
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
    rows = flat(pack([group], PackShape(1, 1, 18), 1.0).batch)
    assert (rows["segment_ids"] > 0).all() and (rows["branch_ids"] == 0).sum() == 10
    first_own = rows["branch_ids"][0].searchsorted(np.arange(1, 5))
    np.testing.assert_array_equal(rows["prev"][0, first_own], [9] * 4)
    np.testing.assert_array_equal(rows["sequence_ids"][0], np.repeat([0, 1, 2, 3, 4], [10, 2, 2, 2, 2]))


def test_siblings_that_sample_the_same_first_token_do_not_share_it():
    """A token that was sampled twice was sampled by two trajectories, whose credit differs."""
    rng = np.random.default_rng(0)
    first = sample(rng, np.arange(10, 20), [(3, 0)], vocab=1000)
    twin = first.with_columns(advantages=first.columns["advantages"] + 1)
    packed = pack([[first, twin]], PackShape(1, 1, 16), 1.0)
    rows = flat(packed.batch)
    assert (rows["segment_ids"][rows["branch_ids"] == 0] > 0).sum() == 10 and rows["sequence_ids"].max() == 2
    got = packed.unpack(packed.batch.advantages)
    np.testing.assert_array_equal(got[1], got[0] + 1)


def test_siblings_that_do_not_fit_take_the_prompt_along():
    rng = np.random.default_rng(0)
    group = [sample(rng, np.arange(10, 20), [(4, 0)], vocab=1000) for _ in range(3)]
    rows = flat(pack([group], PackShape(1, 3, 18), 1.0).batch)
    assert [(row > 0).sum() for row in rows["segment_ids"]] == [18, 14, 0]
    np.testing.assert_array_equal(rows["tokens"][1, :10], np.arange(10, 20))


@given(GROUPS, st.integers(0, 2**32 - 1), st.integers(0, 60))
def test_whole_groups_are_one_segment_each(layout, seed, spare):
    groups = build(layout, seed)
    row_len = max(sum(len(s.tokens) for s in g) for g in groups) + spare
    packed = pack(groups, PackShape(len(groups), 1, row_len), 1.0, unsplit_groups=True)
    homes = set()
    for places in packed.indices:
        every = np.concatenate(places)
        (row,) = set((every // row_len).tolist())
        (segment,) = set(packed.batch.segment_ids.reshape(-1)[every].tolist())
        homes.add((row, segment))
    assert len(homes) == len(groups)


def test_a_group_that_must_stay_together_and_does_not_fit_is_refused():
    rng = np.random.default_rng(0)
    group = [sample(rng, np.arange(10, 20), [(4, 0)], vocab=1000) for _ in range(3)]
    with pytest.raises(DataError, match="group of 22 tokens, that must stay together, is longer than a row of 21"):
        pack([group], PackShape(1, 3, 21), 1.0, unsplit_groups=True)
    assert pack([group], PackShape(1, 1, 22), 1.0, unsplit_groups=True).batch.num_micro == 1


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 120),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_the_bound_on_rows_is_never_exceeded(num_groups, group_size, prompt_tok, response_tok, spare, seed, whole):
    row_len = prompt_tok + (group_size if whole else 1) * response_tok + spare
    rng = np.random.default_rng(seed)
    extremes = rng.choice([0, 0.5, 1.0], 3)  # how often lengths are short, longest, or anything
    assume(extremes.sum() > 0)

    def length(most):
        return int(rng.choice([1, most, rng.integers(1, most + 1)], p=extremes / extremes.sum()))

    groups = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 100, length(prompt_tok))
        groups.append([sample(rng, prompt, [(length(response_tok), 0)], 100) for _ in range(group_size)])
    bound = num_rows_bound(num_groups, group_size, prompt_tok, response_tok, row_len, unsplit_groups=whole)
    pack(groups, PackShape(bound, 1, row_len), 1.0, unsplit_groups=whole)
    assert bound <= num_groups * (1 if whole else group_size)


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(2, 40),
    st.integers(0, 80),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_the_bound_holds_where_prompts_eat_into_the_answers_room(num_groups, group_size, context, spare, seed, whole):
    """Multi-turn phases bound the response by `context - 1`: any split of the context into prompt and rest must fit."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_groups):
        prompt = rng.integers(0, 100, rng.integers(1, context))
        most = context - len(prompt)
        groups.append([sample(rng, prompt, [(rng.integers(1, most + 1), 0)], 100) for _ in range(group_size)])
    row_len = (1 + group_size * (context - 1) if whole else context) + spare
    bound = num_rows_bound(num_groups, group_size, 1, context - 1, row_len, unsplit_groups=whole)
    pack(groups, PackShape(bound, 1, row_len), 1.0, unsplit_groups=whole)


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


def test_siblings_with_different_latent_prefixes_share_no_token():
    rng = np.random.default_rng(0)
    prompts = [np.array([*prefix, 1, 2]) for prefix in ((20, 21), (22, 23), (), (22, 23), ())]
    group = [sample(rng, prompt, [(3, 0)]) for prompt in prompts]
    packed = pack([group], PackShape(1, 3, 12), 1.0, first_latent_id=20)
    rows = flat(packed.batch)
    assert (rows["segment_ids"] > 0).sum() == (4 + 3) + (4 + 6) + (2 + 6)
    for one, index in zip(group, packed.indices[0], strict=True):
        own = [int(index[-1])]
        while (before := rows["prev"].reshape(-1)[own[-1]] + own[-1] // 12 * 12) != own[-1]:
            own.append(int(before))
        np.testing.assert_array_equal(rows["tokens"].reshape(-1)[own[::-1]], one.tokens)
        np.testing.assert_array_equal(rows["positions"].reshape(-1)[own[::-1]], np.arange(len(own)))
    with pytest.raises(DataError, match="begin with different latent prefixes"):
        pack([group], PackShape(1, 3, 12), 1.0, unsplit_groups=True, first_latent_id=20)


def test_too_few_rows_are_an_error_not_a_loss():
    groups = [[sample(np.random.default_rng(i), np.arange(5), [(5, 0)])] for i in range(3)]
    with pytest.raises(DataError, match="more than 2 rows of 10 tokens"):
        pack(groups, PackShape(1, 2, 10), 1.0)


def test_fuller_rows_come_first():
    rng = np.random.default_rng(0)
    groups = [[sample(rng, rng.integers(0, 9, 3), [(int(n), 0)], 1000)] for n in rng.integers(1, 17, 30)]
    packed = pack(groups, PackShape(8, 4, 20), 1.0)
    filled = (flat(packed.batch)["segment_ids"] > 0).sum(1)
    assert (np.diff(filled) <= 0).all() and filled[0] == 20 and filled[-1] == 0


def test_nothing_packs_to_nothing():
    packed = pack([], PackShape(2, 3, 10), 1.0)
    assert packed.batch.num_micro == packed.batch.num_tokens == packed.batch.num_sequences == 0
    assert packed.unpack(packed.batch.tokens) == [] and not flat(packed.batch)["scale"].any()


def test_a_batch_has_exactly_the_arrays_that_were_given():
    rng = np.random.default_rng(0)
    full = sample(rng, np.arange(5), [(6, 0)])
    plain = dataclasses.replace(full, columns={n: full.columns[n] for n in ("mask", "sampler_logp")})
    shape = PackShape(2, 1, 12)
    batch = pack([[plain]], shape, 1.0).batch
    optional = {"trainer_logp", "ref_logp", "weights", "entropy_weights", "returns", "old_values_C", "critic_weights_C"}
    optional |= {"rewards", "reference_points", "expert_ids_Lk", "sampler_ids"}
    assert set(batch.arrays()) == set(ARRAYS) - optional
    assert all(a.shape == (2, 1, 12) for a in batch.arrays().values()) and not batch.advantages.any()
    for name in optional:
        with pytest.raises(ValueError, match=f"uses {name}, but"):
            batch.required(name)
    with pytest.raises(ValueError, match="uses trainer_logp"):
        batch.anchor("proximal")
    assert batch.anchor("behaviour") is batch.sampler_logp

    more = full.with_columns(trainer_logp=full.columns["returns"] * 2)
    batch = pack([[more]], shape, 1.0).batch
    assert set(batch.arrays()) == set(ARRAYS) - optional | {"returns", "old_values_C", "trainer_logp"}
    assert batch.old_values_C.shape == (2, 1, 12, 2)
    np.testing.assert_array_equal(batch.anchor("proximal"), batch.required("returns") * 2)
    ints = {"tokens", "positions", "segment_ids", "branch_ids", "prev", "sequence_ids", "turn_ids"}
    assert {n for n, a in batch.arrays().items() if a.dtype == np.int32} == ints
    assert all(a.dtype == np.float32 for n, a in batch.arrays().items() if n not in ints)
    assert {getattr(batch, n).shape for n in SCALARS} == {()}


def test_every_array_of_a_batch_is_in_the_table_of_columns():
    names, table = [f.name for f in dataclasses.fields(TokenBatch)], batch_module.COLUMNS
    assert [n for n in names if n in table] == list(ARRAYS) and [n for n in names if n not in table] == list(SCALARS)
    assert all(name.endswith(f"_{column.axes}") for name, column in table.items() if column.axes)
    assert {column.asked_by for column in table.values()} - {""} <= {f.name for f in dataclasses.fields(Needs)}


def test_a_micro_batch_is_the_same_by_an_int_and_by_a_traced_index():
    rng = np.random.default_rng(0)
    batch = pack([[sample(rng, np.arange(4), [(5, 2)])] for _ in range(4)], PackShape(2, 2, 16), 1.0).batch
    for i in range(2):
        on_host, traced = batch.micro_batch(i), jax.jit(lambda b, i: b.micro_batch(i))(batch, i)
        assert on_host.arrays().keys() == batch.arrays().keys() and on_host.num_micro == batch.num_micro
        for name, array in batch.arrays().items():
            np.testing.assert_array_equal(getattr(on_host, name), array[i])
            np.testing.assert_array_equal(getattr(traced, name), array[i])


def test_a_sample_of_a_trajectory_is_what_was_sampled():
    def turn(prompt, tokens):
        n = len(tokens)
        logp = -np.arange(1, n + 1, dtype=np.float32)
        return Turn(
            np.array(prompt, np.int32), np.array(tokens, np.int32), logp, np.zeros(n, np.int32), "stop", 0.0, ""
        )

    turns = (turn([1, 2, 3], [4, 5]), turn([6], [7]), turn([8], []), turn([9, 10], [11, 12]))
    got = Sample.of(Trajectory(Key(0, 0, 0), Task("e", 0, "x"), turns, 1.0, {}, True, "ok"))
    assert got.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] and got.tokens.dtype == np.int32
    assert got.indices.tolist() == [3, 4, 6, 10, 11] and got.turns.tolist() == [0, 0, 1, 3, 3]
    assert set(got.columns) == {"mask", "sampler_logp"} and got.mask.tolist() == [True] * 5
    assert got.columns["sampler_logp"].tolist() == [-1, -2, -1, -1, -2]
    again = got.with_columns(mask=~got.mask, returns=np.ones(5))
    assert not again.mask.any() and set(again.columns) == {"mask", "sampler_logp", "returns"} and got.mask.all()


def restarting(rng, prompt, turns, restarts):
    """Return a sample whose stream restarts with the observation before each turn of `restarts`."""
    s = sample(rng, prompt, turns)
    borders = np.cumsum([len(prompt)] + [sum(t) for t in turns])
    begins = [borders[k] - turns[k - 1][1] for k in restarts]
    return dataclasses.replace(s, starts=np.array([0, *begins]))


def pieces(s):
    """Yield a sample's sequences, as samples."""
    for lo, hi in zip(s.starts, [*s.starts[1:], len(s.tokens)], strict=True):
        own = (s.indices >= lo) & (s.indices < hi)
        yield Sample(s.tokens[lo:hi], s.indices[own] - lo, s.turns[own], {n: c[own] for n, c in s.columns.items()})


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 4), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.integers(0, 20),
)
def test_a_stream_that_starts_anew_is_another_sequence_with_the_scale_of_its_trajectory(layout, seed, spare):
    rng = np.random.default_rng(seed)
    groups = []
    for prompt_len, siblings in layout:
        prompt, group = rng.integers(0, 3, prompt_len), []
        for num_turns in siblings:
            turns = [(int(rng.integers(1, 5)), int(rng.integers(1, 4))) for _ in range(num_turns)]
            restarts = [k for k in range(1, num_turns) if rng.random() < 0.5]
            group.append(restarting(rng, prompt, turns, restarts))
        groups.append(group)
    cut = [[list(pieces(s)) for s in g] for g in groups]
    longest = max(len(p.tokens) for g in cut for ps in g for p in ps)
    packed = pack(groups, PackShape(70, 1, longest + spare), 1.0, aggregation="seq-mean-token-mean")

    got = sorted(unpacked(flat(packed.batch)))
    scales = token_scales([[s.mask for s in g] for g in groups], "seq-mean-token-mean", 1)
    want = []
    for group, parts, scale in zip(groups, cut, scales, strict=True):
        for s, ps, whole in zip(group, parts, scale, strict=True):
            done = 0
            for p in ps:
                turns = np.full(len(p.tokens), -1)
                turns[p.indices] = p.turns - p.turns[0]
                arrays = {"tokens": p.tokens}
                for name, values in {
                    **{n: p.columns[n] for n in COLUMNS},
                    "scale": whole[done : done + len(p.indices)],
                }.items():
                    arrays[name] = np.zeros((len(p.tokens), *np.shape(values)[1:]), np.float32)
                    arrays[name][p.indices] = values
                done += len(p.indices)
                want.append(record(arrays, turns))
            assert done == len(s.indices)
    assert got == sorted(want)
    for values, s in zip(packed.unpack(packed.batch.sampler_logp), (s for g in groups for s in g), strict=True):
        np.testing.assert_array_equal(values, s.columns["sampler_logp"])
    assert packed.batch.num_sequences == sum(s.mask.any() for g in groups for s in g)


def test_pairs_are_not_made_of_broken_streams():
    rng = np.random.default_rng(0)
    group = [restarting(rng, np.arange(3), [(2, 1), (2, 1)], [1]), sample(rng, np.arange(3), [(2, 0)])]
    with pytest.raises(DataError, match="more than one sequence"):
        pack([group], PackShape(1, 4, 60), 1.0, unsplit_groups=True)
