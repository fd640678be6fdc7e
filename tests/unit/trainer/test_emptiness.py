"""A step of which nothing is trained on: the rewards' doing, or that of settings that leave everything out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import TrainerError
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.raft import RaftPP
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape
from rolljax.trainer.credit.emptiness import at_best, could_teach, is_empty
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from tests.synthetic import episodes_of, groups_of

DROP = Grpo(filter=GroupFilter())
ELSEWHERE = Opd(teachers=(Teacher("run_start", 1.0, ("elsewhere",)),))


@dataclasses.dataclass(frozen=True)
class Deaf(Grpo):
    """Leaves everybody out."""

    def prepare(self, e):
        return e.rewards, np.zeros(e.num, bool)


NEVER_ONE = Grpo(anchor="proximal", correction=Correction("token", weight_cap=None, ratio_band=(1.5, 2.0)))


def episodes(algorithm, *rewards, **changes):
    """Return groups that all have these rewards."""
    rng = np.random.default_rng(0)
    groups = groups_of(rng, num_groups=3, group_size=len(rewards), rewards=[rewards] * 3)
    return dataclasses.replace(episodes_of(rng, groups, algorithm.needs()), **changes)


@pytest.mark.parametrize(
    "algorithm",
    [
        DROP,
        Dapo(shaping=RewardShaping(overlong_cache=4)),
        RaftPP(),
        Rft(),
        Grpo(filter=GroupFilter(drop_degenerate=False, solve_range=(0.2, 0.4))),
        Grpo(filter=GroupFilter(drop_degenerate=False, solve_range=(3, 5))),
    ],
    ids=lambda a: type(a).__name__,
)
def test_rewards_that_teach_nothing_are_nobodys_fault(algorithm):
    e = episodes(algorithm, 0.0, 0.0, 0.0, 0.0, success=np.zeros(12, bool))
    assert is_empty(algorithm.credit(e, {}), e) and could_teach(algorithm, e, {})


def test_answers_that_are_all_cut_are_nobodys_fault():
    algorithm = Grpo(mask_truncated=True)
    e = episodes(algorithm, 0.0, 0.0, 1.0, 1.0, truncated=np.ones(12, bool))
    assert is_empty(algorithm.credit(e, {}), e) and could_teach(algorithm, e, {})


def test_answers_that_are_all_too_long_are_nobodys_fault():
    algorithm = Grpo(wrong_max_tok=2, right_max_tok=2)
    e = episodes(algorithm, 0.0, 0.0, 1.0, 1.0)
    assert is_empty(algorithm.credit(e, {}), e) and could_teach(algorithm, e, {})
    never = Grpo(wrong_max_tok=1, right_max_tok=1)
    assert not could_teach(never, e, {})


@pytest.mark.parametrize("algorithm", [ELSEWHERE, NEVER_ONE], ids=["routing", "filter"])
def test_what_can_never_teach_is_known(algorithm):
    e = episodes(algorithm, 0.0, 0.0, 1.0, 1.0)
    e = e if e.trainer_logp is None else dataclasses.replace(e, trainer_logp=e.sampler_logp)
    assert is_empty(algorithm.credit(e, {}), e) and not could_teach(algorithm, e, {})


def test_recorded_turns_of_weight_0_can_never_teach():
    e = episodes(Sft(), 1.0)
    assert not is_empty(Sft().credit(e, {}), e)
    e = dataclasses.replace(e, turn_weights=np.zeros_like(e.turn_weights))
    assert is_empty(Sft().credit(e, {}), e) and not could_teach(Sft(), e, {})


def test_the_best_case_is_one_token_with_rewards_that_differ():
    e = episodes(DROP, 0.0, 0.0, 0.0, 0.0)
    best = at_best(Grpo(filter=GroupFilter(drop_degenerate=False, solve_range=(0.25, 0.75))), e)
    np.testing.assert_allclose(best.rewards.reshape(3, 4), [[0, 1 / 3, 2 / 3, 1]] * 3)
    np.testing.assert_allclose(best.turn_rewards.sum(1), best.rewards)
    assert (best.mask.sum(1) == 1).all() and best.sampler_logp is e.sampler_logp


def step(model, params, algorithm, *rewards):
    """Train a step on two groups that both have these rewards."""
    mesh = MeshSpec().build(jax.devices()[:1])
    settings = {"steps": 1, "groups_per_step": 2, "limit_tok": 16}
    trainer = PhaseTrainer(mesh, model, algorithm, AdamW(), PackShape(2, 2, 96), **settings)
    groups = groups_of(np.random.default_rng(0), num_groups=2, group_size=2, rewards=[rewards] * 2)
    return trainer.step(trainer.states.init(jax.tree.map(jnp.copy, params)), groups, {}, 0)[1]


def test_a_step_that_can_train_on_nothing_is_an_error(model, params):
    """An empty step would let the run continue for ever."""
    with pytest.raises(TrainerError, match="leaves out all 4 trajectories, and would whatever their rewards"):
        step(model, params, Deaf(), 0, 1)
    assert step(model, params, DROP, 1, 1).num_trained == 0
