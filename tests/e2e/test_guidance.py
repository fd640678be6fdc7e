"""A run whose trajectories begin with latent prefixes."""

import json

import numpy as np
import pytest

from rolljax import cli, loop
from rolljax.commands.train import main as train
from rolljax.commands.train import parse
from rolljax.concurrency.event_loop import Stopped
from rolljax.model.prefixes import Prefixes, save_prefixes
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.storage.run_reader import RunReader
from rolljax.viewer import answers
from rolljax.viewer.filters import Filter
from rolljax.viewer.runs import ViewedRun

from . import conftest
from .conftest import StopAt, rows, summary

VOCAB, LATENTS, LENGTH = 264, 12, 3


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Return a function for the arguments of a run; guided: of two guided phases, whose prefixes are this long."""
    file = tmp_path_factory.mktemp("palette") / "palette.safetensors"
    vectors = np.random.default_rng(0).normal(0, 0.1, (LATENTS, LENGTH, 64))
    save_prefixes(file, Prefixes(vectors.astype(np.float32)))

    def of(run_dir, guided=None):
        sizes = {
            "Qwen3Config_dot_num_layers": 1,
            "SamplerConfig_dot_slots": 32,
            "warm_start__Phase_dot_steps": 2,
            "rl__Phase_dot_steps": 4,
            "Evaluation_dot_tasks": 4,
            "Recipe_dot_save_every": 3,
        }
        if guided is not None:
            sizes |= {
                "Recipe_dot_prefixes": repr(str(file)),
                "warm_start__Phase_dot_guidance": "@warm_start/Guidance()",
                "warm_start__Guidance_dot_length": min(guided, 1),
                "warm_start__Guidance_dot_schedule": repr("all"),
                "rl__Phase_dot_guidance": "@rl/Guidance()",
                "rl__Guidance_dot_length": guided,
            }
        return conftest.arguments(run_dir, **sizes)

    return of


@pytest.fixture(scope="module")
def guided(arguments, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("guided") / "run"
    assert train(arguments(run_dir, LENGTH)) == 0
    return run_dir


def test_siblings_begin_with_prefixes_as_the_schedule_says(guided):
    shares = [row["guidance/share_frac"] for row in rows(guided)]
    assert shares == [1, 1, 1, 0.75, 0.5, 0.25]
    for step, count in ((1, 1), (3, LENGTH), (5, LENGTH)):
        lines = (guided / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        for record in map(json.loads, lines):
            ids = np.array(record["turns"][0]["prompt_ids"])
            is_guided = step < 5 or record["key"]["sibling"] < 2
            assert (ids[:count] >= VOCAB).all() == is_guided and (ids[count:] < VOCAB).all()
            assert max(record["turns"][0]["tokens"]) < VOCAB
            assert ids.max() < VOCAB + LATENTS * LENGTH


def test_sampler_and_trainer_agree_on_guided_tokens(guided):
    assert all(row["mismatch/abs_max_nat"] <= 1e-5 for row in rows(guided)[2:])


def test_a_guided_run_can_be_looked_at(guided):
    made = answers.trajectory(ViewedRun("run", guided), 3, 0)["turns"][0]
    assert made["prompt_tok"] > LENGTH and answers.step(ViewedRun("run", guided), 3, Filter())["found"] == 32
    assert RunReader(guided).rollout_steps()


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(arguments, guided, tmp_path):
    asked = parse(arguments(tmp_path / "run", LENGTH))
    config = cli.load_recipe(asked.gin, asked.set)
    folder, console = RunFolder(tmp_path / "run"), StopAt(4)
    folder.prepare(config, fresh=False)
    with pytest.raises(Stopped):
        loop.train(check_run(config.value), folder, console, lambda: console.stopped)
    assert train(arguments(tmp_path / "run", LENGTH)) == 0
    assert summary(tmp_path / "run")["state_sha256"] == summary(guided)["state_sha256"]


@pytest.mark.slow
def test_prefixes_of_no_length_change_no_bit(arguments, guided, tmp_path):
    hashes = {}
    for name, length in (("none", None), ("empty", 0)):
        assert train(arguments(tmp_path / name, length)) == 0
        hashes[name] = summary(tmp_path / name)["state_sha256"]
    assert hashes["none"] == hashes["empty"] != summary(guided)["state_sha256"]
