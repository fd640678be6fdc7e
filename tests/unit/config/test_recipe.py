"""Shapes of batches that follow from a recipe and its mesh."""

import dataclasses

import jax
import pytest

from rolljax.envs.games.countdown import Countdown
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.episodes import RolloutConfig
from rolljax.run.preflight import resolve
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.mesh import MeshSpec


def recipe(max_context=200, algorithm=None, mesh=None, **phase):
    numbers = {"steps": 1, "prompts_per_step": 32, "group_size": 4, **phase}
    return Recipe(
        env=Countdown(),
        phases=(Phase("only", algorithm or Reinforce(), **numbers),),
        sampler=SamplerConfig(max_context=max_context, slots=8),
        mesh=mesh or MeshSpec(),
        max_answer_tok=16,
    )


def shape(devices=1, **settings):
    found = resolve(recipe(**settings), jax.devices()[:devices]).recipe
    return found.pack_shape(found.phases[0])


@pytest.mark.parametrize(("max_context", "row_len"), [(80, 128), (128, 128), (129, 256), (1000, 1024)])
def test_rows_are_the_shortest_that_hold_a_trajectory(max_context, row_len):
    assert shape(max_context=max_context).row_len == row_len


def test_a_pair_stands_in_one_row_with_its_prompt():
    assert shape(max_context=120, algorithm=Dpo()).row_len == 256  # 104 + 2 x 16 tokens
    assert shape(max_context=120).row_len == 128


def test_on_cpu_a_micro_batch_is_a_thousand_tokens_however_many_devices():
    assert [shape(max_context=c).micro_rows for c in (128, 256, 1024, 2048)] == [8, 4, 1, 1]
    assert [shape(devices=n).micro_rows for n in (1, 2, 8)] == [4, 4, 8]


def test_no_more_rows_than_a_step_can_fill():
    assert shape(max_context=128, prompts_per_step=2, group_size=1).micro_rows == 2


def test_tokens_of_a_row_divide_over_the_devices_that_share_it():
    assert shape(devices=8, mesh=MeshSpec(data=2, context=4)).row_len % (128 * 4) == 0


def test_what_is_asked_for_stays():
    found = shape(row_len=300, micro_rows=3)
    assert (found.row_len, found.micro_rows) == (300, 3)


def test_a_context_that_drops_its_oldest_turns_has_more_rows():
    plain = resolve(dataclasses.replace(recipe(), env=FrozenLake()), jax.devices()[:1]).recipe
    cut = dataclasses.replace(plain, rollout=RolloutConfig(context="drop_oldest"))
    assert cut.pack_shape(cut.phases[0]).num_micro > plain.pack_shape(plain.phases[0]).num_micro


def test_a_device_takes_what_its_memory_keeps():
    model = resolve(recipe(), jax.devices()[:1]).model
    none, dots, full = (dataclasses.replace(model, remat=remat) for remat in ("none", "dots", "full"))
    assert full.saved_bytes < dots.saved_bytes < none.saved_bytes
    deep = dataclasses.replace(none, cfg=dataclasses.replace(none.cfg, num_layers=20))
    assert deep.saved_bytes == 10 * none.saved_bytes
