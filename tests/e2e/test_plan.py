"""`python -m rolljax.plan` on shipped configs, by the real TPU compiler, each in a process of its own.

A few of them at full size; docs/scaling.md lists the results of all.
"""

import functools
import json

import jax
import pytest

from rolljax.config import loader
from rolljax.recipe import Recipe

from .plan_run import ROOT, needs_libtpu, plan

CONFIGS = sorted(p.stem for p in (ROOT / "configs" / "pods").glob("*_grpo_v*.gin"))
UPDATES = {
    "qwen3_0p6b_grpo_v5e_1": ("v5e:1x1", 0.35),
    "qwen3_8b_grpo_v5p_64": ("v5p:4x4x4", 0.60),
    "qwen3_32b_grpo_v5p_64": ("v5p:4x4x4", 0.45),
}
"""Where they run, and the least MFU that is expected of them."""


def test_every_config_is_short_and_says_its_command():
    assert len(CONFIGS) >= 9
    for name in CONFIGS:
        text = (ROOT / "configs" / "pods" / f"{name}.gin").read_text()
        assert len(text.splitlines()) <= 30
        assert f"#   python -m rolljax.plan --gin {name} --topology v" in text
        recipe = loader.load([name], [], root=Recipe).value
        assert recipe.phases[0].row_len >= 4096


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    done, found = plan("llama3p1_8b_grpo_v6e_8", "v6e:2x4", {}, ("decode", "publish"), tmp_path_factory.mktemp("plan"))
    assert done.returncode == 0, done.stderr
    return done, found, {p["program"]: p for p in found["programs"]}


@pytest.mark.slow
@needs_libtpu
def test_the_sampler_fits_next_to_the_trainer(sampler):
    _, found, by_name = sampler
    assert found["fits"] and found["mesh"] == {"fsdp": 8} and found["sampler_mesh"] == {"tensor": 8}
    decode = by_name["decode"]["memory"]
    params = found["parameters"]
    # float32 masters, momentum in bfloat16, second moments in float32, and the sampler's copy, over 8 chips
    gib = 2**30
    assert decode["beside"]["parameters"] == pytest.approx(4 * params / 8 / gib, rel=0.01)
    assert decode["beside"]["optimizer"] == pytest.approx(6 * params / 8 / gib, rel=0.01)
    assert decode["own"]["sampler weights"] == pytest.approx(2 * params / 8 / gib, rel=0.01)
    # 32 layers, keys and values of 1 head a chip, 128 numbers of bfloat16; pages of 64 tokens
    assert decode["own"]["KV pool"] == pytest.approx(32 * 2 * 1 * 128 * 2 * 2048 * 64 / gib, rel=0.01)
    assert decode["total"] == pytest.approx(decode["peak"] + sum(decode["beside"].values()))


@pytest.mark.slow
@needs_libtpu
def test_a_decode_step_is_bound_by_memory_and_publishing_by_links(sampler):
    _, found, by_name = sampler
    decode, publish = by_name["decode"]["time"], by_name["publish"]["time"]
    weights = by_name["decode"]["memory"]["own"]["sampler weights"] * 2**30
    steps = 8
    assert decode["hbm_s"] > 10 * decode["compute_s"]
    assert decode["hbm_s"] * found["chip"]["hbm_bytes_s"] > 0.9 * steps * weights, "weights are read at every step"
    gathered = sum(c["sent_gib"] for c in by_name["publish"]["collectives"] if c["axes"] == ["fsdp"])
    # each chip has an eighth of every map, and is sent the rest, of which it keeps another eighth
    assert gathered * 2**30 == pytest.approx(8 * weights * 7 / 8, rel=0.1)
    assert publish["step_s"] > 0


