"""RLOO, Dr. GRPO, GSPO, DAPO and GiGPO against the functions of their authors' (or their usual) repositories.

Each oracle here is a formula with its source, in float64 and without rolljax; gradients of a loss are its own central
differences. Both the algorithm and our second implementation (`tests/reference`) must agree with it.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import toys

from rolljax.trainer import masked
from rolljax.trainer.algorithms.base import PolicyOutputs
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.dr_grpo import DrGrpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.rloo import Rloo
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.shaping import RewardShaping
from rolljax.trainer.update import clean_batch
from tests.reference import algorithms as ref

GROUPS, SIZE, LIMIT = 3, 4, 7
LENGTHS = np.array([1, 5, 3, 7, 2, 2, 6, 4, 3, 1, 7, 5])
REWARDS = np.array([1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1.0])
"""The last group teaches nothing."""
INDEX = np.arange(GROUPS * SIZE) // SIZE
MASK = np.arange(LIMIT) < LENGTHS[:, None]
RNG = np.random.default_rng(0)
OLD = np.where(MASK, RNG.uniform(-3, -0.1, MASK.shape), 0.0)
NEW = np.where(MASK, OLD + RNG.normal(0, 0.3, MASK.shape), 0.0)


def batch_of(rewards=REWARDS):
    """Return episodes of one turn per answer."""
    return toys.one_turn_episodes(rewards, INDEX, MASK, OLD, limit_tok=LIMIT)


def ours(algorithm, e, logp=NEW):
    """Return loss and gradient `[N, T]` with respect to the log-probs."""
    zeros = np.zeros(e.mask.shape, np.int64)
    batch = toys.pack(algorithm, toys.Played(e, zeros, zeros, zeros), algorithm.credit(e, {}))

    def loss(logp):
        rows = masked.clean(jnp.reshape(logp, batch.scale.shape), batch.scale)
        policy = PolicyOutputs(rows, jnp.zeros_like(rows))
        return masked.total(algorithm.objective(policy, clean_batch(batch, rows)).loss, batch.scale)

    value, grad = jax.value_and_grad(loss)(jnp.float32(logp))
    return float(value), np.asarray(grad, np.float64)


def twin(result):
    """Return loss and gradient of a `reference.Result`."""
    grad = np.zeros(MASK.shape)
    grad[MASK] = [g for row in result.grad for g in row]
    return result.loss, grad


def told(rewards=REWARDS, logp=NEW):
    """Convert the batch to the reference's format."""
    parts = [(logp[n, :k].tolist(), OLD[n, :k].tolist()) for n, k in enumerate(LENGTHS)]
    return [
        {"group": int(g), "reward": float(r), "turns": [{"logp": new, "sampler_logp": old}]}
        for g, r, (new, old) in zip(INDEX, rewards, parts, strict=True)
    ]


def by_differences(loss, logp=NEW, step=1e-6):
    """Return a loss and its gradient by central differences."""
    grad = np.zeros(logp.shape)
    for at in zip(*np.nonzero(MASK), strict=True):
        moved = np.zeros(logp.shape)
        moved[at] = step
        grad[at] = (loss(logp + moved) - loss(logp - moved)) / (2 * step)
    return loss(logp), grad


def agree(got, want):
    assert got[0] == pytest.approx(want[0], rel=2e-5, abs=2e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-5, atol=2e-6 * np.abs(want[1]).max())


def group_mean(values, index=INDEX):
    return np.array([values[index == i].mean() for i in index])


def clipped(ratio, advantages, low, high):
    """Compute PPO's loss `-min(r A, clip(r) A)`."""
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


# ---- RLOO -----------------------------------------------------------------------------------------------------------


def rloo_advantages(rewards, index=INDEX):
    """Compute the advantages of arXiv 2402.14740, section 2.3.

    github.com/volcengine/verl, verl/trainer/ppo/core_algos.py, `compute_rloo_outcome_advantage`: n/(n-1) of the reward
    less the group's mean. github.com/huggingface/trl, trl/trainer/rloo_trainer.py, and github.com/OpenRLHF/OpenRLHF,
    openrlhf/trainer/ppo_utils/experience_maker.py: less the mean of the others.
    """
    n = np.array([(index == i).sum() for i in index])
    scaled = n / (n - 1) * (rewards - group_mean(rewards, index))
    others = (group_mean(rewards, index) * n - rewards) / (n - 1)
    np.testing.assert_allclose(scaled, rewards - others, atol=1e-12)
    return scaled


