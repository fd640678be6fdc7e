"""Direct preference optimization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.trainer import objectives
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.base import (
    Algorithm,
    AlgorithmState,
    Needs,
    PolicyOutputs,
    Setup,
    Source,
    TokenLoss,
)
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit import shaping
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Stated


def pairs(e: Episodes, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Return the signs `[N]`, +1 for chosen and -1 for rejected, and which trajectories belong to a pair `[N]`."""
    if source == "pairs":
        sign = np.where(np.arange(e.num) % 2 == 0, 1.0, -1.0)
        return sign, np.ones(e.num, bool)
    chosen, rejected = shaping.best_and_worst(e.rewards, e.groups)
    return np.where(chosen, 1.0, -1.0), chosen | rejected


def check_pairs(source: Source, setup: Setup) -> None:
    """Check that the group size fits the source: two for given pairs, two or more for sampled ones."""
    if setup.group_size < 2 or (source == "pairs" and setup.group_size != 2):
        raise ConfigError(
            "is not a pair" if source == "pairs" else "leaves no other answer to prefer",
            setting="Phase.group_size",
            value=setup.group_size,
            remedy="set group_size = 2" if source == "pairs" else "set group_size to 2 or more; 8 gives clearer pairs",
        )


STATED = {
    "loss": Stated("sigmoid", "arXiv 2305.18290, equation 7"),
    "beta": Stated(0.1, "arXiv 2305.18290, appendix B (0.5 for the summaries of TL;DR)"),
    "label_smoothing": Stated(0.0, "arXiv 2305.18290, equation 7: labels are taken as they are"),
    "sft_coef": Stated(0.0, "arXiv 2305.18290, equation 7: no term besides the preference"),
    "reference": Stated(
        "phase_start", "arXiv 2305.18290, section 4, DPO outline: the policy that training starts from"
    ),
}


@dataclasses.dataclass(frozen=True)
class Dpo(Algorithm):
    """DPO (arXiv 2305.18290): of two answers to a prompt the better one gains log-prob, measured from a reference
    policy.

    Pairs are the best and the worst of `group_size` sampled answers (online DPO). `PairDpo` takes recorded ones.
    """

    loss: Literal["sigmoid", "ipo", "simpo"] = "sigmoid"
    """Sigmoid (DPO), ipo (arXiv 2310.12036), or simpo (arXiv 2405.14734: no reference, mean log-probs, `margin`)."""
    beta: Annotated[float, Range(above=0, remedy="0.1 is usual (2 for simpo)")] = 0.1
    """Strength of the pull to the reference: the smaller, the farther the policy may go for a preference."""
    label_smoothing: Annotated[float, Range(low=0, below=0.5, remedy="at 0.5 a label says nothing")] = 0.0
    """Share of labels taken to be wrong (cDPO)."""
    margin: float = 0.0
    """Margin by which the better answer's score should be higher, for the loss simpo."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's mean cross-entropy."""
    reference: PolicySource = "phase_start"
    """The policy that log-probs are measured from."""

    unsplit_groups: ClassVar[bool] = True
    paper: ClassVar[Mapping[str, Stated]] = STATED

    @property
    def aggregation(self) -> Aggregation:
        """A pair is one loss."""
        return "group-mean"

    def needs(self) -> Needs:
        return Needs(ref="" if self.loss == "simpo" else self.reference)

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        sign, keep = pairs(e, self.source)
        return Credit(np.where(e.mask, sign[:, None], 0.0), keep=keep)

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        trained = (batch.scale != 0).astype(jnp.float32)
        length = jnp.maximum(objectives.segment_sum(trained, batch.sequence_ids), 1)
        sign = batch.advantages * trained
        positive, negative = (sign > 0).astype(jnp.float32), (sign < 0).astype(jnp.float32)
        # a pair is a segment of its row, so that sums over segments are sums over pairs
        per_pair = lambda x: objectives.segment_sum(x * trained, batch.segment_ids)  # noqa: E731
        chosen_mean_nll = per_pair(-policy.logp * positive / length)
        if self.loss == "simpo":
            better = per_pair(policy.logp * positive / length)
            worse = per_pair(policy.logp * negative / length)
            loss, gain = objectives.simpo(better, worse, self.beta, self.margin), self.beta * (better - worse)
        else:
            log_ratio = policy.logp - batch.required("ref_logp")
            better, worse = per_pair(log_ratio * positive), per_pair(log_ratio * negative)
            gain = self.beta * (better - worse)
            if self.loss == "ipo":
                loss = objectives.ipo(better - worse, self.beta)
            else:
                loss = objectives.dpo(better, worse, self.beta, self.label_smoothing)
        return TokenLoss(
            loss + self.sft_coef * chosen_mean_nll,
            {
                "preference/margin_nat": jax.lax.stop_gradient(gain),
                "preference/accuracy_frac": (gain > 0).astype(jnp.float32),
                "preference/chosen_nll_nat": chosen_mean_nll,
            },
        )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.label_smoothing and self.loss != "sigmoid":
            raise self.refuse(
                "label_smoothing", f"can have no effect with loss = {self.loss!r}", "set loss = 'sigmoid'"
            )
        if self.margin and self.loss != "simpo":
            raise self.refuse("margin", f"can have no effect with loss = {self.loss!r}", "set loss = 'simpo'")
        if self.loss == "simpo" and self.reference != "phase_start":
            raise self.refuse("reference", "can have no effect: simpo has no reference", "leave it out")

    def check(self, setup: Setup) -> list[str]:
        check_pairs(self.source, setup)
        return []


@dataclasses.dataclass(frozen=True)
class PairDpo(Dpo):
    """DPO (arXiv 2305.18290) on recorded pairs: the environment brings a chosen and a rejected answer to each of its
    prompts."""

    source: ClassVar[Source] = "pairs"
    paper: ClassVar[Mapping[str, Stated]] = STATED
