"""The control of the quickstart: GRPO whose advantages are dealt to the wrong samples."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rolljax.trainer.algorithms.grpo import Grpo


@dataclasses.dataclass(frozen=True)
class PermutedGrpo(Grpo):
    """GRPO with the advantages of a step permuted between all its samples: same sizes, no information."""

    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        advantages = super().advantages(rewards)
        kept = [a for a in advantages if a is not None]
        if not kept:
            return advantages
        # the seed is of the data, so that a continued run permutes alike
        rng = np.random.default_rng(abs(hash(tuple(float(r.sum()) for r in rewards))))
        mixed = iter(np.split(rng.permutation(np.concatenate(kept)), np.cumsum([len(a) for a in kept])[:-1]))
        return [None if a is None else next(mixed) for a in advantages]
