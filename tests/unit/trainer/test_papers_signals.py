"""MaxRL, DPPO and GDPO against their papers' equations and the authors' own code, re-derived here from their facts."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.errors import ConfigError
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.dppo import Dppo
from rolljax.trainer.algorithms.gdpo import Gdpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.maxrl import MaxRl
from rolljax.trainer.credit.estimators import normalise
from rolljax.trainer.credit.shaping import RewardShaping
from tests.synthetic import episodes_of, groups_of
from tests.unit.trainer.test_objectives import coefficients, row
from tests.unit.trainer.test_papers_losses import behaviour, moved, ratios, same, slopes


def advantages(algorithm, groups):
    """Return the advantage of each trajectory."""
    e = episodes_of(np.random.default_rng(0), groups, algorithm.needs())
    return algorithm.credit(e, {}).advantages[:, 0]


def solved(*groups):
    return groups_of(np.random.default_rng(1), len(groups), len(groups[0]), rewards=groups)


# ---- MaxRL ----------------------------------------------------------------------------------------------------------


def test_maxrl_divides_by_the_success_rate():
    """arXiv 2602.02710, algorithm 1: (r - mean) / mean; github.com/tajwarfahim/maxrl at 7db6bb9,
    verl/trainer/ppo/core_algos.py, compute_p_normalization_outcome_advantage, with its 1e-6. A group that is never or
    always solved has no gradient."""
    got = advantages(MaxRl(), solved([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]))
    want = [(r - p) / (p + 1e-6) for p, group in ((0.25, "1000"), (0.75, "1110")) for r in map(int, group)]
    np.testing.assert_allclose(got, [*want, *[0] * 8], rtol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_the_expectation_of_maxrl_is_the_gradient_of_the_truncated_log(p, num=6):
    """Over groups of N answers the estimator's mean is the gradient of -sum_{k < N} (1 - p)^k / k, here for one answer
    that is right with probability p = sigmoid(x). (arXiv 2602.02710 proves k <= N without the baseline, which has no
    part in groups that are never solved.)"""
    found = 0.0
    for right in range(num + 1):
        rewards = np.array([1.0] * right + [0.0] * (num - right))
        scores = normalise(rewards, mean="group", std="group_mean", eps=0.0)
        slope = np.where(rewards > 0, 1 - p, -p)  # of the log-prob of what was sampled, by x
        found += math.comb(num, right) * p**right * (1 - p) ** (num - right) * (scores * slope).mean()
    want = sum((1 - p) ** (k - 1) for k in range(1, num)) * p * (1 - p)
    assert found == pytest.approx(want, rel=1e-9)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match=r"(?s)MaxRl.std.*reward of -1.*RewardShaping"):
        advantages(MaxRl(), solved([1, -1]))
    with pytest.raises(ConfigError, match="reward of"):
        advantages(MaxRl(shaping=RewardShaping(overlong_cache=16)), solved([1, 0]))


# ---- DPPO -----------------------------------------------------------------------------------------------------------

OLD, NEW = np.array([0.10, 0.40, 0.50, 0.70, 0.30, 0.30]), np.array([0.35, 0.10, 0.90, 0.20, 0.60, 0.05])
SIGNS = np.array([1, -1, 1, -1, -1, 1.0])


def weights(**settings):
    """Return the factor of each token's log-prob gradient, relative to its advantage."""
    adv, anchor = row(*SIGNS), jnp.log(row(*OLD))

    def loss(logp):
        return objectives.dppo(jnp.exp(logp - anchor), adv, logp, anchor, **settings)

    return np.asarray(coefficients(loss, jnp.log(row(*NEW))))[0] / SIGNS


