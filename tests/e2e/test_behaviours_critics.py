"""Effects of critics on a policy, on problems of seconds: the trainer's own code with tables as policy and critics."""

import dataclasses
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import toys

from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW

NEAR_SGD = AdamW(lr=20.0, eps=1.0)
ONE = Critic(num=1, epochs=4, optimizer=NEAR_SGD)
TWO = Critic(num=2, epochs=4, first=True, optimizer=NEAR_SGD)
"""As many passes as `ONE` over as many tokens: each critic has half of the responses."""


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """Run the tiny programs on one device, without the passes that would cost more than they save."""
    with jax.default_device(jax.devices()[0]):
        yield


def learned(algorithm):
    """Share of the string that the policy says, mean over training, by seed `[5]`."""
    return toys.train(toys.Worth, algorithm, seeds=5, steps=60, lr=10).measured["right"].mean(1)


@pytest.fixture(scope="module")
def mini():
    return learned(AsyPpo(critic=TWO))


@pytest.mark.slow
@pytest.mark.parametrize("entropy_coef", [0.0, AsyPpo().entropy_coef])
def test_two_mini_critics_beat_one_of_the_same_size(mini, entropy_coef):
    """Where advantages are noisy: prompts are worth more or less, and are new more often than not. Both train critics
    of one size with one budget, four passes over each response (arXiv 2510.01656, updates to data 4)."""
    ppo = learned(Ppo(critic=ONE, entropy_coef=entropy_coef))
    assert (mini > ppo).all() and mini.mean() > ppo.mean() + 0.05, (mini, ppo)


def test_mini_critics_help_because_they_have_learned_from_the_step(mini):
    """As in arXiv 2510.01656: critics first, then values and advantages."""
    late = learned(AsyPpo(critic=dataclasses.replace(TWO, first=False)))
    assert mini.mean() > late.mean() + 0.05, (mini, late)
