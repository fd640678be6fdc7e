"""The loop and its twin without abstraction compute the same losses."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from rolljax.commands.train import main as train

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_twin_gives_the_same_losses(tmp_path):
    spec = importlib.util.spec_from_file_location("rl_loop", ROOT / "examples" / "rl_loop.py")
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    settings = [
        "ReasoningGym.partial_credit = True",  # so that groups differ long before any word is right
        "warm_start/Phase.optimizer = @warm_start/AdamW()",  # the twin's; Muon would be longer than the twin
        "warm_start/AdamW.lr = 3e-3",
        "warm_start/Phase.steps = 4",
        "warm_start/Phase.stop_at_reward = None",
        "warm_start/Phase.eval_every = 0",
        "rl/Phase.steps = 2",
        "rl/Phase.eval_every = 0",
        "Evaluation.tasks = 8",
        "MeshSpec.data = 1",
    ]
    argv = ["--gin", str(ROOT / "configs" / "quickstart.gin"), "--run_dir", str(tmp_path / "run")]
    assert train(argv + [a for s in settings for a in ("--set", s)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    twin.ENV = dataclasses.replace(twin.ENV, partial_credit=True)
    losses = twin.run(sft_steps=4, rl_steps=2)
    assert losses == pytest.approx([r["loss/total"] for r in rows], abs=2e-5)
    assert all(r["groups/trained_n"] > 10 for r in rows[4:])