@pytest.mark.slow
@needs_libtpu
def test_the_report_says_what_it_assumes(sampler):
    done, _, _ = sampler
    assert "assumed of a device: 918 TFLOP/s bf16, 1600 GB/s HBM" in done.stdout
    assert "docs.cloud.google.com/tpu/docs/v6e" in done.stdout
    assert "decode: compiled in" in done.stderr


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Return a function that plans the update of a config, compiled once."""

    @functools.cache
    def update(name):
        done, found = plan(name, UPDATES[name][0], {}, ("update",), tmp_path_factory.mktemp("plan"))
        assert done.returncode == 0, done.stderr
        (program,) = found["programs"]
        return found, program

    return update


@pytest.mark.sweep
@needs_libtpu
@pytest.mark.parametrize("name", UPDATES)
def test_updates_fit_and_use_their_chips(updates, name):
    """At full size. Parameters, gradients and optimizer state are what the mesh leaves of them to each device."""
    found, program = updates(name)
    memory = program["memory"]
    assert program["fits"] and memory["total"] < 0.9 * memory["usable"]
    assert program["mfu"] > UPDATES[name][1]
    each = 4 * found["parameters"] / found["mesh"].get("fsdp", 1) / 2**30
    assert memory["own"]["parameters"] == pytest.approx(each, rel=0.01)
    assert memory["own"]["gradients"] == pytest.approx(each, rel=0.01)
    assert memory["own"]["optimizer"] == pytest.approx((1.5 if "v5e" in name else 2) * each, rel=0.01)


@pytest.mark.sweep
@needs_libtpu
def test_an_updates_flops_are_the_formulas(updates):
    """256 micro-batches of a row of 4096. Layers run forward, again, and twice that backward; the last matmul of a layer
    is not run again. The head's logits are computed twice. Attention by kernels, counted by their own formula."""
    _, program = updates("qwen3_0p6b_grpo_v5e_1")
    tokens, layers = 256 * 4096, 28
    layer = 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072
    head = 151936 * 1024
    assert program["tokens"] == tokens
    expected = 2 * tokens * (layers * (4 * layer - 1024 * 3072) + 4 * head)
    assert program["flops"] - program["kernel_flops"] == pytest.approx(expected, rel=0.02)
    # scores and mixture forward, twice; 7 products backward; blocks of 512 up to the diagonal
    pairs = 4096 * 4096 * (8 + 1) / (2 * 8)
    assert program["kernel_flops"] == pytest.approx(256 * layers * (2 + 2 + 7) * 2 * pairs * 16 * 128, rel=0.02)


@pytest.mark.sweep
@needs_libtpu
def test_an_updates_model_flops_are_six_per_parameter_and_token(updates):
    _, program = updates("qwen3_0p6b_grpo_v5e_1")
    weights = 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072) + 151936 * 1024
    attention = 3 * 4 * 28 * 16 * 128 * 2048
    assert program["model_flops"] == 256 * 4096 * (6 * weights + attention)
    assert program["mfu"] == pytest.approx(program["model_flops"] / 197e12 / program["time"]["step_s"])


def test_a_step_is_its_programs_in_turn():
    """512 answers of 3072 tokens: rollout, two updates, publish. Nothing is said of a step of which a part is missing."""
    from rolljax.aot.report import Memory, ProgramReport, Time
    from rolljax.plan import step_times
    from rolljax.run.preflight import resolve

    recipe = loader.load(["qwen3_0p6b_grpo_v5e_1"], [], root=Recipe).value
    memory = Memory({}, 0.0, {}, 0.0, 0.0, 1.0)
    seconds = {"rl/update": 60.0, "decode": 0.5, "publish": 0.25}
    reports = [ProgramReport(name, 0.0, memory, time=Time(0.0, 0.0, s, 0.0, 0.0)) for name, s in seconds.items()]
    found = resolve(recipe, jax.devices()[:1])
    waves, dispatches = 512 // 16, 3072 // 8
    want = {"rollout_s": waves * dispatches * 0.5, "train_s": 120.0, "publish_s": 0.25}
    assert step_times(found, reports) == {"rl": want}
    assert step_times(found, reports[:2]) == {}


