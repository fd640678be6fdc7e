"""What an algorithm is to the loop and to the update, and what all policy gradients have in common.

    trajectories -> Episodes -> credit -> advantages, weights -> TokenBatch -> objective -> loss per token

`credit` runs on the host, in NumPy, over a whole step; `objective` runs on devices, in the jitted update. Both are
pure.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import ConfigError
from rolljax.model.moe import Load
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.attention_stats import AttentionMaps
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.critic import Critic
from rolljax.trainer.paper import Stated

Source = Literal["gold", "sampler", "pairs"]
Carry = Mapping[str, float]
PolicySource = str
"""Where a frozen policy comes from: `phase_start`, `run_start`, or a local Hugging Face folder."""


@dataclasses.dataclass(frozen=True)
class Law:
    """A frozen policy whose whole next-token distribution is compared with the trained one's, inside the update.

    kind: forward is KL(reference || trained), reverse KL(trained || reference); for the others see `trainer.vocab`.
      tau: both
    laws are taken at it, and the result is multiplied by tau^2 (None: the laws that tokens are drawn from, as they
    are). alpha: of the skewed divergence. top_k: compare only on the frozen policy's k most
    likely tokens (0: all), the rest as one `bucket` or `renormalise`d away.
    """

    policy: PolicySource
    kind: Literal["forward", "reverse", "js", "skewed", "adaptive"] = "forward"
    tau: float | None = 1.0
    alpha: float = 0.1
    top_k: int = 0
    remainder: Literal["bucket", "renormalise"] = "bucket"


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an algorithm asks the loop for, beyond tokens and rewards.

    trainer_logp: log-probs by the weights at the start of the step. ref, scorer, teachers: frozen policies that score
    every sampled token. law: a frozen policy whose whole next-token distribution the objective is compared with, inside
    the update. critics: value models, trained beside the policy. attention: statistics of the policy's attention maps.
    rewards: the objective asks which trajectories were rewarded; credit hands them on.
    """

    trainer_logp: bool = False
    ref: PolicySource = ""
    scorer: PolicySource = ""
    teachers: tuple[PolicySource, ...] = ()
    law: Law | None = None
    critics: Critic | None = None
    attention: AttentionMaps | None = None
    rewards: bool = False

    @property
    def references(self) -> tuple[PolicySource, ...]:
        """Every frozen policy once."""
        law = self.law.policy if self.law else ""
        return tuple(dict.fromkeys(name for name in (self.ref, self.scorer, *self.teachers, law) if name))


