"""The memory account: bytes of programs by the compiler's own analysis, of a whole run, and of the device."""

import contextlib
import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rolljax.aot.programs import SamplerShapes, TrainerShapes, device_bytes
from rolljax.envs.games.countdown import Countdown
from rolljax.errors import ConfigError, OutOfMemory, SamplerError, boundary
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Phase, Recipe
from rolljax.run import memory
from rolljax.run.preflight import resolve
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.batch import PackShape
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer

SHAPE = Qwen3Config(264, 9, 32, 4, 2, 16, 48)  # deep enough that decode scans over its layers


def temporaries(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_pages_follow_from_slots():
    cfg = SamplerConfig(slots=8, max_context=1024, page_size=64, prefill_chunk=1024)
    assert cfg.num_pages == 8 * (1024 // 64 + 1)
    assert SamplerConfig(slots=8, max_context=1024, page_size=64, prefill_chunk=64).num_pages == cfg.num_pages


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_program_of_the_sampler_copies_the_pool(dtype):
    cfg = SamplerConfig(slots=4, max_context=64, page_size=16, prefill_chunk=32, pages=2000)
    shapes = SamplerShapes.of(Model(SHAPE, dtype), cfg, MeshSpec().build(jax.devices()[:1]))
    pool = device_bytes(shapes.state.pool)
    for program in shapes.programs({}):
        assert temporaries(program.lower()) < pool / 4, program.name


# ---- the update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_backward_pass_keeps_no_copy_of_a_weight(dtype):
    model = Model(SHAPE, dtype)
    params = jax.jit(lambda: model.init(0))()
    tokens = jnp.zeros((1, 4), jnp.int32)
    attend = packed(tokens + 1, tokens, jnp.arange(4)[None])
    _, pull = jax.vjp(lambda p: model.bind(p)(tokens, jnp.arange(4)[None], attend).hidden, params)
    own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
    sizes = {x.size for name, x in params["layers"].items() if x.ndim > 2}
    kept = [x for x in jax.tree.leaves(pull) if x.size in sizes]
    assert kept and all(x.unsafe_buffer_pointer() in own for x in kept)


@pytest.mark.parametrize(("num_micro", "most"), [(1, 3.2), (2, 3.6)])
def test_an_update_writes_new_moments_over_the_old_ones(num_micro, most):
    """Sizes are in units of the parameters. One micro-batch needs no sum of gradients in addition to the gradient."""
    model, mesh = Model(Qwen3Config(8192, 2, 64, 4, 2, 16, 96)), MeshSpec().build(jax.devices()[:1])
    shape = PackShape(num_micro, 1, 32)
    shapes = TrainerShapes.of(PhaseTrainer(mesh, model, Grpo(), AdamW(), shape, steps=1, groups_per_step=1))
    (update,) = shapes.programs("rl", {})
    memory = update.lower().compile().memory_analysis()
    assert memory.alias_size_in_bytes >= device_bytes(shapes.state)
    assert memory.temp_size_in_bytes / device_bytes(shapes.state.policy.params) < most


# ---- the account ----------------------------------------------------------------------------------------------------


def resolved(**settings):
    """Return a recipe of a phase of GRPO over one device."""
    sampler = SamplerConfig(**{"slots": 8, "max_context": 128, "prefill_chunk": 64, **settings})
    phase = Phase(name="rl", algorithm=Grpo(), steps=1, prompts_per_step=2, group_size=4, row_len=128)
    recipe = Recipe(model=SHAPE, env=Countdown(), max_answer_tok=32, sampler=sampler, phases=[phase])
    return resolve(recipe, jax.devices()[:1])


def test_the_account_counts_what_is_there():
    found = memory.account(resolved())
    update = next(use for use in found.uses if use.program.name == "rl/update")
    params = 4 * Model(SHAPE).num_params()
    assert update.sizes["parameters"] == update.sizes["gradients"] == params
    assert params * 2 <= update.sizes["optimizer"] < params * 2 + 100  # and its counters
    decode = next(use for use in found.uses if use.program.name == "decode")
    assert decode.sizes["sampler weights"] == params
    pool = 4 * 9 * 8 * (128 // 16 + 1) * 16 * 2 * 2 * 16  # layers, slots, pages, tokens of each, keys and values, heads
    assert pool <= decode.sizes["KV pool"] < 1.05 * pool
    assert update.activations > 0 and update.temporaries is None
    assert found.fits and found.by_compiler() is found, "small runs are not compiled"
    found.check()


def test_an_update_of_a_synchronous_phase_does_not_count_the_sampler():
    """It sleeps meanwhile; if answers are sampled meanwhile, or its pages must stay, it does not."""
    sampler = {"sampler weights", "KV pool"}

    def with_update(found):
        found = {use.program.name: use.sizes.keys() for use in memory.account(found).uses}
        assert sampler <= found["decode"] and "optimizer" in found["decode"]
        return found["rl/update"] & sampler, found["publish"] & sampler

    assert with_update(resolved()) == (set(), {"sampler weights"})
    ahead = resolved()
    phase = dataclasses.replace(ahead.recipe.phases[0], async_ratio=1.0)
    ahead = dataclasses.replace(ahead, recipe=dataclasses.replace(ahead.recipe, phases=(phase,)))
    assert with_update(ahead) == with_update(resolved(reuse_stale=True)) == (sampler, sampler)


def test_the_compiler_is_asked_where_it_can_matter():
    found = memory.account(resolved())
    needed = max(use.total for use in found.uses)
    asked = dataclasses.replace(found, room=memory.DeviceMemory(5 * needed, "of a test")).by_compiler()
    for before, use in zip(found.uses, asked.uses, strict=True):
        assert use.temporaries is not None and use.temporaries >= 0
        assert use.total >= 0.95 * (before.total - before.sizes.get("gradients", 0.0))  # unused arguments are left out
    assert all(f"{use.program.name}: " in "\n".join(asked.lines()) for use in asked.uses)
    none = dataclasses.replace(asked, room=memory.DeviceMemory(asked.largest.total - 1, "of a test"))
    with pytest.raises(ConfigError, match="there is .*of a test") as refused:
        none.check()
    assert refused.value.setting and " = " in refused.value.remedy


def test_pages_that_cannot_fit_are_refused_with_as_many_as_do():
    found = memory.account(resolved(pages=10**12))
    with pytest.raises(ConfigError, match="KV pool") as refused:
        found.check()
    assert refused.value.setting == "SamplerConfig.pages"
    pages = int(re.match(r"SamplerConfig.pages = (\d+): as many as fit", refused.value.remedy)[1])
    memory.account(resolved(pages=pages)).check()


def test_a_host_has_what_its_control_group_leaves(tmp_path, monkeypatch):
    free, total = memory.host_memory()
    assert 0 < free <= total
    own = tmp_path.joinpath(*Path("/proc/self/cgroup").read_text().split("0::")[-1].split()[0].strip("/").split("/"))
    own.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    (own / "memory.max").write_text("1000\n")
    (own / "memory.current").write_text("700\n")
    (own / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory.host_memory() == (400.0, 1000.0)
    (own / "memory.max").write_text("max\n")
    assert memory.host_memory()[1] == total


@pytest.mark.parametrize("wrapped", [False, True], ids=["as it comes", "as the sampler says it"])
def test_memory_that_runs_out_is_an_error_with_the_account(wrapped):
    found = memory.account(resolved())
    inside = boundary(SamplerError, "a call") if wrapped else contextlib.nullcontext()
    said = "(?s)memory ran out: .*of one device: parameters"
    with pytest.raises(OutOfMemory, match=said) as error, memory.explained(found), inside:
        jnp.zeros(1 << 46, jnp.float32).block_until_ready()
    assert error.value.exit_code == 8 and "fix:" in str(error.value)
    with pytest.raises(ValueError, match="something else"), memory.explained(found):
        raise ValueError("something else")
