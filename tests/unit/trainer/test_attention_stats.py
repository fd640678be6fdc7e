"""Attention statistics of packed rows are those of the whole attention matrix of every sequence, and never hold one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.model.attention import packed, packed_mask, visible
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer.attention_stats import (
    AttentionMaps,
    HeadStats,
    TokenRoles,
    block_stats,
    make_attention_stats,
    measured,
    packed_in_blocks,
    reduce,
)
from rolljax.trainer.mesh import MeshSpec, param_shardings

ROW_LEN = 48
# 7 does not divide the row; the windows are short enough to matter in answers of ten tokens
CFG = AttentionMaps(waad_window=4, fai_low=2, fai_high=6, num_layers=2, block_rows=7)
FIELDS = ("tokens", "positions", "segment_ids", "branch_ids", "mask")


@dataclasses.dataclass(frozen=True, eq=False)
class Sequence:
    """One sibling, and the positions of its sampled tokens in the packed rows."""

    tokens: np.ndarray
    mask: np.ndarray
    row: int
    at: np.ndarray


def tree(prompt_len, answers, rng):
    """Return a group: the shared prompt, and siblings made of (sampled, observed) pieces."""
    masks = [np.concatenate([np.arange(s + o) < s for s, o in pieces]) for pieces in answers]
    return rng.integers(0, 264, prompt_len), [(rng.integers(0, 264, len(m)), m) for m in masks]


@pytest.fixture(scope="module")
def packed_rows():
    """Return `[2, ROW_LEN]` arrays by field with two groups per row and padding, and the sequences in them."""
    rng = np.random.default_rng(3)
    layout = [
        [(9, [[(8, 0)], [(3, 2), (5, 0)], [(1, 0)]]), (4, [[(13, 0)]])],
        [(1, [[(11, 1), (4, 0)]]), (7, [[(2, 0)], [(6, 3), (2, 4), (3, 0)]])],
    ]
    arrays = {f: np.zeros((2, ROW_LEN), bool if f == "mask" else np.int32) for f in FIELDS}
    sequences = []

    def write(row, at, **values):
        for field, value in values.items():
            arrays[field][row, at] = value

    for row, groups in enumerate(layout):
        start = 0
        for segment, group in enumerate(groups, 1):
            prompt, siblings = tree(*group, rng)
            P = len(prompt)
            write(row, slice(start, start + P), tokens=prompt, positions=np.arange(P), segment_ids=segment)
            start += P
            for branch, (answer, mask) in enumerate(siblings, 1):
                at = np.arange(start, start + len(answer))
                write(row, at, tokens=answer, positions=P + np.arange(len(at)), mask=mask)
                write(row, at, segment_ids=segment, branch_ids=branch)
                whole = np.concatenate([prompt, answer]), np.concatenate([np.zeros(P, bool), mask])
                sequences.append(Sequence(*whole, row, at[mask]))
                start += len(at)
        assert start < ROW_LEN
    return arrays, sequences


@pytest.fixture(scope="module")
def alone_rows(packed_rows):
    """Return the same sequences, each alone in its row."""
    sequences = packed_rows[1]
    arrays = {f: np.zeros((len(sequences), ROW_LEN), bool if f == "mask" else np.int32) for f in FIELDS}
    for n, s in enumerate(sequences):
        T = len(s.tokens)
        arrays["tokens"][n, :T], arrays["mask"][n, :T] = s.tokens, s.mask
        arrays["positions"][n, :T], arrays["segment_ids"][n, :T] = np.arange(T), 1
    return arrays


@pytest.fixture(scope="module")
def naive(packed_rows, alone_rows):
    """Return naive(model, params, layers): per sequence the span sums [L, H], and WAAD and FAI of its sampled tokens
    [L, H, n], from whole attention matrices in float64."""

    @functools.cache
    def queries_and_keys(model):
        def run(params, rows):
            plain = packed(rows["segment_ids"], rows["branch_ids"], rows["positions"])

            def attend(q, k, v, seen, layer, window=None):
                return plain(q, k, v, None, layer)[0], (seen[0].at[layer].set(q), seen[1].at[layer].set(k))

            c, shape = model.cfg, rows["tokens"].shape
            empty = [jnp.zeros((c.num_layers, *shape, heads, c.head_dim)) for heads in (c.num_heads, c.num_kv_heads)]
            return model.bind(params)(rows["tokens"], rows["positions"], attend, tuple(empty)).cache

        return jax.jit(run)

    def of(model, params, layers):
        q, k = (np.asarray(x, np.float64) for x in queries_and_keys(model)(params, alone_rows))
        return [of_sequence(s, [(q[i, n], k[i, n]) for i in layers]) for n, s in enumerate(packed_rows[1])]

    return of


def of_sequence(sequence, layers):
    T, sampled = len(sequence.tokens), sequence.mask
    distance = np.arange(T)[:, None] - np.arange(T)
    out = []
    for q, k in layers:
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)[:T]
        logits = np.einsum("thc,shc->hts", q[:T], k) / np.sqrt(q.shape[-1])
        logits[:, distance < 0] = -np.inf
        A = np.exp(logits - logits.max(-1, keepdims=True))
        A /= A.sum(-1, keepdims=True)
        fai = np.zeros((len(A), T))
        for s in range(T):
            later = [t for t in range(T) if sampled[t] and CFG.fai_low <= t - s <= CFG.fai_high]
            if later:
                fai[:, s] = A[:, later, s].mean(1)
        span = (A * distance).sum(-1)[:, sampled].sum(-1)
        waad = (A * np.minimum(distance, CFG.waad_window)).sum(-1)
        out.append((span, waad[:, sampled], fai[:, sampled]))
    return [np.stack(x) for x in zip(*out, strict=True)]


program = functools.cache(make_attention_stats)


def run(model, params, arrays, cfg=CFG, mesh=None):
    return jax.tree.map(np.asarray, program(model, mesh, cfg)(params, *(arrays[f] for f in FIELDS)))


def check_packed(stats, arrays, sequences, expected):
    for s, (_, waad, fai) in zip(sequences, expected, strict=True):
        np.testing.assert_allclose(stats.waad_LHBT[:, :, s.row, s.at], waad, atol=2e-5)
        np.testing.assert_allclose(stats.fai_LHBT[:, :, s.row, s.at], fai, atol=2e-5)
    np.testing.assert_allclose(stats.span_sums_LH, sum(n[0] for n in expected), rtol=1e-4)
    assert stats.num_tokens == sum(s.mask.sum() for s in sequences)
    assert not stats.waad_LHBT[:, :, ~arrays["mask"]].any() and not stats.fai_LHBT[:, :, ~arrays["mask"]].any()


def test_statistics_of_packed_rows_are_those_of_whole_matrices(model, params, packed_rows, naive):
    arrays, sequences = packed_rows
    expected, stats = naive(model, params, (0, 1)), run(model, params, arrays)
    check_packed(stats, arrays, sequences, expected)
    # what agrees is not trivial: heads, layers and tokens differ, and some tokens have no token after them
    spans = stats.span_sums_LH / stats.num_tokens
    assert np.ptp(spans) > 0.3 and np.abs(spans[0] - spans[1]).max() > 0.1
    fais = np.concatenate([n[2] for n in expected], -1)
    assert (fais == 0).any() and fais.max() > 2 * fais[fais > 0].min()


def test_only_chosen_layers_are_measured(packed_rows, naive):
    deep = Model(Qwen3Config(num_layers=7, init_std=0.1))
    weights = jax.jit(lambda: deep.init(1))()
    assert CFG.layers(7) == (2, 4)
    check_packed(run(deep, weights, packed_rows[0]), *packed_rows, naive(deep, weights, (2, 4)))


def test_neighbours_in_the_row_change_nothing(model, params, packed_rows, alone_rows, naive):
    stats, expected = run(model, params, alone_rows), naive(model, params, (0, 1))
    for n, (s, (_, waad, fai)) in enumerate(zip(packed_rows[1], expected, strict=True)):
        own = np.flatnonzero(alone_rows["mask"][n])
        assert len(own) == len(s.at)
        np.testing.assert_allclose(stats.waad_LHBT[:, :, n, own], waad, atol=2e-5)
        np.testing.assert_allclose(stats.fai_LHBT[:, :, n, own], fai, atol=2e-5)
    np.testing.assert_allclose(stats.span_sums_LH, sum(n[0] for n in expected), rtol=1e-4)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5), a, b)


def test_block_size_changes_nothing(model, params, packed_rows):
    whole = dataclasses.replace(CFG, block_rows=1000)
    close(run(model, params, packed_rows[0], whole), run(model, params, packed_rows[0]))


@pytest.mark.parametrize(("unroll", "blocks"), [(False, True), (True, False)])
def test_hidden_states_are_those_of_the_plain_forward(model, params, packed_rows, unroll, blocks):
    arrays = packed_rows[0]

    @functools.partial(jax.jit, static_argnums=1)
    def forward(rows, measure):
        decoder, tokens = model.bind(params), TokenRoles.of(*(rows[f] for f in FIELDS[1:]))
        attend, cache = packed(rows["segment_ids"], rows["branch_ids"], rows["positions"]), None
        if measure:
            mix = packed_in_blocks(tokens, 7) if blocks else attend
            attend = measured(mix, tokens, 2, CFG)
            cache = HeadStats.empty(2, model.cfg.num_heads, tokens)
        return decoder(rows["tokens"], rows["positions"], attend, cache, unroll=unroll)[:2]

    hidden, stats = forward(arrays, True)
    real = arrays["segment_ids"] > 0
    np.testing.assert_allclose(hidden[real], forward(arrays, False)[0][real], atol=2e-5)
    close(stats, run(model, params, arrays))


def test_statistics_are_float32_whatever_the_model_computes_in(model):
    half = make_attention_stats(dataclasses.replace(model, dtype="bfloat16"))
    shapes = jax.eval_shape(half, model.abstract(), *[jax.ShapeDtypeStruct((2, ROW_LEN), jnp.int32)] * 5)
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32", "int32"}
    assert shapes.waad_LHBT.shape == (2, model.cfg.num_heads, 2, ROW_LEN)


def test_visible_rows_are_those_of_the_packed_mask(packed_rows):
    arrays = packed_rows[0]
    tokens = TokenRoles.of(*(arrays[f] for f in FIELDS[1:])).places
    some = np.array([3, 11, 12, 30, 47])
    mask = np.asarray(packed_mask(arrays["segment_ids"], arrays["branch_ids"]))
    np.testing.assert_array_equal(visible(jax.tree.map(lambda x: x[:, some], tokens), tokens), mask[:, some])
    assert 0 < mask[:, some].mean() < 1


def test_a_mesh_changes_nothing(model, params, packed_rows):
    mesh = MeshSpec(data=1, fsdp=2, tensor=2).build(jax.devices()[:4])
    placed = jax.device_put(params, param_shardings(mesh, model.axes(), model.abstract()))
    close(run(model, placed, packed_rows[0], mesh=mesh), run(model, params, packed_rows[0]))


# six tokens, all sampled; worked out by hand
WEIGHTS = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0, 0],
        [0.6, 0.2, 0.2, 0, 0, 0],
        [0.1, 0.1, 0.6, 0.2, 0, 0],
        [0.5, 0, 0.2, 0.1, 0.2, 0],
        [0.4, 0.1, 0.3, 0.1, 0, 0.1],
    ]
)


@pytest.mark.parametrize("blocks", [[6], [2, 4]])
def test_statistics_of_a_matrix_worked_out_by_hand(blocks):
    ones = jnp.ones((1, 6), jnp.int32)
    tokens = TokenRoles.of(jnp.arange(6)[None] + 3, ones, ones, ones)
    weights = jnp.asarray(WEIGHTS, jnp.float32)[None, None]
    cfg = AttentionMaps(waad_window=2, fai_low=1, fai_high=3)
    parts = []
    for at in np.split(np.arange(6), np.cumsum(blocks)[:-1]):
        parts.append(block_stats(weights[:, :, at], jax.tree.map(lambda x, at=at: x[:, at], tokens), tokens, cfg))
    span, waad, fai, count = zip(*parts, strict=True)
    np.testing.assert_allclose(np.concatenate(waad, -1)[0, 0], [0, 0.5, 1.4, 1.0, 1.5, 1.8], atol=1e-6)
    np.testing.assert_allclose(sum(span) / 6, [1.5], rtol=1e-6)
    np.testing.assert_array_equal(sum(count)[0], [3, 3, 3, 2, 1, 0])
    mean = sum(fai)[0, 0] / np.maximum(sum(count)[0], 1)
    np.testing.assert_allclose(mean, [0.4, 0.1, 0.366667, 0.1, 0, 0], atol=1e-6)


def some_stats(span_sums, num_tokens, seed):
    waad, fai = np.random.default_rng(seed).random((2, 2, 5, 3, 4))
    return HeadStats(np.asarray(span_sums, np.float32), np.int32(num_tokens), waad, fai)


def test_heads_are_ranked_by_their_span_over_the_whole_batch():
    # ten heads; in each part alone others would be lowest and highest
    a = some_stats([[10, 50, 90, 40, 60], [50, 50, 20, 70, 50]], 10, 0)
    b = some_stats([[90, 50, 10, 80, 50], [50, 50, 40, 40, 50]], 20, 1)
    out = reduce([a, b], AttentionMaps(head_frac=0.2))
    np.testing.assert_allclose(out.spans_LH, np.array([[100, 100, 100, 120, 110], [100, 100, 60, 110, 100]]) / 30)
    # the second lowest of many equal ones is the first of them
    assert out.local_heads.tolist() == [[1, 2], [0, 0]]
    assert out.global_heads.tolist() == [[1, 3], [0, 3]]
    for m, part in enumerate([a, b]):
        np.testing.assert_allclose(out.waad_MBT[m], (part.waad_LHBT[1, 2] + part.waad_LHBT[0, 0]) / 2)
        np.testing.assert_allclose(out.fai_MBT[m], (part.fai_LHBT[1, 3] + part.fai_LHBT[0, 3]) / 2)


@pytest.mark.parametrize(("head_frac", "n"), [(0.01, 1), (0.3, 3), (0.39, 3), (0.5, 5)])
def test_number_of_heads(head_frac, n):
    out = reduce([some_stats(np.arange(10).reshape(2, 5), 1, 0)], AttentionMaps(head_frac=head_frac))
    assert out.local_heads.tolist() == [[i // 5, i % 5] for i in range(n)]
    assert out.global_heads.tolist() == [[i // 5, i % 5] for i in range(10 - n, 10)]


def test_batch_without_sampled_tokens_is_zero(model, params, packed_rows):
    stats = run(model, params, {**packed_rows[0], "mask": np.zeros((2, ROW_LEN), bool)})
    out = reduce([stats, stats], CFG)
    assert stats.num_tokens == 0 and out.waad_MBT.shape == (2, 2, ROW_LEN)
    assert not out.waad_MBT.any() and not out.fai_MBT.any() and not out.spans_LH.any()


@pytest.mark.parametrize(
    ("depth", "num_layers", "layers"),
    [
        (36, 5, (12, 15, 18, 21, 24)),
        (28, 5, (9, 11, 13, 16, 18)),
        (15, 5, (5, 6, 7, 9, 10)),
        (6, 5, (2, 3, 4)),
        (2, 5, (0, 1)),
        (1, 5, (0,)),
        (9, 1, (4,)),
    ],
)
def test_layers_of_the_middle_third(depth, num_layers, layers):
    """From L/3 to 2L/3, both included: 12 to 24 of the 36 layers of Qwen3-8B (arXiv 2510.13554)."""
    assert AttentionMaps(num_layers=num_layers).layers(depth) == layers


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("waad_window", {"waad_window": 0}),
        ("fai_low", {"fai_low": -1}),
        ("fai_high", {"fai_low": 5, "fai_high": 4}),
        ("head_frac", {"head_frac": 0}),
        ("head_frac", {"head_frac": 0.6}),
        ("num_layers", {"num_layers": 0}),
        ("block_rows", {"block_rows": 0}),
    ],
)
def test_settings_that_cannot_work_are_refused(field, settings):
    with pytest.raises(ConfigError, match=f"AttentionMaps.{field}"):
        AttentionMaps(**settings)


def temp_bytes(model, row_len, **how):
    rows = [jax.ShapeDtypeStruct((1, row_len), jnp.int32)] * 5
    lowered = make_attention_stats(model, **how).lower(model.abstract(), *rows)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.fixture
def full_compiles():
    """Compile with all optimizations: fusion decides which arrays are in memory."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compiles")
def test_memory_grows_linearly_with_the_row(model):
    short, long = (temp_bytes(model, T) for T in (1024, 2048))
    assert long < 2.2 * short
    matrix = 4 * model.cfg.num_heads * 2048**2
    assert long < matrix / 2
    # the measure does see matrices where there are some
    assert temp_bytes(model, 2048, attend_for=packed) > matrix
