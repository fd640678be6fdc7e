"""Losses and credit against the papers' equations and the authors' own code, re-derived here from their facts.

Every expected number comes from a formula that names its place; what is compared is the gradient (or advantage) that the
code that trains makes of the same trajectories (`tests/synthetic.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax import cli
from rolljax.errors import ConfigError
from rolljax.trainer import objectives, vocab
from rolljax.trainer.algorithms.base import DivergenceTerm, Setup
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.kimi import Kimi
from rolljax.trainer.algorithms.lite_ppo import LitePpo
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rolljax.trainer.algorithms.rloo import Rloo
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.forward import hidden_before, policy_outputs
from rolljax.trainer.kl import AdaptiveKl, KlLoss, KlReward
from tests.synthetic import LIMIT_TOK, SHAPE, Objective, episodes_of, groups_of, samples_of, trained, trajectory

SAID = ((4, 2, 3), (1, 5, 2), (3, 3, 1), (2, 4, 6))


def three_turns(rewards=((0, 0, 1), (0, 0.5, -0.1), (0.2, 0, 0), (0, 0, 0))):
    """Return one group of four episodes of three turns, with rewards by turn."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 99, 5)
    made = []
    for n, (said, by_turn) in enumerate(zip(SAID, rewards, strict=True)):
        t = trajectory(rng, 0, n, prompt, [(2, k) for k in said], reward=float(sum(by_turn)))
        turns = tuple(dataclasses.replace(u, reward=float(r)) for u, r in zip(t.turns, by_turn, strict=True))
        made.append(dataclasses.replace(t, turns=turns))
    return [made]


def behaviour(groups):
    return [np.concatenate([u.sampler_logp for u in t.turns]).astype(float) for g in groups for t in g]


def moved(groups, scale=0.3):
    rng = np.random.default_rng(5)
    return [np.minimum(x + rng.normal(0, scale, len(x)), -1e-3).astype(np.float32) for x in behaviour(groups)]


def slopes(algorithm, groups, logps, seed=0):
    """Return d loss / d logp of every trajectory, and the loss."""
    e = episodes_of(np.random.default_rng(seed), groups, algorithm.needs())
    loss, grads = trained(algorithm, groups, e, logps)
    return loss, [g[0] for g in grads], e


def same(got, want, rel=1e-6):
    largest = max(np.abs(w).max() for w in want)
    assert largest > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rel * largest)


def ratios(groups, logps):
    return [np.exp(np.asarray(p, float) - q) for p, q in zip(logps, behaviour(groups), strict=True)]


def clipped_slope(ratio, advantage, low=0.2, high=0.2):
    """Compute d/d logp of `-min(r A, clip(r) A)`."""
    cut = np.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
    return np.where(cut, 0.0, -ratio * advantage)


# ---- the KL to a reference ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed():
    groups = groups_of(np.random.default_rng(3))
    batch = Objective(Reinforce()).rows(samples_of(groups), SHAPE).batch
    batch = dataclasses.replace(batch, temperature=np.float32(0.7))
    return dataclasses.replace(batch, **{n: jnp.asarray(a[0]) for n, a in batch.arrays().items()})


