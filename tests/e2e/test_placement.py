"""Trainer and sampler on devices of their own: the same run as on shared ones, both busy at once, nothing lost on the way."""

import asyncio
import dataclasses
import json
import time

import jax
import numpy as np
import pytest

from rolljax import cli, loop
from rolljax.commands.train import main as train
from rolljax.concurrency.event_loop import Stopped
from rolljax.console.progress import Console
from rolljax.errors import ConfigError, SamplerError
from rolljax.metrics import check_row
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.model.lora import Lora
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.run.preflight import meshes
from rolljax.run.trainer import Trainer
from rolljax.run.weight_channel import ReshardSink, open_channel
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import MeshSpec, Split, param_shardings
from rolljax.trainer.publish import Reshard, checksums, differing
from rolljax.trainer.state import fingerprint
from rolljax.types import SamplingParams
from tests.ends import OF_THE_CLOCK

from .conftest import StopAt, rows

GIN = """
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.envs.adapters import reasoning_gym
from rolljax.model import lora
from rolljax.model.families import qwen3
from rolljax.model.families import qwen3_moe
from rolljax.sampler import settings
from rolljax.trainer import mesh
from rolljax.trainer.algorithms import grpo
from rolljax.envs import pool

recipe.Recipe.env = @reasoning_gym.ReasoningGym()
reasoning_gym.ReasoningGym.family = 'spell_backward'
reasoning_gym.ReasoningGym.partial_credit = True
recipe.Recipe.pool = @pool.PoolConfig()
pool.PoolConfig.where = 'thread'
recipe.Recipe.model = @qwen3.Qwen3Config()
qwen3.Qwen3Config.num_layers = 1
qwen3.Qwen3Config.init_std = 0.1
recipe.Recipe.max_answer_tok = 8
recipe.Recipe.sampler = @settings.SamplerConfig()
settings.SamplerConfig.slots = 24
settings.SamplerConfig.max_context = 80
settings.SamplerConfig.prefill_chunk = 128
recipe.Recipe.phases = [@recipe.Phase()]
recipe.Recipe.evaluation = @recipe.Evaluation()
recipe.Evaluation.tasks = 4
recipe.Phase.name = 'rl'
recipe.Phase.algorithm = @grpo.Grpo()
grpo.Grpo.clip_high = 0.2
recipe.Phase.steps = 3
recipe.Phase.prompts_per_step = 6
recipe.Phase.group_size = 4
recipe.Phase.updates_per_step = 2
"""


def split(sampler, trainer=-1):
    return ["Recipe.placement = @Split()", f"Split.sampler = {sampler}", f"Split.trainer = {trainer}"]


def prepared(folder, *settings):
    """Return the checked run and its folder."""
    folder.parent.mkdir(exist_ok=True)
    file = folder.parent / "small.gin"
    file.write_text(GIN)
    config, out = cli.load_recipe([str(file)], list(settings)), RunFolder(folder)
    checked = check_run(config.value)
    out.prepare(config, fresh=False)
    return checked, out


