"""REINFORCE leave-one-out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.credit.estimators import Mean
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Rloo(Reinforce):
    """RLOO (arXiv 2402.14740): the baseline of a trajectory is the mean reward of its siblings, without itself. An
    answer is one action, so that its token losses are summed."""

    mean: Mean = "leave_one_out"
    aggregation: Aggregation = "seq-mean-token-sum"

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("leave_one_out", "arXiv 2402.14740, section 2.3: the RLOO estimator"),
        "std": Stated("none", "arXiv 2402.14740, section 2.3: the RLOO estimator"),
        "aggregation": Stated(
            "seq-mean-token-sum", "arXiv 2402.14740, section 2.2: the whole completion is one action"
        ),
    }