@pytest.mark.slow
def test_full_is_the_mean_of_k1_over_the_policy(packed, model, params):
    """KL(policy || reference) = E_policy[log policy - log reference], of the laws that tokens are drawn from: Schulman,
    "Approximating KL divergence"; github.com/alibaba/ROLL, roll/utils/functionals.py, compute_approx_kl."""
    other = model.init(1)
    law = Grpo(kl=KlLoss(0.1, estimator="full")).needs().divergence
    assert (law.kind, law.tau) == ("reverse", None)
    found = policy_outputs(model, params, packed, reference=(law, model, other)).divergence
    every = jnp.broadcast_to(jnp.arange(model.cfg.vocab_size), (*packed.tokens.shape, model.cfg.vocab_size))
    said = []
    for p in (params, other):
        decoder, hidden, _ = hidden_before(model, p, packed)
        said.append(vocab.logp_at(hidden, decoder.head_matrix, every, packed.temperature))
    want = (jnp.exp(said[0]) * objectives.kl(said[0], said[1], "k1")).sum(-1)
    backwards = (jnp.exp(said[1]) * (said[1] - said[0])).sum(-1)
    trained_on = np.asarray(packed.scale) != 0
    np.testing.assert_allclose(np.asarray(found)[trained_on], np.asarray(want)[trained_on], rtol=2e-4)
    assert np.abs(np.asarray(want - backwards))[trained_on].mean() > 0.01
    # a law without a temperature of its own is that of the batch; with one it is scaled by its square (arXiv 1503.02531)
    warm = policy_outputs(
        model, params, packed, reference=(DivergenceTerm("x", "reverse", tau=0.7), model, other)
    ).divergence
    np.testing.assert_allclose(warm, 0.49 * found, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_estimators_as_losses():
    """What each is on average over tokens that the policy drew: k1 has none, k2 that of KL(policy || reference), k3 that
    of KL(reference || policy), abs that of the total variation."""
    rng = np.random.default_rng(0)
    z, ref = (jnp.asarray(rng.normal(0, 1, 7), jnp.float32) for _ in range(2))
    q = jax.nn.log_softmax(ref)

    def drawn(kind):
        """Return the expectation over tokens of the gradient of that token's loss."""
        slope = jax.vmap(lambda v: jax.grad(lambda z: objectives.kl(jax.nn.log_softmax(z), q, kind)[v])(z))
        return jax.nn.softmax(z) @ slope(jnp.arange(7))

    def of(loss):
        return jax.grad(lambda z: loss(jax.nn.log_softmax(z)))(z)

    forward, reverse = of(lambda p: (jnp.exp(q) * (q - p)).sum()), of(lambda p: (jnp.exp(p) * (p - q)).sum())
    near = {"rtol": 0, "atol": 1e-6}
    np.testing.assert_allclose(drawn("k1"), np.zeros(7), **near)
    np.testing.assert_allclose(drawn("k2"), reverse, **near)
    np.testing.assert_allclose(drawn("k3"), forward, **near)
    np.testing.assert_allclose(drawn("abs"), of(lambda p: jnp.abs(jnp.exp(p) - jnp.exp(q)).sum()), **near)
    assert np.abs(forward - reverse).max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "abs"])
def test_estimators_without_a_useful_gradient_are_refused_as_losses(kind):
    with pytest.raises(ConfigError, match=r"KlLoss\.estimator") as refused:
        Grpo(kl=KlLoss(0.1, estimator=kind))
    assert "KlReward" in str(refused.value) and "'full'" in str(refused.value)
    Grpo(kl=KlReward(0.1, estimator=kind))  # in the reward they are what they should be


# ---- ReBN: GEM's trainer --------------------------------------------------------------------------------------------


def gem(groups, logps, gamma, ignore_cut=False):
    """Compute the loss of github.com/axon-rl/gem, examples/train_oat/train_oat.py (prepare_trajectories,
    compute_monte_carlo_advantages, Learner._init) and github.com/sail-sg/oat, oat/algorithms/ppo.py (learning_step).

    Every turn is a sample; its return is normalised over all turns (population, 1e-9); PPO's clip of .2; a masked sum
    over generate_max_length; a turn that was cut is multiplied by 0 only with ignore_no_eos; the mean over all turns.
    """
    returns, cut = [], []
    for t in groups[0]:
        tail, own = 0.0, []
        for u in reversed(t.turns):
            tail = u.reward + gamma * tail
            own.append(tail)
        returns += own[::-1]
        cut += [u.finish_reason == "length" for u in t.turns]
    returns = np.array(returns)
    advantages = iter(
        zip((returns - returns.mean()) / (np.sqrt((returns**2).mean() - returns.mean() ** 2) + 1e-9), cut, strict=True)
    )
    out = []
    for t, ratio in zip(groups[0], ratios(groups, logps), strict=True):
        start, row = 0, []
        for u in t.turns:
            a, was_cut = next(advantages)
            own = clipped_slope(ratio[start : start + len(u.tokens)], a) / (LIMIT_TOK * len(returns))
            row.append(own * (0.0 if ignore_cut and was_cut else 1.0))
            start += len(u.tokens)
        out.append(np.concatenate(row))
    return out


