"""Algorithms with their class defaults, against what authors' code and papers say, computed independently in float64.

Nothing of our own is on the other side: advantages, losses and their sums are written down here from the places that
each test names.
"""

import dataclasses

import numpy as np
import pytest

from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.raft import RaftPP
from rolljax.trainer.credit.shaping import RewardShaping
from rolljax.trainer.kl import KlLoss
from tests.synthetic import episodes_of, groups_of, trained

BINARY = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
"""Rewards of four groups, two of which teach nothing."""


@pytest.fixture(params=range(3))
def step(request):
    """Return groups of one turn, the log-probs of a policy that has changed since sampling, and a function for our
    gradients."""
    rng = np.random.default_rng(request.param)
    groups = groups_of(rng, max_turns=1, rewards=BINARY)
    every = [t for group in groups for t in group]
    sampler = [t.turns[0].sampler_logp.astype(np.float64) for t in every]
    logp = [np.minimum(x + rng.normal(0, 0.3, len(x)), -1e-3).astype(np.float32) for x in sampler]

    def ours(algorithm):
        e = episodes_of(np.random.default_rng(9), groups, algorithm.needs())
        return e, [g[0] for g in trained(algorithm, groups, e, logp)[1]]

    return np.array(BINARY, float), sampler, [x.astype(np.float64) for x in logp], ours


def outcome_advantages(scores):
    """Compute verl's compute_grpo_outcome_advantage (verl/trainer/ppo/core_algos.py): mean and unbiased deviation of
    the group, epsilon 1e-6."""
    mean, std = scores.mean(1, keepdims=True), scores.std(1, ddof=1, keepdims=True)
    return ((scores - mean) / (std + 1e-6)).reshape(-1)


def clipped_slope(advantage, ratio, low=0.2, high=0.2):
    """Compute d/dlogp of min(ratio A, clip(ratio) A): the ratio times A where it is not clipped away (PPO, arXiv
    1707.06347, equation 7)."""
    clipped = np.clip(ratio, 1 - low, 1 + high)
    return np.where(ratio * advantage <= clipped * advantage, ratio * advantage, 0.0)


def agree(ours, slopes):
    for mine, theirs in zip(ours, slopes, strict=True):
        np.testing.assert_allclose(mine, -theirs, rtol=2e-4, atol=2e-7)


def test_grpo(step):
    """DeepSeekMath (arXiv 2402.03300), equation 3: 1/G over answers of 1/|o| over tokens. All groups count; averaged
    over prompts as well."""
    scores, sampler, logp, ours = step
    advantages = outcome_advantages(scores)
    slopes = [
        clipped_slope(a, np.exp(new - old)) / len(new) / scores.size
        for a, new, old in zip(advantages, logp, sampler, strict=True)
    ]
    agree(ours(Grpo())[1], slopes)


def test_grpo_with_the_papers_kl_term(step):
    """DeepSeekMath, equation 4 (the estimator) inside equation 3, with the coefficient of section 4.2."""
    scores, sampler, logp, ours = step
    e, got = ours(Grpo(kl=KlLoss(0.04)))
    slopes = []
    for n, (a, new, old) in enumerate(zip(outcome_advantages(scores), logp, sampler, strict=True)):
        reference = e.ref_logp[n, : len(new)]
        kl_slope = 1 - np.exp(reference - new)  # of pi_ref/pi - log(pi_ref/pi) - 1
        slopes.append((clipped_slope(a, np.exp(new - old)) - 0.04 * kl_slope) / len(new) / scores.size)
    agree(got, slopes)


def test_dapo_counts_tokens_of_groups_that_teach(step):
    """DAPO (arXiv 2503.14476), equations 8, 9 and 11: one mean over the tokens of all groups with different rewards,
    clip 0.2 and 0.28. The answers here are far from the limit of the penalty."""
    scores, sampler, logp, ours = step
    keep = np.repeat(scores.std(1) > 0, scores.shape[1])
    tokens = sum(len(x) for x, k in zip(logp, keep, strict=True) if k)
    slopes = [
        k * clipped_slope(a, np.exp(new - old), high=0.28) / tokens
        for a, k, new, old in zip(outcome_advantages(scores), keep, logp, sampler, strict=True)
    ]
    agree(ours(Dapo(shaping=RewardShaping(overlong_cache=4)))[1], slopes)


