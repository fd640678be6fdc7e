"""Every scheme of aggregation is a sum with scales, and the scales are those of its formula."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.trainer.aggregation import Aggregation, token_scales
from rolljax.trainer.batch import PackShape, Sample, pack

KINDS = Aggregation.__args__
LOSSES = [np.array([1.0, 2.0, 3.0, 0.0]), np.array([4.0, 0.0, 0.0, 0.0])]
MASKS = [np.array([1, 1, 1, 0], bool), np.array([1, 0, 0, 0], bool)]


def total(kind, losses, groups, limit_tok=1):
    scales = [s for group in token_scales(groups, kind, limit_tok) for s in group]
    return sum(float(np.sum(s * x)) for s, x in zip(scales, losses, strict=True))


@pytest.mark.parametrize(
    "kind, limit_tok, want",
    [
        ("token-mean", 1, 2.5),
        ("seq-mean-token-sum", 1, 5.0),
        ("seq-mean-token-mean", 1, 3.0),
        ("seq-sum-norm", 2, 2.5),  # a constant of 4: two sequences of at most two tokens
        ("seq-sum-norm", 4, 1.25),  # Dr. GRPO's: sequences times the longest answer
    ],
)
@pytest.mark.parametrize("split", [False, True], ids=["one group", "two groups"])
def test_two_sequences_of_three_tokens_and_one(kind, limit_tok, want, split):
    groups = [[MASKS[0]], [MASKS[1]]] if split else [MASKS]
    assert total(kind, LOSSES, groups, limit_tok) == pytest.approx(want, abs=1e-12)


def test_turns_are_samples():
    """GEM, examples/train_oat/train_oat.py: a masked sum over generate_max_length, then the mean over turns."""
    mask = np.array([1, 1, 0, 1, 0, 0], bool)
    turns = [[np.array([0, 0, 0, 1, 2, 2])], [np.array([0])]]
    # two turns of the first sequence have a token that counts, and the only one of the second
    first, second = token_scales([[mask], [np.array([True])]], "turn-sum-norm", 5, turns)
    np.testing.assert_allclose(first[0], np.where(mask, 1 / 15, 0))
    np.testing.assert_allclose(second[0], 1 / 15)


def test_group_means():
    """Groups of one sequence: the mean over sequences. Of two: one loss for all their tokens."""
    assert total("group-mean", LOSSES, [[MASKS[0]], [MASKS[1]]]) == pytest.approx(3.0)
    assert total("group-mean", LOSSES, [MASKS]) == pytest.approx(2.5)
    # a loss that is one number per pair, on each of its tokens: the mean over pairs, whatever the lengths
    pairs = [[np.ones(3, bool), np.ones(1, bool)], [np.ones(7, bool), np.ones(2, bool)]]
    losses = [np.full(3, 0.5), np.full(1, 0.5), np.full(7, 2.0), np.full(2, 2.0)]
    assert total("group-mean", losses, pairs) == pytest.approx(1.25)


MASKED = st.lists(
    st.lists(st.lists(st.booleans(), min_size=0, max_size=6), min_size=1, max_size=4), min_size=0, max_size=4
)


@given(MASKED, st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_scales_are_the_schemes_by_loops(layout, seed, limit_tok):
    """Each formula written out with loops; sequences and groups without a token are in no denominator."""
    rng = np.random.default_rng(seed)
    groups = [[np.array(m, bool) for m in group] for group in layout]
    losses = [[rng.normal(size=len(m)) for m in group] for group in groups]
    by_seq = [(x[m].sum(), m.sum()) for g, xs in zip(groups, losses, strict=True) for m, x in zip(g, xs, strict=True)]
    by_seq = [(s, n) for s, n in by_seq if n]
    by_group = [
        (sum(x[m].sum() for m, x in zip(g, xs, strict=True)), sum(m.sum() for m in g))
        for g, xs in zip(groups, losses, strict=True)
    ]
    by_group = [(s, n) for s, n in by_group if n]
    want = dict.fromkeys(KINDS, 0.0)
    if by_seq:
        want = {
            "token-mean": sum(s for s, _ in by_seq) / sum(n for _, n in by_seq),
            "seq-mean-token-sum": np.mean([s for s, _ in by_seq]),
            "seq-mean-token-mean": np.mean([s / n for s, n in by_seq]),
            "seq-sum-norm": sum(s for s, _ in by_seq) / (len(by_seq) * limit_tok),
            "turn-sum-norm": sum(s for s, _ in by_seq) / (len(by_seq) * limit_tok),  # turns that nobody told apart
            "group-mean": np.mean([s / n for s, n in by_group]),
        }
    flat = [x for xs in losses for x in xs]
    for kind in KINDS:
        assert total(kind, flat, groups, limit_tok) == pytest.approx(want[kind], abs=1e-9), kind
        for group, scales in zip(groups, token_scales(groups, kind, limit_tok), strict=True):
            for mask, scale in zip(group, scales, strict=True):
                assert scale.dtype == np.float64 and scale.shape == mask.shape
                np.testing.assert_array_equal(scale != 0, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_add_up_over_any_split_into_micro_batches(kind):
    """Denominators are global: rows of one, two or four give the same sum, and a mean of means would not."""
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(4):
        prompt = rng.integers(0, 99, 3)
        lengths = rng.integers(1, 9, 2)
        groups.append([])
        for n in lengths:
            tokens = np.concatenate([prompt, rng.integers(0, 99, n)]).astype(np.int32)
            columns = {name: rng.normal(size=n).astype(np.float32) for name in ("advantages", "sampler_logp")}
            columns["mask"] = rng.random(n) < 0.8
            groups[-1].append(Sample(tokens, 3 + np.arange(n), np.zeros(n, int), columns))
    totals = []
    for shape in (PackShape(8, 1, 20), PackShape(4, 2, 20), PackShape(1, 8, 40)):
        b = pack(groups, shape, 1.0, aggregation=kind, limit_tok=8).batch
        totals.append(np.sum(b.scale * b.advantages, axis=(1, 2), dtype=np.float64))
        assert (np.count_nonzero(totals[-1]) == 1) == (shape.num_micro == 1)
    for found in totals:
        assert found.sum() == pytest.approx(totals[0].sum(), abs=1e-6)
    alone = []
    for g in groups:
        b = pack([g], PackShape(1, 2, 20), 1.0, aggregation=kind, limit_tok=8).batch
        alone.append(np.sum(b.scale * b.advantages, dtype=np.float64))
    if kind != "group-mean":
        assert abs(np.mean(alone) - totals[0].sum()) > 1e-3
