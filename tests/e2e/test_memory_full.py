"""A model of real size: Qwen3-0.6B's shape with random weights trains a step with the default number of pages."""

import os
import subprocess
import sys

import pytest

from rolljax.run.memory import GIB, host_memory

from .conftest import ROOT

MOST_GIB, FREE_GIB = 15, 17
RUN = """
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.envs.games import countdown
from rolljax.model.families import qwen3
from rolljax.sampler import settings
from rolljax.trainer.algorithms import grpo

recipe.Recipe.env = @countdown.Countdown()
recipe.Recipe.model = @qwen3.Qwen3Config()
qwen3.Qwen3Config.vocab_size = 151936
qwen3.Qwen3Config.num_layers = 28
qwen3.Qwen3Config.hidden_size = 1024
qwen3.Qwen3Config.num_heads = 16
qwen3.Qwen3Config.num_kv_heads = 8
qwen3.Qwen3Config.head_dim = 128
qwen3.Qwen3Config.ffn_size = 3072
recipe.Recipe.dtype = 'bfloat16'
recipe.Recipe.remat = 'full'
recipe.Recipe.max_answer_tok = 4
recipe.Recipe.wait_s = 3600.0
recipe.Recipe.sampler = @settings.SamplerConfig()
settings.SamplerConfig.slots = 8
settings.SamplerConfig.max_context = 1024
settings.SamplerConfig.page_size = 64
settings.SamplerConfig.prefill_chunk = 1024
recipe.Recipe.evaluation = @recipe.Evaluation()
recipe.Evaluation.tasks = 1
recipe.Recipe.phases = [@recipe.Phase()]
recipe.Phase.name = 'rl'
recipe.Phase.algorithm = @grpo.Grpo()
recipe.Phase.steps = 1
recipe.Phase.prompts_per_step = 2
recipe.Phase.group_size = 4
recipe.Phase.row_len = 1024
recipe.Phase.micro_rows = 1
"""


@pytest.mark.alone
def test_a_step_of_qwen3_0p6b_takes_at_most_15_gib(tmp_path):
    free = host_memory()[0] / GIB
    if free < FREE_GIB:
        pytest.skip(f"{free:.1f} GiB of memory are free here; this takes up to {MOST_GIB}, and wants {FREE_GIB}")
    (tmp_path / "run.gin").write_text(RUN)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "rolljax.train", "--gin", "run.gin", "--run_dir", "run"]
    with open(tmp_path / "said.txt", "w") as said:
        child = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=said, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, (tmp_path / "said.txt").read_text()[-3000:]
    peak = used.ru_maxrss * 1024 / GIB
    assert peak <= MOST_GIB, f"{peak:.2f} GiB"