def run(folder, *settings):
    """Run to the end; return the rows, without timings, and the fingerprint of the state."""
    trainer, _ = loop.train(*prepared(folder, *settings), Console())
    written = rows(folder)
    assert all(check_row(row) == [] for row in written)
    return [{k: v for k, v in r.items() if not k.startswith(OF_THE_CLOCK)} for r in written], fingerprint(trainer.state)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run on one device."""
    return run(tmp_path_factory.mktemp("alone") / "run", "MeshSpec.data = 1")[0]


def assert_the_same(found, expected):
    assert len(found) == len(expected) == 3
    assert any(row["reward/std"] > 0 for row in expected)
    for of_split, of_one in zip(found, expected, strict=True):
        assert of_split["loss/total"] == pytest.approx(of_one["loss/total"], abs=1e-5)
        assert of_split["optim/grad_norm"] == pytest.approx(of_one["optim/grad_norm"], rel=1e-4)
        assert of_split["mismatch/abs_max_nat"] < 1e-5
        for name in ("reward/mean", "rollout/len_tok", "groups/started_n", "groups/trained_n", "stale/max_ver"):
            assert of_split[name] == of_one[name], name


PLACEMENTS = {
    "2 + 2": split(2, 2),
    "8": [],
    "4 + 4": split(4),
    "6 + 2": split(2),
    "6 + 2, matrices split": [*split(2), "MeshSpec.data = 3", "MeshSpec.tensor = 2", "SamplerConfig.tensor = 1"],
}


RUN_BY = {"2 + 2": [], "6 + 2, matrices split": [pytest.mark.slow]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=RUN_BY.get(n, [pytest.mark.sweep])) for n in PLACEMENTS])
def test_the_placement_changes_no_loss(alone, tmp_path, name):
    assert_the_same(run(tmp_path / "run", *PLACEMENTS[name])[0], alone)


@pytest.mark.slow
def test_a_split_run_that_is_stopped_and_continued_is_the_run_that_never_was(tmp_path):
    whole, expected = run(tmp_path / "whole" / "run", *split(4))
    checked, folder = prepared(tmp_path / "parts" / "run", *split(4))
    console = StopAt(2)
    with pytest.raises(Stopped):
        loop.train(checked, folder, console, lambda: console.stopped)
    parts, found = run(tmp_path / "parts" / "run", *split(4))
    assert found == expected
    assert [r["loss/total"] for r in parts] == [r["loss/total"] for r in whole]


@pytest.mark.slow
def test_adapters_arrive_as_their_sum(tmp_path):
    adapters = ["Recipe.lora = @Lora()", "Lora.rank = 4"]
    expected = run(tmp_path / "a" / "run", *adapters)[0]
    assert_the_same(run(tmp_path / "b" / "run", *adapters, *split(4))[0], expected)


@pytest.mark.slow
def test_experts_arrive_and_are_replayed(tmp_path):
    """Split over two devices on either side."""
    experts = ["Recipe.model = @Qwen3MoeConfig()", "Qwen3MoeConfig.num_layers = 1", "Qwen3MoeConfig.num_experts = 4"]
    experts += ["Qwen3MoeConfig.init_std = 0.1", "SamplerConfig.record_experts = True"]
    expected = run(tmp_path / "a" / "run", *experts, "MeshSpec.data = 1")[0]
    axes = ["MeshSpec.data = 2", "MeshSpec.expert = 2", "SamplerConfig.expert = 2"]
    found = run(tmp_path / "b" / "run", *experts, *axes, *split(4))[0]
    assert_the_same(found, expected)
    replayed = [row["router/replayed_frac"] for row in found]
    assert replayed == [row["router/replayed_frac"] for row in expected] and min(replayed) > 0


@pytest.mark.slow
def test_trainer_and_sampler_work_at_the_same_time(tmp_path, monkeypatch):
    """One device each. While the trainer is inside a step, the sampler ends dispatches of later groups."""
    checked, folder = prepared(
        tmp_path / "run",
        *split(1, 1),
        "Phase.async_ratio = 1.0",
        "Phase.epochs = 8",
        "Phase.steps = 5",
        "SamplerConfig.steps_per_dispatch = 1",
    )
    assert [m.devices.flatten().tolist() for m in (checked.mesh, checked.sampler_mesh)] == [
        [d] for d in jax.devices()[:2]
    ]
    dispatches, steps = [], []

    def timed(owner, name, intervals):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            began = time.perf_counter()
            found = jax.block_until_ready(real(*args, **kwargs))
            intervals.append((began, time.perf_counter()))
            return found

        monkeypatch.setattr(owner, name, call)

    timed(EngineWorker, "generate", dispatches)
    timed(Trainer, "step", steps)
    loop.train(checked, folder, Console())
    assert len(steps) == 5
    inside = [sum(a < c and d < b for c, d in dispatches) for a, b in steps]
    assert sum(n > 1 for n in inside) >= 2, inside
    assert max(r["stale/max_ver"] for r in rows(folder.path)) == 1


# ---- the way of the weights -----------------------------------------------------------------------------------------

DENSE = Model(Qwen3Config(num_layers=3, tie_embeddings=False), "bfloat16")
MODELS = {
    "dense": DENSE,
    "experts": Model(Qwen3MoeConfig(num_layers=3, num_experts=4), "bfloat16"),
    "adapters": dataclasses.replace(DENSE, lora=Lora(rank=4)),
}
SHARES = {
    "4 + 4": (MeshSpec(data=1, fsdp=2, tensor=2), MeshSpec(data=2, tensor=2), 4),
    "6 + 2": (MeshSpec(data=3, fsdp=2), MeshSpec(data=1, tensor=2), 2),
    "7 + 1": (MeshSpec(data=7), MeshSpec(), 1),
}


def weights(model, mesh, seed):
    """Return weights on the trainer's mesh, as arguments of `Model.bind`."""
    plain = jax.jit(lambda: model.plain.init(seed))()
    if model.lora is None:
        return jax.device_put(plain, param_shardings(mesh, model.axes(), model.abstract()))
    adapters = jax.tree.map(lambda x: x + 0.1, jax.jit(lambda: model.init(seed + 1))())
    return jax.device_put(
        model.full_params(adapters, jax.jit(model.base)(plain)),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_every_part_has_a_sender_and_arrives(name, shares):
    """No device is sent what is not, just so, on one of the trainer's: else it would pass through the host."""
    model, (spec, other, parts) = MODELS[name], SHARES[shares]
    devices, n = jax.devices(), int(shares[0])
    mesh, to = spec.build(devices[:n]), other.build(devices[n:])
    reshard, params = Reshard(mesh, model, to), weights(model, mesh, 1)
    assert reshard.parts == parts
    sent = reshard.cast(params)
    received = reshard.move(sent)
    places = lambda x: {str(index) for index in x.sharding.devices_indices_map(x.shape).values()}  # noqa: E731
    assert jax.tree.all(jax.tree.map(lambda a, b: places(b) <= places(a), sent, received))
    assert reshard.moved_bytes == sum(s.data.nbytes for x in jax.tree.leaves(received) for s in x.addressable_shards)
    old = reshard.write(received, None)
    buffers = jax.tree.map(lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards], old["layers"])
    new = reshard.write(received, old)
    assert all(x.is_deleted() for x in jax.tree.leaves(old)), "given up"
    assert buffers == jax.tree.map(
        lambda x: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards], new["layers"]
    )
    expected = jax.device_get(model.plain.apart(model.plain.computed(model.merged(params, model.dtype))))
    got = jax.device_get(new)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    where = param_shardings(to, model.plain.apart_axes(), expected, fsdp=False)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), new, where))
    got["layers"] = jax.tree.map(lambda *layers: np.stack(layers), *got["layers"])
    assert differing(jax.device_get(checksums(sent)), jax.device_get(checksums(got))) == []


