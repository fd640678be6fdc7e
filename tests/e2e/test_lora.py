"""A run that trains adapters: its files, how it resumes, and that its folders compute the same in `transformers`
and PEFT."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from rolljax import cli, serve
from rolljax.commands.export import export as export_run
from rolljax.commands.export import main as export
from rolljax.commands.train import main as train
from rolljax.errors import ConfigError
from rolljax.model import hf
from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.lora import Adapted
from rolljax.run.preflight import check as check_run
from rolljax.run.trained_weights import trained_params
from rolljax.storage.layout import RESOLVED
from rolljax.trainer.state import fingerprint

from .conftest import ROOT, rows, summary

pytestmark = pytest.mark.slow

RANK = 4
SMALL = {
    "Lora.rank": RANK,
    "ReasoningGym.config": "{'min_word_len': 3, 'max_word_len': 4}",
    "ReasoningGym.partial_credit": True,
    "SamplerConfig.slots": 64,
    "SamplerConfig.prefill_chunk": 256,
    "SamplerConfig.max_context": 64,
    "Phase.row_len": 64,
    "warm_start/Phase.steps": 12,
    "warm_start/Phase.prompts_per_step": 32,
    "warm_start/Phase.eval_every": 0,
    "warm_start/Phase.stop_at_reward": None,
    "rl/Phase.steps": 4,
    "rl/Phase.prompts_per_step": 8,
    "rl/Phase.group_size": 4,
    "rl/Phase.eval_every": 0,
    "Grpo.kl": "@KlLoss()",
    "KlLoss.coef": 0.05,
    "Evaluation.tasks": 8,
    "Recipe.save_every": 7,
    "MeshSpec.data": 1,
}


def settings_of(base, **changes):
    settings = SMALL | {"Recipe.model": repr(str(base))} | changes
    return [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]


@pytest.fixture(scope="module")
def base(tmp_path_factory, chat):
    """Save random weights as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    model = Model(Qwen3Config(init_std=0.1, tie_embeddings=False))
    hf.save(folder, model, jax.jit(lambda: model.init(0))(), chat.tokenizer)
    return folder


@pytest.fixture(scope="module")
def arguments(base):
    return ["--gin", str(ROOT / "configs" / "lora.gin"), *settings_of(base)]