def test_dapo_punishes_long_answers_as_in_its_runs():
    """DAPO, section 4.1: 20480 tokens at most, of which the last 4096 are the cache; equation 13."""
    groups = groups_of(np.random.default_rng(0), num_groups=1, group_size=4, max_turns=1, rewards=[[1, 1, 1, -1]])
    e = episodes_of(np.random.default_rng(0), groups, Dapo().needs(), limit_tok=20480)
    lengths = (16384, 18432, 20480, 17408)
    turns = np.where(np.arange(20480) < np.array(lengths)[:, None], 0, -1)
    rewards, keep = Dapo().prepare(dataclasses.replace(e, turns=turns, mask=turns == 0))
    np.testing.assert_allclose(rewards - e.rewards, [0, -0.5, -1, -0.25])
    assert keep.all()


def test_raft_plus_plus(step):
    """RAFT++ (arXiv 2504.11343, version 2, equation 6): the mean over rewarded answers of 1/|a| over tokens of the
    clipped ratio."""
    scores, sampler, logp, ours = step
    right = scores.reshape(-1) == 1
    slopes = [
        r * clipped_slope(1.0, np.exp(new - old)) / len(new) / right.sum()
        for r, new, old in zip(right, logp, sampler, strict=True)
    ]
    agree(ours(RaftPP())[1], slopes)


def test_on_policy_distillation(step):
    """tinker-cookbook, tinker_cookbook/distillation/train_on_policy.py: the advantage of a token is minus the
    coefficient times (student - teacher), nothing discounted, no other reward."""
    _, sampler, _, ours = step
    algorithm = Opd(teachers=(Teacher("run_start"),))
    e, got = ours(algorithm)
    tokens = sum(map(len, sampler))
    agree(got, [(e.teacher_logp[0, n, : len(x)] - x) / tokens for n, x in enumerate(sampler)])


def test_distillation_from_two_teachers_and_rewards(step):
    """github.com/alibaba/ROLL, roll/utils/functionals.py, use_opd: an advantage of rewards less the sum of
    coefficients times (student - teacher)."""
    scores, sampler, _, ours = step
    algorithm = Opd(teachers=(Teacher("run_start", 0.7), Teacher("phase_start", 0.2)), reward_coef=1.0)
    e, got = ours(algorithm)
    tokens = sum(map(len, sampler))
    slopes = []
    for n, (a, x) in enumerate(zip(outcome_advantages(scores), sampler, strict=True)):
        first, second = e.teacher_logp[:, n, : len(x)]
        slopes.append((a - 0.7 * (x - first) - 0.2 * (x - second)) / tokens)
    agree(got, slopes)


def test_attention_rhythm_amplifies_the_anchors(step):
    """arXiv 2510.13554 (version 2), equations 12, 16 and 17: 1.5 times the advantage, of either sign, on the 40 % of an
    answer's tokens with the highest FAI, GRPO's objective otherwise."""
    scores, sampler, logp, ours = step
    e, got = ours(AttentionRhythm(rhythm="global"))
    slopes = []
    for n, (a, new, old) in enumerate(zip(outcome_advantages(scores), logp, sampler, strict=True)):
        fai = e.fai[n, : len(new)]
        top = np.argsort(-fai, kind="stable")[: int(0.4 * len(new))]
        gamma = np.ones(len(new))
        gamma[top] = 1.5
        slopes.append(clipped_slope(a * gamma, np.exp(new - old)) / len(new) / scores.size)
    agree(got, slopes)


def test_gigpo():
    """GiGPO's authors, github.com/langfengQ/verl-agent, gigpo/core_gigpo.py: discounted returns of turns; both parts
    less the mean, over the unbiased deviation + 1e-6, of the group and of turns in one state of it (a state that comes
    once: 0); joint with weight 1. Episodes count once each in the mean of theirs (compute_mean_std_cross_steps
    False, as in equation 3 of arXiv 2505.10978; the repository's own default counts them once per turn)."""
    groups = groups_of(np.random.default_rng(0), rewards=BINARY)
    e = episodes_of(np.random.default_rng(0), groups, GiGpo().needs())
    got = GiGpo().credit(e, {}).advantages

    episode = outcome_advantages(e.rewards.reshape(4, 4))
    states: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for n in range(e.num):
        running = 0.0
        for k in reversed(range(e.num_turns[n])):
            running = e.turn_rewards[n, k] + 0.95 * running
            states.setdefault((e.groups[n], e.states[n, k]), []).append((n, k, running))
    turn = np.zeros_like(e.turn_rewards)
    for same in states.values():
        returns = np.array([r for _, _, r in same])
        std = returns.std(ddof=1) if len(same) > 1 else 1.0
        for n, k, r in same:
            turn[n, k] = (r - returns.mean()) / (std + 1e-6)
    assert max(map(len, states.values())) == 4
    for n in range(e.num):
        want = [episode[n] + turn[n, k] for k in e.turns[n][e.mask[n]]]
        np.testing.assert_allclose(got[n][e.mask[n]], want, rtol=1e-6, atol=1e-9)
