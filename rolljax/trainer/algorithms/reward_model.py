"""Training a reward model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import Algorithm, AlgorithmState, Needs, PolicyOutputs, Setup, Source, TokenLoss
from rolljax.trainer.algorithms.dpo import check_pairs, pairs
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.paper import Stated

STATED = {
    "critic": Stated(
        Critic(optimizer=AdamW(lr=9e-6)),
        "arXiv 2203.02155, section 3.5 and appendix C.2: one pass, at a rate of 9e-6",
        "that rate is for 6 billion parameters; the models here are small",
    ),
}


@dataclasses.dataclass(frozen=True)
class RewardModel(Algorithm):
    """A Bradley-Terry reward model (InstructGPT, arXiv 2203.02155): the value before the closing token of the better
    answer shall be above that of the worse one. The policy stays as it is; a next phase takes the model over as its
    critic with `Critic.model = 'previous'`, or is rewarded by it (`rewards.reward_model.RewardModelScore`)."""

    critic: Critic = Critic(optimizer=AdamW(lr=1e-4))
    """Shape, start and optimizer of the reward model. Pairs are the best and the worst of `group_size` sampled answers;
    `PairRewardModel` takes recorded pairs."""

    trains_policy: ClassVar[bool] = False
    paper: ClassVar[Mapping[str, Stated]] = STATED
    unsplit_groups: ClassVar[bool] = True

    @property
    def aggregation(self) -> Aggregation:
        """A pair is one loss."""
        return "group-mean"

    def needs(self) -> Needs:
        return Needs(critics=self.critic)

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        sign, keep = pairs(e, self.source)
        last = credits.at_last(np.ones(e.num), e.mask) > 0
        returns = np.where(last, sign[:, None], 0.0)
        return Credit(
            np.zeros(e.mask.shape),
            mask=last,
            keep=keep,
            returns=returns,
            algorithm_state=_remembered(e, last, algorithm_state),
        )

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        raise NotImplementedError("a reward model has no objective for the policy")

    def critic_loss(
        self, values: jax.Array, returns: jax.Array, old_values: jax.Array, batch: TokenBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        trained = (batch.scale != 0).astype(jnp.float32)
        gain = objectives.segment_sum(values * returns * trained, batch.segment_ids)
        loss = objectives.bradley_terry(gain, jnp.zeros_like(gain))
        return loss, {"preference/accuracy_frac": (gain > 0).astype(jnp.float32), "preference/margin_nat": gain}

    def check(self, setup: Setup) -> list[str]:
        check_pairs(self.source, setup)
        return []


DECAY = 0.9
"""Factor on the weight of a step's scores with every later step."""


def _remembered(e: Episodes, last: np.ndarray, algorithm_state: AlgorithmState) -> AlgorithmState:
    """Return weighted sums of the scores of this and earlier steps, of their squares, and of their number."""
    scores = e.required("values").mean(0)[last]
    now = {"score_n": float(scores.size), "score_sum": float(scores.sum()), "score_squares": float((scores**2).sum())}
    return {name: DECAY * algorithm_state.get(name, 0.0) + value for name, value in now.items()}


def score_spread(algorithm_state: AlgorithmState) -> tuple[float, float]:
    """Return the mean and standard deviation of a reward model's scores in its last steps, from `algorithm_state`."""
    number = algorithm_state.get("score_n", 0.0)
    if not number:
        return 0.0, 1.0
    mean = algorithm_state["score_sum"] / number
    return mean, math.sqrt(max(algorithm_state["score_squares"] / number - mean**2, 0.0))


@dataclasses.dataclass(frozen=True)
class PairRewardModel(RewardModel):
    """A Bradley-Terry reward model (arXiv 2203.02155) from recorded pairs of answers."""

    source: ClassVar[Source] = "pairs"
    paper: ClassVar[Mapping[str, Stated]] = STATED