def test_checksums_notice_parts_that_change_places():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = int(
        (x.view(np.uint32).ravel().astype(np.uint64) * (2 * np.arange(24, dtype=np.uint64) + 1)).sum() % 2**32
    )
    same = {"a": x, "b": x.astype("bfloat16"), "c": np.int8(x)}
    found = jax.device_get(checksums(same))
    assert found["a"] == expected
    swapped = {name: value[[1, 0, 2, 3]] for name, value in same.items()}
    assert differing(found, jax.device_get(checksums(swapped))) == ["a", "b", "c"]
    one_bit = x.copy()
    one_bit.view(np.uint32)[2, 3] ^= 1
    assert differing(found, jax.device_get(checksums(same | {"a": one_bit}))) == ["a"]


@pytest.fixture
def channel(tmp_path):
    """Return a split run's channel with a sampler."""
    checked, _ = prepared(tmp_path / "run", *split(2, 2))
    params = jax.jit(
        lambda: checked.model.init(0),
        out_shardings=jax.sharding.NamedSharding(checked.mesh, jax.sharding.PartitionSpec()),
    )()
    engine = Engine(checked.model.plain, checked.recipe.sampler, checked.sampler_mesh, SLOT_AXES)
    worker = EngineWorker(engine)
    source, sink = open_channel(checked, lambda: params, worker)
    assert isinstance(sink, ReshardSink)
    sink.prepare(source.push(0))
    sink.swap(0)
    sampler = Sampler(engine, None, 0, worker=worker, sink=sink, longest_prompt=0)
    yield source, sampler
    sampler.close()