@pytest.mark.parametrize("parts", ["whole", "without a publish"])
def test_a_plan_feeds_a_simulation(tmp_path, capsys, parts):
    """The step of the simulation is that of the plan: the same programs, every answer of full length."""
    from rolljax import plan, simulate
    from rolljax.aot.chips import CHIPS
    from rolljax.aot.report import Memory, ProgramReport, Time
    from rolljax.run.preflight import resolve

    own = ["rl/Phase.prompts_per_step = 4", "rl/Phase.steps = 6"]
    recipe = loader.load(["quickstart"], own, root=Recipe).value
    memory = Memory({}, 0.0, {}, 0.0, 0.0, 1.0)
    seconds = {
        "rl/update": 3.0,
        "rl/logprobs": 0.5,
        "decode": 0.5,
        "prefill": 0.0,
        "publish": 0.25,
        "warm_start/update": 1.0,
    }
    reports = [
        ProgramReport(name, 0.0, memory, time=Time(0.0, 0.0, s, 0.0, 0.0), tokens=10)
        for name, s in seconds.items()
        if parts == "whole" or name != "publish"
    ]
    found = plan.Plan(resolve(recipe, jax.devices()[:1]), CHIPS["v5e"], "v5e:1x1", None, reports)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json(found)))
    more = [word for setting in own for word in ("--set", setting)]
    code = simulate.main(
        ["--gin", "quickstart", *more, "--timings", str(tmp_path / "plan.json"), "--out", str(tmp_path)]
    )
    if parts != "whole":
        assert code == 2 and "without the programs of a step" in capsys.readouterr().err
        return
    assert code == 0
    simulated = json.loads((tmp_path / "simulation.json").read_text())
    assert simulated["step_s"] == pytest.approx(plan.to_json(found)["step_s"]["rl"], rel=0.01)


@pytest.fixture
def two_slices(monkeypatch):
    """Replace two slices of TPUs by devices of this machine: 6 and 2."""
    from rolljax.aot import chips
    from rolljax.trainer import publish

    found = {"v5p:6": jax.devices()[:6], "v5p:2": jax.devices()[6:], "v5e:2": jax.devices()[6:]}
    monkeypatch.setattr(chips, "devices", lambda topology: list(found[topology]))
    monkeypatch.setattr(publish, "lies_apart", lambda mesh: False)


@pytest.mark.parametrize(
    ("settings", "slices", "says"),
    [
        (["Split.trainer = 6", "Split.sampler = 2"], ("v5p:6", "v5e:2"), "of another chip"),
        (["Split.trainer = 4", "Split.sampler = 4"], ("v5p:6", "v5p:2"), "have 2 and 6 chips"),
        (["Recipe.placement = @Colocated()"], ("v5p:6", "v5p:2"), "can have no effect"),
    ],
    ids=str,
)
def test_a_slice_that_is_not_the_samplers_share_is_refused(two_slices, settings, slices, says):
    from rolljax.errors import ConfigError
    from rolljax.plan import devices

    recipe = loader.load(["qwen3_32b_split_v5p_64"], settings, root=Recipe).value
    with pytest.raises(ConfigError, match=rf"(?s)--sampler_topology.*{says}"):
        devices(recipe, *slices)


def test_on_separate_devices_trainer_and_sampler_share_no_memory(two_slices):
    """On devices of this machine: no weights, nothing compiled. The memory next to a program, and the transfers."""
    from rolljax.aot.chips import CHIPS
    from rolljax.plan import Plan, devices
    from rolljax.run.memory import programs
    from rolljax.run.preflight import resolve

    small = [
        "Split.trainer = 6",
        "Split.sampler = 2",
        "MeshSpec.data = 3",
        "MeshSpec.fsdp = 2",
        "SamplerConfig.tensor = 2",
    ]
    small += ["rl/Phase.micro_rows = 6", "Recipe.attention = 'xla'", "Qwen3Config.num_layers = 2"]
    recipe = loader.load(["qwen3_32b_split_v5p_64"], small, root=Recipe).value
    found = resolve(recipe, devices(recipe, "v5p:6", "v5p:2"))
    by_name = {p.name: p for p in programs(found)}
    assert list(by_name) == ["rl/update", "decode", "prefill", "insert", "cast", "publish"]
    assert by_name["rl/update"].beside == {} and set(by_name["decode"].beside) == {"arriving weights"}
    assert set(by_name["cast"].beside) == {"optimizer"} and set(by_name["publish"].beside) == {"KV pool"}
    weights = by_name["decode"].own["sampler weights"]
    arriving = by_name["publish"].own["arriving weights"]
    assert (
        arriving == by_name["cast"].own["leaving weights"] == pytest.approx(weights, rel=1e-3)
    )  # halves, otherwise cut
    way = Plan(found, CHIPS["v5p"], "v5p:6", "v5p:2", []).transfer
    assert (way.parts, way.link, way.gib) == (2, "DCN", 2 * arriving / 2**30)
    assert way.seconds == arriving / 6.25e9
    assert Plan(found, CHIPS["v5p"], "v5p:8", None, []).transfer.seconds == arriving / 100e9


