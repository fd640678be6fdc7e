"""The policy of a run whose environment, reward or rows this process does not have."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rolljax import eval as evaluation
from rolljax.config import loader, resolved
from rolljax.config.classes import fields
from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.questions import Questions
from rolljax.errors import CheckpointError, ConfigError
from rolljax.model.lora import Lora
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.run.checkpoint import Checkpoints
from rolljax.run.policy import _OF_TRAINING, policy_recipe, stored_phases
from rolljax.run.progress import RunProgress
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.state import ParamState, TrainState


def folder_of(config, path):
    path.mkdir()
    (path / "config.gin").write_text(config.operative)
    (path / "config.resolved.json").write_text(json.dumps(config.resolved))
    return path


@pytest.mark.parametrize("name", ["quickstart", "reward_model_ppo", "agent_ipa", "qwen3_32b_split_v5p_64", "think_j"])
def test_all_that_a_policy_needs_is_in_the_resolved_settings(name, tmp_path):
    config = loader.load([name], root=Recipe)
    found = policy_recipe(folder_of(config, tmp_path / "run"))
    for field in fields(Recipe):
        if field not in _OF_TRAINING:
            assert getattr(found, field) == getattr(config.value, field), field


@pytest.mark.parametrize("name", ["quickstart", "sft_dpo_grpo", "reward_model_ppo", "agent_ipa"])
def test_phases_are_built_again(name, tmp_path):
    config = loader.load([name], root=Recipe)
    assert stored_phases(folder_of(config, tmp_path / "run")) == config.value.phases


def own_objects():
    @dataclasses.dataclass(frozen=True)
    class Mine(Grpo):
        extra: int = 3

    reward = lambda prompt, answer, record: float(len(answer))  # noqa: E731
    rows = [{"question": f"{i}?", "answer": "1"} for i in range(20)]
    return Recipe(
        env=Questions(records=rows, reward=reward),
        phases=[Phase("rl", Mine(), steps=3, group_size=4, updates_per_step=2)],
        lora=Lora(rank=2),
        sampler=SamplerConfig(slots=8, max_context=96),
        evaluation=Evaluation(tasks=8, temperature=0),
    )


def test_a_run_with_objects_of_its_own_has_its_policy(tmp_path):
    config = loader.given(own_objects())
    path = folder_of(config, tmp_path / "run")
    found = policy_recipe(path)
    assert (found.lora, found.sampler, found.model) == (Lora(rank=2), config.value.sampler, config.value.model)
    with pytest.raises(ConfigError, match="only the run's policy was read"):
        found.env.task(0)
    with pytest.raises(ConfigError, match="of a class that is not here"):
        stored_phases(path)
    assert evaluation.recipe_of_run(path, others=True) == found
    with pytest.raises(ConfigError, match=r"or ask tasks that are here: --env NAME"):
        evaluation.recipe_of_run(path)


def test_a_model_of_a_class_that_is_not_here_is_named(tmp_path):
    config = loader.given(own_objects())
    settings = config.resolved | {"model.__class__": "nobody.has.This"}
    path = folder_of(dataclasses.replace(config, resolved=settings), tmp_path / "run")
    with pytest.raises(ConfigError, match="model is of a class that is not here") as e:
        policy_recipe(path)
    assert e.value.value == "nobody.has.This"
    with pytest.raises(ConfigError, match="must be int"):
        resolved.build({"a": "x"}, "a", int)
    with pytest.raises(CheckpointError, match="is not a run folder"):
        policy_recipe(tmp_path)


def test_the_policy_is_read_alone(tmp_path):
    """Whatever the rest of the state is made of; a model of another shape is an error."""
    params = {"a": jnp.arange(12.0).reshape(3, 4), "b": {"c": jnp.ones(5)}}
    opt = [{"mu": jnp.zeros((2, 2))}, (jnp.int32(3), jnp.zeros(7))]
    state = TrainState(ParamState(params, opt, jnp.int32(4)), ParamState({"v": jnp.ones((2, 3))}, (), jnp.int32(1)))
    checkpoints = Checkpoints(tmp_path / "ckpt")
    checkpoints.save("000001_step_4", state, RunProgress(total_steps=4))
    shapes = jax.eval_shape(lambda: params)
    here = SingleDeviceSharding(jax.devices()[0])
    where = jax.tree.map(lambda _: here, shapes)
    found = checkpoints.params("000001_step_4", shapes, where)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    for wrong in ({"a": shapes["a"], "d": shapes["a"]}, {"a": jax.ShapeDtypeStruct((9, 9), jnp.float32)}):
        with pytest.raises(CheckpointError, match="000001_step_4"):
            checkpoints.params("000001_step_4", wrong, jax.tree.map(lambda _: here, wrong))


def test_settings_of_an_environment_that_are_not_the_run_s_are_told(tmp_path):
    path = folder_of(loader.load(["quickstart"], root=Recipe), tmp_path / "run")
    own = loader.load(["quickstart"], root=Recipe).value.env
    assert evaluation.own_settings(path, own) == "" == evaluation.own_settings(path, FrozenLake())
    said = evaluation.own_settings(path, ReasoningGym(family=own.family))
    assert "has settings of its own, not the run's" in said and "config is " in said and "in the run" in said
