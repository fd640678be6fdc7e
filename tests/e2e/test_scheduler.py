"""Guarantees of the scheduler: shared prompts, kept turns, weights in flight, too few pages, aborts, priorities,
distributions."""

import asyncio
import dataclasses
import functools
import random
import threading
import time

import jax
import numpy as np
import pytest

from rolljax.errors import SamplerError
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.kernels import TritonPath
from rolljax.sampler.prompt_queue import Request
from rolljax.sampler.scheduler import Scheduler
from rolljax.sampler.settings import SamplerConfig
from rolljax.sampler.weights import Snapshot
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec, param_shardings
from rolljax.trainer.publish import make_publish
from rolljax.types import Sampled, SamplingParams
from tests.compilations import compiled_from_now_on

from ..families import load, make_folder
from .test_sampler import MODEL, close, engine_of, open_sampler, publisher, weights

TINY = Model(
    Qwen3Config(vocab_size=40, num_layers=1, hidden_size=16, num_heads=2, head_dim=8, ffn_size=16, init_std=0.3)
)

PUBLISHING = threading.Lock()


def publish(sampler, params, version):
    """Swap the weights from a coroutine, without blocking the event loop."""
    snapshot = Snapshot(version, publisher(sampler.engine.mesh)(params))

    def both():
        with PUBLISHING:
            sampler.prepare(snapshot)
            sampler.swap(version)

    return asyncio.get_running_loop().run_in_executor(None, both)


def run(sampler, coroutine):
    try:
        return asyncio.run(coroutine)
    finally:
        close(sampler)


def ids(rng, n):
    return rng.integers(0, 256, n).astype(np.int32)


# ---- against transformers


@pytest.fixture(scope="module")
def hf_pair(request, one_torch_thread, tmp_path_factory):
    """Return a random Qwen3 of `transformers`, ours from its folder, 64 prompts of mixed length and torch's answers."""
    import torch

    folder = tmp_path_factory.mktemp("qwen3")
    reference = make_folder(folder, tie_word_embeddings=request.param == "tied")
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 40)
    prompts = [
        np.concatenate(
            [shared[: rng.integers(20, 40)] if i % 3 == 0 else [], rng.integers(0, 256, rng.integers(1, 80))]
        )
        for i in range(64)
    ]
    prompts = [p.astype(np.int32) for p in prompts]
    wanted = []
    for prompt in prompts:
        with torch.no_grad():
            prompt_ids = torch.tensor(prompt[None].astype(np.int64))
            out = reference.generate(
                prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=24, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        wanted.append(out[0, len(prompt) :].numpy())
    return *load(folder), prompts, wanted


PAGED, PREEMPTED = {"page_size": 4}, {"page_size": 4, "pages": 120, "slots": 32, "steps_per_dispatch": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("hf_pair", "how"),
    [
        pytest.param("tied", PAGED, id="paged"),
        pytest.param("tied", {"prefix_match": "any", "slots": 4}, id="shared beginnings"),
        pytest.param("tied", {"prefill_chunk": 32}, id="in chunks"),
        pytest.param("tied", PREEMPTED, id="preempted"),
        pytest.param("untied", PREEMPTED, id="untied and preempted"),  # what differs is the matrix of the logits alone
    ],
    indirect=["hf_pair"],
)
def test_greedy_equals_transformers_generate(hf_pair, how):
    model, params, prompts, wanted = hf_pair
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(**({"max_context": 160, "slots": 16} | how))
    sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), params, 0, longest_prompt=0)

    async def everything():
        greedy = SamplingParams(0.0, 24)
        return await asyncio.gather(*(sampler.generate(p, greedy, (i,)) for i, p in enumerate(prompts)))

    done = run(sampler, everything())
    for got, want in zip(done, wanted, strict=True):
        np.testing.assert_array_equal(got.tokens, want)
    stats = sampler.stats
    if "pages" in how:
        assert stats.preemptions > 5
    if how.get("prefix_match") == "any":
        assert stats.reused_tok > 200
    if "prefill_chunk" in how:
        assert max(map(len, prompts)) > 3 * cfg.prefill_chunk


# ---- sharing