def test_a_step_of_two_sides_at_once_is_the_longer_one(two_slices):
    from rolljax.aot.chips import CHIPS
    from rolljax.aot.report import Memory, ProgramReport, Time
    from rolljax.plan import Plan, devices, step_times
    from rolljax.run.preflight import resolve

    small = [
        "Split.trainer = 6",
        "Split.sampler = 2",
        "MeshSpec.data = 6",
        "MeshSpec.fsdp = 1",
        "SamplerConfig.tensor = 2",
    ]
    small += ["rl/Phase.micro_rows = 6", "Recipe.attention = 'xla'"]

    def plan(*more):
        recipe = loader.load(["qwen3_32b_split_v5p_64"], [*small, *more], root=Recipe).value
        return Plan(resolve(recipe, devices(recipe, "v5p:6", "v5p:2")), CHIPS["v5p"], "v5p:6", "v5p:2", [])

    times = {"rollout_s": 5.0, "train_s": 4.0, "publish_s": 0.5}
    assert plan().step_s("rl", times) == 5.0
    assert plan().step_s("rl", times | {"train_s": 6.0}) == 6.5
    assert plan("rl/Phase.async_ratio = 0.0").step_s("rl", times) == 9.5
    memory, seconds = (
        Memory({}, 0.0, {}, 0.0, 0.0, 1.0),
        {"rl/update": 60.0, "decode": 0.5, "cast": 1.0, "publish": 0.25},
    )
    reports = [ProgramReport(name, 0.0, memory, time=Time(0.0, 0.0, s, 0.0, 0.0)) for name, s in seconds.items()]
    found = plan("SamplerConfig.slots = 1024")
    (parts,) = step_times(found.resolved, reports, found.moves_s).values()
    # 1024 slots hold the answers of two steps; every one of 3072 tokens
    assert parts["rollout_s"] == 3072 // 8 * 0.5 / 2
    assert parts["publish_s"] == 1.25 + found.transfer.seconds


SMALL_REMOTE = [
    "MeshSpec.data = 3",
    "MeshSpec.fsdp = 2",
    "rl/Phase.micro_rows = 6",
    "Recipe.attention = 'xla'",
    "Qwen3Config.num_layers = 2",
]


@pytest.mark.parametrize("tensor", [1, 2])
def test_of_samplers_in_other_processes_both_sides_are_planned(two_slices, tensor):
    """On devices of this machine: no weights, nothing compiled. One part of the weights, or two that both fetch."""
    from rolljax.aot.chips import CHIPS
    from rolljax.plan import Plan, devices, remote_sampler
    from rolljax.run.memory import programs, sampler_programs
    from rolljax.run.preflight import resolve

    small = [*SMALL_REMOTE, f"SamplerConfig.tensor = {tensor}"]
    recipe = loader.load(["qwen3_32b_remote_v5p_64_v5e_32"], small, root=Recipe).value
    found, sampler = resolve(recipe, devices(recipe, "v5p:6", "v5e:2")), remote_sampler(recipe, "v5e:2")
    update, cast = programs(found)
    assert set(update.beside) == {"leaving weights"} and set(cast.beside) == {"optimizer"}
    assert update.beside["leaving weights"] == cast.own["leaving weights"]
    there = {p.name: p for p in sampler_programs(sampler)}
    assert list(there) == ["decode", "prefill", "insert", *(["publish"] if tensor == 1 else [])]
    weights, arriving = there["decode"].own["sampler weights"], there["decode"].beside["arriving weights"]
    assert arriving == pytest.approx(weights if tensor == 2 else weights / 2, rel=1e-3)
    plan = Plan(found, CHIPS["v5p"], "v5p:6", "v5e:2", [], sampler)
    full = plan.push.gib * 2**30
    assert full == pytest.approx(weights * tensor, rel=1e-3) and plan.transfer is None
    assert plan.push.write_s == full / (6 * 6.25e9) and plan.push.read_s == full / (2 * 3.125e9)
    assert plan.push.delta_gib / plan.push.gib == pytest.approx(0.045, rel=0.01), "three bytes of a change"
    assert plan.side("decode") is sampler and plan.side("cast") is plan.side("rl/update") is found


def test_a_plan_of_remote_samplers_needs_their_slice(two_slices):
    from rolljax.errors import ConfigError
    from rolljax.plan import devices

    recipe = loader.load(["qwen3_32b_remote_v5p_64_v5e_32"], [], root=Recipe).value
    with pytest.raises(ConfigError, match="(?s)--sampler_topology.*is needed"):
        devices(recipe, "v5p:6", None)


