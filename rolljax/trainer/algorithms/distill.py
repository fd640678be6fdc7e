"""Distillation of a teacher's next-token distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from rolljax.errors import Checked, ConfigError, Range
from rolljax.trainer.algorithms.base import DivergenceTerm, Needs, PolicyOutputs, Setup, TokenLoss
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Distill(Checked, Sft):
    """Knowledge distillation (Hinton et al., arXiv 1503.02531): cross-entropy of the reference tokens plus `coef` times
    a divergence from the teacher's distribution at each of them."""

    teacher: PolicySource = ""
    """A local Hugging Face folder with the same tokenizer."""
    divergence: Literal["forward", "reverse", "js", "skewed", "adaptive"] = "forward"
    """Forward, reverse, js, skewed (by `alpha`) or adaptive."""
    coef: Annotated[float, Range(above=0, remedy="without a teacher use sft.Sft")] = 0.5
    """Weight of the divergence."""
    cross_entropy: Annotated[float, Range(low=0, remedy="0 switches it off")] = 1.0
    """Weight of the first part."""
    tau: Annotated[float, Range(above=0, remedy="without a teacher use sft.Sft")] = 1.0
    """Temperature of both, the result times tau^2."""
    alpha: Annotated[float, Range(above=0, below=1, remedy="0.1 is usual")] = 0.1
    """Share of the teacher in the mixture of the `skewed` divergence."""
    top_k: Annotated[int, Range(low=0, remedy="0 switches it off")] = 0
    """Only the teacher's most likely tokens (0: all), the rest as one bucket or renormalised away."""
    remainder: Literal["bucket", "renormalise"] = "bucket"
    """Treatment of the tokens that `top_k` leaves out: `bucket` counts them as one token, `renormalise` ignores
    them."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "divergence": Stated("forward", "arXiv 1503.02531, section 2: cross-entropy with the teacher's soft targets"),
        "alpha": Stated(
            0.1,
            "arXiv 2402.03898, algorithm 1; github.com/jongwooko/distillm, distillm/losses.py, lam of the skewed ones",
        ),
        "top_k": Stated(0, "arXiv 1503.02531, section 2: all classes"),
    }

    def needs(self) -> Needs:
        how = (self.divergence, self.tau, self.alpha, self.top_k, self.remainder)
        return Needs(divergence=DivergenceTerm(self.teacher, *how))

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        assert policy.divergence is not None
        weight = 1.0 if batch.weights is None else batch.weights
        loss = weight * (self.coef * policy.divergence - self.cross_entropy * policy.logp)
        return TokenLoss(loss, {"distill/divergence_nat": policy.divergence, "distill/ce_nat": -policy.logp})

    def check(self, setup: Setup) -> list[str]:
        if not self.teacher:
            raise ConfigError(
                "is not given", setting="Distill.teacher", value="", remedy="name a local Hugging Face folder"
            )
        if self.divergence != "skewed" and self.alpha != 0.1:
            raise self.refuse("alpha", "belongs to the skewed divergence only", "set divergence = 'skewed'")
        if self.top_k and self.divergence != "forward":
            raise self.refuse("top_k", "is for the forward divergence only", "set top_k = 0")
        if not self.top_k and self.remainder != "bucket":
            raise self.refuse("remainder", "can have no effect: top_k is 0", "set top_k (64 is usual)")
        return super().check(setup)
