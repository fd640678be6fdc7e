"""AsyPPO, PPO, DPO and segment rewards against their papers and authors' code, worked out here from the places that each
test names."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Phase, Recipe
from rolljax.run.preflight import resolve
from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.base import Setup
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.segment_reward import SegmentDpo, SegmentPairDpo, SegmentPpo, SegmentReward, SegmentRft
from rolljax.trainer.batch import PackShape
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.segments import agreement_mask
from rolljax.trainer.critic import Critic
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.state import fingerprint
from tests import synthetic
from tests.synthetic import episodes_of, groups_of, samples_of, trained

SMALL = Qwen3Config(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, init_std=0.1)


@pytest.fixture(scope="module")
def groups():
    return groups_of(np.random.default_rng(3), num_groups=4, group_size=4)


def moved(e, groups):
    """Return log-probs of a policy that has changed since sampling, `[T]` float32 of each trajectory."""
    rng = np.random.default_rng(8)
    lengths = [t.num_sampled_tok for g in groups for t in g]
    near = np.minimum(e.sampler_logp + rng.normal(0, 0.3, e.mask.shape), -1e-3).astype(np.float32)
    return [near[n, :length] for n, length in enumerate(lengths)]


# ---- AsyPPO: the order of a step ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Watched(AsyPpo):
    """Notes what credit is given and what it makes of it."""

    seen: list = dataclasses.field(default_factory=list, hash=False, compare=False)

    def credit(self, e, algorithm_state):
        result = super().credit(e, algorithm_state)
        self.seen.append((e, result))
        return result


def trainer(model, algorithm, **settings):
    shape = PackShape(3, 4, 64)
    steps = {"steps": 5, "groups_per_step": 4, "limit_tok": 16, **settings}
    mesh = MeshSpec().build(jax.devices()[:1])
    return PhaseTrainer(mesh, model, algorithm, AdamW(lr=1e-2), shape, **steps)


@pytest.mark.slow
def test_values_and_masks_are_those_of_the_updated_critics(model, params, groups):
    """AsyPPO (arXiv 2510.01656): critics are updated, then values, their deviation, GAE and both masks are computed, then
    the policy is updated; with several updates per datum, of the policy too if asked."""
    critic = Critic(num=2, model=SMALL, epochs=4, first=True, optimizer=AdamW(lr=1e-2))
    algorithm = Watched(critic=critic)
    found = trainer(model, algorithm, epochs=2)
    state = found.states.init(params)
    samples, plain = samples_of(groups), Episodes.of(groups, limit_tok=16)
    before = found.compute_credit_inputs(state, found.pack_samples(samples), plain).values
    first_state, first = found.step(state, groups, {}, 0)
    after = found.compute_credit_inputs(first_state, found.pack_samples(samples), plain).values
    assert first_state.critics.num_updates.tolist() == [4, 4] and int(first_state.policy.num_updates) == 2
    (old, _), (new, result) = algorithm.seen
    np.testing.assert_array_equal(old.values, before)
    np.testing.assert_array_equal(new.values, after)
    assert np.abs(after - before)[:, old.mask].max() > 0.05

    # the targets do not hang on values: what an answer is rewarded with in the end (gamma 1), on each of its tokens
    rewards = np.where(plain.mask, plain.rewards[:, None], 0)
    np.testing.assert_allclose(result.returns, rewards, atol=1e-12)
    # GAE of the mean of the updated critics, as baselines/ppo2/runner.py of github.com/openai/baselines has it
    np.testing.assert_allclose(result.advantages, baselines_gae(rewards, after.mean(0), plain.mask), atol=1e-9)
    apart = np.where(plain.mask, after.std(0), np.nan)
    left_out = plain.mask & (result.weights == 0)
    assert left_out.sum() == int(0.2 * plain.mask.sum())
    assert np.nanmax(np.where(left_out, apart, np.nan)) <= np.nanmin(np.where(left_out, np.nan, apart))
    no_bonus = plain.mask & (result.entropy_weights == 0)
    assert np.nanmin(np.where(no_bonus, apart, np.nan)) >= np.nanmax(np.where(no_bonus, np.nan, apart))
    # what critics foresee is measured before they have learned it
    assert first.row["critic/explained_var"] == pytest.approx(algorithm.seen[0][1].stats["critic/explained_var"])
    assert first.row["critic/spread"] == pytest.approx(np.nanmean(apart))


@pytest.mark.slow
def test_the_policy_learns_from_the_second_credit(model, params, groups):
    """The advantages of updated critics are what is trained on: the same update, made by hand."""
    algorithm = Watched(critic=Critic(num=2, model=SMALL, epochs=2, first=True, optimizer=AdamW(lr=1e-2)))
    found = trainer(model, algorithm)
    first_state, first = found.step(found.states.init(params), groups, {}, 0)
    e, result = algorithm.seen[-1]
    kept = apply_credit(found.algorithm.needs(), samples_of(groups), e, result)
    again, *_ = found.update_policy(found.states.init(params), found.pack_micro_batches(kept), 0)
    assert fingerprint(again.policy) == fingerprint(first_state.policy)


def baselines_gae(last_rewards, values, mask, gamma=1.0, lam=0.95):
    """Compute advantage_and_returns of baselines/ppo2/runner.py; `last_rewards` holds an answer's reward on all of its
    tokens."""
    out = np.zeros(mask.shape)
    for n, length in enumerate(mask.sum(1)):
        algorithm_state = 0.0
        for t in reversed(range(length)):
            last = t == length - 1
            reward = last_rewards[n, t] if last else 0.0
            delta = reward + (0.0 if last else gamma * values[n, t + 1]) - values[n, t]
            algorithm_state = delta + (0.0 if last else gamma * lam * algorithm_state)
            out[n, t] = algorithm_state
    return out


# ---- AsyPPO: the objective ------------------------------------------------------------------------------------------


def test_asyppo_is_its_last_equation(groups):
    """Arxiv 2510.01656, section 4.2, the objective with both masks: the mean over responses of 1/|o| times the sum over
    tokens of the masked clipped surrogate and the filtered entropy bonus."""
    algorithm = AsyPpo(entropy_coef=0.05)
    e = episodes_of(np.random.default_rng(4), groups, algorithm.needs())
    logps = moved(e, groups)
    _, grads = trained(algorithm, groups, e, logps)
    values, rewards = e.values.mean(0), np.where(e.mask, e.rewards[:, None], 0)
    advantages, apart = baselines_gae(rewards, values, e.mask), e.values.std(0)
    tokens = np.argsort(np.where(e.mask, apart, np.inf).reshape(-1), kind="stable")[: e.mask.sum()]
    share = int(0.2 * e.mask.sum())
    low, top = (np.isin(np.arange(e.mask.size), x).reshape(e.mask.shape) for x in (tokens[:share], tokens[-share:]))
    for n, logp in enumerate(logps):
        size = len(logp)
        a = advantages[n, :size]
        ratio = np.exp(logp.astype(np.float64) - e.sampler_logp[n, :size])
        inside = np.where(a > 0, ratio <= 1.2, ratio >= 0.8)
        want = -np.where(inside & ~low[n, :size], ratio * a, 0) / (size * e.num)
        np.testing.assert_allclose(grads[n][0], want, rtol=2e-4, atol=2e-7)
        np.testing.assert_allclose(grads[n][1], -0.05 * ~top[n, :size] / (size * e.num), rtol=1e-5)


def test_critics_average_over_tokens_whatever_the_policy_does(groups):
    """Arxiv 2510.01656, section 4.1: the expectation over the states of a critic's own share; responses are not weighed
    by their length."""
    algorithm = AsyPpo()
    e = episodes_of(np.random.default_rng(4), groups, algorithm.needs())
    found = synthetic.trainer(algorithm)
    batch = found.pack(apply_credit(found.algorithm.needs(), samples_of(groups), e, algorithm.credit(e, {}))).batch
    assert len(np.unique(batch.scale)) > 3  # the policy's shares hang on lengths
    share = np.asarray(algorithm.critic_scale(batch))[..., None] * batch.critic_weights_C
    each = share.reshape(-1, 2)
    owners = algorithm.shares(e)[:, e.mask].sum(1)
    for m, own in enumerate(owners):
        np.testing.assert_allclose(each[each[:, m] > 0, m], 1 / own, rtol=1e-6)


def test_a_critic_no_smaller_than_the_policy_is_refused_or_warned_about():
    """Arxiv 2510.01656, section 1: mini-critics, far smaller than the policy."""
    setup = Setup(group_size=8, updates=2)
    assert any("as large as the policy" in text for text in AsyPpo().check(setup))
    mini = Critic(num=2, model=SMALL, epochs=4, first=True)
    assert not any("as large" in text for text in AsyPpo(critic=mini).check(setup))

    def plan(shape):
        algorithm = AsyPpo(critic=dataclasses.replace(mini, model=shape))
        phase = Phase(name="rl", algorithm=algorithm, steps=5, prompts_per_step=8, group_size=8, updates_per_step=2)
        recipe = Recipe(env=FrozenLake(), model=Qwen3Config(), phases=(phase,))
        return resolve(recipe, jax.devices()[:1])

    assert plan(SMALL).model.cfg == Qwen3Config()
    for shape in (Qwen3Config(), Qwen3Config(num_layers=3)):
        with pytest.raises(ConfigError, match="no smaller than the policy") as error:
            plan(shape)
        assert error.value.setting == "Critic.model" and error.value.remedy


# ---- PPO and DPO ----------------------------------------------------------------------------------------------------


def test_ppo_is_that_of_baselines(groups):
    """Github.com/openai/baselines, baselines/ppo2: advantages and returns (runner.py), normalised over the batch, the
    clipped surrogate and the clipped value loss, halved (model.py). Its deviation is the population's."""
    algorithm = Ppo(critic=Critic(clip=0.2))
    e = episodes_of(np.random.default_rng(4), groups, algorithm.needs())
    logps = moved(e, groups)
    _, grads = trained(algorithm, groups, e, logps)
    advantages = baselines_gae(np.where(e.mask, e.rewards[:, None], 0), e.values[0], e.mask)
    num = e.mask.sum()
    normal = (advantages - advantages[e.mask].mean()) / (advantages[e.mask].std() * math.sqrt(num / (num - 1)) + 1e-8)
    for n, logp in enumerate(logps):
        a = normal[n, : len(logp)]
        ratio = np.exp(logp.astype(np.float64) - e.sampler_logp[n, : len(logp)])
        worse = -a * ratio >= -a * np.clip(ratio, 0.8, 1.2)
        np.testing.assert_allclose(grads[n][0], -np.where(worse, a * ratio, 0) / num, rtol=2e-4, atol=2e-7)
    result = algorithm.credit(e, {})
    returns = np.where(e.mask, advantages + e.values[0], 0)
    np.testing.assert_allclose(result.returns, returns, atol=1e-12)
    new, old = e.values[0] + 0.5, e.values[0]
    near = old + np.clip(new - old, -0.2, 0.2)
    want = 0.5 * np.maximum((new - returns) ** 2, (near - returns) ** 2)
    loss, _ = algorithm.critic_loss(*(np.float32(x) for x in (new, returns, old)), None)
    np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-6)


