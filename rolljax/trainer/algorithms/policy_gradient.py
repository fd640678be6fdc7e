"""The common base of policy gradients, and two mixins of which most of them consist.

    class Grpo(NormalisedReward, ClippedRatio, PolicyGradient)

`PolicyGradient` computes credit from episodes, and a loss per token from log-probs. `NormalisedReward` subtracts a
baseline from the rewards and scales them, `ClippedRatio` is the surrogate of PPO; an algorithm adds its own parts to
these.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms import checks
from rolljax.trainer.algorithms.base import (
    Algorithm,
    AlgorithmState,
    DivergenceTerm,
    Needs,
    PolicyOutputs,
    Setup,
    TokenLoss,
    refusal,
)
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.credit.mismatch import Correction, RatioLevel
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.kl import KlLoss, KlReward


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """The common parts of policy gradients: preparation of rewards, choice of the trained groups, aggregation of token
    losses, and the terms besides the surrogate. Subclasses write `surrogate`, may write `advantages`, and override
    defaults."""

    aggregation: Aggregation = "token-mean"
    """Scheme by which token losses become one number, as listed in `trainer.aggregation`."""
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """Log-probs that ratios are taken to: recorded while sampling (`behaviour`), or computed again by the trainer
    before the step's first update (`proximal`)."""
    shaping: RewardShaping | None = None
    """Terms added to rewards, and a clip of the rewards (`shaping.RewardShaping`)."""
    filter: GroupFilter | None = None
    """Rule for groups to leave out, and for drawing replacements (`shaping.GroupFilter`)."""
    mask_truncated: bool = False
    """Answers cut by a limit are left out."""
    wrong_max_tok: Annotated[int | None, Range(above=0, remedy="give a positive number, or None for none")] = None
    """Number of sampled tokens below which unsolved trajectories take part; longer ones are left out (None: all take
    part)."""
    right_max_tok: Annotated[int | None, Range(above=0, remedy="give a positive number, or None for none")] = None
    """Number of sampled tokens below which solved trajectories take part; longer ones are left out (None: all take
    part)."""
    difficulty_weight: bool = False
    """Whether trajectories of prompts that are rarely solved get a higher weight; the average weight is 1
    (`shaping.sample_weights`)."""
    length_weight: bool = False
    """Whether short trajectories get a higher weight; the average weight is 1 (`shaping.sample_weights`)."""
    whiten: bool = False
    """Advantages to mean 0 and standard deviation 1 over all tokens."""
    advantage_clip: Annotated[float | None, Range(above=0, remedy="give a positive number, or None for none")] = None
    """Bound c of the final clip of advantages to [-c, c] (None: no clip)."""
    kl: KlLoss | KlReward | None = None
    """KL term that holds the policy near a reference: `kl.KlLoss`, a term in the loss, or `kl.KlReward`, a penalty in
    the reward of every token."""
    entropy_coef: Annotated[float, Range(low=0, remedy="0 switches it off")] = 0.0
    """Weight of the entropy bonus."""
    sft_coef: Annotated[float, Range(low=0, remedy="0 switches it off")] = 0.0
    """Weight of the cross-entropy of trajectories whose reward is positive, in addition to the surrogate."""
    correction: Correction | None = None
    """Weights and filters for a gap between sampler and trainer (`mismatch.Correction`)."""

    ratio_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that act on the ratio and can be switched off with None."""
    level: ClassVar[RatioLevel] = "token"
    """The level of the ratio."""
    whiten_ddof: ClassVar[int] = 1
    """Degrees of freedom that `whiten` subtracts from the number of tokens in the variance."""

    # ---- what an algorithm writes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        """Return the per-token loss `[B, T]`; `ratio` is at `level` and relative to the anchor."""

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        """Return advantages `[N, T]` from prepared rewards `[N]`: every token has its trajectory's."""
        return credits.spread(self.clipped(self.scores(e, rewards, algorithm_state)), e.mask)

    def scores(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        """Return prepared rewards `[N]` relative to a baseline. Default: unchanged."""
        return rewards

    def uses_ratio(self) -> bool:
        """Return whether the surrogate uses the ratio."""
        return True

    def uses_groups(self) -> bool:
        """Return whether members of a group are each other's baseline, so that a group of one has no signal."""
        return False

    def uses_rewards(self) -> bool:
        """Return whether the objective needs to know which trajectories were rewarded (`TokenBatch.rewards`)."""
        return self.sft_coef > 0

    def remember(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> AlgorithmState:
        """Return the state for the next step. It is computed before this step's advantages, which use it."""
        return algorithm_state

    @property
    def clip_range(self) -> tuple[float | None, float | None] | None:
        """The clip of a ratio below and above 1 (None: no clip)."""
        return None

    def check_fields(self) -> None:
        """Refuse invalid values of the settings that mixins (`ClippedRatio`) add."""

    # ---- what the loop and the trainer ask --------------------------------------------------------------------------

    @property
    def solve_range(self) -> tuple[float, float] | None:
        return self.filter.solve_range if self.filter else None

    @property
    def dynamic_sampling_rounds(self) -> int:
        return self.filter.dynamic_sampling_rounds if self.filter else 0

    @property
    def overlong_cache(self) -> int:
        return self.shaping.overlong_cache if self.shaping else 0

    @property
    def kl_coef(self) -> float:
        return self.kl.coef if isinstance(self.kl, KlLoss) else 0.0

    @property
    def entropy_grad(self) -> bool:
        return self.entropy_coef != 0

    def needs(self) -> Needs:
        """Return the inputs that the settings require: log-probs, a reference policy, full divergences, rewards per
        token."""
        full = isinstance(self.kl, KlLoss) and self.kl.estimator == "full"
        reference = self.kl.reference if self.kl else ""
        return Needs(
            trainer_logp=self.anchor == "proximal" or self.correction is not None,
            ref="" if full else reference,
            divergence=DivergenceTerm(reference, "reverse", tau=None) if full else None,
            rewards=self.uses_rewards(),
        )

    def has_signal(self, e: Episodes) -> np.ndarray:
        return self.prepare(e)[1]

    # ---- credit -----------------------------------------------------------------------------------------------------

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        rewards, keep = self.prepare(e)
        algorithm_state = self.remember(e, rewards, algorithm_state)
        advantages = self.advantages(e, rewards, algorithm_state)
        penalty, algorithm_state, stats = self.kl_penalty(e, algorithm_state)
        if penalty is not None:
            advantages = advantages + credits.discounted(penalty, e.mask, 1.0)
        return self.finish(e, rewards, keep, advantages, algorithm_state, stats)

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        """Return rewards `[N]` before normalisation, and which trajectories take part `[N]`."""
        rewards = np.asarray(e.rewards, np.float64)
        keep = np.ones(e.num, bool) if self.filter is None else self.filter.kept(rewards, e.groups)
        if self.mask_truncated:
            keep &= ~e.truncated
        for success, most in ((False, self.wrong_max_tok), (True, self.right_max_tok)):
            if most is not None:
                keep &= (e.success != success) | (e.lengths < most)
        return (self.shaping.shaped(rewards, e) if self.shaping else rewards), keep

    def clipped(self, rewards: np.ndarray) -> np.ndarray:
        """Clip rewards `[N]` (normalised, if the algorithm does so) to `RewardShaping.clip`."""
        return self.shaping.clipped(rewards) if self.shaping else rewards

    def kl_penalty(
        self, e: Episodes, algorithm_state: AlgorithmState
    ) -> tuple[np.ndarray | None, dict[str, float], dict[str, float]]:
        """Return the token rewards `[N, T]` of a KL penalty (None without one), the adapted coefficient, and the
        measured KL."""
        carried = dict(algorithm_state)
        if self.kl is None or not self.needs().ref:
            return None, carried, {}
        logp = e.trainer_logp if e.trainer_logp is not None else e.sampler_logp
        ref_logp = e.required("ref_logp")
        gap = credits.clean(logp, e.mask) - credits.clean(ref_logp, e.mask)
        measured = float(np.mean(gap[e.mask])) if e.mask.any() else 0.0
        coef = algorithm_state.get("kl_coef", self.kl.coef)
        if self.kl.adaptive is not None:
            carried["kl_coef"] = self.kl.adaptive.following(coef, measured, e.num)
        stats = {"kl/ref_k1_nat": measured, "kl/coef": coef}
        if isinstance(self.kl, KlLoss):
            return None, carried, stats
        return shaping.kl_penalty(logp, ref_logp, e.mask, coef, self.kl.estimator), carried, stats

    def finish(
        self,
        e: Episodes,
        rewards: np.ndarray,
        keep: np.ndarray,
        advantages: np.ndarray,
        algorithm_state: AlgorithmState,
        stats: Mapping[str, float],
    ) -> Credit:
        """Complete the credit after the advantages: normalisation over tokens, clip, correction of a mismatch, weights.

        Args:
          rewards, keep: as `prepare` made them.
        """
        mask, weights = e.mask & ~e.expert, np.ones(e.mask.shape)
        if self.correction is not None:
            weights, kept = self.correction.apply(e.required("trainer_logp"), e.sampler_logp, mask, e.turns)
            stats = {**stats, "mismatch/filtered_frac": 1 - float(kept[mask].mean()) if mask.any() else 0.0}
            mask = mask & kept
        if self.difficulty_weight or self.length_weight:
            weights = weights * self.sample_weights(e, keep)[:, None]
        if self.whiten:
            advantages = credits.whiten(advantages, mask & keep[:, None], ddof=self.whiten_ddof)
        if self.advantage_clip is not None:
            advantages = np.clip(advantages, -self.advantage_clip, self.advantage_clip)
        return Credit(
            advantages,
            weights=weights,
            mask=mask,
            keep=keep,
            rewards=credits.spread(rewards, e.mask) if self.uses_rewards() else None,
            algorithm_state=dict(algorithm_state),
            stats=dict(stats),
        )

    def sample_weights(self, e: Episodes, keep: np.ndarray) -> np.ndarray:
        """Return the factor of each trajectory's surrogate, `[N]`; its mean over the trained trajectories is 1."""
        unsolved = 1 - credits.GroupStats(e.groups).mean(e.success.astype(np.float64))
        weights = np.ones(e.num)
        weights[keep] = shaping.sample_weights(
            unsolved[keep] if self.difficulty_weight else None, e.lengths[keep] if self.length_weight else None
        )
        return weights

    # ---- the objective ----------------------------------------------------------------------------------------------

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        anchor = batch.anchor(self.anchor)
        mask = (batch.scale != 0).astype(jnp.float32)
        log_ratio = objectives.log_ratio(policy.logp, anchor, mask, self.level, batch.sequence_ids, batch.turn_ids)
        ratio = jnp.exp(log_ratio)
        loss = self.surrogate(policy.logp, ratio, batch)
        if batch.weights is not None:
            loss = loss * batch.weights
        mean: dict[str, jax.Array] = {"policy/ratio_mean": ratio, "policy/ratio_sq": ratio * ratio, "loss/policy": loss}
        if isinstance(self.kl, KlLoss):
            kl = self.kl_to_reference(self.kl, policy, batch)
            loss = loss + batch.kl_coef * kl
            mean["kl/ref_nat"] = kl
        if self.entropy_coef:
            bonus = policy.entropy if batch.entropy_weights is None else policy.entropy * batch.entropy_weights
            loss = loss - self.entropy_coef * bonus
        if self.sft_coef:
            loss = loss - self.sft_coef * jnp.where(batch.required("rewards") > 0, policy.logp, 0.0)
        if self.clip_range is not None:
            mean |= objectives.clip_stats(ratio, batch.advantages, *self.clip_range)
        return TokenLoss(loss, mean, {"policy/ratio_max": ratio})

    def kl_to_reference(self, term: KlLoss, policy: PolicyOutputs, batch: TokenBatch) -> jax.Array:
        """Return the KL to the reference at every token, nats, `[B, T]`."""
        if term.estimator != "full":
            return objectives.kl(policy.logp, batch.required("ref_logp"), term.estimator)
        assert policy.divergence is not None
        return policy.divergence

    # ---- checks -----------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_fields()

    def check(self, setup: Setup) -> list[str]:
        checks.check_groups(self, setup)
        checks.check_kl(self, setup)
        return [*checks.narrow_range(self, setup), *checks.check_ratio(self, setup)]


@dataclasses.dataclass(frozen=True)
class NormalisedReward:
    """A part of policy gradients whose tokens all have the trajectory's reward: `(R - mean) / (std + 1e-6)`."""

    mean: credits.Mean = "group"
    """Scope of the mean that is subtracted from rewards: nothing, the group, the batch, all steps so far (`running`),
    or the other members of the group (`leave_one_out`)."""
    std: credits.Std = "group"
    """Scope of the standard deviation that rewards are divided by: nothing, the group, the batch, or all steps so far
    (`running`). `group_mean`: they are divided by the group's mean instead (`maxrl.MaxRl`)."""
    split_by: str = ""
    """Name of a part of the reward; members of a group are only compared with members of the same value of it.
    Complementary RL (arXiv 2603.17621) splits groups into those with and without an experience. Empty: no split."""

    def scores(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        """Return prepared rewards `[N]`, normalised."""
        running = _running(algorithm_state) if "running" in (self.mean, self.std) else None
        groups = e.groups
        if self.split_by:
            groups = credits.split_groups(groups, np.array([parts.get(self.split_by, 0.0) for parts in e.parts]))
        return credits.normalise(rewards, groups, mean=self.mean, std=self.std, running=running)

    def remember(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> AlgorithmState:
        """Add the rewards to the moments of all steps so far, if the settings use them."""
        if "running" not in (self.mean, self.std):
            return algorithm_state
        seen = _running(algorithm_state).add(rewards)
        return {**algorithm_state, **{f"reward_{k}": v for k, v in dataclasses.asdict(seen).items()}}

    def uses_groups(self) -> bool:
        """Return whether members of a group are each other's baseline, so that a group of one has no signal."""
        return self.mean in ("group", "leave_one_out") or self.std in ("group", "group_mean")


@dataclasses.dataclass(frozen=True)
class ClippedRatio:
    """A part of policy gradients whose surrogate is PPO's clipped ratio."""

    clip_low: float | None = 0.2
    """Distance that the ratio may fall before a token's gradient ends (None: no bound)."""
    clip_high: float | None = 0.2
    """Distance that the ratio may rise before a token's gradient ends (None: no bound)."""
    dual_clip: float | None = None
    """Upper bound of the ratio for negative advantages (arXiv 1912.09729; 3 is usual)."""

    ratio_settings: ClassVar[tuple[str, ...]] = ("clip_high", "clip_low", "dual_clip")

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        """Return the per-token loss `[B, T]`; `ratio` is relative to the anchor."""
        return objectives.clipped(ratio, batch.advantages, self.clip_low, self.clip_high, self.dual_clip)

    @property
    def clip_range(self) -> tuple[float | None, float | None]:
        """How far below and above 1 a ratio counts."""
        return self.clip_low, self.clip_high

    def check_fields(self) -> None:
        """Refuse clips that are invalid or can have no effect."""
        checks.check_clips(self, self.clip_low, "clip_low", "clip_high", "dual_clip")
        if self.dual_clip is not None and self.dual_clip <= 1 + (self.clip_high or 0):
            why, remedy = "would cut inside the clip range", "choose more than 1 + clip_high; 3 is usual"
            raise refusal(self, "dual_clip", why, remedy)


def _running(algorithm_state: AlgorithmState) -> credits.RunningMoments:
    names = [f.name for f in dataclasses.fields(credits.RunningMoments)]
    return credits.RunningMoments(**{n: algorithm_state.get(f"reward_{n}", 0.0) for n in names})


def token_rewards(e: Episodes, rewards: np.ndarray) -> np.ndarray:
    """Return rewards `[N, T]` on the tokens that earned them: a turn's reward on the turn's last token, and the change
    by shaping on the trajectory's last token."""
    last_of_turn = e.mask & np.diff(np.where(e.mask, e.turns, -1), axis=1, append=-1).astype(bool)
    earned = credits.spread_turns(e.turn_rewards, e.turns, e.mask) * last_of_turn
    return earned + credits.at_last(rewards - earned.sum(1), e.mask)


def turn_returns(e: Episodes, rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Return the discounted return `[N, K]` from each turn on; the last turn gets the shaping in `rewards` `[N]`."""
    shaped = e.turn_rewards.copy()
    shaped[np.arange(e.num), e.num_turns - 1] += rewards - e.rewards
    return credits.turn_returns(shaped, e.num_turns, gamma)
