"""JetStream's own code (the released package, in processes of its own) over our engine: the same tokens as our client's.
And our engine under JetStream's interfaces without JetStream's code."""

import abc
import asyncio
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rolljax.errors import ConfigError, SamplerError
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.jetstream import compat, engine
from rolljax.sampler.jetstream.compat import ExistingPrefix
from rolljax.sampler.jetstream.engine import NO_BOS
from rolljax.sampler.weights import Snapshot
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import SamplingParams
from tests.e2e.jetstream_run import CONFIG, LONGEST_PROMPT, MODEL, weights

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("jetstream_run.py")
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (60, 31, 32, 64, 5, 1, 17, 33, 9, 2, 40, 12)]
LONG = RNG.integers(0, 256, 90).tolist()
MAX_TOKENS = [30, 12, 1, 20, 25, 30, 7, 11, 2, 30, 1000, 16]
TEXTS = ["What is 2 + 2?", "Count to three.", "Grüße", "x", "one two three four", "the end"]
LOAD = compat.load.__wrapped__


def in_process(asked, *params):
    """Return our client's tokens for (prompt, sampling, address), under each set of parameters in turn."""
    mesh = MeshSpec().build(jax.devices()[:1])
    sampler = Sampler(Engine(MODEL, CONFIG, mesh, BATCH_AXES), params[0], 0)

    async def everything():
        return await asyncio.gather(*(sampler.generate(np.array(p, np.int32), *how) for p, *how in asked))

    out = []
    try:
        for version, each in enumerate(params):
            sampler.prepare(Snapshot(version, each))
            sampler.swap(version)
            out.append([c.tokens.tolist() for c in asyncio.run(everything())])
    finally:
        sampler.close()
    return out


@pytest.fixture(scope="module")
def client():
    """Send requests to our client: greedy, until the context is full, under two sets of weights; and three samples."""
    tokenizer = byte_tokenizer()
    texts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in TEXTS]
    greedy = [(p, SamplingParams(0.0, max_tokens=1000), (0,)) for p in [*PROMPTS, LONG[-LONGEST_PROMPT:], *texts]]
    samples = [(PROMPTS[1], SamplingParams(1.0, max_tokens=13, top_p=0.9), (7, 1, i)) for i in range(3)]
    return in_process([*greedy, *samples], *(weights(seed, jax.devices()[:1]) for seed in (1, 2)))


@pytest.fixture(scope="module")
def ours(client):
    """Return our client's greedy tokens for every prompt, under the first and the second weights."""
    names = [*range(len(PROMPTS)), "long", *TEXTS]
    return [dict(zip(names, tokens, strict=False)) for tokens in client]


@pytest.fixture(scope="module")
def plan(ours):
    """Plan more requests than slots, a stop token at the start of one answer, a prompt without BOS, and a long one."""
    requests = [[p, n, i % 5 != 3] for i, (p, n) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))]
    return {
        "requests": [*requests, [LONG, 9, True], [LONG, 9, False]],
        "names": [*range(len(PROMPTS)), "long", "long"],
        "texts": TEXTS,
        "stop_ids": [ours[0][4][0]],
    }


@pytest.fixture(scope="module")
def run(plan, tmp_path_factory):
    """Return a function that runs a scenario of `jetstream_run.py` once and returns its result."""
    results = {}

    def one(scenario):
        if scenario in results:
            return results[scenario]
        folder = tmp_path_factory.mktemp(scenario)
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, str(SCRIPT), scenario, str(folder / "plan.json"), str(folder / "result.json")]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=folder)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        results[scenario] = json.loads((folder / "result.json").read_text())
        return results[scenario]

    return one


def expected(plan, ours):
    """Return the part of our client's tokens that JetStream 0.2.2 returns: at most max_tokens, and no stop token."""
    out = []
    for name, (_, limit, _) in zip(plan["names"], plan["requests"], strict=True):
        tokens = ours[name][:limit]
        stop = [i for i, t in enumerate(tokens) if t in plan["stop_ids"]]
        out.append(tokens[: stop[0]] if stop else tokens)
    return out


