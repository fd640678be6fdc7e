"""Group relative policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.kl import KlLoss
from rolljax.trainer.paper import Stated

EQ3 = "arXiv 2402.03300, section 4.1.1, equation 3"


@dataclasses.dataclass(frozen=True)
class Grpo(NormalisedReward, ClippedRatio, PolicyGradient):
    """GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards under PPO's clipped ratio, mean over answers of
    the mean over their tokens. Groups whose rewards are all equal stay in the denominator.

    The paper adds a KL term to the loss (`kl.KlLoss`, estimator k3); it is off by default. With one update per step and
    no staleness the ratio is 1 and a clip has no effect: one that is not the default is refused then.
    """

    aggregation: Aggregation = "seq-mean-token-mean"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2402.03300, section 4.1.2"),
        "std": Stated("group", "arXiv 2402.03300, section 4.1.2"),
        "aggregation": Stated("seq-mean-token-mean", EQ3),
        "anchor": Stated("behaviour", EQ3),
        "filter": Stated(None, EQ3),
        "kl": Stated(
            KlLoss(coef=0.04, estimator="k3", reference="phase_start"),
            "arXiv 2402.03300, section 4.2; section 4.1.1, equation 4; algorithm 1",
            "the term needs a second copy of the weights and a forward pass, and for rewards that can be checked later "
            "papers do without it (arXiv 2503.14476, section 2.3)",
        ),
    }
