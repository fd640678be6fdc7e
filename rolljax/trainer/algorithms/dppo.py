"""A trust region of probabilities instead of ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax

from rolljax.errors import Range
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.policy_gradient import NormalisedReward, PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.estimators import Std
from rolljax.trainer.objectives import Divergence
from rolljax.trainer.paper import Stated

SCRIPT = "github.com/volcengine/verl, examples/dppo_trainer/run_qwen30b_dppo.sh"
CODE = "github.com/sail-sg/Stable-RL at 22ce6d3, verl/trainer/ppo/core_algos.py"


@dataclasses.dataclass(frozen=True)
class Dppo(NormalisedReward, PolicyGradient):
    """DPPO (arXiv 2602.04879): REINFORCE weighted by the ratio, without the tokens whose probability has already moved
    too far in the direction of their advantage. A probability that grows from 1e-5 to 1e-3 has moved little, though its
    ratio is 100; one that falls from .99 to .8 has moved far."""

    std: Std = "none"
    aggregation: Aggregation = "seq-sum-norm"
    divergence: Divergence = "tv"
    """Distance of two probabilities of the sampled token: their difference (`tv`), or the KL divergence of the two
    yes-or-no distributions (`kl`, nats)."""
    mask_low: float | None = 0.15
    """Distance that the probability may fall before a token of negative advantage is left out (None: no bound)."""
    mask_high: float | None = 0.15
    """Distance that the probability may rise before a token of positive advantage is left out (None: no bound)."""
    cap: Annotated[float, Range(above=0)] = 10.0
    """Largest importance weight; larger ratios are cut to it."""
    square_coef: Annotated[float, Range(low=0, remedy="0 switches it off")] = 0.0
    """Weight of the squared log-ratio, which pulls all tokens, also those left out, back to the anchor (prime-rl:
    1e-3)."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "std": Stated("none", f"{SCRIPT}: norm_adv_by_std_in_grpo=False"),
        "aggregation": Stated("seq-sum-norm", f"{SCRIPT}: seq-mean-token-sum-norm"),
        "divergence": Stated("tv", f"{SCRIPT}: LOSS_MODE defaults to dppo_tv"),
        "mask_low": Stated(0.15, f"{SCRIPT}: dppo_tv; 0.05 for dppo_kl"),
        "mask_high": Stated(0.15, f"{SCRIPT}: dppo_tv; 0.05 for dppo_kl"),
        "cap": Stated(10.0, f"{CODE}: clip_ratio_c"),
        "anchor": Stated("behaviour", "arXiv 2602.04879, section 5.2: relative to the sampler, not recomputed"),
        "square_coef": Stated(0.0, f"{CODE}: no such term"),
    }

    ratio_settings: ClassVar[tuple[str, ...]] = ("mask_high", "mask_low")

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.dppo(
            ratio,
            batch.advantages,
            logp,
            batch.anchor(self.anchor),
            self.divergence,
            self.mask_low,
            self.mask_high,
            self.cap,
            self.square_coef,
        )

    def check_fields(self) -> None:
        Range(above=0, remedy="give a positive number, or None for none").check(self, "mask_low", "mask_high")
