"""The engine worker: what it keeps under tickets, and how another process repeats its calls from host data alone."""

import contextlib
import dataclasses
import pickle

import jax
import numpy as np
import pytest

from rolljax.concurrency.lockstep import Lockstep
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.sampler.engine import LOCKSTEP_CALLS, Engine, EngineWorker
from rolljax.sampler.prompt_queue import Request
from rolljax.sampler.scheduler import Pace, Scheduler
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.types import Sampled, SamplingParams

MODEL = Model(
    Qwen3Config(vocab_size=40, num_layers=1, hidden_size=16, num_heads=2, head_dim=8, ffn_size=16, init_std=0.3)
)
CFG = SamplerConfig(slots=4, max_context=96, page_size=8, pages=24, prefill_chunk=32, steps_per_dispatch=4)


def worker(model=MODEL, mesh=None, *, apart=False):
    """Return a worker with its first weights; apart: layers as on GPUs."""
    mesh = mesh or MeshSpec().build(jax.devices()[:1])
    cfg = dataclasses.replace(CFG, pages=24 + 8 * (mesh.size - 1))
    made = EngineWorker(Engine(model, cfg, mesh, BATCH_AXES))
    made.set_params(model.apart(model.init(0)) if apart else model.init(0))
    return made


def sample(engine_worker, make):
    """Sample twelve requests, long and short, with siblings; abort two, swap the weights and put the sampler to sleep
    in between; there are too few pages for all. make: returns the weights after the sleep."""
    scheduler, done, requests = Scheduler(engine_worker, 0), {}, []
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, n).astype(np.int32) for n in (3, 70, 33, 8)]
    for i in range(12):

        def deliver(request, reason, i=i):
            done[i] = (Sampled.concatenate(request.parts).tokens.tolist() if request.parts else [], reason)

        requests.append(Request(prompts[i % 4], SamplingParams(1.0, 20), (i,), 0, deliver))
        scheduler.add(requests[-1])
    for _ in range(3):
        scheduler.step()
    for i in (0, 11):
        scheduler.abort(requests[i])
    scheduler.publish(lambda: None, 1)
    scheduler.step()
    scheduler.sleep()
    scheduler.publish(lambda: engine_worker.set_params(make()), 2)
    while scheduler.busy:
        scheduler.step()
    assert len(done) == 12
    return done


@pytest.fixture(scope="module")
def alone():
    one = worker()
    return one, sample(one, lambda: MODEL.init(1))


def test_no_logits_are_kept_when_nothing_runs(alone):
    one, _ = alone
    assert one._logits == {}


def test_another_worker_repeats_the_calls_from_host_data(alone):
    """What travels is pickled bytes; the other's decode state ends as ours does, bit by bit, and no logits stay."""
    ours, other, names = worker(), worker(), []

    class Leader:
        @contextlib.contextmanager
        def broadcast(self, *call):
            shared, name, args, kwargs = pickle.loads(pickle.dumps(call))
            assert shared == "engine"
            names.append(name)
            getattr(other, name)(*args, **kwargs)
            yield

    def make():
        assert ours.params is None and other.params is None and other._state is None, "both sleep"
        other.set_params(MODEL.init(1))
        return MODEL.init(1)

    assert sample(Lockstep(Leader(), "engine", ours, LOCKSTEP_CALLS), make) == alone[1]
    assert set(names) == set(LOCKSTEP_CALLS) - {"verify", "score"} and names.count("prefill") == names.count("release")
    for mine, its in zip(jax.tree.leaves(ours._state), jax.tree.leaves(other._state), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert ours._logits == other._logits == {}


def test_logits_that_were_released_cannot_be_drawn_from(alone):
    one, _ = alone
    with pytest.raises(KeyError):
        one.release([0])


@pytest.mark.parametrize("kind", ["dense", "experts", pytest.param("experts split", marks=pytest.mark.slow)])
def test_layers_that_lie_apart_sample_the_same(kind):
    """Bit by bit: on CPUs programs write out the layers of both forms."""
    common = {"vocab_size": 40, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "head_dim": 8, "init_std": 0.3}
    cfg = Qwen3MoeConfig(num_experts=4, experts_per_token=2, expert_ffn_size=16, **common)
    model = Model(Qwen3Config(ffn_size=16, **common) if kind == "dense" else cfg)
    mesh = MeshSpec(expert=2).build(jax.devices()[:2]) if kind == "experts split" else None
    stacked = sample(worker(model, mesh), lambda: model.init(1))
    assert stacked == sample(worker(model, mesh, apart=True), lambda: model.apart(model.init(1)))


def test_checked_guesses_record_the_experts_of_their_tokens(monkeypatch):
    """A run that saw all answers before ends with the tokens and experts of one without guesses."""
    monkeypatch.setattr(Pace, "cost", lambda self: 2.0)  # whatever the machine's speed
    cfg = Qwen3MoeConfig(
        vocab_size=40,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        head_dim=8,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_size=16,
        init_std=0.3,
    )
    model, rng = Model(cfg), np.random.default_rng(0)
    prompts = [rng.integers(0, 40, n).astype(np.int32) for n in (3, 40, 33)]
    found = {}
    for speculate in (0, 5):
        settings = dataclasses.replace(CFG, speculate=speculate, record_experts=True)
        made = EngineWorker(Engine(model, settings, MeshSpec().build(jax.devices()[:1]), BATCH_AXES))
        made.set_params(model.init(0))
        scheduler = Scheduler(made, 0)
        for _ in range(2):
            requests = [
                Request(prompt, SamplingParams(1.0, 24), (i,), 0, lambda *_: None) for i, prompt in enumerate(prompts)
            ]
            for request in requests:
                scheduler.add(request)
            while scheduler.busy:
                scheduler.step()
        found[speculate] = [Sampled.concatenate(request.parts) for request in requests]
        assert (scheduler.stats.accepted_tok > 20) == bool(speculate)
    for plain, got in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(got.tokens, plain.tokens)
        np.testing.assert_array_equal(got.experts, plain.experts)
        assert plain.experts.shape == (24, 2, 2) and plain.experts.min() >= -1