def test_a_group_costs_one_prefill_and_holds_its_prompt_once():
    sampler = open_sampler(max_context=640, slots=16, prefill_chunk=512)
    prompt = ids(np.random.default_rng(0), 512)
    most = []

    async def group():
        watch = lambda _: most.append(sampler.load())  # noqa: E731
        params = SamplingParams(1.0, 32)
        return await asyncio.gather(*(sampler.generate(prompt, params, (i,), on_tokens=watch) for i in range(16)))

    done = run(sampler, group())
    stats, page = sampler.stats, sampler.engine.cfg.page_size
    assert (stats.prefills, stats.prefill_tok, stats.reused_tok) == (1, 512, 15 * 512)
    assert max(load.shared_pages for load in most) == 512 // page
    assert max(load.used_pages for load in most) <= 512 // page + 16 * (32 // page)
    assert len({tuple(c.tokens) for c in done}) == 16


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["turns", "any"])
def test_a_conversation_prefills_each_token_once(rule):
    sampler = open_sampler(max_context=512, slots=2, prefix_match=rule, prefill_chunk=512)
    rng = np.random.default_rng(0)

    async def talk():
        stream, sampled, before = ids(rng, 37), 0, 0
        for turn in range(10):
            c = await sampler.generate(stream, SamplingParams(1.0, 11), (turn,))
            assert c.cached_tok == before
            sampled += len(c.tokens)
            before = len(stream) + len(c.tokens) - 1  # the last token never was an input
            stream = np.concatenate([stream, c.tokens, ids(rng, 1 + turn % 5)])
        return before + 1 - sampled  # prompt tokens of all turns

    prompt_tok = run(sampler, talk())
    assert sampler.stats.prefill_tok == prompt_tok + 9  # and each turn's last sampled token


