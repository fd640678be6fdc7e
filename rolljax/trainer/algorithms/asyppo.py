"""Asymmetric PPO with mini-critics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import AlgorithmState, Needs, Setup
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.critic import Critic
from rolljax.trainer.paper import Reproduction, Stated

REPRODUCTION = Reproduction(
    paper="2510.01656",
    name="AsyPPO",
    claim="small critics on parts of the data beat one",
    there="6 % better than PPO (4B)",
    here="one critic and two learn the same on two problems; fitting them before the advantages helps on one",
    state="not shown",
    seeds=20,
    config="algorithms/asyppo",
    figure="docs/mini_critics.png",
    why="with all else equal, critics as tables; small language models as critics were not tried",
)


@dataclasses.dataclass(frozen=True)
class AsyPpo(Ppo):
    """AsyPPO (arXiv 2510.01656): several small critics, each fitted to the returns of its own share of every prompt's
    responses. They learn from a step first; their mean is then the value. Where they agree most there is little to
    learn, and the surrogate is left out (`mask_frac`); where they disagree most the state is noise, and the entropy
    bonus is left out (`entropy_mask_frac`).

    Give `critic.model` a shape well below the policy's; with None the critics are as large as the policy. The paper's
    updates per datum are `Critic.epochs` for the critics and `Phase.epochs` for the policy.
    """

    critic: Critic = Critic(num=2, epochs=4, first=True)
    value_lam: float | None = 1.0
    whiten: bool = False
    mask_frac: Annotated[float, Range(low=0, below=1, remedy="0.2 is the paper's")] = 0.2
    """Share of tokens, those on which critics agree most, without a surrogate."""
    entropy_mask_frac: Annotated[float, Range(low=0, below=1, remedy="0.2 is the paper's")] = 0.2
    """Share of tokens, those on which they disagree most, without an entropy bonus."""
    entropy_coef: float = 0.01
    aggregation: Aggregation = "seq-mean-token-mean"

    mini_critics: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Stated]] = {
        "critic": Stated(
            Critic(num=2, epochs=4, first=True),
            "arXiv 2510.01656: two (figure 9 b), each on its own share of every prompt's responses (section 4.1), "
            "updates to data 4 (as in figure 5 b), before values, GAE and masks",
        ),
        "value_lam": Stated(1.0, "arXiv 2510.01656, section 4.1: the critics' target R_t is the Monte-Carlo return"),
        "mask_frac": Stated(0.2, "arXiv 2510.01656, figure 10 (left)"),
        "entropy_mask_frac": Stated(0.2, "arXiv 2510.01656, figure 10 (middle)"),
        "aggregation": Stated(
            "seq-mean-token-mean", "arXiv 2510.01656, section 4.2, the objective with both masks: 1/|o|"
        ),
        "whiten": Stated(False, "arXiv 2510.01656, section 4.2: the advantage of GAE as it is"),
    }

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), entropy_weights=True)

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        credit = super().credit(e, algorithm_state)
        _, spread = credits.critic_spread(e.required("values"))
        trained = credit.trained(e.mask)
        agree = credits.lowest(spread, trained, self.mask_frac)
        noisy = credits.highest(spread, trained, self.entropy_mask_frac)
        weights = np.where(agree, 0.0, credit.weights)
        return dataclasses.replace(credit, weights=weights, entropy_weights=1.0 - noisy)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.critic.num < 2:
            raise self.refuse("critic", "has one critic: there is no other to disagree with", "set Critic.num = 2")
        if self.critic.shard == "all":
            raise self.refuse(
                "critic", "has critics that learn the same: they will agree", "set Critic.shard = 'response'"
            )

    def check(self, setup: Setup) -> list[str]:
        if setup.group_size < self.critic.num and self.critic.shard == "response":
            raise self.refuse(
                "critic",
                f"has {self.critic.num} critics to share {setup.group_size} response(s) of a prompt",
                "raise Phase.group_size, or set Critic.shard = 'prompt'",
            )
        if self.entropy_mask_frac and not self.entropy_coef and self.entropy_mask_frac != 0.2:
            raise self.refuse("entropy_mask_frac", "can have no effect: entropy_coef is 0", "set entropy_coef")
        said = super().check(setup)
        if self.critic.model is None or self.critic.model == "previous":
            size = f"each of the {self.critic.num} critics is as large as the policy; the paper's are far smaller"
            said.append(f"AsyPpo.critic: {size}: give Critic.model a smaller shape")
        return said
