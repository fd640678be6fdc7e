"""The sampler's programs compiled ahead of time for three TPU generations, without a TPU: 2 layers with Qwen3-8B's heads.

In a process of their own: libtpu is loaded there and nowhere else.
"""

import importlib.util
import re

import pytest

from rolljax.aot import chips
from rolljax.errors import ConfigError

from .plan_run import needs_libtpu, plan

TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
SMALL = {
    "Qwen3Config.num_layers": 2,
    "Qwen3Config.vocab_size": 8192,
    "Qwen3Config.hidden_size": 512,
    "Qwen3Config.ffn_size": 1024,
    "SamplerConfig.slots": 32,
    "SamplerConfig.prefill_chunk": 256,
    "SamplerConfig.speculate": 7,
}
FILLS = {"v5e:2x4": 11008, "v5p:2x2x2": 75776, "v6e:2x4": 23552}
"""Pages of 64 tokens: with 36 layers they fill the chips."""


@pytest.fixture(scope="module", params=TOPOLOGIES)
def compiled(request, tmp_path_factory):
    """Return the compiler's report by program."""
    settings = SMALL | {"SamplerConfig.pages": FILLS[request.param]}
    only = ("decode", "verify", "prefill", "insert", "publish")
    done, found = plan("qwen3_8b_grpo_v5e_8", request.param, settings, only, tmp_path_factory.mktemp("plan"))
    assert done.returncode == 0, done.stderr
    return {p["program"]: p for p in found["programs"]}


@pytest.mark.sampled(1)
@needs_libtpu
def test_the_programs_fit_a_tpu_and_update_the_pool_in_place(compiled):
    for name in ("decode", "verify", "prefill"):
        assert compiled[name]["kernels"], f"attention of {name} by the Pallas kernel"
    for name in ("decode", "verify", "prefill", "insert"):
        memory = compiled[name]["memory"]
        pool = memory["own"]["KV pool"]
        most = 0.02 if name == "verify" else 0.01  # logits of every guess
        assert memory["aliased"] > 0.999 * pool and memory["temporaries"] < most * pool, name
    for program in compiled.values():
        assert program["memory"]["total"] < 0.9 * program["memory"]["usable"], program["program"]


@pytest.mark.slow
@needs_libtpu
def test_low_bits_halve_what_a_decode_step_reads(tmp_path):
    shape = {"Qwen3Config.num_layers": 4, "Qwen3Config.vocab_size": 1024, "SamplerConfig.slots": 32}
    bits = {"none": {}, "low": {"SamplerConfig.quantization": "'int8'", "SamplerConfig.kv_dtype": "'fp8'"}}
    found = {}
    for name, settings in bits.items():
        done, report = plan("qwen3_8b_grpo_v5e_8", "v5e:2x4", shape | settings, ("decode",), tmp_path / name)
        assert done.returncode == 0, done.stderr
        found[name] = report["programs"][0]
    own = {name: one["memory"]["own"] for name, one in found.items()}
    assert own["low"]["KV pool"] < 0.51 * own["none"]["KV pool"]
    assert found["low"]["time"]["hbm_s"] < 0.55 * found["none"]["time"]["hbm_s"]


@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_is_refused_with_the_remedy(tmp_path):
    settings = SMALL | {"SamplerConfig.pages": 1_000_000}
    done, found = plan("qwen3_8b_grpo_v5e_8", "v5e:2x4", settings, ("decode",), tmp_path)
    assert done.returncode == 1
    pages = int(re.search(r"try SamplerConfig.pages = (\d+)", done.stdout)[1])
    assert "decode does not fit" in done.stdout and 0 < pages < 500_000
    assert found["programs"][0]["refused"] and not found["fits"]
    done, found = plan(
        "qwen3_8b_grpo_v5e_8", "v5e:2x4", settings | {"SamplerConfig.pages": pages}, ("decode",), tmp_path
    )
    assert done.returncode == 0 and found["fits"], done.stdout


def test_without_libtpu_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        chips.devices("v5e:2x4")
    assert "pip install 'rolljax[tpu]'" in error.value.remedy


def test_an_unknown_topology_is_refused():
    with pytest.raises(ConfigError, match="names no TPU known here"):
        chips.devices("v9:2x2")