def episodes(**how):
    """Run ten episodes of four turns, two from each start; return all completions and the sampler's totals."""
    sampler = open_sampler(slots=8, page_size=4, version=0, **how)

    async def episode(i):
        rng = np.random.default_rng(i // 2)
        stream, out = ids(rng, 9 + i // 2), []
        for turn in range(4):
            out.append(await sampler.generate(stream, SamplingParams(1.0, 1 + (3 * i + turn) % 7), (i, turn)))
            stream = np.concatenate([stream, out[-1].tokens, ids(rng, 1 + turn)])
            if turn == 1:
                await publish(sampler, weights(), i)
        return out

    async def everything():
        return await asyncio.gather(*(episode(i) for i in range(10)))

    return run(sampler, everything()), sampler.stats


@pytest.mark.slow
def test_kept_pages_save_work_and_change_nothing_else():
    plain, without = episodes(prefix_match="off")
    tight = {"pages": 30}  # what is kept makes room for what runs, so that it may save nothing
    for how in ({}, {"prefix_match": "any"}, tight, {"num_devices": 4, "pages": 120}, {"reuse_stale": True}):
        kept, stats = episodes(**how)
        assert how is tight or stats.prefill_tok < without.prefill_tok, how
        for a, b in zip(sum(plain, []), sum(kept, []), strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


# ---- weights in flight: the scheduler itself, step by step


def open_scheduler(*, num_devices=1, make=engine_of, **sizes):
    mesh = MeshSpec().build(jax.devices()[:num_devices])
    cfg = SamplerConfig(**({"max_context": 128, "prefill_chunk": 128, "slots": 8} | sizes))
    worker = EngineWorker(make(cfg, mesh))
    worker.set_params(on(mesh, weights()))
    return Scheduler(worker, 0), on(mesh, weights(2))


def on(mesh, params):
    return publisher(mesh)(params)


def ask(scheduler, prompt, n, max_tokens):
    """Submit `n` siblings to the scheduler; the returned dict receives them when they are done."""
    done = {}
    for i in range(n):

        def deliver(request, reason, i=i):
            done[i] = (Sampled.concatenate(request.parts), reason)

        scheduler.add(Request(prompt, SamplingParams(1.0, max_tokens), (i,), 0, deliver))
    return done


def finish(scheduler):
    while scheduler.busy:
        scheduler.step()
    load = scheduler.load()
    assert load.used_pages == load.shared_pages == 0, f"pages leaked: {load}"


def swapped(scheduler, new, prompt, n, max_tokens=70):
    """Sample `n` siblings while the weights change from version 0 to 1 after a few dispatches."""
    done = ask(scheduler, prompt, n, max_tokens)
    for _ in range(4):
        scheduler.step()
    assert not done
    scheduler.publish(lambda: scheduler.worker.set_params(new), 1)
    finish(scheduler)
    return [done[i][0] for i in range(n)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{}, {"num_devices": 4, "slots": 32}, {"pages": 40, "page_size": 8}], ids=str)
def test_tokens_after_a_swap_are_those_of_a_fresh_request_under_the_new_weights(how):
    prompt = ids(np.random.default_rng(5), 21)
    scheduler, new = open_scheduler(**how)
    done = swapped(scheduler, new, prompt, 6)
    for i, c in enumerate(done):
        cut = int((c.versions == 0).sum())
        assert len(c) == 70 and 0 < cut < 70
        assert (c.versions[:cut] == 0).all() and (c.versions[cut:] == 1).all()
        fresh = {}

        def deliver(request, _, fresh=fresh):
            fresh["sampled"] = Sampled.concatenate(request.parts)

        stream = np.concatenate([prompt, c.tokens[:cut]])
        scheduler.add(Request(stream, SamplingParams(1.0, 70 - cut), (i,), 0, deliver))
        finish(scheduler)
        np.testing.assert_array_equal(c.tokens[cut:], fresh["sampled"].tokens)
        np.testing.assert_allclose(c.sampler_logp[cut:], fresh["sampled"].sampler_logp, atol=1e-5)


def test_a_swap_prefills_a_shared_prompt_once():
    prompt = ids(np.random.default_rng(5), 64)
    scheduler, new = open_scheduler()
    done = swapped(scheduler, new, prompt, 8, 40)
    assert scheduler.stats.prefill_tok == 64 + 64 + sum(int((c.versions == 0).sum()) for c in done)


def test_kept_pages_continue_and_are_not_reused():
    prompt = ids(np.random.default_rng(5), 32)
    kept, new = open_scheduler(on_publish="keep")
    done = swapped(kept, new, prompt, 4)
    assert kept.stats.prefill_tok == 32 and kept.stats.preemptions == 0
    assert all(set(c.versions) == {0, 1} and len(c) == 70 for c in done)
    ask(kept, prompt, 1, 3)
    finish(kept)
    assert kept.stats.prefill_tok == 64
    # the same noise on other keys and values: after the swap the samples part from the exact ones
    exact, new = open_scheduler()
    exactly = swapped(exact, new, prompt, 4)
    assert all(a.tokens[:30].tolist() == b.tokens[:30].tolist() for a, b in zip(done, exactly, strict=True))
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(done, exactly, strict=True))


@pytest.mark.parametrize(("reuse", "prefilled"), [(False, 40 + 80), (True, 40 + 41)])
def test_stale_pages_are_reused_only_when_the_setting_says_so(reuse, prefilled):
    prompt = ids(np.random.default_rng(5), 40)
    scheduler, new = open_scheduler(reuse_stale=reuse)
    ask(scheduler, prompt, 1, 1)
    finish(scheduler)
    scheduler.publish(lambda: scheduler.worker.set_params(new), 1)
    ask(scheduler, np.concatenate([prompt, prompt]), 1, 1)
    finish(scheduler)
    assert scheduler.stats.prefill_tok == prefilled - reuse


def test_a_swap_compiles_nothing():
    scheduler, new = open_scheduler(make=new_engine)
    prompt = np.arange(20, dtype=np.int32)
    compiled = compiled_from_now_on(here=True)
    scheduler.warm_up(128, multi_turn=True)
    newer = on(scheduler.engine.mesh, weights())
    before = len(compiled)
    swapped(scheduler, new, prompt, 2)
    for version, params in ((2, newer), (3, new)):
        ask(scheduler, prompt, 5, 30)
        scheduler.step()
        scheduler.publish(functools.partial(scheduler.worker.set_params, params), version)
        finish(scheduler)
    assert len(compiled) == before > 5


def new_engine(cfg, mesh):
    """Return an engine that has compiled nothing."""
    return Engine(MODEL, cfg, mesh, BATCH_AXES)


def of_gpus(cfg, mesh):
    """Return an engine whose decode steps run the GPU's kernel, in Pallas' interpreter."""
    engine = new_engine(cfg, mesh)
    paged = (MODEL.cfg, MODEL.dtype, cfg.page_size, engine.pages_per_shard)
    engine.decode_path = TritonPath(*paged, False, mesh, interpret=True)
    return engine


@pytest.mark.parametrize("kind", ["dense", "triton"])
def test_beginnings_that_are_read_once_need_no_program_that_a_server_has_not_compiled(kind):
    scheduler, _ = open_scheduler(make=of_gpus if kind == "triton" else new_engine, cascade_tok=32, programs="few")
    for program in scheduler.programs(128, multi_turn=True, variants=scheduler.cfg.draw_variants):
        program()
    scheduler.compiles_when_needed = False
    compiled = compiled_from_now_on(here=True)
    ask(scheduler, np.arange(100, dtype=np.int32), 8, 10)
    finish(scheduler)
    assert not compiled
    assert (scheduler.stats.cascades > 0) == (kind == "triton")
    scheduler.compiles_when_needed = True
    ask(scheduler, np.arange(100, dtype=np.int32), 8, 10)
    finish(scheduler)
    assert scheduler.stats.cascades and bool(compiled) == (kind == "dense")


@pytest.mark.slow
def test_weights_travel_between_meshes():
    """A trainer on four devices (fsdp 2, tensor 2) publishes to a sampler on four others (data 2, tensor 2)."""
    trainer = MeshSpec(data=1, fsdp=2, tensor=2).build(jax.devices()[:4])
    mesh = MeshSpec(data=2, tensor=2).build(jax.devices()[4:])
    params = jax.device_put(weights(), param_shardings(trainer, MODEL.axes(), MODEL.abstract()))
    cfg = SamplerConfig(slots=8, max_context=96)
    sampler = Sampler(
        Engine(MODEL, cfg, mesh, BATCH_AXES), make_publish(trainer, MODEL, mesh)(params), 0, longest_prompt=0
    )
    alone = open_sampler(slots=8, version=0)
    prompts = [ids(np.random.default_rng(i), 20) for i in range(6)]

    async def everything(s):
        return await asyncio.gather(*(s.generate(p, SamplingParams(1.0, 12), (i,)) for i, p in enumerate(prompts)))

    for a, b in zip(run(sampler, everything(sampler)), run(alone, everything(alone)), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


# ---- too little of everything


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1_500, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_many_requests_through_too_few_pages(requests):
    """A page budget too small for half of them finishes all of them as a large one does, and leaks nothing."""
    mesh = MeshSpec().build(jax.devices()[:1])
    params = TINY.init(0)
    rng = np.random.default_rng(0)
    starts = [rng.integers(0, 40, n).astype(np.int32) for n in rng.integers(1, 12, 400)]
    wanted = []
    for i in range(requests):
        tail = rng.integers(0, 40, rng.integers(0, 5)).astype(np.int32)
        prompt = np.concatenate([starts[rng.integers(400)], tail])
        wanted.append((prompt, SamplingParams(1.0, int(min(1 + rng.geometric(0.06), 56))), (i,)))

    def all_of(pages, **how):
        cfg = SamplerConfig(slots=128, max_context=72, page_size=4, pages=pages, steps_per_dispatch=8, **how)
        sampler = Sampler(Engine(TINY, cfg, mesh, BATCH_AXES), params, 0, longest_prompt=0)

        async def everything():
            return await asyncio.gather(*(sampler.generate(*w) for w in wanted))

        return run(sampler, everything()), sampler.stats

    enough, _ = all_of(128 * 18 + 256)
    scarce, stats = all_of(100, prefix_match="any")
    assert stats.finished == requests and stats.preemptions > 0
    # pages that all slots together would hold are more than twice what there is
    assert 128 * np.mean([len(p) + len(c.tokens) for (p, _, _), c in zip(wanted, enough, strict=True)]) / 4 > 2 * 100
    for a, b in zip(enough, scarce, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)
        assert a.finish_reason == b.finish_reason


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", ["forwards", "shuffled"])
def test_abort_and_resume_change_nothing(order):
    """Every request is aborted once or twice and continues from its tokens: same tokens, same log-probs."""
    rng = np.random.default_rng(0)
    wanted = [(ids(rng, rng.integers(1, 40)), SamplingParams(1.0, int(rng.integers(10, 40))), (i,)) for i in range(24)]
    plain = open_sampler(slots=8)

    async def straight():
        return await asyncio.gather(*(plain.generate(*w) for w in wanted))

    reference = run(plain, straight())
    sampler = open_sampler(slots=6, steps_per_dispatch=2, page_size=4, pages=140)
    aborted = []

    async def one(i):
        prompt, params, address = wanted[i]
        sofar = None
        for attempt in range(3):
            seen = asyncio.Event()
            pending = sampler.submit(prompt, params, address, on_tokens=lambda _, e=seen: e.set(), resume=sofar)
            if attempt < 1 + i % 2:
                done, _ = await asyncio.wait(
                    [pending.completion, asyncio.ensure_future(seen.wait())], return_when="FIRST_COMPLETED"
                )
                pending.abort()
            c = await pending.completion
            if c.finish_reason != "abort":
                return c
            aborted.append(i)
            sofar = c.sampled
        raise AssertionError("aborted for ever")

    async def everything():
        order_ = list(range(24))
        if order == "shuffled":
            random.Random(0).shuffle(order_)
        return dict(zip(order_, await asyncio.gather(*(one(i) for i in order_)), strict=True))

    done = run(sampler, everything())
    assert len(aborted) > 20 and sampler.stats.aborted == len(aborted)
    for i, want in enumerate(reference):
        np.testing.assert_array_equal(done[i].tokens, want.tokens)
        np.testing.assert_allclose(done[i].sampler_logp, want.sampler_logp, atol=1e-5)
        assert done[i].finish_reason == want.finish_reason


def test_an_abort_frees_the_slot_at_once():
    scheduler, _ = open_scheduler(slots=2)
    start = time.perf_counter()
    requests, reasons = [], {}
    for i in range(5):
        deliver = lambda request, reason, i=i: reasons.__setitem__(i, (len(request.parts), reason))  # noqa: E731
        requests.append(Request(np.arange(5 + i, dtype=np.int32), SamplingParams(1.0, 90), (i,), 0, deliver))
        scheduler.add(requests[i])
    scheduler.step()
    assert (scheduler.load().running, scheduler.load().waiting) == (2, 3)
    for i in (0, 1, 3):
        scheduler.abort(requests[i])
        scheduler.abort(requests[i])
    assert {i: r for i, (_, r) in reasons.items()} == {0: "abort", 1: "abort", 3: "abort"}
    assert [reasons[i][0] > 0 for i in (0, 1, 3)] == [True, True, False]
    assert (scheduler.load().running, scheduler.load().waiting) == (0, 2)
    scheduler.step()
    assert scheduler.load().running == 2
    finish(scheduler)
    assert [reasons[i][1] for i in (2, 4)] == ["length", "length"] and scheduler.stats.aborted == 3
    assert scheduler.stats.aborted_tok == sum(requests[i].num_sampled for i in (0, 1, 3)) > 0
    held_s = scheduler.stats.held_s
    assert 0 < held_s <= 2 * (time.perf_counter() - start)
    scheduler.step()
    assert scheduler.stats.held_s == held_s, "nobody has a slot"


TWO_SLOTS = {"slots": 2, "max_context": 2048, "prefill_chunk": 32, "steps_per_dispatch": 1}


@pytest.mark.slow
def test_a_cancelled_wait_aborts_its_request():
    sampler = open_sampler(**TWO_SLOTS)

    async def everything():
        seen = asyncio.Event()
        prompt = np.arange(5, dtype=np.int32)
        task = asyncio.ensure_future(
            sampler.generate(prompt, SamplingParams(1.0, 2000), (), on_tokens=lambda _: seen.set())
        )
        await seen.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while sampler.load().running:
            await asyncio.sleep(0.001)
        assert sampler.stats.aborted == 1 and sampler.stats.sampled_tok < 2000

    run(sampler, everything())


def test_lower_priority_numbers_go_first():
    sampler = open_sampler(slots=1)
    finished = []

    async def one(i, priority):
        await sampler.generate(np.full(3, i, np.int32), SamplingParams(1.0, 4), (i,), priority=priority)
        finished.append(i)

    async def everything():
        await asyncio.gather(*(one(i, p) for i, p in enumerate([5, 5, 1, 9, 0])))

    run(sampler, everything())
    assert finished == [4, 2, 0, 1, 3]


@pytest.mark.slow
def test_long_prompts_stall_decoding_for_one_chunk_at_most():
    """While one request decodes, a prompt of eight chunks is prefilled between its dispatches, one chunk each."""
    sampler = open_sampler(**TWO_SLOTS)
    prefills = []

    async def everything():
        seen = asyncio.Event()

        def on_tokens(_):
            prefills.append(sampler.stats.prefills)
            seen.set()

        first = asyncio.ensure_future(
            sampler.generate(np.arange(8, dtype=np.int32), SamplingParams(1.0, 60), (), on_tokens=on_tokens)
        )
        await seen.wait()
        await sampler.generate(ids(np.random.default_rng(0), 256), SamplingParams(1.0, 2), (1,))
        await first

    run(sampler, everything())
    assert prefills[-1] == 1 + 8


# ---- distributions


def distribution_of(logits, p):
    """Compute the sampling distribution by hand: `[V]` log-probs, in float64."""
    z = np.asarray(logits, np.float64) / p.temperature
    order = np.argsort(-z)
    keep = np.zeros(len(z), bool)
    keep[order[: p.top_k or len(z)]] = True
    probs = np.where(keep, np.exp(z - z.max()), 0)
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[before >= p.top_p]] = False
    keep &= probs >= p.min_p * probs.max()
    z = np.where(keep, z, -np.inf)
    return z - np.log(np.exp(z - z.max()).sum()) - z.max()


SETTINGS = [
    SamplingParams(0.7, 1),
    SamplingParams(1.0, 1, top_k=3),
    SamplingParams(1.3, 1, top_p=0.6),
    SamplingParams(1.0, 1, min_p=0.2),
    SamplingParams(0.8, 1, top_k=12, top_p=0.8, min_p=0.05),
]


def test_samples_and_log_probs_follow_the_distribution():
    """2,000 draws per distribution: their log-probs are its own, their frequencies fit it (chi square)."""
    sampler = Sampler(
        Engine(TINY, SamplerConfig(slots=250, max_context=32), MeshSpec().build(jax.devices()[:1]), BATCH_AXES),
        TINY.init(0), 0, longest_prompt=0,
    )  # fmt: skip
    prompt = np.arange(7, dtype=np.int32)
    draws = 2000

    async def everything():
        asked = [dataclasses.replace(p, top_logprobs=5) for p in SETTINGS]
        return [
            await asyncio.gather(*(sampler.generate(prompt, p, (i, n)) for n in range(draws)))
            for i, p in enumerate(asked)
        ]

    from rolljax.model.attention import packed

    decoder, one = TINY.bind(TINY.init(0)), np.ones((1, 7), np.int32)
    positions = np.arange(7)[None]
    hidden = decoder(prompt[None], positions, packed(one, one, positions)).hidden
    logits = np.asarray(decoder.logits(hidden[0, -1]))
    model = distribution_of(logits, SamplingParams())
    for p, done in zip(SETTINGS, run(sampler, everything()), strict=True):
        logp = distribution_of(logits, p)
        tokens = np.concatenate([c.tokens for c in done])
        np.testing.assert_allclose(np.concatenate([c.sampler_logp for c in done]), logp[tokens], atol=1e-5)
        np.testing.assert_allclose(np.concatenate([c.sampled.model_logp for c in done]), model[tokens], atol=1e-5)
        inside = np.isfinite(logp)
        expected = draws * np.exp(logp[inside])
        counts = np.bincount(tokens, minlength=len(logp))
        assert counts[~inside].sum() == 0
        chi2 = ((counts[inside] - expected) ** 2 / expected).sum()
        assert chi2 < inside.sum() + 5 * np.sqrt(2 * inside.sum())
        top = done[0].sampled
        np.testing.assert_array_equal(top.top_ids[0], np.argsort(-logits)[:5])
        np.testing.assert_allclose(top.top_model_logp[0], model[top.top_ids[0]], atol=1e-5)
        np.testing.assert_allclose(top.top_sampler_logp[0], logp[top.top_ids[0]], atol=1e-5)


def test_truncated_neighbours_change_nothing(chat):
    """Requests that ask for no truncation get the same tokens next to others that truncate theirs."""
    rng = np.random.default_rng(0)
    plain = [(ids(rng, 10), SamplingParams(1.0, 12), (i,)) for i in range(8)]
    cut = [(ids(rng, 10), SamplingParams(1.0, 20, top_k=5, top_logprobs=3), (100 + i,)) for i in range(8)]

    async def everything(sampler, requests):
        return await asyncio.gather(*(sampler.generate(*r) for r in requests))

    alone, mixed = open_sampler(), open_sampler()
    a = run(alone, everything(alone, plain))
    b = run(mixed, everything(mixed, cut + plain))[8:]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_allclose(x.sampler_logp, y.sampler_logp, atol=1e-5)
        assert x.sampled.top_ids.shape == (12, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [1, 5])
def test_stop_texts_end_at_the_token_that_completes_them(chat, steps):
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=4, max_context=256, steps_per_dispatch=steps)
    sampler = Sampler(engine_of(cfg, mesh), weights(), 0, vocabulary=chat.vocabulary, longest_prompt=0)
    prompt = np.arange(65, 90, dtype=np.int32)
    parts = []

    async def everything():
        free = await sampler.generate(prompt, SamplingParams(1.0, 60), ())
        text = chat.tokenizer.decode(free.tokens[20:22])
        stopped = await sampler.generate(
            prompt, SamplingParams(1.0, 60, stop=("never there", text)), (), on_tokens=parts.append
        )
        return free, text, stopped

    free, text, stopped = run(sampler, everything())
    n = next(i for i in range(1, 61) if text in chat.tokenizer.decode(free.tokens[:i]))
    assert 1 < n <= 22
    assert stopped.finish_reason == "stop"
    np.testing.assert_array_equal(stopped.tokens, free.tokens[:n])
    np.testing.assert_array_equal(Sampled.concatenate(parts).tokens, stopped.tokens)