SCENARIOS = ["interleaved", pytest.param("split", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_orchestrator_returns_our_clients_tokens(run, plan, ours, scenario):
    got, want = run(scenario), expected(plan, ours[0])
    assert got["first"] == want
    assert not got["tensorflow"]
    assert got["steps"] < sum(map(len, want)), "requests share decode steps"
    assert want[4] == [], "a stop token comes first"
    assert len(want[0]) == MAX_TOKENS[0] and len(want[2]) == 1, "exactly max_tokens"
    assert len(want[10]) == CONFIG.max_context - len(PROMPTS[10]), "until the context is full"
    assert len(want) > 3 * CONFIG.slots
    assert want[-1] == want[-2] == ours[0]["long"][:9], "a long prompt is cut from the left"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_weights_are_swapped_under_load(run, plan, ours, scenario):
    got, old, new = run(scenario), expected(plan, ours[0]), expected(plan, ours[1])
    assert got["version"] == 1
    assert got["after"] == new
    assert old != new
    swapped = got["swapped"]
    mixed = [a for a, b, c in zip(swapped, old, new, strict=True) if a not in (b, c)]
    assert mixed, "running requests continued under the new weights"
    assert any(a[:10] == b[:10] for a, b in zip(swapped, old, strict=True) if len(a) > 10)
    limits = [limit for _, limit, _ in plan["requests"]]
    assert all(len(a) <= limit for a, limit in zip(swapped, limits, strict=True))


@pytest.mark.slow
def test_the_grpc_server_and_its_benchmark(run, plan, ours):
    got = run("server")
    stop = set(plan["stop_ids"])
    assert got["live"]
    assert got["tokens"] == expected(plan, ours[0])[0]
    assert got["listens"]
    assert all(host.endswith("0100007F") for host in got["listens"]), "on 127.0.0.1 only"
    want = ours[0][TEXTS[0]][: MAX_TOKENS[0]]
    assert got["text_ids"] == want[: len(got["text_ids"])]
    assert len(got["text_ids"]) > 5
    assert got["text"] == byte_tokenizer().decode(got["text_ids"], skip_special_tokens=True)
    assert set(got["benchmark"]) == set(TEXTS)
    for i, text in enumerate(TEXTS):
        tokens = ours[0][text][: 3 + i]
        cut = next((j for j, t in enumerate(tokens) if t in stop), len(tokens))
        assert got["benchmark"][text] == tokens[:cut]
    assert got["throughput"] > 0


# ---- the interface, without JetStream's code


HEAD = """prefill prefill_multisampling insert bulk_insert generate load_params init_decode_state
get_prefix_destination_sharding get_tokenizer max_concurrent_decodes samples_per_slot max_prefill_length mesh
colocated_cpus use_chunked_prefill prefill_chunk_size""".split()
"""Abstract members of JetStream's `Engine` at the head of its repository (29329e8), which cannot be installed."""
HeadEngine = abc.ABCMeta("HeadEngine", (), {name: abc.abstractmethod(lambda self: None) for name in HEAD})


@pytest.fixture(scope="module")
def without():
    """Load our module as if JetStream were not installed: its interface is then that of the head."""

    def missing():
        raise ConfigError("is missing")

    spec = importlib.util.spec_from_file_location("jetstream_without", engine.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "load", missing)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


def build(module, num_devices=1, mesh=None, **options):
    mesh = (mesh or MeshSpec()).build(jax.devices()[:num_devices])
    cfg = dataclasses.replace(CONFIG, steps_per_dispatch=1)
    options = {"stop_ids": ()} | options
    params = make_publish(mesh, MODEL)(jax.jit(MODEL.init, static_argnums=0)(1))
    return module.JetStreamEngine(Engine(MODEL, cfg, mesh, BATCH_AXES), params, byte_tokenizer(), **options)


@pytest.fixture(scope="module")
def head(without):
    return build(without)


def pad(ids, bos=False):
    ids = np.array([NO_BOS, *ids] if bos else ids, np.int32)
    return {"padded_tokens": np.pad(ids, (0, 64 - len(ids) % 64)), "true_length": len(ids)}


def follow(engine, state, slots, steps):
    """Return the tokens of the slots over some steps, as far as they are valid, and the state."""
    out = {slot: [] for slot in slots}
    for _ in range(steps):
        state, result = engine.generate(engine.load_params(), state)
        result = result.convert_to_numpy()
        for slot in slots:
            data = result.get_result_at_slot(slot)
            if data.valid[0, 0]:
                out[slot].append(int(data.tokens[0, 0]))
    return out, state


def first_of(result, row=0):
    return int(result.convert_to_numpy().get_result_at_slots([row]).tokens[0, 0])


def test_the_engine_has_the_members_of_both_interfaces(without):
    from jetstream.engine import engine_api

    assert issubclass(engine.JetStreamEngine, engine_api.Engine)
    assert not engine.JetStreamEngine.first_from_prefill
    assert issubclass(without.JetStreamEngine, compat.JetStreamEngineApi)
    assert without.JetStreamEngine.first_from_prefill
    assert compat.JetStreamEngineApi.__abstractmethods__ == set(HEAD)

    class Both(engine.JetStreamEngine, HeadEngine):
        pass

    class Neither(HeadEngine):
        pass

    assert not Both.__abstractmethods__
    build(type("module", (), {"JetStreamEngine": Both}))
    with pytest.raises(TypeError):
        Neither()


@pytest.mark.slow
def test_prefill_insert_generate_without_jetstream(head, ours):
    """Twice as many prompts as slots, the second half over the pages of the first."""
    state = head.init_decode_state()
    for batch in (range(4), range(4, 8)):
        out = {}
        for slot, i in enumerate(batch):
            prefix, first = head.prefill(params=head.load_params(), **pad(PROMPTS[i], bos=i % 2))
            out[slot] = [first_of(first)]
            state = head.insert(prefix, state, slot=slot)
            for leaf in (prefix["cache"], prefix["logits"]):
                leaf.delete()
        more, state = follow(head, state, range(4), 15)
        for slot, i in enumerate(batch):
            assert out[slot] + more[slot] == ours[0][i][:16]


@pytest.mark.slow
def test_a_stop_token_ends_a_slot_even_as_the_first(without, ours):
    engine = build(without, stop_ids=[ours[0][4][0], ours[0][5][6]])
    state = engine.init_decode_state()
    for slot, i in enumerate((4, 5)):
        prefix, first = engine.prefill(params=engine.load_params(), **pad(PROMPTS[i]))
        assert first_of(first) == ours[0][i][0]
        state = engine.insert(prefix, state, slot)
    out, _ = follow(engine, state, range(2), 12)
    assert out[0] == []
    stop = next(n for n, t in enumerate(ours[0][5]) if t in engine.build_tokenizer().stop_tokens)
    assert out[1] == ours[0][5][1 : stop + 1]


@pytest.mark.parametrize("cut", [1, 20, 32, 59])
def test_a_prompt_continues_an_existing_prefix(head, ours, cut):
    prompt, params = PROMPTS[0], head.load_params()
    start, _ = head.prefill(params=params, **pad(prompt[:cut], bos=True))
    as_jetstream = ExistingPrefix(start["cache"], np.array([NO_BOS, *prompt[:cut]]))
    for existing in (start, as_jetstream):
        prefix, first = head.prefill(params=params, existing_prefix=existing, **pad(prompt[cut:]))
        out, _ = follow(head, head.insert(prefix, head.init_decode_state(), 3), [3], 8)
        assert [first_of(first), *out[3]] == ours[0][0][:9]


@pytest.mark.slow
def test_several_samples_of_one_prompt_on_a_mesh_are_those_of_our_client(without, client):
    engine = build(without, 4, MeshSpec(data=2, tensor=2), temperature=1.0, top_p=0.9, seed=7)
    params = engine.load_params()
    engine.prefill(params=params, **pad(PROMPTS[2]))
    prefix, first = engine.prefill_multisampling(params=params, num_samples=3, **pad(PROMPTS[1]))
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [2, 0, 3])
    out, _ = follow(engine, state, [2, 0, 3], 12)
    got = [[first_of(first, i), *out[slot]] for i, slot in enumerate([2, 0, 3])]
    assert got == client[0][-3:]
    assert len(set(map(tuple, got))) == 3


def test_a_step_reads_the_weights_once_and_follows_a_swap(without, head):
    state = head.init_decode_state()
    other = weights(2, jax.devices()[:1])
    prefix, _ = head.prefill(params=head.load_params(), **pad(PROMPTS[0]))
    state = head.insert(prefix, state, 0)
    _, state = follow(head, state, [0], 3)
    copy = jax.tree.map(lambda x: x.copy(), state)
    handle = without.LoadedWeights(head.load_params().params)
    handle.swap(other, 3)
    assert handle.version == 3
    swapped = [r.convert_to_numpy().data[0] for r in (head.generate(handle, state)[1], head.generate(other, copy)[1])]
    np.testing.assert_array_equal(*swapped)


def test_a_slot_that_is_refilled_before_it_is_freed_continues(head, ours):
    prefix, _ = head.prefill(params=head.load_params(), **pad(PROMPTS[0]))
    state = head.insert(prefix, head.init_decode_state(), 1)
    state = head.insert(prefix, state, 1)
    head.free_resource(1)
    out, state = follow(head, state, [1], 3)
    assert out[1] == ours[0][0][1:4]
    head.free_resource(1)
    assert follow(head, state, [1], 2)[0] == {1: []}


def test_text_comes_token_by_token():
    tokenizer = build(engine).build_tokenizer()
    ids = tokenizer.encode("Grüße")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces == ["G", "r", "<0xC3>", "<0xBC>", "<0xC3>", "<0x9F>", "e"]
    assert compat.load().token_utils.text_tokens_to_str(pieces) == tokenizer.decode(ids) == "Grüße"
    padded, length = tokenizer.encode("ab", is_bos=True, max_prefill_length=32, jax_padding=False)
    assert (len(padded), length, padded[0]) == (16, 3, NO_BOS)


def test_what_jetstream_cannot_use_is_refused(head, monkeypatch):
    mesh = MeshSpec().build(jax.devices()[:1])
    make = lambda cfg, **o: engine.JetStreamEngine(Engine(MODEL, cfg, mesh, BATCH_AXES), {}, byte_tokenizer(), **o)  # noqa: E731
    one = dataclasses.replace(CONFIG, steps_per_dispatch=1)
    for cfg, options, setting in (
        (CONFIG, {}, "steps_per_dispatch"),
        (dataclasses.replace(one, pages=8), {}, "pages"),
        (dataclasses.replace(one, max_context=16), {}, "max_context"),
        (one, {"max_prefill_length": 48}, "max_prefill_length"),
        (one, {"max_prefill_length": 128}, "max_prefill_length"),
        (one, {"stop_ids": range(5)}, "stop_ids"),
        (one, {"top_p": 0.0}, "top_p"),
    ):
        with pytest.raises(ConfigError, match=setting):
            make(cfg, **options)
    with pytest.raises(SamplerError, match="sampler"):
        head.generate(head.load_params(), head.init_decode_state(), sampler=lambda x: x)
    with pytest.raises(SamplerError, match="does not fit"):
        head.prefill(params=head.load_params(), **pad(range(96)))
    monkeypatch.setitem(sys.modules, "jetstream.core.config_lib", None)
    with pytest.raises(ConfigError, match="--no-deps google-jetstream==0.2.2"):
        LOAD()