@pytest.mark.slow
@needs_libtpu
def test_samplers_of_32b_fit_slices_of_another_chip(tmp_path):
    """64 chips of v5p train; in each sampler 32 chips of v5e hold the weights, a piece of the next, and the pages."""
    flags, only = ("--sampler_topology", "v5e:4x8"), ("cast", "decode", "publish")
    done, found = plan("qwen3_32b_remote_v5p_64_v5e_32", "v5p:4x4x4", {}, only, tmp_path, flags=flags)
    assert done.returncode == 0, done.stderr
    assert found["fits"] and found["mesh"] == {"data": 2, "fsdp": 32}
    assert found["sampler_mesh"] == {"data": 4, "tensor": 8}
    cast, decode, publish = found["programs"]
    weights = 2 * found["parameters"]
    assert cast["memory"]["own"]["leaving weights"] * 2**30 == pytest.approx(weights / 64, rel=0.01)
    assert decode["memory"]["own"]["sampler weights"] * 2**30 == pytest.approx(weights / 8, rel=0.01)
    assert decode["memory"]["beside"]["arriving weights"] * 2**30 == pytest.approx(weights / 32, rel=0.01)
    assert cast["memory"]["usable"] > 95 and publish["memory"]["usable"] < 16
    assert publish["memory"]["aliased"] > 0.9 * publish["memory"]["own"]["sampler weights"]
    assert found["push"]["gib"] * 2**30 == pytest.approx(weights, rel=0.01)
    assert "a push writes 61.03 GiB: 0.16 s, then 0.66 s to be read by a sampler" in done.stdout


@pytest.mark.slow
@needs_libtpu
def test_weights_of_32b_reach_a_slice_of_its_own(tmp_path):
    """64 chips train, 32 of another slice sample. In 32 parts nothing is gathered before it travels."""
    flags = ("--sampler_topology", "v5p:2x4x4")
    done, found = plan("qwen3_32b_split_v5p_64", "v5p:4x4x4", {}, ("cast", "publish"), tmp_path, flags=flags)
    assert done.returncode == 0, done.stderr
    assert found["fits"] and found["mesh"] == {"data": 2, "fsdp": 32}
    assert found["sampler_mesh"] == {"data": 8, "tensor": 4}
    cast, publish = found["programs"]
    assert cast["collectives"] == []
    weights = 2 * found["parameters"]
    way = found["transfer"]
    assert (way["parts"], way["link"]) == (32, "DCN")
    assert way["gib"] * 2**30 == pytest.approx(weights, rel=0.01)
    assert way["seconds"] == pytest.approx(weights / 32 / 6.25e9, rel=0.01)
    own = publish["memory"]["own"]
    assert own["sampler weights"] * 2**30 == pytest.approx(weights / 4, rel=0.01)
    assert own["arriving weights"] * 2**30 == pytest.approx(weights / 32, rel=0.01)
    assert publish["memory"]["aliased"] > 0.9 * own["sampler weights"] and publish["memory"]["temporaries"] < 3
    assert "a publish moves 61" in done.stdout


def test_of_a_folder_only_its_config_is_read(tmp_path):
    """Memory from shapes alone, on devices of this machine: no weights, no tokenizer, nothing compiled."""
    from rolljax.run.memory import programs
    from rolljax.run.preflight import resolve

    shape = {
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **shape}))
    settings = [f'Recipe.model = "{tmp_path}"']
    recipe = loader.load(["qwen3_0p6b_grpo_v5e_1"], settings, root=Recipe).value
    found = {p.name: p for p in programs(resolve(recipe, jax.devices()[:1]))}
    assert list(found) == ["rl/update", "decode", "prefill", "insert", "publish"]
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 192 + 2 * 64 + 2 * 16
    assert found["publish"].own["parameters"] == 4 * (2 * layer + 512 * 64 + 64)
    assert found["rl/update"].trips == 256 and found["rl/update"].tokens == 256 * 4096


def test_without_the_compiler_the_error_names_the_extra(monkeypatch, capsys):
    import importlib.util

    from rolljax import plan as verb

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert verb.main(["--gin", "qwen3_0p6b_grpo_v5e_1", "--topology", "v5e:1x1"]) == 2
    assert "pip install 'rolljax[tpu]'" in capsys.readouterr().err
