"""Kahneman-Tversky optimization: preferences of single answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar

import jax.numpy as jnp
import numpy as np

from rolljax.errors import Checked, Range
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
from rolljax.trainer.algorithms.dpo import check_pairs, pairs
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Stated

CODE = "arXiv 2402.01306; github.com/huggingface/trl, trl/trainer/kto_config.py"
STATED = {
    "beta": Stated(0.1, f"{CODE}: beta"),
    "good_weight": Stated(1.0, f"{CODE}: desirable_weight"),
    "bad_weight": Stated(1.0, f"{CODE}: undesirable_weight"),
    "reference": Stated("phase_start", "arXiv 2402.01306: the model that alignment starts from"),
}


@dataclasses.dataclass(frozen=True)
class Kto(Checked, Algorithm):
    """KTO (arXiv 2402.01306): an answer that is good gains log-prob, measured from a reference policy, and one that is
    bad loses it; the farther an answer already is from the average one, the less.

    Answers are the policy's own; those that solve their task are good. The average is an estimate of KL(policy ||
    reference) by the step's answers, at least 0 and without a gradient. `PairKto` takes recorded answers.
    """

    beta: Annotated[float, Range(above=0, remedy="0.1 is usual")] = 0.1
    """Strength of the pull to the reference: the smaller, the farther the policy may go."""
    good_weight: Annotated[float, Range(low=0, remedy="1 is usual")] = 1.0
    """Weight of good answers (lambda_D). With its number of answers, each kind should weigh about the same."""
    bad_weight: Annotated[float, Range(low=0, remedy="1 is usual")] = 1.0
    """Weight of bad answers (lambda_U)."""
    reference: PolicySource = "phase_start"
    """The policy that log-probs are measured from."""

    paper: ClassVar[Mapping[str, Stated]] = STATED

    @property
    def aggregation(self) -> Aggregation:
        """An answer is one loss."""
        return "seq-mean-token-mean"

    def needs(self) -> Needs:
        return Needs(trainer_logp=True, ref=self.reference, reference_points=True)

    def labels(self, e: Episodes) -> np.ndarray:
        """Return +1 for good trajectories and -1 for bad ones, `[N]`."""
        return np.where(e.success, 1.0, -1.0)

    def log_ratios(self, e: Episodes) -> np.ndarray:
        """Return the log-ratios to the reference, nats, `[N, T]`, of which the mean over answers is the KL."""
        return e.required("trainer_logp") - e.required("ref_logp")

    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        labels = np.where(e.mask, self.labels(e)[:, None], 0.0)
        kl = float(np.where(e.mask, self.log_ratios(e), 0.0).sum(1).mean()) if e.num else 0.0
        point = max(kl, 0.0)
        return Credit(
            labels,
            reference_points=np.where(e.mask, point, 0.0),
            stats={"preference/reference_point_nat": point},
        )

    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        trained = (batch.scale != 0).astype(jnp.float32)
        of_tokens = (policy.logp - batch.required("ref_logp")) * trained
        gain = objectives.segment_sum(of_tokens, batch.sequence_ids) - batch.required("reference_points")
        good = batch.advantages > 0
        loss = jnp.where(good, self.good_weight, self.bad_weight) * objectives.kto(gain, good, self.beta)
        return TokenLoss(loss, {"preference/accuracy_frac": ((gain > 0) == good).astype(jnp.float32)})


@dataclasses.dataclass(frozen=True)
class PairKto(Kto):
    """KTO (arXiv 2402.01306) on recorded pairs, taken apart: the chosen answer to a prompt is good, the rejected one
    bad.

    The KL is estimated with the answers of one prompt after the next prompt of the step, as in the paper.
    """

    source: ClassVar[Source] = "pairs"
    paper: ClassVar[Mapping[str, Stated]] = STATED

    def needs(self) -> Needs:
        return Needs(ref=self.reference, reference_points=True, context="next_prompt")

    def labels(self, e: Episodes) -> np.ndarray:
        return pairs(e, self.source)[0]

    def log_ratios(self, e: Episodes) -> np.ndarray:
        return e.required("context_logp") - e.required("context_ref_logp")

    def check(self, setup: Setup) -> list[str]:
        check_pairs(self.source, setup)
        return []