def test_rebn_has_gems_gradient():
    groups = three_turns()
    logps = moved(groups)
    want = gem(groups, logps, 0.9)
    same(slopes(ReBn(), groups, logps)[1], want)
    # divided by episodes instead of turns it was three times as large
    same(slopes(ReBn(aggregation="seq-sum-norm"), groups, logps)[1], [3 * w for w in want])
    assert sum((w == 0).sum() for w in want) > 0  # some tokens are clipped


def test_rebn_leaves_out_a_cut_turn_only_if_asked_and_never_its_episode():
    groups = three_turns()
    first = groups[0][0]
    turns = (first.turns[0], dataclasses.replace(first.turns[1], finish_reason="length"), first.turns[2])
    groups = [[dataclasses.replace(first, turns=turns), *groups[0][1:]]]
    logps = moved(groups)
    same(slopes(ReBn(), groups, logps)[1], gem(groups, logps, 0.9))
    _, got, e = slopes(ReBn(mask_truncated=True), groups, logps)
    same(got, gem(groups, logps, 0.9, ignore_cut=True))
    assert e.truncated[0] and e.cut[0].tolist() == [False, True, False]
    lengths = np.cumsum([len(u.tokens) for u in turns])
    assert (got[0][lengths[0] : lengths[1]] == 0).all() and np.abs(got[0][: lengths[0]]).max() > 0


# ---- REINFORCE++ ----------------------------------------------------------------------------------------------------


def openrlhf(groups, e, beta, baseline=False):
    """Compute compute_advantages_and_returns of github.com/OpenRLHF/OpenRLHF,
    openrlhf/trainer/ppo_utils/experience_maker.py.

    The reward (less its group's mean for reinforce_baseline) is on the last token, -beta (logp - ref_logp) on every
    token, summed to the end; then less the mean over all tokens, times 1/sqrt(population variance).
    """
    rows = []
    scores = e.rewards - (e.rewards.mean() if baseline else 0.0)
    for n, length in enumerate(e.lengths):
        cost = np.zeros(length) if e.ref_logp is None else -beta * (e.sampler_logp - e.ref_logp)[n, :length]
        cost[-1] += scores[n]
        rows.append(cost[::-1].cumsum()[::-1])
    flat = np.concatenate(rows)
    return [(row - flat.mean()) / np.sqrt(flat.var()) for row in rows]


def test_reinforce_pp_normalises_over_all_tokens():
    """arXiv 2501.03262 (version 9), eq. 4 and 5: A_t = r - beta sum_{i >= t} KL(i), normalised over the tokens of the
    batch."""
    groups = groups_of(np.random.default_rng(1), num_groups=1, group_size=6)
    logps = moved(groups)
    algorithm = ReinforcePP(kl=KlReward(0.2))
    _, got, e = slopes(algorithm, groups, logps)
    total = e.mask.sum()
    every = zip(ratios(groups, logps), openrlhf(groups, e, 0.2), strict=True)
    same(got, [clipped_slope(r, a) / total for r, a in every], rel=2e-6)
    assert all(np.ptp(row) > 0 for row in openrlhf(groups, e, 0.2) if len(row) > 1)


def test_reinforce_pp_in_rolls_order():
    """github.com/alibaba/ROLL, docs, Reinforce_Plus_Plus: norm_mean_type and norm_std_type "batch", whiten_advantages
    false: (R - mean) / (std + 1e-6), the KL's cost added as it is (roll/utils/functionals.py)."""
    groups = groups_of(np.random.default_rng(1), num_groups=1, group_size=6)
    algorithm = ReinforcePP(kl=KlReward(0.2), mean="batch", std="batch", whiten=False)
    e = episodes_of(np.random.default_rng(0), groups, algorithm.needs())
    got = algorithm.credit(e, {}).advantages
    scores = (e.rewards - e.rewards.mean()) / (e.rewards.std(ddof=1) + 1e-6)
    for n, length in enumerate(e.lengths):
        cost = -0.2 * (e.sampler_logp - e.ref_logp)[n, :length]
        np.testing.assert_allclose(got[n, :length], scores[n] + cost[::-1].cumsum()[::-1])