def dpo_slopes(e, logps, beta, masks):
    """Compute the preference loss of github.com/eric-mitchell/direct-preference-optimization, trainers.py: minus log
    sigmoid of beta times the policy's log-ratio less the reference's, averaged over pairs.

    Pairs are the best and worst of every group; `masks`: the tokens that are summed.
    """
    slopes = [np.zeros(len(x)) for x in logps]
    groups = np.unique(e.groups)
    for g in groups:
        members = np.flatnonzero(e.groups == g)
        best, worst = members[np.argmax(e.rewards[members])], members[np.argmin(e.rewards[members])]
        gain = {
            n: ((logps[n] - e.ref_logp[n, : len(logps[n])]) * masks[n, : len(logps[n])]).sum() for n in (best, worst)
        }
        push = beta / (1 + math.exp(beta * (gain[best] - gain[worst]))) / len(groups)
        slopes[best] += -push * masks[best, : len(logps[best])]
        slopes[worst] += push * masks[worst, : len(logps[worst])]
    return slopes


def test_dpo_is_its_authors(groups):
    e = episodes_of(np.random.default_rng(4), groups, Dpo().needs())
    logps = moved(e, groups)
    _, grads = trained(Dpo(), groups, e, logps)
    for got, want in zip(grads, dpo_slopes(e, logps, 0.1, e.mask), strict=True):
        np.testing.assert_allclose(got[0], want, rtol=2e-4, atol=1e-7)