def test_weights_of_another_version_are_not_taken(channel):
    source, sampler = channel
    sampler.prepare(source.push(1))
    with pytest.raises(SamplerError, match=r"weights of version 2 are wanted, those of version 1 were prepared"):
        sampler.swap(2)
    assert sampler.version == 0 and isinstance(sampler.error, SamplerError)


def test_weights_that_changed_on_their_way_are_not_used(channel):
    source, sampler = channel
    pushed = source.push(1)
    layers = pushed.parts["layers"] | {"q": pushed.parts["layers"]["q"] + 1}
    sampler.prepare(dataclasses.replace(pushed, parts=pushed.parts | {"layers": layers}))

    async def ask():
        return await sampler.generate(np.arange(5, dtype=np.int32), SamplingParams(1.0, 4), (0,))

    with pytest.raises(
        SamplerError, match=r"version 1 are not what the trainer sent: checksums of 1 arrays.*layers\.q"
    ):
        sampler.swap(1)
    with pytest.raises(SamplerError, match="has stopped"):
        asyncio.run(ask())


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (split(0, 4), r"Split.sampler.*must be positive"),
        (split(-1, -1), r"Split.sampler.*cannot both be -1"),
        (split(8), r"Split.sampler.*leaves the trainer none of 8 devices"),
        (split(-1, 8), r"Split.trainer.*leaves the sampler none of 8 devices"),
        (split(4, 6), r"Split.sampler.*Split.trainer = 6 are 10 devices, there are 8"),
        ([*split(3), "MeshSpec.tensor = 2"], r"MeshSpec.tensor.*2 devices per row of the mesh, there are 5"),
        ([*split(2), "MeshSpec.data = 2"], r"Recipe.mesh.*takes 2 of the trainer's 6 devices.*Split.trainer = 2"),
        ([*split(3), "SamplerConfig.tensor = 2"], r"SamplerConfig.tensor.*3 devices do not divide"),
        ([*split(5), "SamplerConfig.slots = 8"], r"SamplerConfig.slots.*5 batch shards"),
        (["Recipe.placement = 'split'"], r"Recipe.placement"),
    ],
    ids=str,
)
def test_shares_that_do_not_add_up_are_refused(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        prepared(tmp_path / "run", *settings)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    checked, _ = prepared(tmp_path / "run", *split(4))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="(?s)Recipe.placement.*a run of 2 processes"):
        meshes(checked.recipe)


def test_a_dry_run_shows_the_devices_of_both_sides(tmp_path, capsys):
    prepared(tmp_path / "run")
    argv = ["--gin", str(tmp_path / "small.gin"), "--dry_run"]
    assert train([*argv, *(a for s in split(2, 4) for a in ("--set", s))]) == 0
    shown = capsys.readouterr().out
    assert "mesh      data=4" in shown and "sampler's data=2" in shown
    assert (
        "split     devices 0 to 3 train, 4 to 5 sample; a publish moves" in shown and "2 devices are not used" in shown
    )
    assert train(argv) == 0
    assert "split  " not in capsys.readouterr().out


def test_the_default_shares_all_devices():
    from rolljax.recipe import Recipe

    fields = {f.name: f.default for f in dataclasses.fields(Recipe)}
    cfg = SamplerConfig()
    mesh = MeshSpec().build()
    assert cfg.mesh(mesh) is mesh and type(fields["placement"]).__name__ == "Colocated"
    assert json.dumps(dataclasses.asdict(Split(2))) == '{"sampler": 2, "trainer": -1}'