def test_rloo():
    """The whole answer is one action: its log-prob is the sum of its tokens' (TRL's loss with a ratio of 1)."""
    algorithm = Rloo(aggregation="seq-mean-token-sum")
    credit = algorithm.credit(batch_of(), {})
    np.testing.assert_allclose(credit.advantages, np.where(MASK, rloo_advantages(REWARDS)[:, None], 0), atol=1e-12)
    assert credit.advantages[0, 0] == pytest.approx(1 - 1 / 3) and credit.advantages[7, 0] == pytest.approx(1.0)
    want = by_differences(lambda logp: -(rloo_advantages(REWARDS) * (logp * MASK).sum(1)).mean())
    agree(ours(algorithm, batch_of()), want)
    agree(twin(ref.rloo(told(), aggregation="seq-mean-token-sum")), want)


# ---- Dr. GRPO -------------------------------------------------------------------------------------------------------


def test_dr_grpo():
    """github.com/sail-sg/oat (the authors'), oat/algorithms/ppo.py: `compute_monte_carlo_advantages` without the
    deviation, and `masked_sum` of an answer over the constant `generate_max_length`, then the mean over answers; TRL's
    `dr_grpo` is the same. (verl's `seq-mean-token-sum-norm` leaves the number of answers out.)"""
    advantages = (REWARDS - group_mean(REWARDS))[:, None]

    def loss(logp):
        return ((clipped(np.exp(logp - OLD), advantages, 0.2, 0.2) * MASK).sum(1) / LIMIT).mean()

    want = by_differences(loss)
    agree(ours(DrGrpo(filter=None), batch_of()), want)
    agree(twin(ref.dr_grpo(told(), LIMIT)), want)


def test_dr_grpo_is_rloo_but_for_a_constant():
    """Of groups of G answers its advantage is (G - 1) / G of RLOO's, from both definitions."""
    dr, rloo = (a.credit(batch_of(), {}).advantages for a in (DrGrpo(filter=None), Rloo()))
    np.testing.assert_allclose(dr, (SIZE - 1) / SIZE * rloo, atol=1e-12)


# ---- GSPO -----------------------------------------------------------------------------------------------------------


def gspo_loss(logp, low, high):
    """Compute equations 5 to 7 of arXiv 2507.18071; verl's `compute_policy_loss_gspo` has the same gradient."""
    std = np.array([REWARDS[i == INDEX].std(ddof=1) for i in INDEX])
    advantages = (REWARDS - group_mean(REWARDS)) / (std + 1e-6)
    ratio = np.exp(((logp - OLD) * MASK).sum(1) / LENGTHS)
    return clipped(ratio, advantages, low, high).mean()


@pytest.mark.parametrize("far", [1e-4, 0.3], ids=["inside the clip", "mostly outside"])
def test_gspo(far):
    """Section 5.1: clipped at 3e-4 below and 4e-4 above."""
    logp = np.where(MASK, OLD + far / 0.3 * (NEW - OLD), 0.0)
    algorithm = Gspo(filter=None)
    assert (algorithm.clip_low, algorithm.clip_high) == (3e-4, 4e-4)
    want = by_differences(lambda x: gspo_loss(x, 3e-4, 4e-4), logp, 1e-8)
    got, second = ours(algorithm, batch_of(), logp), twin(ref.gspo(told(logp=logp)))
    largest = np.abs(want[1]).max()
    assert largest > 0
    for loss, grad in (got, second):
        assert loss == pytest.approx(want[0], abs=1e-5)
        np.testing.assert_allclose(grad, want[1], atol=1e-4 * largest)
    # verl: the gradient of an answer is shared equally by its tokens
    rows = [row[:k] for row, k in zip(got[1], LENGTHS, strict=True)]
    assert all(np.ptp(row) <= 1e-6 * largest for row in rows)


# ---- DAPO -----------------------------------------------------------------------------------------------------------


def test_dapos_soft_penalty_at_the_papers_lengths():
    """arXiv 2503.14476, equation 13 and section 4.1: 16,384 tokens are expected, 4,096 more are the cache, 20,480 the
    most. verl/workers/reward_manager/dapo.py: `min(-(length - expected) / cache, 0)`."""
    lengths = np.array([1, 16384, 16385, 17408, 18432, 20479, 20480])
    want = np.minimum(-(lengths - 16384) / 4096, 0)
    np.testing.assert_allclose(shaping.overlong_penalty(lengths, 20480, 4096), want, atol=1e-12)
    assert want[[1, 3, 4, 6]].tolist() == [0, -0.25, -0.5, -1]


