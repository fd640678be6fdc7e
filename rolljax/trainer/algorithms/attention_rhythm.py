"""Credit by the rhythm of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np

from rolljax.errors import Range, check_fields
from rolljax.trainer.algorithms.base import AlgorithmState, Needs, Setup
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.attention_stats import AttentionMaps
from rolljax.trainer.credit import rhythm
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.rhythm import Pick
from rolljax.trainer.paper import Reproduction, Stated

REPRODUCTION = Reproduction(
    paper="2510.13554",
    name="Attention rhythm",
    claim="amplified credit where attention plans and anchors",
    there="Countdown 52.6 to 63.1",
    here="global and coupled: the top 40 % learn faster than any 40 %, and these faster than the bottom, on every seed",
    state="partly",
    seeds=5,
    config="algorithms/attention_rhythm",
    figure="docs/effects.png",
    why="local credit is no better than at random tokens: here the tokens that look back do not decide",
)


PAPER = "arXiv 2510.13554 (version 2)"


@dataclasses.dataclass(frozen=True)
class AttentionRhythm(Grpo):
    """ "Attention Illuminates LLM Reasoning" (arXiv 2510.13554): GRPO whose advantages are amplified where attention
    shows planning (`local`: jumps of the windowed span), influence on later tokens (`global`), or both (`coupled`: the
    influence of tokens that follow from a plan is shared with the plan). As in version 2 of the paper advantages of
    either sign are amplified; version 1 amplified no negative advantages, and its FAI reached to 50 tokens."""

    rhythm: Literal["local", "global", "coupled"] = "coupled"
    """Choice of the tokens whose advantages are amplified. local: where attention shows planning (jumps of the windowed
    span); global: where it shows influence on later tokens; coupled: both, and the influence of tokens that follow from
    a plan is shared with the plan."""
    amplify: Annotated[float, Range(low=1, remedy="1.5 is the paper's; 1 is plain GRPO")] = 1.5
    """The factor; 1 is plain GRPO."""
    top: Annotated[float, Range(above=0, high=1, remedy="0.4 is the paper's")] = 0.4
    """Share of each answer's tokens."""
    pick: Pick = "top"
    """Amplify that share where the statistic ranks highest or, as the paper's controls, lowest or anywhere."""
    share: float = 0.5
    """Share of the amplification that moves from a token to its plan, in the coupled form."""
    lookback: int = 2
    """Maximum number of tokens between a token and the start of its plan before it, in the coupled form."""
    maps: AttentionMaps = AttentionMaps()
    """Settings of the attention statistics and of the layers that they are measured in."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "rhythm": Stated("coupled", f"{PAPER}, tables 3 and 4: the best of the three on average"),
        "amplify": Stated(1.5, f"{PAPER}, section 5.2, gamma_amp"),
        "top": Stated(0.4, f"{PAPER}, section 5.3.1, q = 40 %; table 5"),
        "lookback": Stated(2, f"{PAPER}, section 5.3.1: k is 1, 2 or 3"),
        "maps": Stated(
            AttentionMaps(),
            f"{PAPER}, section 5.3.1: W = 10, H from 10 to 100; 5.1: five layers from L/3 to 2L/3; 4.1: 30 % of heads",
        ),
        "mean": Stated("group", f"{PAPER}, section 3.2, equation 6"),
        "std": Stated("group", f"{PAPER}, section 3.2, equation 6"),
        "aggregation": Stated("seq-mean-token-mean", f"{PAPER}, section 5.2, equation 12: 1/|o| per response"),
        "filter": Stated(None, f"{PAPER}, section 5.3.1: on top of GRPO"),
        "kl": Stated(None, f"{PAPER}, section 5.3.1: no KL term"),
        "entropy_coef": Stated(0.0, f"{PAPER}, section 5.3.1: no entropy bonus"),
    }

    def needs(self) -> Needs:
        return dataclasses.replace(super().needs(), attention=self.maps)

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        return super().advantages(e, rewards, algorithm_state) * self.factors(e)

    def factors(self, e: Episodes) -> np.ndarray:
        """Return the factor on each token's advantage, `[N, T]`, at least 1."""
        waad, fai = e.required("waad"), e.required("fai")
        if self.rhythm == "local":
            return rhythm.local_gamma(waad, e.mask, self.amplify, self.top, self.pick, e.step)
        if self.rhythm == "global":
            return rhythm.global_gamma(fai, e.mask, self.amplify, self.top, self.pick, e.step)
        return rhythm.coupled_gamma(waad, fai, e.mask, self.amplify, self.top, self.share, self.lookback)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def check(self, setup: Setup) -> list[str]:
        if self.rhythm != "coupled" and (self.share, self.lookback) != (0.5, 2):
            raise self.refuse("share", "and lookback belong to the coupled form only", "set rhythm = 'coupled'")
        if self.rhythm == "coupled" and self.pick != "top":
            raise self.refuse("pick", "has no meaning for the coupled form", "set rhythm = 'global' or 'local'")
        return super().check(setup)