def test_reinforce_pp_with_a_baseline():
    """arXiv 2501.03262 (version 9), eq. 6 and 7."""
    groups = groups_of(np.random.default_rng(1), num_groups=1, group_size=6)
    e = episodes_of(np.random.default_rng(0), groups, ReinforcePPBaseline().needs())
    got = ReinforcePPBaseline().credit(e, {}).advantages
    for row, want in zip(got, openrlhf(groups, e, 0.0, baseline=True), strict=True):
        np.testing.assert_allclose(row[: len(want)], want, atol=1e-7)


# ---- sequences: Kimi, TOPR, RLOO ------------------------------------------------------------------------------------


def test_kimi_squares_the_sum():
    """arXiv 2501.12599, eq. 3: the mean over k answers of grad log pi (r - mean r) - tau/2 grad (log pi/pi_i)^2, with
    the probabilities of whole answers."""
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4)
    logps = moved(groups)
    loss, got, e = slopes(Kimi(tau=0.3), groups, logps)
    baseline = e.rewards.mean()
    drift = [np.sum(np.log(r)) for r in ratios(groups, logps)]
    want = [-np.full(len(p), (r - baseline) - 0.3 * d) / 4 for p, r, d in zip(logps, e.rewards, drift, strict=True)]
    same(got, want)
    value = [-(r - baseline) * p.sum() + 0.15 * d**2 for p, r, d in zip(logps, e.rewards, drift, strict=True)]
    assert loss == pytest.approx(np.mean(value), rel=1e-5)
    # ROLL, roll/pipeline/rlvr/actor_pg_worker.py, _compute_kimi15_loss: each token its own square
    _, got, _ = slopes(Kimi(tau=0.3, square="token", aggregation="token-mean"), groups, logps)
    tokens = sum(map(len, logps))
    every = zip(ratios(groups, logps), e.rewards, strict=True)
    same(got, [-((r - baseline) - 0.3 * np.log(x)) / tokens for x, r in every])


def test_topr_tapers_whole_trajectories_by_the_sign_of_the_reward():
    """arXiv 2503.14286, eq. 8: R grad log pi where R is positive, else [pi/mu]_0^1 R grad log pi, of trajectories."""
    rewards = [[1.0, -1.0, 0.5, -0.5, -1.0, -1.0]]
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=6, rewards=rewards)
    logps = moved(groups)
    _, got, e = slopes(Topr(), groups, logps)
    taper = [1.0 if r > 0 else min(np.prod(x), 1.0) for r, x in zip(e.rewards, ratios(groups, logps), strict=True)]
    same(got, [np.full(len(p), -w * r / 6) for p, w, r in zip(logps, taper, e.rewards, strict=True)])
    assert len({round(w, 6) for w in taper}) > 3
    # with a baseline the reward still says which half: ROLL, actor_pg_worker.py, _compute_topr_loss, `scores > 0`
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4, rewards=[[1.0, 0.1, 0.0, 1.0]])
    logps = moved(groups)
    token = Topr(level="token", mean="group", aggregation="token-mean")
    _, got, e = slopes(token, groups, logps)
    advantages = e.rewards - e.rewards.mean()
    tokens = sum(map(len, logps))
    want = []
    for r, a, x in zip(e.rewards, advantages, ratios(groups, logps), strict=True):
        want.append(-(np.ones(len(x)) if r > 0 else np.minimum(x, 1)) * a / tokens)
    same(got, want)
    assert advantages[1] < 0 < e.rewards[1]


def test_topr_with_a_geometric_mean_is_the_baseline_of_ipa():
    """arXiv 2512.24873, section 3.2.4.1, eq. 4 and 5: the ratio is the geometric mean over a trajectory's tokens, cut
    to [0, 1], for non-positive rewards only."""
    rewards = [[1.0, -1.0, 0.5, -0.5, -1.0, -1.0]]
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=6, rewards=rewards)
    logps = moved(groups)
    _, got, e = slopes(SequenceTopr(), groups, logps)
    means = [np.exp(np.log(x).mean()) for x in ratios(groups, logps)]
    taper = [1.0 if r > 0 else min(mean, 1.0) for r, mean in zip(e.rewards, means, strict=True)]
    same(got, [np.full(len(p), -w * r / 6) for p, w, r in zip(logps, taper, e.rewards, strict=True)])
    assert len({round(w, 6) for w in taper}) > 2