# ---- segment rewards ------------------------------------------------------------------------------------------------


def told(algorithm, groups):
    e = episodes_of(np.random.default_rng(4), groups, algorithm.needs())
    return e, moved(e, groups)


def masks_of(e, signs, min_len=1):
    """Mark the tokens of segments whose mean implicit reward (arXiv 2305.18290, equation 5, beta 0.1) has the sign."""
    return agreement_mask(0.1 * (e.scorer_logp - e.teacher_logp[0]), e.mask, signs, min_len=min_len)


def test_segments_of_ppo_keep_their_advantage_and_their_place(groups):
    """Arxiv 2411.00809: gradients only where a segment agrees with the outcome. The critic learns from every token."""
    algorithm, plain = SegmentPpo(min_segment=1), Ppo()
    e, logps = told(algorithm, groups)
    ours, theirs = algorithm.credit(e, {}), plain.credit(e, {})
    agree = masks_of(e, np.sign(np.where(e.mask, theirs.advantages, 0).sum(1)))
    assert 0.2 < agree[e.mask].mean() < 0.9
    np.testing.assert_array_equal(ours.advantages, theirs.advantages)
    np.testing.assert_array_equal(ours.returns, theirs.returns)
    np.testing.assert_array_equal(ours.weights[e.mask], agree[e.mask])
    assert ours.stats["credit/segment_frac"] == pytest.approx(agree[e.mask].mean())
    _, grads = trained(algorithm, groups, e, logps)
    _, whole = trained(plain, groups, e, logps)
    for n, (got, all_of_it) in enumerate(zip(grads, whole, strict=True)):
        np.testing.assert_allclose(got[0], all_of_it[0] * agree[n, : len(got[0])], rtol=1e-6)


