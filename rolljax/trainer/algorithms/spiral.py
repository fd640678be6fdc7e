"""Self-play with a baseline for every role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np

from rolljax.errors import Range
from rolljax.trainer import objectives
from rolljax.trainer.algorithms.base import AlgorithmState, Setup
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.paper import Stated


@dataclasses.dataclass(frozen=True)
class Spiral(PolicyGradient):
    """Self-play in zero-sum games (SPIRAL, arXiv 2506.24119): the policy plays both roles, turn by turn, and the
    advantage of a role's turns is its return minus the moving average of this role's returns.

    The trajectory's reward is the return of the role that moves first; the other role has its negative. A role that
    wins more often than the other thus learns from how well it plays, not from which role it is.
    """

    decay: float = 0.95
    """Share of a role's baseline that stays when a trajectory is added."""
    by_role: bool = True
    """Whether each role has a baseline of its own; False: both have one, which is then about 0."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "decay": Stated(0.95, "github.com/spiral-rl/spiral, train_spiral.py: role_baseline_ema_gamma"),
        "by_role": Stated(True, "arXiv 2506.24119, role-conditioned advantage estimation"),
    }

    def remember(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> AlgorithmState:
        """Add the step's returns to the moving averages, trajectory by trajectory."""
        carried = dict(algorithm_state)
        for domain, reward in zip(e.domains, rewards, strict=True):
            for name, outcome in zip(self._names(domain), (reward, -reward), strict=True):
                carried[name] = self.decay * carried.get(name, 0.0) + (1 - self.decay) * float(outcome)
        return carried

    def advantages(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        averages = np.array([[algorithm_state[name] for name in self._names(d)] for d in e.domains]).reshape(-1, 2)
        by_role = np.stack([rewards, -rewards], 1) - averages
        return np.where(e.mask, np.take_along_axis(by_role, e.turns % 2, 1), 0.0)

    def _names(self, domain: str) -> tuple[str, str]:
        """Return the names of the baselines of both roles in a game."""
        first, second = ("first", "second") if self.by_role else ("both", "both")
        return f"baseline/{domain}/{first}", f"baseline/{domain}/{second}"

    def surrogate(self, logp: jax.Array, ratio: jax.Array, batch: TokenBatch) -> jax.Array:
        return objectives.vanilla(batch.advantages, logp)

    def uses_ratio(self) -> bool:
        return False

    def check_fields(self) -> None:
        super().check_fields()
        Range(low=0, below=1, remedy="0.95 is usual").check(self, "decay")

    def check(self, setup: Setup) -> list[str]:
        said = super().check(setup)
        if setup.max_turns < 2:
            said.append("Spiral: episodes of this environment have one turn, so that the second role never moves")
        return said