def test_rloo_sums_over_an_answer():
    """arXiv 2402.14740, section 2.3: mean over k of (R_i - mean of the others) grad log pi of the whole answer."""
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4)
    logps = behaviour(groups)
    _, got, e = slopes(Rloo(), groups, [x.astype(np.float32) for x in logps])
    others = [(e.rewards.sum() - r) / 3 for r in e.rewards]
    same(got, [np.full(len(p), -(r - o) / 4) for p, r, o in zip(logps, e.rewards, others, strict=True)])


# ---- weights of the ratio -------------------------------------------------------------------------------------------


def test_cispo_has_no_lower_bound():
    """arXiv 2506.13585, eq. 4 and 5 and the sentence after them: the weight is clipped from above only; the mean is over
    all tokens; the advantage is the group's."""
    assert Cispo().clip_low is None
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4)
    logps = moved(groups, 0.8)
    _, got, e = slopes(Cispo(), groups, logps)
    advantages = (e.rewards - e.rewards.mean()) / (e.rewards.std(ddof=1) + 1e-6)
    tokens = sum(map(len, logps))
    every = list(zip(ratios(groups, logps), advantages, strict=True))
    same(got, [-np.minimum(x, 1.28) * a / tokens for x, a in every])
    assert min(x.min() for x, _ in every) < 0.5  # far below where a bound of .2 would have held it


def test_tis_truncates_to_one():
    """github.com/alibaba/ROLL, roll/pipeline/rlvr/actor_pg_worker.py, _compute_tis_loss: the ratio within 0 and 1."""
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4)
    logps = moved(groups)
    _, got, e = slopes(Tis(mean="none", std="none"), groups, logps)
    tokens = sum(map(len, logps))
    same(got, [-np.clip(x, 0, 1) * r / tokens for x, r in zip(ratios(groups, logps), e.rewards, strict=True)])


def test_decoupled_ppo_is_areals_below_the_cap():
    """github.com/inclusionAI/AReaL, areal/utils/functional/functional.py, ppo_actor_loss_fn: PPO's clip around the
    proximal policy times proximal/behaviour. Its rejection_sampling can leave out tokens above a bound (`mask`) or cap
    their weight (`clamp`); ours caps it, and can leave them out, too."""
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4)
    logps = moved(groups)
    for algorithm, cap in (
        (DecoupledPpo(mean="none", std="none"), 2.0),
        (DecoupledPpo(mean="none", std="none", correction=Correction(weight_cap=1.05, ratio_band=(0, 1.05))), 1.05),
    ):
        _, got, e = slopes(algorithm, groups, logps)
        weights = np.exp(e.trainer_logp - e.sampler_logp)
        kept = weights <= cap
        assert kept[e.mask].all() == (cap == 2.0)
        counted = (kept & e.mask).sum()
        want = []
        for n, (p, r) in enumerate(zip(logps, e.rewards, strict=True)):
            part = slice(0, len(p))
            ratio = np.exp(p.astype(float) - e.trainer_logp[n, part])
            want.append(weights[n, part] * kept[n, part] * clipped_slope(ratio, r) / counted)
        same(got, want)


# ---- rewards and who takes part -------------------------------------------------------------------------------------


def outcomes(algorithm, rewards, **layout):
    groups = groups_of(
        np.random.default_rng(4), num_groups=len(rewards), group_size=len(rewards[0]), rewards=rewards, **layout
    )
    e = episodes_of(np.random.default_rng(0), groups, algorithm.needs())
    return e, algorithm.credit(e, {})


def test_lite_ppo_divides_by_the_batch():
    """arXiv 2508.08221, section 5; github.com/alibaba/ROLL, roll/utils/functionals.py, reward_norm with norm_mean_type
    "group" and norm_std_type "batch": unbiased, + 1e-6."""
    rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, 1]])
    _, credit = outcomes(LitePpo(), rewards.tolist())
    want = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(credit.advantages[:, 0], want.ravel())


