"""Decoupled clip and dynamic sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.paper import Stated

PAPER = "arXiv 2503.14476"
SCRIPT = "github.com/volcengine/verl at 2e1a1a6, recipe/dapo/run_dapo_qwen2.5_32b.sh"


@dataclasses.dataclass(frozen=True)
class Dapo(NormalisedReward, ClippedRatio, PolicyGradient):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, groups that teach nothing replaced by further ones until
    the step is full, the mean over tokens, a soft penalty for answers near the limit, and no KL term.

    `RewardShaping.overlong_cache`: tokens before the limit over which the penalty falls to -1; the paper's 4096 belong
    to answers of up to 20480, so that shorter ones need a fifth of theirs. `GroupFilter.dynamic_sampling_rounds`: after
    this many rounds a step continues with the groups that it has, and warns; without a group the run ends.
    """

    aggregation: Aggregation = "token-mean"
    clip_high: float | None = 0.28
    filter: GroupFilter | None = GroupFilter(dynamic_sampling_rounds=30)
    shaping: RewardShaping | None = RewardShaping(overlong_cache=4096)

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", f"{PAPER}, equation 9"),
        "std": Stated("group", f"{PAPER}, equation 9"),
        "aggregation": Stated("token-mean", f"{PAPER}, section 3.3, equation 12"),
        "clip_low": Stated(0.2, f"{PAPER}, section 4.1"),
        "clip_high": Stated(0.28, f"{PAPER}, section 4.1"),
        "filter": Stated(
            GroupFilter(dynamic_sampling_rounds=9),
            f"{PAPER}, section 3.2, equation 11; {SCRIPT}: max_num_gen_batches=10, each of three times the prompts of "
            "a step",
            "a round here draws only the groups that are missing, so that none is thrown away: more, smaller rounds",
        ),
        "shaping": Stated(RewardShaping(overlong_cache=4096), f"{PAPER}, section 4.1 (of 20480 tokens; equation 13)"),
        "mask_truncated": Stated(
            False, f"{SCRIPT}: no filter; {PAPER}, section 3.4 and table 1, has one on the way to the soft penalty"
        ),
        "kl": Stated(None, f"{PAPER}, section 2.3"),
        "entropy_coef": Stated(0.0, f"{SCRIPT}: entropy_coeff=0"),
    }
