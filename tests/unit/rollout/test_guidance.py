"""Guidance: which trajectories begin with a latent prefix, and with which."""

import numpy as np
import pytest

from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError
from rolljax.model.prefixes import Prefixes
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.guidance import Guidance, Guide
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.types import EVAL_STREAM, Key

VOCAB, LATENTS, LENGTH = 264, 16, 3


def guide(schedule="linear", length=2, seed=0):
    prefixes = Prefixes(np.zeros((LATENTS, LENGTH, 4), np.float32))
    return Guide(Guidance(length, schedule), prefixes, VOCAB, group_size=8, groups_per_step=5, steps=20, seed=seed)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", {0: 8, 0.25: 6, 0.5: 4, 1: 0}),
        ("two_phase", {0: 8, 0.49: 8, 0.5: 0, 1: 0}),
        ("all", {0: 8, 0.5: 8, 1: 8}),
    ],
)
def test_schedules(schedule, expected):
    assert {t: Guidance(8, schedule).num_guided(8, t) for t in expected} == expected
    assert all(Guidance(0, schedule).num_guided(8, t) == 0 for t in expected)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match=r"Guidance\.schedule"):
        Guidance(8, "cosine")


def test_progress_is_counted_in_steps_of_the_phase():
    shares = [sum(guide().is_guided(Key(0, index, s)) for s in range(8)) for index in range(0, 120, 5)]
    assert shares[0] == 8 and shares[10] == 4 and shares[20:] == [0] * 4  # replaced groups come after the last step's
    same_step = {tuple(guide().is_guided(Key(0, index, s)) for s in range(8)) for index in range(25, 30)}
    assert len(same_step) == 1


def test_a_prefix_depends_on_seed_and_address_alone():
    one, again, other = guide("all"), guide("all"), guide("all", seed=1)
    keys = [Key(1, index, s) for index in range(20) for s in range(8)]
    found = [one.prefix(key) for key in keys]
    for key, ids in zip(keys, found, strict=True):
        assert ids.dtype == np.int32 and len(ids) == 2 and ids[1] == ids[0] + 1
        assert (ids[0] - VOCAB) % LENGTH == 0 and VOCAB <= ids[0] < VOCAB + LATENTS * LENGTH
        np.testing.assert_array_equal(ids, again.prefix(key))
    assert any(ids[0] != other.prefix(key)[0] for key, ids in zip(keys, found, strict=True))
    assert any(ids[0] != one.prefix(Key(0, k.prompt_index, k.sibling))[0] for k, ids in zip(keys, found, strict=True))
    assert all(len({int(ids[0]) for ids in found[i : i + 8]}) == 8 for i in range(0, len(found), 8))
    assert {int(ids[0]) for ids in found} == set(range(VOCAB, VOCAB + LATENTS * LENGTH, LENGTH))


def test_evaluations_are_not_guided_and_spare_siblings_are():
    assert not guide("all").is_guided(Key(EVAL_STREAM, 0, 0))
    assert [guide().is_guided(Key(0, 50, s)) for s in (3, 4, 11, 12)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("phase", "settings", "said"),
    [
        ({}, {}, r"Recipe\.prefixes names none"),
        ({"group_size": 2, "algorithm": Dpo()}, {"prefixes": "p.safetensors"}, "compares trajectories of one prompt"),
        ({"group_size": 2, "algorithm": GiGpo()}, {"prefixes": "p.safetensors"}, "compares turns of one context"),
        (
            {"algorithm": Grpo(), "group_size": 2},
            {"prefixes": "p.safetensors", "agent": AgentProgram("a.f", sandbox="none")},
            "agent",
        ),
    ],
)
def test_guidance_that_cannot_work_is_refused(phase, settings, said):
    phase = Phase(**{"name": "rl", "algorithm": Sft(), "steps": 1, "guidance": Guidance()} | phase)
    with pytest.raises(ConfigError, match=said):
        Recipe(FrozenLake(), (phase,), **settings)