def test_segments_of_dpo_are_what_is_summed(groups):
    """Arxiv 2411.00809: the rewarded segments of the chosen answer, the unrewarded segments of the rejected one."""
    algorithm = SegmentDpo(min_segment=1)
    e, logps = told(algorithm, groups)
    signs = np.zeros(e.num)
    for g in np.unique(e.groups):
        members = np.flatnonzero(e.groups == g)
        signs[members[np.argmax(e.rewards[members])]], signs[members[np.argmin(e.rewards[members])]] = 1, -1
    # who is in no pair counts for nothing, but for the batch's mean and deviation
    agree = masks_of(e, np.where(signs == 0, -1, signs))
    assert 0.2 < agree[signs != 0][e.mask[signs != 0]].mean() < 0.95
    _, grads = trained(algorithm, groups, e, logps)
    for got, want in zip(grads, dpo_slopes(e, logps, 0.1, agree), strict=True):
        np.testing.assert_allclose(got[0], want, rtol=2e-4, atol=1e-7)
    assert SegmentPairDpo.source == "pairs" and SegmentPairDpo(min_segment=1) != algorithm


def test_segments_of_right_answers_are_imitated(groups):
    """Arxiv 2411.00809, for rejection sampling: the cross-entropy of the tokens that agree, over their number."""
    algorithm = SegmentRft(min_segment=1)
    e, logps = told(algorithm, groups)
    keep, agree = Rft().credit(e, {}).keep, masks_of(e, np.ones(e.num))
    part = agree & keep[:, None]
    assert 0 < part.sum() < (e.mask & keep[:, None]).sum()
    _, grads = trained(algorithm, groups, e, logps)
    for n, got in enumerate(grads):
        np.testing.assert_allclose(got[0], -(part[n, : len(got[0])] / part.sum()), rtol=1e-6)


@pytest.mark.parametrize(
    ("ours", "plain"), [(SegmentReward, "Grpo"), (SegmentPpo, "Ppo"), (SegmentDpo, "Dpo"), (SegmentRft, "Rft")]
)
def test_segment_rewards_change_no_other_default(ours, plain):
    base = next(b for b in ours.__mro__ if b.__name__ == plain)()
    assert all(getattr(ours(), f.name) == getattr(base, f.name) for f in dataclasses.fields(base))


def test_segment_dpo_has_sums_not_means():
    with pytest.raises(ConfigError, match="of which segments are left out"):
        SegmentDpo(loss="simpo")
