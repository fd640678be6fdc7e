"""Proximal policy optimization with a critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState, Needs
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient, token_rewards
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.critic import Critic
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Ppo(NormalisedReward, ClippedRatio, PolicyGradient):
    """PPO (arXiv 1707.06347) with generalised advantage estimation (arXiv 1506.02438) and a critic. The last token
    of a turn gets the reward of that turn, and every token its KL penalty."""

    mean: Mean = "none"
    std: Std = "none"
    whiten: bool = True
    gamma: Annotated[float, Range(low=0, high=1, remedy="1 and 0.95 are usual")] = 1.0
    """Discount per sampled token; observations are skipped."""
    lam: Annotated[float, Range(low=0, high=1, remedy="1 and 0.95 are usual")] = 0.95
    """Trace decay per sampled token; observations are skipped."""
    value_lam: Annotated[float | None, Range(low=0, high=1, remedy="1 and 0.95 are usual")] = None
    """Trace decay of the returns to which critics are fitted (None: `lam`; 1: Monte-Carlo returns)."""
    critic: Critic = Critic()
    """The value model, whose loss is a mean over tokens however the policy's losses are summed. `mean` and `std`
    normalise the reward of trajectories first."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "clip_low": Stated(0.2, "arXiv 1707.06347, section 6.1 and table 1: the best of three"),
        "clip_high": Stated(0.2, "arXiv 1707.06347, section 6.1 and table 1: the best of three"),
        "gamma": Stated(
            0.99, "arXiv 1707.06347, table 3", "answers end: arXiv 2203.02155, appendix C.4, discounts nothing"
        ),
        "lam": Stated(0.95, "arXiv 1707.06347, table 3"),
        "value_lam": Stated(
            None,
            "github.com/openai/baselines, baselines/ppo2/runner.py: returns are advantages plus values "
            "(arXiv 1707.06347, equation 9, leaves the target open)",
        ),
        "entropy_coef": Stated(0.0, "arXiv 1707.06347, section 6.1: no entropy bonus in continuous control"),
        "aggregation": Stated("token-mean", "arXiv 1707.06347, section 2.1: the mean over a batch of samples"),
        "whiten": Stated(True, "github.com/openai/baselines, baselines/ppo2/model.py: advantages normalised"),
        "critic": Stated(
            Critic(epochs=10),
            "arXiv 1707.06347, algorithm 1, equation 9 and table 3",
            "as for language models in arXiv 2203.02155, appendix C.4: one pass over each step's data",
        ),
    }

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), critics=self.critic)

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        rewards, keep = self.prepare(e)
        algorithm_state = self.remember(e, rewards, algorithm_state)
        penalty, algorithm_state, stats = self.kl_penalty(e, algorithm_state)
        per_token = self.rewards(e, rewards, algorithm_state) + (0 if penalty is None else penalty)
        values, spread = credits.critic_spread(e.required("values"))
        advantages, returns = credits.gae(per_token, values, e.mask, self.gamma, self.lam)
        returns = self.targets(per_token, values, returns, e)
        stats = {**stats, **self.value_stats(e, values, spread, returns)}
        credit = self.finish(e, rewards, keep, advantages, algorithm_state, stats)
        return dataclasses.replace(credit, returns=returns, critic_weights=self.shares(e))

    def rewards(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        """Return token rewards `[N, T]`. Normalised rewards are known per trajectory only, and are put on its last
        token."""
        if self.mean == self.std == "none":
            return token_rewards(e, self.clipped(rewards))
        return credits.at_last(self.advantages(e, rewards, algorithm_state)[:, 0], e.mask)

    def targets(self, per_token: np.ndarray, values: np.ndarray, returns: np.ndarray, e: Episodes) -> np.ndarray:
        """Return the targets of the critics, `[N, T]`: the `returns` of the advantages if `value_lam` is `lam`. With a
        trace decay of 1 they do not depend on the values."""
        lam = self.lam if self.value_lam is None else self.value_lam
        if lam == 1:
            return credits.discounted(per_token, e.mask, self.gamma)
        if lam == self.lam:
            return returns
        return credits.gae(per_token, values, e.mask, self.gamma, lam)[1]

    def shares(self, e: Episodes) -> np.ndarray | None:
        """Return which critic learns from which trajectory, `[M, N, T]`; None: all from all."""
        if self.critic.num == 1 or self.critic.shard == "all":
            return None
        owner = credits.critic_shards(e.groups, self.critic.num, self.critic.shard, e.step)
        return (owner == np.arange(self.critic.num)[:, None])[:, :, None] * e.mask

    def value_stats(
        self, e: Episodes, values: np.ndarray, spread: np.ndarray, returns: np.ndarray
    ) -> Mapping[str, float]:
        """Return a step's metrics of the critics."""
        stats = {
            "critic/explained_var": credits.explained_variance(values, returns, e.mask),
            "critic/value_mean": float(values[e.mask].mean()) if e.mask.any() else 0.0,
            "critic/return_mean": float(returns[e.mask].mean()) if e.mask.any() else 0.0,
        }
        if self.critic.num > 1 and e.mask.any():
            error = np.abs(values - returns)[e.mask]
            apart = spread[e.mask]
            stats["critic/spread"] = float(apart.mean())
            varied = apart.std() > 0 and error.std() > 0
            stats["critic/spread_error_corr"] = float(np.corrcoef(apart, error)[0, 1]) if varied else 0.0
        return stats

    def critic_scale(self, batch: TokenBatch) -> jax.Array:
        return (batch.scale != 0).astype(jnp.float32) / jnp.maximum(batch.num_tokens, 1)

    def critic_loss(
        self, values: jax.Array, returns: jax.Array, old_values: jax.Array, batch: TokenBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = objectives.value_loss(values, returns, old_values, self.critic.clip)
        return loss, {"critic/abs_error": jnp.abs(values - returns)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