def test_dppo_leaves_out_what_has_moved_far_enough():
    """arXiv 2602.04879, equation of the mask; github.com/sail-sg/Stable-RL at 22ce6d3,
    verl/trainer/ppo/core_algos.py, _compute_token_mask_for_policy_loss: by the sign of the advantage, over the bound of
    that side. A token that moves back, as the last two, stays."""
    ratio = NEW / OLD
    np.testing.assert_allclose(weights(low=0.2, high=0.28), ratio * [1, 0, 0, 0, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(weights(low=0.2, high=0.2), ratio * [0, 0, 0, 0, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(weights(low=0.45, high=0.5), ratio * [1, 1, 1, 0, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(weights(cap=1.5), np.minimum(ratio, 1.5), rtol=1e-5)


def test_dppo_by_kl():
    kl = OLD * np.log(OLD / NEW) + (1 - OLD) * np.log((1 - OLD) / (1 - NEW))
    for bound in (0.2, 0.4, 0.55):
        stays = (kl <= bound) | (np.sign(NEW - OLD) != SIGNS)
        assert 2 < stays.sum() < 6
        np.testing.assert_allclose(weights(divergence="kl", low=bound, high=bound), NEW / OLD * stays, rtol=1e-5)


def test_a_rare_token_may_move_by_a_large_ratio():
    """arXiv 2602.04879, section 3: PPO's clip stops 1e-5 -> 1e-3, and lets .99 -> .8 pass."""
    old, new, adv = row(1e-5, 0.99), row(1e-3, 0.8), row(1.0, -1.0)
    loss = {
        "dppo": lambda x: objectives.dppo(jnp.exp(x - jnp.log(old)), adv, x, jnp.log(old), "tv", 0.15, 0.15),
        "ppo": lambda x: objectives.clipped(jnp.exp(x - jnp.log(old)), adv, 0.2, 0.2),
    }
    trains = {name: (np.asarray(coefficients(f, jnp.log(new)))[0] != 0).tolist() for name, f in loss.items()}
    assert trains == {"dppo": [True, False], "ppo": [False, True]}


def test_dppo_pulls_all_tokens_back_as_in_prime_rl():
    """github.com/PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/loss.py: kl_tau * log_ratio^2 over all tokens, those
    that the mask left out too."""
    groups = groups_of(np.random.default_rng(2))
    logps = moved(groups, 0.6)
    plain, pulled = (
        slopes(Dppo(square_coef=c, aggregation="token-mean", mask_low=0.1, mask_high=0.1), groups, logps)[1]
        for c in (0.0, 0.5)
    )
    assert any((g == 0).any() for g in plain)
    tokens = sum(map(len, logps))
    want = [g + 2 * 0.5 * np.log(r) / tokens for g, r in zip(plain, ratios(groups, logps), strict=True)]
    same(pulled, want, rel=1e-5)
    assert len(behaviour(groups)) == len(pulled)


# ---- GDPO -----------------------------------------------------------------------------------------------------------


def with_parts(groups, rng):
    """Give trajectories two parts, whose sum is their reward."""
    made = []
    for group in groups:
        parts = [{"right": float(rng.integers(2)), "form": float(rng.integers(2))} for _ in group]
        made.append(
            [dataclasses.replace(t, reward=sum(p.values()), reward_parts=p) for t, p in zip(group, parts, strict=True)]
        )
    return made


def test_gdpo_is_its_authors():
    """github.com/NVlabs/GDPO at 7ab53af, verl-GDPO/verl/trainer/ppo/ray_trainer.py, adv_estimator 'gdpo': GRPO's scores
    (unbiased deviation, 1e-6) of each reward, added, then verl's masked_whiten over all tokens."""
    groups = with_parts(groups_of(np.random.default_rng(4)), np.random.default_rng(5))
    e = episodes_of(np.random.default_rng(0), groups, Gdpo().needs())
    added = np.zeros(e.num)
    for name in ("right", "form"):
        for g in range(len(groups)):
            inside = e.groups == g
            values = np.array([parts[name] for parts in e.parts])[inside]
            added[inside] += (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    tokens = np.repeat(added, e.lengths)
    want = (added - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    got = Gdpo(parts=("right", "form")).credit(e, {}).advantages
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-5)
    assert (got[e.mask] == np.repeat(got[:, 0], e.lengths)).all()


def test_gdpo_tells_mixtures_of_one_sum_apart():
    """arXiv 2601.05242, section 2: (1, 0) and (0, 1) have one advantage under GRPO. Where one part is rare, GDPO gives
    it more."""
    parts = [(1, 0), (0, 1), (0, 1), (0, 1), (0, 0), (0, 0)]
    groups = solved([sum(p) for p in parts])
    named = [
        [
            dataclasses.replace(t, reward_parts={"a": float(a), "b": float(b)})
            for t, (a, b) in zip(groups[0], parts, strict=True)
        ]
    ]
    grpo = advantages(Grpo(), named)
    assert grpo[0] == grpo[1]
    gdpo = advantages(Gdpo(parts=("a", "b")), named)
    assert gdpo[0] > gdpo[1] > gdpo[4]


def test_names_of_parts():
    groups = with_parts(groups_of(np.random.default_rng(4)), np.random.default_rng(5))
    with pytest.raises(ConfigError, match=r"(?s)Gdpo.parts.*rewards of this step have form, right"):
        advantages(Gdpo(parts=("rihgt",)), groups)
    with pytest.raises(ConfigError, match="names a part twice"):
        Gdpo(parts=("a", "a"))
    with pytest.raises(ConfigError, match="one for each"):
        Gdpo(parts=("a", "b"), part_weights=(1.0,))