@pytest.fixture(scope="module")
def trained(arguments, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    assert train([*arguments, "--run_dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture(scope="module")
def plan(trained):
    return check_run(cli.load_recipe([str(trained / "config.gin")], []).value)


@pytest.fixture(scope="module")
def whole(plan, trained):
    return trained_params(plan, trained)[0]


IDS = np.random.default_rng(0).integers(0, 256, (2, 24))


@pytest.fixture(scope="module")
def ours(plan, whole):
    """Compute logits with the run's own function and the adapters added to the base."""

    @jax.jit
    def logits(whole):
        ids, segments = jnp.array(IDS), jnp.ones(IDS.shape, jnp.int32)
        positions = jnp.tile(jnp.arange(IDS.shape[1]), (len(IDS), 1))
        decoder = plan.model.bind(whole)
        return decoder.logits(decoder(ids, positions, packed(segments, 0 * segments, positions)).hidden)

    found, off = logits(whole), logits(Adapted(whole.base, None))
    assert jnp.abs(found - off).max() > 1  # adapters have learned
    return np.asarray(found)


def torch_logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


def test_adapters_learn_and_are_handed_on(trained, plan, whole):
    run = rows(trained)
    assert [r["phase"] for r in run] == ["warm_start"] * 12 + ["rl"] * 4
    assert run[11]["loss/total"] < 0.8 * run[0]["loss/total"]
    learned = [row for row in run[12:] if row["groups/trained_n"]]
    assert len(learned) > 1
    for row in learned:
        assert row["mismatch/abs_max_nat"] <= 1e-5 and row["stale/max_ver"] == 0
        assert row["kl/ref_nat"] > 0
    # the base is the folder's to the bit, after all updates
    here = SingleDeviceSharding(jax.devices()[0])
    untouched = hf.load(plan.recipe.model, plan.model, jax.tree.map(lambda _: here, whole.base))
    assert fingerprint(whole.base) == fingerprint(untouched)


def test_checkpoints_hold_adapters_only(trained, base):
    saved = sum(f.stat().st_size for f in (trained / "ckpt").rglob("*") if f.is_file())
    kept = sum(f.stat().st_size for f in (trained / "phase_start").rglob("*") if f.is_file())
    weights = (base / "model.safetensors").stat().st_size
    adapters = 4 * RANK * 2 * (64 * 4 + 64 + 32 + 32 + 64 + 3 * (64 + 192))
    assert adapters < kept < adapters + 60_000 < weights
    # under load TensorStore writes a part of its index more than once
    assert 3 * adapters < saved < 2 * (3 * adapters + 90_000) < weights


def test_a_killed_run_resumes_to_the_same_bits(trained, arguments, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    *_, after_14, finished = sorted(p for p in (run_dir / "ckpt").iterdir() if p.is_dir())
    assert after_14.name.endswith("_step_14")  # two steps into the second phase
    shutil.rmtree(finished)
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "hf")
    assert train([*arguments, "--run_dir", str(run_dir)]) == 0
    names = ("step", "loss/total", "optim/grad_norm", "reward/mean")
    assert [[r.get(n) for n in names] for r in rows(run_dir)] == [[r.get(n) for n in names] for r in rows(trained)]
    assert summary(run_dir)["state_sha256"] == summary(trained)["state_sha256"]
    assert (run_dir / "hf" / "model.safetensors").read_bytes() == (trained / "hf" / "model.safetensors").read_bytes()


def test_the_merged_folder_computes_the_same(trained, ours, tmp_path):
    assert export(["--run", str(trained), "--to", str(tmp_path / "hf")]) == 0
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    assert {k: v.tobytes() for k, v in load_file(trained / "hf" / "model.safetensors").items()} == {
        k: v.tobytes() for k, v in merged.items()
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    np.testing.assert_allclose(torch_logits(model), ours, atol=1e-5 * np.abs(ours).max())


def test_peft_reads_the_adapter_folder(trained, base, ours, tmp_path):
    from peft import PeftModel

    assert export(["--run", str(trained), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == [f"{m}_proj" for m in ("down", "gate", "k", "o", "q", "up", "v")]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = torch_logits(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    np.testing.assert_allclose(torch_logits(adapted), ours, atol=1e-4)
    assert np.abs(plain - ours).max() > 1


def test_verbs_take_such_a_run(trained, arguments, capsys):
    engine, weights, version, _ = serve.load(run=trained)
    assert version == 16 and engine.model.lora is None
    merged = load_file(trained / "hf" / "model.safetensors")
    np.testing.assert_array_equal(weights["layers"][1]["down"].T, merged["model.layers.1.mlp.down_proj.weight"])
    assert train([*arguments, "--dry_run"]) == 0
    assert "rank 4 on q, k, v, o, gate, up, down; base weights in float32" in capsys.readouterr().out


def test_adapter_folders_need_adapters_and_a_folder(trained, tmp_path):
    argv = ["--run", str(trained), "--to", str(tmp_path / "c"), "--adapter", "--dtype", "bfloat16"]
    assert export(argv) == 2 and not (tmp_path / "c").exists()
    with pytest.raises(ConfigError, match="--adapter"):
        export_run(tmp_path / "a", model=trained / "hf", adapter=True)
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    resolved = json.loads((run / RESOLVED).read_text())
    random = {name: value for name, value in resolved.items() if name.partition(".")[0] != "model"}
    (run / RESOLVED).write_text(json.dumps(random))
    with pytest.raises(ConfigError, match="random base weights"):
        export_run(tmp_path / "b", run=run, adapter=True)
    full = {name: value for name, value in random.items() if name.partition(".")[0] != "lora"}
    (run / RESOLVED).write_text(json.dumps(full))
    with pytest.raises(ConfigError, match="this run has no adapters"):
        export_run(tmp_path / "b", run=run, adapter=True)
    assert not (tmp_path / "b").exists()
