"""PPO with a proximal policy that is separate from the behaviour policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class DecoupledPpo(NormalisedReward, ClippedRatio, PolicyGradient):
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): the clip is around the weights at the start of the
    step (the proximal policy), and a capped weight from the behaviour policy to it corrects for stale samples."""

    anchor: Literal["behaviour", "proximal"] = "proximal"
    correction: Correction | None = Correction(level="token", weight_cap=2.0)

    paper: ClassVar[Mapping[str, Stated]] = {
        "anchor": Stated("proximal", "arXiv 2110.00641, section 2; arXiv 2505.24298, section 5.2"),
        "correction": Stated(
            "weights without a cap",
            "arXiv 2505.24298, section 5.2; github.com/inclusionAI/AReaL, areal/api/cli_args.py, rejection_sampling: "
            "none unless asked for, then tokens are dropped or weights capped (before, behave_imp_weight_cap: dropped "
            "above 5)",
            "one token that the sampler found unlikely would outweigh a batch; AReaL's filter is ratio_band = (0, cap)",
        ),
        "clip_low": Stated(0.2, "arXiv 2505.24298, appendix B.1, table 3"),
        "clip_high": Stated(0.2, "arXiv 2505.24298, appendix B.1, table 3"),
        "kl": Stated(None, "arXiv 2505.24298, appendix B.1, table 3: no reference model"),
    }
