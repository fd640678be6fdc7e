"""REINFORCE leave-one-out."""

from __future__ import annotations

import dataclasses

from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.credit import Mean


@dataclasses.dataclass(frozen=True)
class Rloo(Reinforce):
    """RLOO (arXiv 2402.14740): the baseline of a trajectory is the mean reward of its siblings, without itself."""

    mean: Mean = "leave_one_out"
