"""The control of the quickstart: GRPO whose advantages are dealt to the wrong samples."""

import dataclasses

import numpy as np

from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import spread


@dataclasses.dataclass(frozen=True)
class PermutedGrpo(Grpo):
    """GRPO with the advantages of a step permuted between all samples that take part: same sizes, no information."""

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        values = super().advantages(e, rewards, algorithm_state)[:, 0]
        kept = np.flatnonzero(self.has_signal(e))
        # the seed is of the data, so that a continued run permutes alike
        rng = np.random.default_rng(abs(hash(tuple(rewards.tolist()))))
        values[kept] = values[rng.permutation(kept)]
        return spread(values, e.mask)
