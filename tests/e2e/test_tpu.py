"""The sampler's programs compiled ahead of time for three TPU generations, without a TPU: 2 layers with Qwen3-8B's heads.

In a process of their own: libtpu is loaded there and nowhere else.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolljax.errors import ConfigError
from rolljax.sampler import aot

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'rolljax[tpu]'"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(topology, program) -> what the compiler says."""
    out = tmp_path_factory.mktemp("aot") / "programs.json"
    command = [sys.executable, ROOT / "benchmarks" / "aot_sampler.py", "--small", "--json", out]
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return {(p["topology"], p["program"]): aot.Program(**p) for p in json.loads(out.read_text())}


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_programs_fit_a_tpu_and_update_the_pool_in_place(compiled, topology):
    decode, prefill, insert, sync = (compiled[topology, p] for p in ("decode", "prefill", "insert", "sync"))
    assert decode.kernels and prefill.kernels, "attention by the Pallas kernel"
    for program in (decode, prefill, insert):
        assert program.pool_aliased and program.temp_share < 0.01, program
    for program in (decode, prefill, insert, sync):
        assert program.peak_share < 0.9, program


@needs_libtpu
def test_what_does_not_fit_is_refused_with_the_remedy():
    command = [sys.executable, ROOT / "benchmarks" / "aot_sampler.py", "--small", "--topology", "v5e:2x4"]
    command += ["--pages", "1000000"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 1
    assert "too large for v5e:2x4" in done.stderr and "fewer pages" in done.stderr


def test_a_machine_without_libtpu_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        aot.devices("v5e:2x4")
    assert "pip install 'rolljax[tpu]'" in error.value.remedy


def test_an_unknown_topology_is_refused():
    with pytest.raises(ConfigError, match="names no TPU known here"):
        aot.devices("v9:2x2")