@dataclasses.dataclass(frozen=True)
class Setup:
    """What an algorithm is combined with; `check` looks at it before anything starts.

    updates: optimizer updates per step, over all epochs. truncated_law: tokens are cut from the sampled law (top-k,
      ...). environment: its name, as in `Episodes.domains` (empty: not known).
    """

    group_size: int
    updates: int = 1
    staleness: int = 0
    max_turns: int = 1
    truncated_law: bool = False
    first_phase: bool = False
    environment: str = ""

    @property
    def on_policy(self) -> bool:
        """Every token is trained on exactly once, by the weights that sampled it: ratios are 1."""
        return self.updates == 1 and not self.staleness


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutputs:
    """What the model that is trained says about a micro-batch; arrays `[B, T]` float32, aligned to the token they
    describe.

    logp: of the token. entropy: of the distribution it was drawn from. divergence: of that distribution from the frozen
    `law`, if there is one. load: how a model's experts were used, sums over the micro-batch; objectives do not see it.
    """

    logp: jax.Array
    entropy: jax.Array
    divergence: jax.Array | None = None
    load: Load | None = None


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What an objective returns; every array is `[B, T]`, aligned to the token it describes.

    loss: per token, before the scale of its aggregation.
    mean, largest: statistics that the update reduces by token mean and by maximum.
    """

    loss: jax.Array
    mean: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    largest: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


class Algorithm(abc.ABC):
    """Credit and objective of one phase. Subclasses are frozen dataclasses, one per file of this folder."""

    source: ClassVar[Source] = "sampler"
    """Who acts in the environments: the policy, the gold answers that come with them, or pairs of a gold answer and a
    rejected one."""
    trains_policy: ClassVar[bool] = True
    unsplit_groups: ClassVar[bool] = False
    """The loss relates members of a group, so that a group must not be split over rows."""
    paper: ClassVar[Mapping[str, Stated]] = {}
    """What the paper states for this class's settings; a class says it for itself, nothing is inherited."""

    @property
    def aggregation(self) -> Aggregation:
        """How token losses are summed (`trainer.aggregation`); a field where it can be chosen."""
        return "token-mean"

    def needs(self) -> Needs:
        return Needs()

    @property
    def entropy_grad(self) -> bool:
        """Whether the objective differentiates the entropy."""
        return False

    @abc.abstractmethod
    def credit(self, e: Episodes, carry: Carry) -> Credit:
        """Advantages, and who takes part. `carry` is what the step before returned in `Credit.carry`; empty at
        first."""

    def has_signal(self, e: Episodes) -> np.ndarray:
        """Which trajectories credit will keep, as far as rewards alone tell, bool `[N]`; dynamic
        sampling draws further groups for those without."""
        return np.ones(e.num, bool)

    dynamic_sampling_rounds: int = 0
    """Rounds of further groups that are drawn while fewer groups than asked for teach something."""

    @property
    def imitates(self) -> bool:
        """Whether it learns from an expert's turns (`Phase.starts`), besides what the policy makes of them."""
        return False

    @abc.abstractmethod
    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        """Per-token loss of one micro-batch (arrays `[B, T]`, clean where `batch.scale` is 0)."""

    def critic_scale(self, batch: TokenBatch) -> jax.Array:
        """Share `[B, T]` of each token in a critic's loss that learns from all of them; as in the policy's."""
        return batch.scale

    def critic_loss(
        self, values: jax.Array, returns: jax.Array, old_values: jax.Array, batch: TokenBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Per-token loss `[B, T]` of one critic, and statistics (token means)."""
        raise NotImplementedError(f"{type(self).__name__} asks for critics, but has no loss for them")

    def check(self, setup: Setup) -> list[str]:
        """Warnings about this combination. Raises `ConfigError` for one that cannot work or in which a setting is
        inert."""
        return []

    def refuse(self, setting: str, why: str, remedy: str) -> ConfigError:
        """The error for one of this algorithm's own settings."""
        value = getattr(self, setting)
        return ConfigError(why, setting=f"{type(self).__name__}.{setting}", value=value, remedy=remedy)


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Algorithm):
    """What policy gradients share: how rewards are prepared, who takes part, how token losses are summed, and the terms
    that stand beside the surrogate. Subclasses write `advantages` and `surrogate`, and override defaults.

    aggregation: see `trainer.aggregation`. anchor: log-probs that ratios are taken to: recorded while sampling
      (`behaviour`), or computed again by the trainer before the step's first update (`proximal`).
    reward_clip: rewards are cut to [-c, c] once they are normalised. overlong_cache: tokens before the limit over which
      DAPO's soft penalty falls from 0 to -1 (0: none). length_reward: weight of Kimi k1.5's reward for answers that are
      short within their group (arXiv 2501.12599, section 2.3.3).
    mask_truncated: answers cut by a limit are left out. wrong_max_tok, right_max_tok: of unsolved, or of solved,
      trajectories only those with fewer sampled tokens take part (None: all). drop_degenerate: groups whose rewards are
      all equal are left out. solve_range: only groups with a mean reward strictly between these take part.
    difficulty_weight, length_weight: trajectories of prompts that are rarely solved, or short ones, count more; on
      average 1 (`shaping.sample_weights`).
    whiten: advantages to mean 0 and standard deviation 1 over all tokens. advantage_clip: to [-c, c] at last.
    kl_coef: weight of the KL term in the loss (estimator `kl`: k2, k3, or full = KL(policy || reference) over the whole
      vocabulary). Of tokens that the policy drew, k2 has the gradient of `full` on average, k3 that of KL(reference ||
      policy), k1 none.
    kl_reward_coef: weight of the KL penalty in the reward (`kl_reward`: k1, abs, k2, k3).
    kl_target, kl_horizon: adapt the coefficient in use so that the KL to the reference stays near the target; the
      horizon is in trajectories. reference: the policy KL refers to.
    entropy_coef: weight of the entropy bonus. sft_coef: weight of the cross-entropy of trajectories whose reward is
      positive, beside the surrogate.
    correction: weights and filters for a gap between sampler and trainer (`mismatch.Correction`).
    dynamic_sampling_rounds: rounds of further groups that are drawn while fewer groups than asked for have a signal
      (DAPO).
    """

    aggregation: Aggregation = "token-mean"
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    reward_clip: float | None = None
    overlong_cache: int = 0
    length_reward: float = 0.0
    mask_truncated: bool = False
    wrong_max_tok: int | None = None
    right_max_tok: int | None = None
    drop_degenerate: bool = False
    solve_range: tuple[float, float] | None = None
    difficulty_weight: bool = False
    length_weight: bool = False
    whiten: bool = False
    advantage_clip: float | None = None
    kl_coef: float = 0.0
    kl: Literal["k1", "abs", "k2", "k3", "full"] = "k3"
    kl_reward_coef: float = 0.0
    kl_reward: Literal["k1", "abs", "k2", "k3"] = "k1"
    kl_target: float | None = None
    kl_horizon: int = 10_000
    reference: PolicySource = "phase_start"
    entropy_coef: float = 0.0
    sft_coef: float = 0.0
    correction: Correction | None = None
    dynamic_sampling_rounds: int = 0

    ratio_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that act on the ratio and can be switched off with None."""
    level: ClassVar[objectives.Level] = "token"
    """What the ratio is taken over: a token; the geometric mean of a turn ("chunk") or of the whole trajectory
    ("sequence"); the product over the trajectory ("trajectory")."""

    # ---- what an algorithm writes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        """`[N, T]` from prepared rewards `[N]`."""

    @abc.abstractmethod
    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        """Per-token loss `[B, T]`; `ratio` at `level`, to the anchor."""

    def uses_ratio(self) -> bool:
        """Whether the surrogate looks at the ratio."""
        return True

    def uses_groups(self) -> bool:
        """Whether members of a group are each other's baseline, so that a group of one teaches nothing."""
        return False

    def uses_rewards(self) -> bool:
        """Whether the objective asks which trajectories were rewarded (`TokenBatch.rewards`)."""
        return self.sft_coef > 0

    def remember(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> Carry:
        """What is carried to the next step, brought up to date before this step's advantages."""
        return carry

    def clip(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards `[N]`, normalised where they are, within `reward_clip`."""
        return rewards if self.reward_clip is None else np.clip(rewards, -self.reward_clip, self.reward_clip)

    def whitened(self, advantages: np.ndarray, part: np.ndarray) -> np.ndarray:
        """Advantages `[N, T]` as `whiten` has them, over the tokens `part` that take part."""
        return credits.whiten(advantages, part) if self.whiten else advantages

    def has_signal(self, e: Episodes) -> np.ndarray:
        return self.prepare(e)[1]

    # ---- the rest is the same for all -------------------------------------------------------------------------------

    def needs(self) -> Needs:
        sampled_kl = (self.kl_coef and self.kl != "full") or self.kl_reward_coef
        return Needs(
            trainer_logp=self.anchor == "proximal" or self.correction is not None,
            ref=self.reference if sampled_kl else "",
            law=Law(self.reference, "reverse", tau=None) if self.kl_coef and self.kl == "full" else None,
            rewards=self.uses_rewards(),
        )

    def credit(self, e: Episodes, carry: Carry) -> Credit:
        rewards, keep = self.prepare(e)
        carry = self.remember(e, rewards, carry)
        advantages = self.advantages(e, rewards, carry)
        penalty, carry, stats = self.kl_penalty(e, carry)
        if penalty is not None:
            advantages = advantages + credits.discounted(penalty, e.mask, 1.0)
        return self.finish(e, advantages, keep, carry, stats)

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        """Rewards `[N]` before they are normalised, and which trajectories take part `[N]`."""
        rewards = np.asarray(e.rewards, np.float64)
        keep = np.ones(e.num, bool)
        if self.drop_degenerate:
            keep &= ~shaping.degenerate(rewards, e.groups)
        if self.solve_range is not None:
            keep &= shaping.difficulty_mask(rewards, e.groups, *self.solve_range)
        if self.mask_truncated:
            keep &= ~e.truncated
        for success, most in ((False, self.wrong_max_tok), (True, self.right_max_tok)):
            if most is not None:
                keep &= (e.success != success) | (e.lengths < most)
        if self.overlong_cache:
            rewards = rewards + shaping.overlong_penalty(e.longest_answers, e.limit_tok, self.overlong_cache)
        if self.length_reward:
            rewards = rewards + self.length_reward * shaping.length_reward(e.lengths, e.success, e.groups)
        return rewards, keep

    def kl_penalty(self, e: Episodes, carry: Carry) -> tuple[np.ndarray | None, dict[str, float], dict[str, float]]:
        """Token rewards `[N, T]` of a KL penalty (None: there is none), the adapted coefficient, and the KL
        measured."""
        if not self.needs().ref:
            return None, dict(carry), {}
        logp = e.trainer_logp if e.trainer_logp is not None else e.sampler_logp
        ref = e.given("ref_logp")
        kind: Literal["k1", "abs", "k2", "k3"] = self.kl_reward if self.kl_reward_coef else "k1"
        measured = float(np.mean(shaping.kl_estimate(logp, ref, "k1")[e.mask])) if e.mask.any() else 0.0
        beta = carry.get("kl_coef", self.kl_reward_coef or self.kl_coef)
        carried = dict(carry)
        if self.kl_target is not None:
            carried["kl_coef"] = shaping.adaptive_beta(beta, measured, self.kl_target, self.kl_horizon, e.num)
        stats = {"kl/ref_k1_nat": measured, "kl/coef": beta}
        if not self.kl_reward_coef:
            return None, carried, stats
        zero = np.zeros(e.num)
        return shaping.kl_in_reward(zero, logp, ref, e.mask, beta, kind), carried, stats

    def finish(
        self,
        e: Episodes,
        advantages: np.ndarray,
        keep: np.ndarray,
        carry: Carry,
        stats: Mapping[str, float],
    ) -> Credit:
        """What follows the advantages: normalisation over tokens, the clip, the correction of a mismatch, weights."""
        mask, weights = e.mask & ~e.expert, None
        if self.correction is not None:
            weights, kept = self.correction.apply(e.given("trainer_logp"), e.sampler_logp, mask, e.turns)
            stats = {**stats, "mismatch/filtered_frac": 1 - float(kept[mask].mean()) if mask.any() else 0.0}
            mask = mask & kept
        if self.difficulty_weight or self.length_weight:
            own = self.sample_weights(e, keep)[:, None] * e.mask
            weights = own if weights is None else own * weights
        advantages = self.whitened(advantages, mask & keep[:, None])
        if self.advantage_clip is not None:
            advantages = np.clip(advantages, -self.advantage_clip, self.advantage_clip)
        return Credit(
            advantages,
            weights=weights,
            mask=mask,
            keep=keep,
            rewards=credits.spread(self.prepare(e)[0], e.mask) if self.uses_rewards() else None,
            carry=dict(carry),
            stats=dict(stats),
        )

    def sample_weights(self, e: Episodes, keep: np.ndarray) -> np.ndarray:
        """What each trajectory's surrogate is multiplied by, `[N]`: on average 1 over those that take part."""
        unsolved = 1 - credits.Groups(e.groups).mean(e.success.astype(np.float64))
        weights = np.ones(e.num)
        weights[keep] = shaping.sample_weights(
            unsolved[keep] if self.difficulty_weight else None, e.lengths[keep] if self.length_weight else None
        )
        return weights

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        anchor = batch.anchor(self.anchor)
        mask = (batch.scale != 0).astype(jnp.float32)
        log_ratio = objectives.log_ratio(policy.logp, anchor, mask, self.level, batch.sequence_ids, batch.turn_ids)
        ratio = jnp.exp(log_ratio)
        loss = self.surrogate(policy.logp, ratio, batch)
        if batch.weights is not None:
            loss = loss * batch.weights
        mean: dict[str, jax.Array] = {"policy/ratio_mean": ratio, "policy/ratio_sq": ratio * ratio, "loss/policy": loss}
        if self.kl_coef:
            if self.kl == "full":
                assert policy.divergence is not None
                kl = policy.divergence
            else:
                kl = objectives.kl(policy.logp, batch.required("ref_logp"), self.kl)
            loss = loss + batch.kl_coef * kl
            mean["kl/ref_nat"] = kl
        if self.entropy_coef:
            bonus = policy.entropy if batch.entropy_weights is None else policy.entropy * batch.entropy_weights
            loss = loss - self.entropy_coef * bonus
        if self.sft_coef:
            loss = loss - self.sft_coef * jnp.where(batch.required("rewards") > 0, policy.logp, 0.0)
        return TokenLoss(loss, {**mean, **self.ratio_stats(ratio, batch)}, {"policy/ratio_max": ratio})

    def ratio_stats(self, ratio: jax.Array, batch: TokenBatch) -> dict[str, jax.Array]:
        """Shares of tokens whose ratio left the clip range; none without clip settings."""
        if not hasattr(self, "clip_low"):
            return {}
        return objectives.clip_stats(ratio, batch.advantages, self.clip_low, self.clip_high)  # type: ignore[attr-defined]

    @property
    def entropy_grad(self) -> bool:
        return self.entropy_coef != 0

    def __post_init__(self) -> None:
        positive = ("clip_low", "clip_high", "reward_clip", "advantage_clip", "kl_target", "kl_horizon", "dual_clip")
        for name in (*positive, "wrong_max_tok", "right_max_tok"):
            value = getattr(self, name, None)
            if value is not None and value <= 0:
                raise self.refuse(name, "must be positive", "give a positive number, or None for none")
        if self.solve_range is not None and not self.solve_range[0] < self.solve_range[1]:
            raise self.refuse("solve_range", "is empty", "give (low, high), for instance (0.1, 0.95)")
        for name in (
            "kl_coef",
            "kl_reward_coef",
            "entropy_coef",
            "overlong_cache",
            "length_reward",
            "dynamic_sampling_rounds",
            "sft_coef",
        ):
            if getattr(self, name) < 0:
                raise self.refuse(name, "must not be negative", "0 switches it off")
        if self.kl in ("k1", "abs"):
            why = {
                "k1": "has a gradient of 0 on average: as a loss it is nothing but noise",
                "abs": "has the gradient of another distance (total variation), which does not fade near the reference",
            }
            raise self.refuse(
                "kl", why[self.kl], "choose 'k2', 'k3' or 'full', or put it into the reward: kl_reward_coef"
            )

    def check(self, setup: Setup) -> list[str]:
        self._check_groups(setup)
        self._check_kl()
        if setup.truncated_law and (self.kl_reward_coef or self.kl_target) and not self.needs().trainer_logp:
            raise self.refuse(
                "kl_reward_coef" if self.kl_reward_coef else "kl_target",
                "would compare the sampled law, from which tokens are cut (Phase.top_p, top_k or min_p), with the "
                "reference's whole law",
                "set anchor = 'proximal', or sample from the whole law",
            )
        return [*self._narrow_range(setup), *self._check_ratio(setup)]

    def _narrow_range(self, setup: Setup) -> list[str]:
        """That no group can be in `solve_range`, if rewards are 0 or 1."""
        low, high = self.solve_range or (0.0, 1.0)
        means = np.arange(setup.group_size + 1) / setup.group_size
        if self.solve_range is None or ((means > low) & (means < high)).any():
            return []
        return [
            f"if rewards are 0 or 1, nothing is trained on: no mean of {setup.group_size} of them is between {low} "
            f"and {high} ({type(self).__name__}.solve_range)"
        ]

    def _check_groups(self, setup: Setup) -> None:
        names = ("drop_degenerate", "solve_range", "dynamic_sampling_rounds", "length_reward", "difficulty_weight")
        by_group = [n for n in names if getattr(self, n)]
        if setup.group_size < 2 and (self.uses_groups() or by_group):
            raise ConfigError(
                "a group of one has no baseline: every advantage would be 0"
                if self.uses_groups()
                else f"a group of one has nothing to compare, but {type(self).__name__}.{by_group[0]} is set",
                setting="Phase.group_size",
                value=setup.group_size,
                remedy="set group_size to 2 or more (8 is usual)",
            )
        if self.dynamic_sampling_rounds and not self.drop_degenerate and self.solve_range is None:
            raise self.refuse(
                "dynamic_sampling_rounds", "can have no effect: no group is ever dropped", "set drop_degenerate = True"
            )

    def _check_kl(self) -> None:
        if self.kl_coef and self.kl_reward_coef:
            raise self.refuse(
                "kl_coef",
                "and kl_reward_coef would both pull to the reference",
                "choose one of the two, set the other to 0",
            )
        if not self.kl_coef and not self.kl_reward_coef:
            for name in ("kl_target", "reference"):
                if getattr(self, name) != _default(self, name):
                    raise self.refuse(name, "can have no effect: there is no KL term", "set kl_coef or kl_reward_coef")
        for name, coef in (("kl", "kl_coef"), ("kl_reward", "kl_reward_coef")):
            if getattr(self, name) != _default(self, name) and not getattr(self, coef):
                raise self.refuse(name, f"can have no effect: {coef} is 0", f"set {coef}")
        if self.kl_target is None and self.kl_horizon != _default(self, "kl_horizon"):
            raise self.refuse("kl_horizon", "can have no effect without kl_target", "set kl_target")
        if self.kl == "full" and self.kl_target is not None:
            raise self.refuse("kl_target", "needs log-probs of the reference on every token", "choose kl = 'k3'")

    def _check_ratio(self, setup: Setup) -> list[str]:
        if setup.truncated_law and self.correction is not None:
            raise self.refuse(
                "correction",
                "compares the sampled law, from which tokens are cut (Phase.top_p, top_k or min_p), with the model's "
                "whole law: every weight and filter would be wrong",
                "set correction = None, or sample from the whole law",
            )
        if not self.uses_ratio():
            if self.anchor != _default(self, "anchor"):
                raise self.refuse("anchor", "can have no effect: this objective has no ratio", "leave it out")
            if setup.on_policy or self.correction is not None:
                return []
            name = type(self).__name__
            return [f"{name} has no ratio: nothing corrects for samples of older weights (staleness, several updates)"]
        if setup.truncated_law and self.anchor == "behaviour":
            raise self.refuse(
                "anchor",
                "compares the sampled law, from which tokens are cut (Phase.top_p, top_k or min_p), with the model's "
                "whole law: the ratio would be wrong for every token",
                "set anchor = 'proximal', or sample from the whole law",
            )
        weighs = self.correction is not None and self.correction.weighs
        if weighs and self.anchor == "behaviour":
            raise self.refuse(
                "correction",
                "would weigh the gap between sampler and trainer twice: the ratio to the behaviour policy has it",
                "set anchor = 'proximal', or weight_cap = None to filter only",
            )
        if setup.updates == 1 and self.anchor == "proximal" and self.correction is None:
            raise self.refuse(
                "anchor",
                "makes every ratio 1: with one update per step the proximal policy is the policy",
                "set Phase.updates_per_step to 2 or more, or anchor = 'behaviour'",
            )
        if setup.updates > 1 or (setup.staleness and self.anchor == "behaviour"):
            return []
        for name in self.ratio_settings:
            if getattr(self, name) is not None:
                raise self.refuse(
                    name,
                    "can have no effect: with one update per step and no staleness the ratio is 1",
                    "set Phase.updates_per_step to 2 or more, or "
                    + " and ".join(f"{type(self).__name__}.{n} = None" for n in self.ratio_settings),
                )
        if self.ratio_settings:
            return []
        name = type(self).__name__
        return [f"{name} differs from REINFORCE by its ratio, which is 1 here: one update per step and no staleness"]


@dataclasses.dataclass(frozen=True)
class OutcomeGradient(PolicyGradient):
    """Policy gradients whose tokens all get the trajectory's reward: `(R - mean) / (std + 1e-6)`.

    mean, std: taken over nothing, the group, the batch, all steps so far (`running`), or (mean only) the other members
    of the group (`leave_one_out`).
    """

    mean: credits.Mean = "group"
    std: credits.Std = "group"

    def advantages(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> np.ndarray:
        running = _running(carry) if "running" in (self.mean, self.std) else None
        scores = credits.normalise(rewards, e.groups, mean=self.mean, std=self.std, running=running)
        return credits.spread(self.clip(scores), e.mask)

    def remember(self, e: Episodes, rewards: np.ndarray, carry: Carry) -> Carry:
        if "running" not in (self.mean, self.std):
            return carry
        seen = _running(carry).add(rewards)
        return {**carry, **{f"reward_{k}": v for k, v in dataclasses.asdict(seen).items()}}

    def uses_groups(self) -> bool:
        return self.mean in ("group", "leave_one_out") or self.std == "group"


@dataclasses.dataclass(frozen=True)
class ClippedRatio(OutcomeGradient):
    """PPO's clipped ratio as the surrogate; what GRPO and its relatives share.

    clip_low, clip_high: how far the ratio may fall or rise before a token's gradient ends (None: any).
    dual_clip: for negative advantages the ratio counts as at most this (arXiv 1912.09729; 3 is usual).
    """

    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    dual_clip: float | None = None

    ratio_settings: ClassVar[tuple[str, ...]] = ("clip_high", "clip_low", "dual_clip")

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.clipped(ratio, batch.advantages, self.clip_low, self.clip_high, self.dual_clip)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1 + (self.clip_high or 0):
            raise self.refuse(
                "dual_clip", "would cut inside the clip range", "choose more than 1 + clip_high; 3 is usual"
            )
        if self.clip_low is not None and self.clip_low >= 1:
            raise self.refuse("clip_low", "can have no effect: a ratio is never below 0", "choose less than 1")


def _running(carry: Carry) -> credits.Running:
    names = [f.name for f in dataclasses.fields(credits.Running)]
    return credits.Running(**{n: carry.get(f"reward_{n}", 0.0) for n in names})


def token_rewards(e: Episodes, rewards: np.ndarray) -> np.ndarray:
    """Rewards `[N, T]` where they were earned: a turn's on its last token; what shaping added, on the last token."""
    last_of_turn = e.mask & np.diff(np.where(e.mask, e.turns, -1), axis=1, append=-1).astype(bool)
    earned = credits.spread_turns(e.turn_rewards, e.turns, e.mask) * last_of_turn
    return earned + credits.at_last(rewards - earned.sum(1), e.mask)


def _default(algorithm: Algorithm, name: str) -> object:
    return next(f.default for f in dataclasses.fields(algorithm) if f.name == name)  # type: ignore[arg-type]
