"""Guarantees of the sampler: one model function, and samples that depend on nothing but their address."""

import asyncio
import copy
import dataclasses
import functools
import random

import jax
import numpy as np
import pytest

from rolljax.errors import SamplerError
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.scheduler import Pace
from rolljax.sampler.settings import SamplerConfig
from rolljax.sampler.weights import Snapshot
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.forward import policy_outputs
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import SamplingParams

MODEL = Model(Qwen3Config(num_layers=2, init_std=0.15))
STOP = tuple(range(60, 64))


@functools.cache
def weights(seed=1):
    return jax.jit(lambda: MODEL.init(seed))()


@functools.cache
def publisher(mesh):
    return make_publish(mesh, MODEL)


@functools.cache
def _engine(cfg, mesh):
    return Engine(MODEL, cfg, mesh, BATCH_AXES)


def engine_of(cfg, mesh):
    """Return an engine that shares its programs with equal ones: only the scheduler reads the replaced settings."""
    plain = dataclasses.replace(cfg, prefix_match="turns", on_publish="recompute", reuse_stale=False)
    engine = copy.copy(_engine(plain, mesh))
    engine.cfg = cfg
    return engine


def requests():
    """Return mixed lengths, shared prompts, mixed settings; several stop ids, so that answers end at any length."""
    rng = np.random.default_rng(0)
    out = []
    for group in range(14):
        prompt = rng.integers(0, 256, rng.integers(1, 50)).astype(np.int32)
        for sibling in range(rng.integers(1, 9)):
            params = SamplingParams([1.0, 0.7, 1.3][group % 3], int(rng.integers(1, 30)), STOP)
            out.append((prompt, params, (5, 0, group, sibling, 0)))
    return out


def open_sampler(*, num_devices=1, version=7, **sizes):
    mesh = MeshSpec().build(jax.devices()[:num_devices])
    cfg = SamplerConfig(**({"max_context": 96, "prefill_chunk": 128, "slots": 16} | sizes))
    return Sampler(engine_of(cfg, mesh), publisher(mesh)(weights()), version, longest_prompt=0)


def close(sampler):
    """Close the sampler and check that it leaves nothing."""
    load, error = sampler.load(), sampler.error
    sampler.close()
    assert error is None
    assert load.running == load.waiting == load.used_pages == load.shared_pages == 0, f"pages leaked: {load}"


def sample(requests, *, order=None, spread=False, times=1, **how):
    """Return all completions, in the order of `requests`, however they were submitted; and the sampler's totals.

    times: how often everything is sampled; the completions are the last ones.
    """
    sampler = open_sampler(**how)
    order = order or list(range(len(requests)))

    async def one(i):
        if spread:
            await asyncio.sleep(random.Random(i).random() * 0.3)
        return await sampler.generate(*requests[i])

    async def everything():
        return await asyncio.gather(*(one(i) for i in order))

    try:
        for _ in range(times):
            done = asyncio.run(everything())
    finally:
        close(sampler)
    return [c for _, c in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])], sampler.stats


def assert_equal(done, expected):
    """Check that completions have the same tokens and ends, and log-probs up to rounding."""
    for got, ref in zip(done, expected, strict=True):
        np.testing.assert_array_equal(got.tokens, ref.tokens)
        np.testing.assert_allclose(got.sampler_logp, ref.sampler_logp, atol=1e-5)
        assert got.finish_reason == ref.finish_reason


