"""Asymmetric PPO with mini-critics."""

from __future__ import annotations

import dataclasses

import numpy as np

from rolljax.trainer import credit as credits
from rolljax.trainer.algorithms.base import Memory
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.critic import Critic
from rolljax.trainer.episodes import Credit, Episodes


@dataclasses.dataclass(frozen=True)
class AsyPpo(Ppo):
    """AsyPPO (arXiv 2510.01656): several small critics, each fitted to its own share of every prompt's responses. Their
    mean is the value; where they agree most there is little to learn, and the surrogate is left out (`mask_frac`);
    where they disagree most the state is noise, and the entropy bonus is left out (`entropy_mask_frac`).

    Give `critic.model` a shape well below the policy's; with None the critics are as large as the policy.
    """

    critic: Critic = Critic(num=2, epochs=4, warmup_steps=10)
    mask_frac: float = 0.2
    entropy_mask_frac: float = 0.2
    entropy_coef: float = 0.01

    def credit(self, e: Episodes, memory: Memory) -> Credit:
        credit = super().credit(e, memory)
        _, spread = credits.critic_spread(e.given("values"))
        valid = e.mask if credit.mask is None else credit.mask
        valid = valid if credit.keep is None else valid & credit.keep[:, None]
        agree = credits.lowest(spread, valid, self.mask_frac)
        noisy = credits.highest(spread, valid, self.entropy_mask_frac)
        weights = np.where(agree, 0.0, 1.0 if credit.weights is None else credit.weights)
        return dataclasses.replace(credit, weights=weights, entropy_weights=1.0 - noisy)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mask_frac", "entropy_mask_frac"):
            if not 0 <= getattr(self, name) < 1:
                raise self.refuse(name, "must be at least 0 and below 1", "0.2 is the paper's")
        if self.critic.num < 2:
            raise self.refuse("critic", "has one critic: there is nobody to disagree with", "set Critic.num = 2")
        if self.critic.shard == "all":
            raise self.refuse(
                "critic", "has critics that learn the same: they will agree", "set Critic.shard = 'response'"
            )

    def check(self, setup):
        if setup.group_size < self.critic.num and self.critic.shard == "response":
            raise self.refuse(
                "critic",
                f"has {self.critic.num} critics to share {setup.group_size} response(s) of a prompt",
                "raise Phase.group_size, or set Critic.shard = 'prompt'",
            )
        if self.entropy_mask_frac and not self.entropy_coef and self.entropy_mask_frac != 0.2:
            raise self.refuse("entropy_mask_frac", "can have no effect: entropy_coef is 0", "set entropy_coef")
        return super().check(setup)
