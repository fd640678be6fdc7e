"""Rewards of several parts, each compared by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, PolicyGradient
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.paper import Stated

CODE = "github.com/NVlabs/GDPO at 7ab53af, verl-GDPO/verl/trainer/ppo/ray_trainer.py"


@dataclasses.dataclass(frozen=True)
class Gdpo(ClippedRatio, PolicyGradient):
    """GDPO (arXiv 2601.05242): each part of the reward is normalised within its group, then the parts are added and
    normalised over the batch. Under GRPO different mixtures of parts with one sum have one advantage, and a part of
    small spread has almost no effect.

    The reward itself, and what `RewardShaping` adds to it, are not used where the parts are named.
    """

    whiten: bool = True
    parts: tuple[str, ...] = ()
    """Names of the parts in `reward_parts`; empty: the reward is the only part."""
    part_weights: tuple[float, ...] = ()
    """Weight of each part after it was normalised; empty: 1 for each."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "part_weights": Stated((), "arXiv 2601.05242, section 3.1: a sum; weights are an option of section 3.2"),
        "whiten": Stated(True, f"arXiv 2601.05242, section 3.1; over the tokens as in {CODE}"),
    }

    def uses_groups(self) -> bool:
        return True

    def scores(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        if not self.parts:
            return credits.normalise(rewards, e.groups)
        known = {name for parts in e.parts for name in parts}
        if e.num and not known & set(self.parts):
            remedy = f"the rewards of this step have {', '.join(sorted(known)) or 'no parts'}"
            raise self.refuse("parts", "names no part of any reward", remedy)
        values_KN = np.array([[parts.get(name, 0.0) for parts in e.parts] for name in self.parts])
        weights_K = np.array(self.part_weights or [1.0] * len(self.parts))
        return weights_K @ np.array([credits.normalise(values_N, e.groups) for values_N in values_KN])

    def check_fields(self) -> None:
        super().check_fields()
        if len(set(self.parts)) < len(self.parts):
            raise self.refuse("parts", "names a part twice", "name each once; part_weights says how much it counts")
        if self.part_weights and len(self.part_weights) != len(self.parts):
            raise self.refuse("part_weights", f"are not {len(self.parts)}, one for each of Gdpo.parts", "leave it out")