def dapo_loss(logp, cache):
    """Compute equations 8 to 13 of arXiv 2503.14476.

    Rewards have the penalty; groups whose answers are all right or all wrong are removed; ratios are clipped at .2
    below and .28 above; the loss is the mean over the tokens of all remaining answers.
    """
    rewards = REWARDS + np.minimum(-(LENGTHS - (LIMIT - cache)) / cache, 0)
    std = np.array([rewards[i == INDEX].std(ddof=1) for i in INDEX])
    advantages = ((rewards - group_mean(rewards)) / (std + 1e-6))[:, None]
    right = group_mean(REWARDS)
    part = MASK & ((right > 0) & (right < 1))[:, None]
    return (clipped(np.exp(logp - OLD), advantages, 0.2, 0.28) * part).sum() / part.sum()


def test_dapo():
    algorithm = Dapo(shaping=RewardShaping(overlong_cache=4))
    want = by_differences(lambda logp: dapo_loss(logp, 4))
    agree(ours(algorithm, batch_of()), want)
    agree(twin(ref.dapo(told(), LIMIT, 4)), want)
    assert algorithm.has_signal(batch_of()).tolist() == (INDEX < 2).tolist()


# ---- GiGPO ----------------------------------------------------------------------------------------------------------

TURNS = np.array([3, 2, 3, 1])
STATES = np.array([[7, 1, 2], [7, 1, 0], [7, 3, 1], [7, 0, 0]])
"""One group: all begin in state 7; state 1 is met three times, 2 and 3 once."""
TURN_REWARDS = np.array([[0, 0, 1], [0, 0.5, 0], [0, 0, 0], [0, 0, 0.0]])


def gigpo_batch():
    """Return episodes with one token per turn."""
    mask = np.arange(3) < TURNS[:, None]
    return dataclasses.replace(
        batch_of(),
        rewards=TURN_REWARDS.sum(1),
        groups=np.zeros(4, np.int64),
        mask=mask,
        turns=np.where(mask, np.arange(3), -1),
        turn_rewards=TURN_REWARDS,
        turn_weights=np.ones((4, 3)),
        states=STATES,
        num_turns=TURNS,
        truncated=np.zeros(4, bool),
        success=TURN_REWARDS.sum(1) > 0,
        texts=("",) * 4,
        domains=("x",) * 4,
        sampler_logp=np.where(mask, -1.0, 0.0),
        expert=np.zeros(mask.shape, bool),
    )


def gigpo_advantages(divide, gamma=0.95, weight=1.0):
    """Compute equations 3 to 8 of arXiv 2505.10978 as github.com/langfengQ/verl-agent, gigpo/core_gigpo.py.

    `episode_norm_reward` (over trajectories: compute_mean_std_cross_steps False), `build_step_group` by equal
    observations of one group, `step_norm_reward` (a state met once: 0), `compute_step_discounted_returns`; torch's
    unbiased deviation, 1e-6.
    """

    def normed(values):
        return (values - values.mean()) / ((values.std(ddof=1) + 1e-6) if divide else 1.0)

    episode = normed(TURN_REWARDS.sum(1))
    returns = np.zeros(STATES.shape)
    for n, turns in enumerate(TURNS):
        for k in reversed(range(turns)):
            returns[n, k] = TURN_REWARDS[n, k] + gamma * (returns[n, k + 1] if k + 1 < turns else 0)
    inside, step = np.arange(3) < TURNS[:, None], np.zeros(STATES.shape)
    for state in np.unique(STATES[inside]):
        where = inside & (state == STATES)
        step[where] = normed(returns[where]) if where.sum() > 1 else 0.0
    return np.where(inside, episode[:, None] + weight * step, 0)


@pytest.mark.parametrize("std", ["group", "none"], ids=["mean_std_norm", "mean_norm"])
def test_gigpo(std):
    algorithm = GiGpo(std=std, filter=None)
    assert (algorithm.gamma, algorithm.turn_weight) == (0.95, 1.0)  # ROLL's GiGPO: step_reward_gamma .95, weights 1
    want = gigpo_advantages(std == "group")
    np.testing.assert_allclose(algorithm.credit(gigpo_batch(), {}).advantages, want, atol=1e-9)
    episodes = [
        {
            "group": 0,
            "reward": float(TURN_REWARDS[n].sum()),
            "turns": [
                {"logp": [-1.0], "sampler_logp": [-1.0], "reward": float(TURN_REWARDS[n, k]), "state": STATES[n, k]}
                for k in range(TURNS[n])
            ],
        }
        for n in range(4)
    ]
    found = ref.gigpo(episodes, divide=std == "group").advantages
    for row, other, turns in zip(found, want, TURNS, strict=True):
        np.testing.assert_allclose(row, other[:turns], atol=1e-9)
    if std == "none":  # by hand: state 7 has returns .9025, .475, 0, 0; the episodes' scores are 1, .5, 0, 0
        assert want[0, 0] == pytest.approx(1 - 0.375 + 0.9025 - (0.9025 + 0.475) / 4)