def test_rewards_are_clipped_once_they_are_normalised():
    """github.com/alibaba/ROLL, roll/utils/functionals.py, reward_postprocess: first reward_norm, then the clamp. One
    success in eight is (1 - 1/8) / .353553 = 2.474867, which a clip at 2 cuts, though no reward is above 1."""
    _, credit = outcomes(Grpo(shaping=RewardShaping(clip=2.0)), [[1.0] + [0.0] * 7])
    np.testing.assert_allclose(credit.advantages[:, 0], [2.0] + [-0.353552] * 7, atol=1e-6)
    _, whole = outcomes(Grpo(), [[1.0] + [0.0] * 7])
    np.testing.assert_allclose(whole.advantages[0, 0], 2.474867, atol=1e-6)
    # where nothing is normalised it is the reward itself
    _, plain = outcomes(TurnReinforce(gamma=1.0, shaping=RewardShaping(clip=0.5)), [[1.0, 0.25]], max_turns=1)
    np.testing.assert_allclose(plain.advantages[:, 0], [0.5, 0.25])


def test_long_answers_are_left_out_by_outcome():
    """github.com/alibaba/ROLL, roll/utils/functionals.py, get_sample_level_mask, error_max_len_clip: an unsolved answer
    takes part below the threshold only, a solved one always."""
    e, credit = outcomes(Grpo(wrong_max_tok=8), [[1.0, 0.0, 0.0, 1.0]] * 4)
    np.testing.assert_array_equal(credit.keep, (e.rewards == 1) | ((e.rewards == 0) & (e.lengths < 8)))
    assert 0 < (~credit.keep).sum() < (e.rewards == 0).sum()
    _, right = outcomes(Grpo(right_max_tok=8, filter=None), [[1.0, 0.0, 0.0, 1.0]] * 4)
    np.testing.assert_array_equal(right.keep, (e.rewards == 0) | (e.lengths < 8))


def test_samples_are_weighed_as_in_roll():
    """github.com/alibaba/ROLL, roll/pipeline/rlvr/actor_worker.py, compute_sample_weights: (.5 + 1.5 difficulty) times
    (1.5 - scaled length), then to a mean of 1."""
    e, credit = outcomes(Grpo(difficulty_weight=True, length_weight=True), [[1.0, 0, 0, 0], [1.0, 1, 1, 0]])
    difficulty = np.repeat([0.75, 0.25], 4)
    length = (e.lengths - e.lengths.min()) / np.ptp(e.lengths)
    want = (0.5 + 1.5 * difficulty) * (1.5 - length)
    np.testing.assert_allclose(credit.weights[:, 0], want / want.mean())


def test_cross_entropy_of_what_was_rewarded():
    """github.com/alibaba/ROLL before its v0.2.0, roll/pipeline/rlvr/actor_worker.py, postive_loss_coef: a supervised
    loss on samples with scores > 0, added to the policy's (there times the advantage; since v0.2.0 it is not read)."""
    groups = groups_of(np.random.default_rng(2), num_groups=1, group_size=4, rewards=[[1.0, 0.0, -1.0, 0.5]])
    logps = moved(groups)
    _, plain, e = slopes(Reinforce(), groups, logps)
    _, both, _ = slopes(Reinforce(sft_coef=0.4), groups, logps)
    tokens = sum(map(len, logps))
    same(both, [g - 0.4 * (r > 0) / tokens for g, r in zip(plain, e.rewards, strict=True)])


def test_length_reward_is_added_before_normalising():
    e, credit = outcomes(Reinforce(shaping=RewardShaping(length_reward=0.5)), [[1.0, 0.0, 0.0, 1.0]] * 2)
    want = e.rewards + 0.5 * shaping.length_reward(e.lengths, e.success, e.groups)
    np.testing.assert_allclose(credit.advantages[:, 0], want)


# ---- turns and distillation -----------------------------------------------------------------------------------------


