"""Runs that train a reward model, and a policy on what it says."""

import asyncio
import json
import shutil

import jax
import numpy as np
import pytest

from rolljax.commands.train import main as train
from rolljax.config import loader
from rolljax.errors import ConfigError
from rolljax.model.attention import packed
from rolljax.recipe import Recipe
from rolljax.rewards.row_scores import RowScores
from rolljax.run.checkpoint import Checkpoints, step_of
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import resolve
from rolljax.run.reward_models import TrainedRewardModels
from rolljax.trainer.mesh import MeshSpec

from .conftest import SMALL, rows, summary

CONFIG = "reward_model_ppo"
SETTINGS = SMALL | {
    "warm_start/Phase.steps": "4",
    "warm_start/Phase.eval_every": "0",
    "warm_start/Phase.stop_at_reward": "None",
    "reward_model/Phase.steps": "4",
    "reward_model/Phase.prompts_per_step": "8",
    "reward_model/Phase.group_size": "4",
    "rl/Phase.steps": "4",
    "rl/Critic.warmup_steps": "1",
    "Recipe.save_every": "2",
    "Recipe.keep_checkpoints": "20",
    "MeshSpec.data": "1",
}
RM, RL = range(5, 9), range(9, 13)
"""Steps of the phases."""


def run(run_dir, *more, **changes):
    settings = SETTINGS | changes
    gone = [p for p in ("reward_model", "rl") if p not in settings.get("Recipe.phases", "reward_model rl")]
    settings = {name: value for name, value in settings.items() if name.partition("/")[0] not in gone}
    argv = [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]
    return train(["--gin", CONFIG, "--run_dir", str(run_dir), *argv, *more])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    assert run(run_dir) == 0
    return run_dir


@pytest.mark.slow
def test_the_policy_is_trained_on_the_reward_models_scores(straight):
    folder, found = RunFolder(straight), {r["step"]: r for r in rows(straight)}
    for step in RM:
        assert all(t.reward == t.reward_parts["environment"] for t in folder.trajectories(step))
    scores = json.loads((folder.reward_model("reward_model") / "scores.json").read_text())
    for step in RL:
        for t in folder.trajectories(step):
            value = (t.reward_parts["reward_model"] - scores["mean"]) / scores["std"]
            assert t.reward == t.turns[-1].reward == np.clip(value, -3, 3)
            assert 0 <= t.reward_parts["environment"] <= 1
        assert found[step]["rewards/calls_n"] == len(folder.trajectories(step)) == 32
        assert found[step]["rewards/lost_n"] == 0 and found[step]["rewards/part/environment"] <= 1
    heldout = [json.loads(line) for line in (straight / "rollouts" / "heldout_rl.jsonl").read_text().splitlines()]
    assert all(t["reward"] == t["reward_parts"]["environment"] for t in heldout)


@pytest.mark.slow
def test_the_saved_reward_model_gives_the_scores_of_training(straight):
    """Scores computed from the run's files equal those of the critic in the next phase, which another program
    computed."""
    recipe = loader.load([str(straight / "config.gin")], [], root=Recipe).value
    resolved, mesh = resolve(recipe), MeshSpec(data=1).build(jax.devices()[:1])
    value = TrainedRewardModels(resolved, RunFolder(straight)).load(mesh, "reward_model", "")
    trajectories = RunFolder(straight).trajectories(RL[0])
    tokens = [t.stream()[0][:-1] for t in trajectories]

    async def scores():
        rows = RowScores(value, mesh)
        try:
            return await asyncio.gather(*map(rows.score, tokens))
        finally:
            rows.close()

    found = asyncio.run(scores())
    assert found == [t.reward_parts["reward_model"] for t in trajectories]
    plain = jax.tree.map(lambda x: x[0], value.params)
    for ids, score in zip(tokens[:4], found, strict=False):
        place, one = np.arange(len(ids))[None], np.ones((1, len(ids)), np.int32)
        model = value.model
        hidden = model.trunk.bind(plain["trunk"])(ids[None], place, packed(one, one * 0, place)).hidden
        np.testing.assert_allclose(model.head(plain, hidden[0, -1]), score, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("after", [6, pytest.param(10, marks=pytest.mark.sweep)])
def test_a_run_resumes_bitwise(straight, tmp_path, after):
    """Resume in the middle of the reward model's phase, whose end is already on disk, and in the middle of the
    policy's phase."""
    again = tmp_path / "run"
    shutil.copytree(straight, again)
    for name in Checkpoints(again / "ckpt").names():
        if step_of(name) > after:
            shutil.rmtree(again / "ckpt" / name)
    (again / "summary.json").unlink()
    assert run(again) == 0
    told = ("step", "loss/total", "critic/loss", "reward/mean")
    assert [[r.get(name) for name in told] for r in rows(again)] == [
        [r.get(name) for name in told] for r in rows(straight)
    ]
    for name in ("state_sha256", "heldout_reward"):
        assert summary(again)[name] == summary(straight)[name]


@pytest.mark.sweep
def test_a_run_may_use_the_reward_model_of_another(straight, tmp_path):
    """Of a finished run; in the phases before, too."""
    settings = {
        "Recipe.phases": "[@warm_start/Phase(), @rl/Phase()]",
        "rl/Critic.model": "None",
        "scored.RewardModelScore.phase": "''",
        "scored.RewardModelScore.path": repr(str(straight)),
        "rl/Phase.steps": "2",
    }
    assert run(tmp_path / "run", **settings) == 0
    for t in RunFolder(tmp_path / "run").trajectories(5):
        assert set(t.reward_parts) == {"reward_model", "environment"} and abs(t.reward) <= 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scored.RewardModelScore.phase": "'rl'"}, "no phase of this run that trains a reward model"),
        ({"Recipe.phases": "[@warm_start/Phase(), @reward_model/Phase()]"}, "no phase follows"),
    ],
)
def test_phases_without_a_reward_model_are_refused(tmp_path, capsys, settings, message):
    assert run(tmp_path / "run", "--dry_run", **settings) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_a_reward_model_is_refused(straight, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(straight, copy, ignore=shutil.ignore_patterns("ckpt", "rollouts"))
    shutil.rmtree(copy / "reward_models")
    with pytest.raises(ConfigError, match="holds no reward model"):
        TrainedRewardModels(None).check("", str(copy))
