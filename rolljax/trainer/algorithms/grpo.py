"""Group relative policy optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import ClippedRatio
from rolljax.trainer.paper import Stated

EQ3 = "arXiv 2402.03300, section 4.1.1, equation 3"


@dataclasses.dataclass(frozen=True)
class Grpo(ClippedRatio):
    """GRPO (DeepSeekMath, arXiv 2402.03300): group-normalised rewards under PPO's clipped ratio, mean over answers of
    the mean over their tokens. Groups whose rewards are all equal stay in the denominator.

    The paper adds a KL term to the loss (`kl_coef`, estimator k3); it is off by default. With one update per step and
    no staleness the ratio is 1 and a clip has no effect; then `clip_low` and `clip_high` must be None.
    """

    aggregation: Aggregation = "seq-mean-token-mean"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2402.03300, section 4.1.2"),
        "std": Stated("group", "arXiv 2402.03300, section 4.1.2"),
        "aggregation": Stated("seq-mean-token-mean", EQ3),
        "anchor": Stated("behaviour", EQ3),
        "drop_degenerate": Stated(False, EQ3),
        "kl": Stated("k3", "arXiv 2402.03300, section 4.1.1, equation 4"),
        "kl_coef": Stated(
            0.04,
            "arXiv 2402.03300, section 4.2",
            "the term needs a second copy of the weights and a forward pass, and for rewards that can be checked later "
            "papers do without it (arXiv 2503.14476, section 2.3)",
        ),
        "reference": Stated("phase_start", "arXiv 2402.03300, algorithm 1"),
    }