def test_turns_get_their_discounted_return():
    """github.com/alibaba/ROLL, roll/pipeline/agentic/utils.py, compute_agentic_reinforce_return: all positions of a
    segment get its last reward plus gamma times the next segment's."""
    groups = three_turns()
    e = episodes_of(np.random.default_rng(0), groups, TurnReinforce().needs())
    got = TurnReinforce(gamma=0.95).credit(e, {}).advantages
    for row, t in zip(got, groups[0], strict=True):
        g = [t.turns[0].reward + 0.95 * (t.turns[1].reward + 0.95 * t.turns[2].reward), 0, t.turns[2].reward]
        g[1] = t.turns[1].reward + 0.95 * t.turns[2].reward
        want = np.repeat(g, [len(u.tokens) for u in t.turns])
        np.testing.assert_allclose(row[: len(want)], want)


def test_skewed_divergence_is_distillms():
    """arXiv 2402.03898, section 3.1; github.com/jongwooko/distillm, distillm/losses.py, skewed_forward_kl: KL(p ||
    .1 p + .9 q) with teacher p and student q."""
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(0, 1, (3, 9)).astype(np.float32) for _ in range(2))
    got = vocab.divergence(jnp.asarray(student), jnp.eye(9), jnp.asarray(teacher), jnp.eye(9), "skewed", alpha=0.1)
    q, p = (np.exp(z - z.max(1, keepdims=True)).astype(float) for z in (student, teacher))
    q, p = q / q.sum(1, keepdims=True), p / p.sum(1, keepdims=True)
    np.testing.assert_allclose(got, (p * np.log(p / (0.1 * p + 0.9 * q))).sum(1), rtol=1e-5)


# ---- defaults -------------------------------------------------------------------------------------------------------

STATED = (
    ReBn,
    Cispo,
    Kimi,
    Topr,
    Rloo,
    Reinforce,
    ReinforcePP,
    ReinforcePPBaseline,
    LitePpo,
    Tis,
    DecoupledPpo,
    SequenceTopr,
    TurnReinforce,
)


@pytest.mark.parametrize("cls", STATED, ids=lambda c: c.__name__)
def test_defaults_are_the_papers_or_say_why_not(cls):
    assert issubclass(cls, PolicyGradient) and cls.paper
    for name, stated in cls.paper.items():
        equal = getattr(cls(), name) == stated.value
        assert equal != bool(stated.why), f"{cls.__name__}.{name}"


# ---- settings that cannot work, and the preset -----------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{"shaping": RewardShaping(length_reward=1.0)}, {"difficulty_weight": True}])
def test_what_compares_siblings_needs_some(setting):
    algorithm = Reinforce(**setting)
    with pytest.raises(ConfigError, match=next(iter(setting))):
        algorithm.check(Setup(group_size=1))
    algorithm.check(Setup(group_size=2))


@pytest.mark.parametrize(
    ("cls", "bad"),
    [
        (Reinforce, {"sft_coef": -0.1}),
        (Reinforce, {"wrong_max_tok": 0}),
        (Reinforce, {"right_max_tok": -1}),
        (RewardShaping, {"length_reward": -0.5}),
        (RewardShaping, {"clip": 0.0}),
        (RewardShaping, {}),
        (GroupFilter, {"dynamic_sampling_rounds": -1}),
        (KlLoss, {"coef": 0.0}),
        (AdaptiveKl, {"target": 0.0}),
        (AdaptiveKl, {"target": 0.1, "horizon": 0}),
    ],
)
def test_tricks_out_of_range_are_refused(cls, bad):
    with pytest.raises(ConfigError) as refused:
        cls(**bad)
    assert refused.value.setting.startswith(f"{cls.__name__}.{next(reversed(bad), '')}") and refused.value.remedy


def test_the_sampling_of_tricks_or_traps_is_a_preset():
    """arXiv 2508.08221, section 3.1: temperature .99, top-p .99, top-k 100."""
    setting = 'grpo.Grpo.anchor = "proximal"'
    phase = cli.load_recipe(["quickstart", "presets/tricks_or_traps"], [setting]).value.phases[-1]
    assert (phase.temperature, phase.top_p, phase.top_k) == (0.99, 0.99, 100)