@pytest.fixture(scope="module")
def reference():
    return sample(requests(), slots=16)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {"slots": 1, "page_size": 4, "steps_per_dispatch": 16, "prefix_match": "any"},
        {"slots": 4, "prefill_chunk": 32},
        {"slots": 64, "steps_per_dispatch": 4, "page_size": 4},
        {"slots": 64, "steps_per_dispatch": 16},
        {"slots": 8, "steps_per_dispatch": 1, "order": "shuffled", "prefix_match": "off"},
        {"slots": 16, "order": "reversed"},
        {"slots": 16, "order": "shuffled", "spread": True},
        {"slots": 4, "page_size": 4, "order": "shuffled", "spread": True, "prefix_match": "any"},
        {"slots": 8, "pages": 20},
        {"slots": 8, "pages": 7},  # one full sequence and a page
        {"slots": 8, "pages": 25, "page_size": 4, "steps_per_dispatch": 1, "preempts": True},
        {"slots": 16, "num_devices": 8},
        {"slots": 64, "num_devices": 4, "order": "shuffled", "pages": 240},
    ],
    ids=str,
)
def test_samples_do_not_depend_on_the_schedule(reference, how):
    wanted = requests()
    order = list(range(len(wanted)))
    if kind := how.pop("order", None):
        order.reverse() if kind == "reversed" else random.Random(3).shuffle(order)
    preempts = how.pop("preempts", False)
    done, stats = sample(wanted, order=order, **how)
    assert not preempts or stats.preemptions > 0
    assert_equal(done, reference)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {"slots": 64},
        {"slots": 16, "prefix_match": "any"},
        {"slots": 64, "pages": 250, "steps_per_dispatch": 2},
        {"slots": 64, "num_devices": 2},
        {"slots": 64, "speculate": 7, "speculate_tok": 64, "times": 2},
    ],
    ids=str,
)
def test_beginnings_that_are_read_once_change_no_token(how, fixed_cost):
    """Six groups of eight, and four requests alone."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in (40, 41, 47, 53, 60, 39)]
    lone = [rng.integers(0, 256, n).astype(np.int32) for n in (3, 20, 5, 9)]
    wanted = [
        (p, SamplingParams([1.0, 0.7][i % 2], 4 + 3 * sibling, STOP), (5, 0, i, sibling, 0))
        for i, p in enumerate([*prompts, *lone])
        for sibling in range(8 if i < 6 else 1)
    ]
    plain, stats = sample(wanted, slots=64, page_size=4, cascade_tok=0)
    assert not stats.cascades
    done, stats = sample(wanted, page_size=4, cascade_tok=12, **how)
    assert stats.cascades > 0
    assert_equal(done, plain)


@pytest.fixture
def fixed_cost(monkeypatch):
    """Make how often the sampler guesses independent of the machine's speed."""
    monkeypatch.setattr(Pace, "cost", lambda self: 2.0)


GUESSES = {"slots": 16, "speculate": 7, "times": 2}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"slots": 4, "speculate": 3, "steps_per_dispatch": 1, "page_size": 4},
        {"speculate_tok": 40},  # guesses for five rows at most
        {"slots": 8, "pages": 12, "steps_per_dispatch": 2, "prefix_match": "any"},
        {"num_devices": 8},
        {"record_alternatives": 3},
    ],
    ids=str,
)
def test_guesses_change_no_token(reference, how, fixed_cost):
    """The second time, each answer was seen before."""
    done, stats = sample(requests(), **GUESSES | how)
    assert stats.accepted_tok > 0.9 * stats.drafted_tok > 0
    assert_equal(done, reference)


@pytest.mark.slow
def test_wrong_guesses_change_no_token(fixed_cost):
    """Answers of other weights are guessed, running requests are aborted and resumed, and some
    distributions are cut off or greedy: the tokens are those of the new weights without guesses."""
    cut = dataclasses.replace
    wanted = [
        (p, (cut(s, top_k=40), cut(s, top_p=0.8, min_p=0.01), cut(s, temperature=0.0))[i % 3], a)
        for i, (p, s, a) in enumerate(requests())
    ]
    prompt, mesh = np.arange(5, dtype=np.int32), MeshSpec().build(jax.devices()[:1])
    long = prompt, SamplingParams(0.3, 80), (1,)

    async def play(sampler):
        await asyncio.gather(*(sampler.generate(*r) for r in (*wanted, long)))
        sampler.prepare(Snapshot(8, publisher(mesh)(weights(2))))
        await asyncio.to_thread(sampler.swap, 8)
        done = await asyncio.gather(*(sampler.generate(*r) for r in wanted))
        whole = await sampler.generate(*long)
        some = asyncio.Event()
        pending = sampler.submit(*long, on_tokens=lambda part: some.set())
        await some.wait()
        pending.abort()
        part = (await pending.completion).sampled
        return [*done, whole, await sampler.generate(*long, resume=part)]

    found = []
    for speculate in (0, 7):
        sampler = open_sampler(slots=16, speculate=speculate, steps_per_dispatch=4)
        found.append(asyncio.run(play(sampler)))
        assert bool(speculate) == (sampler.stats.drafted_tok > sampler.stats.accepted_tok)
        close(sampler)
    for plain, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got.tokens, plain.tokens)
        assert got.finish_reason == plain.finish_reason
    np.testing.assert_array_equal(found[0][-1].tokens, found[0][-2].tokens)


def test_completions_end_where_they_should(reference):
    for (_, params, _), c in zip(requests(), reference, strict=True):
        assert 1 <= len(c.tokens) <= params.max_tokens
        assert not set(c.tokens[:-1]) & set(STOP)
        assert (c.tokens[-1] in STOP) == (c.finish_reason == "stop")
        assert (c.versions == 7).all()
        assert len(c.sampler_logp) == len(c.versions) == len(c.tokens)
    assert {c.finish_reason for c in reference} == {"stop", "length"}
    siblings = [tuple(c.tokens) for (_, p, a), c in zip(requests(), reference, strict=True) if a[2] == 1]
    assert len(siblings) > 1
    assert len(set(siblings)) == len(siblings), "siblings must not share their noise"


