"""Group-in-group policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.algorithms.base import AlgorithmState, Setup
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.kl import KlLoss
from rolljax.trainer.paper import Stated

SCRIPT = "github.com/langfengQ/verl-agent, examples/gigpo_trainer/run_alfworld.sh"


@dataclasses.dataclass(frozen=True)
class GiGpo(NormalisedReward, ClippedRatio, PolicyGradient):
    """GiGPO (arXiv 2505.10978): the group-normalised score of the episode, plus the discounted return of a turn
    normalised over all turns of the group that began in the same state (equal observation)."""

    episode_weight: float = 1.0
    """Weight of the episode's part of the advantage."""
    turn_weight: float = 1.0
    """Weight of the turn's part of the advantage."""
    gamma: float = 0.95
    """Discount per turn."""

    matches_contexts: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2505.10978, equation 3"),
        "std": Stated("group", f"arXiv 2505.10978, equation 3 (either); {SCRIPT}: mode=mean_std_norm"),
        "episode_weight": Stated(1.0, "arXiv 2505.10978, equation 8"),
        "turn_weight": Stated(1.0, f"arXiv 2505.10978, appendix E.1; {SCRIPT}: step_advantage_w=1.0"),
        "gamma": Stated(0.95, f"arXiv 2505.10978, appendix E.1; {SCRIPT}: algorithm.gamma=0.95"),
        "aggregation": Stated(
            "token-mean", "github.com/langfengQ/verl-agent, verl/trainer/config/ppo_trainer.yaml: loss_agg_mode"
        ),
        "filter": Stated(None, "arXiv 2505.10978, equation 3"),
        "kl": Stated(
            KlLoss(coef=0.01, estimator="k3"),
            f"arXiv 2505.10978, appendix E.1; {SCRIPT}: kl_loss_coef=0.01, kl_loss_type=low_var_kl",
            "the term needs a second copy of the weights and a forward pass; set it where the policy drifts",
        ),
    }

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        episode = super().advantages(e, rewards, algorithm_state)
        returns = credits.turn_returns(e.turn_rewards, e.num_turns, self.gamma)
        turn = credits.same_state_normalised(returns, e.states, e.num_turns, e.groups, std=self.std != "none")
        return self.episode_weight * episode + self.turn_weight * credits.spread_turns(turn, e.turns, e.mask)

    def check(self, setup: Setup) -> list[str]:
        if setup.max_turns == 1 and self.turn_weight:
            raise self.refuse(
                "turn_weight",
                "compares turns that began in the same state, but episodes have one turn",
                "use grpo.Grpo, or an environment with several turns",
            )
        return super().check(setup)