def test_score_is_the_model_s_log_prob():
    sampler = open_sampler()
    prompt = ids(np.random.default_rng(0), 13)

    async def everything():
        return await sampler.score(prompt), await sampler.generate(prompt[:12], SamplingParams(0.0, 1), ())

    logp, c = run(sampler, everything())
    assert np.isnan(logp[0]) and logp.shape == (13,) and (logp[1:] <= 0).all()
    assert c.tokens[0] != prompt[12] or logp[12] == pytest.approx(float(c.sampled.model_logp[0]), abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], SamplingParams(), "0 tokens"),
        ([300], SamplingParams(), "between 0 and 263"),
        ([-1], SamplingParams(), "between 0"),
        ([1], SamplingParams(max_tokens=0), "max_tokens"),
        ([1], SamplingParams(temperature=-1), "temperature"),
        ([1], SamplingParams(temperature=float("nan")), "temperature"),
        ([1], SamplingParams(top_p=0), "top_p"),
        ([1], SamplingParams(min_p=1.5), "min_p"),
        ([1], SamplingParams(stop_ids=(1, 2, 3, 4, 5)), "4 stop ids"),
        ([1], SamplingParams(top_logprobs=21), "20"),
        ([1], SamplingParams(stop=("x",)), "vocabulary"),
    ],
)
def test_malformed_requests_are_refused(shared_sampler, prompt, params, says):
    async def ask():
        await shared_sampler.generate(np.array(prompt, np.int32), params, ())

    with pytest.raises(SamplerError, match=says):
        asyncio.run(ask())


@pytest.fixture(scope="module")
def shared_sampler():
    sampler = open_sampler()
    yield sampler
    close(sampler)
