"""REINFORCE++."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.estimators import Mean, Std
from rolljax.trainer.paper import Stated

_CODE = "github.com/OpenRLHF/OpenRLHF, openrlhf/trainer/ppo_utils/experience_maker.py"
_PAPER = "arXiv 2501.03262 (version 9)"
_CLIP = Stated(
    0.2,
    "arXiv 2501.03262 (version 1), table 1; github.com/OpenRLHF/OpenRLHF, openrlhf/cli/train_ppo_ray.py, "
    "actor.eps_clip",
)
_NO_KL = "the term needs a second copy of the weights and a forward pass; set it where the policy drifts"
_SUM = Stated(
    "token-mean",
    "github.com/OpenRLHF/OpenRLHF, openrlhf/models/loss.py, token_level_loss "
    f"({_PAPER}, equation 1: the mean over an answer's tokens first)",
)


@dataclasses.dataclass(frozen=True)
class ReinforcePP(NormalisedReward, ClippedRatio, PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262) under PPO's clipped ratio: a token's advantage is the reward less the KL penalty
    from it to the end of the answer (`kl.KlReward`), normalised over all tokens of the batch.

    With `mean = std = 'batch'` and without `whiten` rewards of trajectories are normalised over the batch instead, and
    the KL penalty is added to them as it is (ROLL).
    """

    mean: Mean = "none"
    std: Std = "none"
    whiten: bool = True

    whiten_ddof: ClassVar[int] = 0  # the authors' code takes the deviation of the population

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("none", f"{_PAPER}, equation 4; {_CODE}"),
        "std": Stated("none", f"{_PAPER}, equation 4; {_CODE}"),
        "whiten": Stated(True, f"{_PAPER}, equation 5; {_CODE}"),
        "clip_low": _CLIP,
        "clip_high": _CLIP,
        "aggregation": _SUM,
        "kl": Stated("k1 in the reward", f"{_PAPER}, equation 4", _NO_KL),
    }


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaseline(NormalisedReward, ClippedRatio, PolicyGradient):
    """REINFORCE++ with a baseline (arXiv 2501.03262): rewards less the group's mean, then normalised over all tokens of
    the batch. The paper's KL term is k2 in the loss (`kl.KlLoss`)."""

    mean: Mean = "group"
    std: Std = "none"
    whiten: bool = True

    whiten_ddof: ClassVar[int] = 0  # the authors' code takes the deviation of the population

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", f"{_PAPER}, equation 6; {_CODE}, reinforce_baseline"),
        "std": Stated("none", f"{_PAPER}, equation 6; {_CODE}, reinforce_baseline"),
        "whiten": Stated(True, f"{_PAPER}, equation 7; {_CODE}"),
        "kl": Stated("k2 in the loss", f"{_PAPER}, equation 8", _NO_KL),
        "aggregation": _SUM,
    }