def sample_of(prompt, tokens, logp):
    """Return prompt and answer as one training sequence."""
    n = len(tokens)
    columns = {"mask": np.ones(n, bool), "sampler_logp": logp}
    return Sample(np.concatenate([prompt, tokens]), len(prompt) + np.arange(n), np.zeros(n, int), columns)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_logp_equals_the_trainers(reference, temperature):
    pairs = [(r, c) for r, c in zip(requests(), reference, strict=True) if r[1].temperature == temperature]
    groups = {}
    for (prompt, _, address), c in pairs:
        groups.setdefault(address[2], []).append(sample_of(prompt, c.tokens, c.sampler_logp))
    batch = pack(list(groups.values()), PackShape(4, 8, 128), temperature).batch
    flat = dataclasses.replace(batch, **{n: a.reshape(-1, 128) for n, a in batch.arrays().items()})
    logp = jax.jit(lambda p, b: policy_outputs(MODEL, p, b).logp)(weights(), flat)
    where = flat.scale > 0
    assert where.sum() == sum(len(c.tokens) for _, c in pairs)
    np.testing.assert_allclose(np.asarray(logp)[where], flat.sampler_logp[where], atol=1e-5)


def test_new_weights_are_taken_between_dispatches():
    """Requests that run while weights are swapped continue; each token carries the version that sampled it."""
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=4, max_context=96, steps_per_dispatch=1)
    publish = publisher(mesh)
    sampler = Sampler(engine_of(cfg, mesh), publish(weights()), 0, longest_prompt=0)
    prompt = np.arange(5, dtype=np.int32)
    sampler.prepare(Snapshot(1, publish(weights(2))))

    async def run():
        loop = asyncio.get_running_loop()
        running = [asyncio.ensure_future(sampler.generate(prompt, SamplingParams(1.0, 90), (i,))) for i in range(4)]
        while sampler.stats.dispatches < 5:
            await asyncio.sleep(0.001)
        await loop.run_in_executor(None, sampler.swap, 1)
        first = await asyncio.gather(*running)
        fresh = await sampler.generate(prompt, SamplingParams(0.0, 8), (0,))
        return first, fresh

    try:
        first, fresh = asyncio.run(run())
    finally:
        sampler.close()
    for c in first:
        assert len(c.tokens) == 90
        assert set(c.versions) == {0, 1}
        assert (np.diff(c.versions) >= 0).all()
    assert set(fresh.versions) == {1}


def test_requests_that_are_held_start_together(monkeypatch):
    """A running request continues meanwhile, a held one can be aborted, and held requests fail with the sampler."""
    monkeypatch.setattr("rolljax.sampler.client.HOLD_S", 600.0)  # however long the programs compile
    sampler, prompt = open_sampler(slots=4), np.arange(5, dtype=np.int32)

    def ask(number, max_tokens=24):
        return sampler.submit(prompt, SamplingParams(1.0, max_tokens), (number,))

    async def run():
        first = ask(2, 60)
        release = sampler.hold()
        held = [ask(i) for i in (0, 1, 0)]
        assert (await first.completion).finish_reason == "length"
        load = sampler.load()
        assert load.waiting == load.running == 0 and not any(p.completion.done() for p in held)
        held[2].abort()
        release()
        done = await asyncio.gather(*(p.completion for p in held))
        assert [c.finish_reason for c in done] == ["length", "length", "abort"]
        release()  # a second time changes nothing
        sampler.hold()
        lost = ask(0)
        await asyncio.to_thread(sampler.close)
        with pytest.raises(SamplerError, match="the sampler was closed"):
            await lost.completion

    asyncio.run(run())


def test_greedy_is_the_largest_logit():
    prompt = np.arange(20, dtype=np.int32)
    (c,), _ = sample([(prompt, SamplingParams(0.0, 12), (0,))])
    batch = pack([[sample_of(prompt, c.tokens, c.sampler_logp)]], PackShape(1, 1, 40), 1.0).batch
    row = dataclasses.replace(batch, **{n: a[0] for n, a in batch.arrays().items()})
    from rolljax.model.attention import packed

    decoder = MODEL.bind(weights())
    hidden = decoder(row.tokens, row.positions, packed(row.segment_ids, row.branch_ids, row.positions)).hidden
    best = np.asarray(decoder.logits(hidden)[0].argmax(-1))
    np.testing.assert_array_equal(best[19:31], c.tokens)


def test_a_prompt_that_does_not_fit_is_refused():
    with pytest.raises(SamplerError, match="96"):
        sample([(np.zeros(96, np.int32), SamplingParams(1.0, 4), (0,))])


def test_context_limit_ends_a_completion():
    (c,), _ = sample([(np.zeros(90, np.int32), SamplingParams(1.0, 30), (0,))])
    assert len(c.tokens) == 6
    assert c.finish_reason == "context"
