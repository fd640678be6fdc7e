"""What an algorithm is to the loop and to the update."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import jax
import numpy as np

from rolljax.trainer.batch import TokenBatch


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What an objective returns; every array is `[B, T]`, aligned to the token it describes.

    loss: per token, before weights and the global denominator.
    mean, largest: statistics that the update reduces by token mean and by maximum.
    """

    loss: jax.Array
    mean: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    largest: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


class Algorithm(abc.ABC):
    """Credit and objective of one phase. Pure: arrays in, arrays out."""

    source: ClassVar[Literal["gold", "sampler"]]
    """Who acts in the environments: the gold answers that come with them, or the policy."""

    @abc.abstractmethod
    def advantages(self, rewards: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Per group the advantages `[G]` of its trajectories; None for a group that teaches nothing and is dropped."""

    @abc.abstractmethod
    def objective(self, trainer_logp_BT: jax.Array, batch: TokenBatch) -> TokenLoss:
        """Per-token loss of one micro-batch (`batch` arrays are `[B, T]`, already clean where the weight is 0)."""

    def check(self, *, group_size: int, on_policy: bool) -> None:  # noqa: B027  # most have nothing to check
        """Raise `ConfigError` for a setting that cannot work, or can have no effect, in this combination.

        on_policy: every token is trained on exactly once, by the weights that sampled it (its ratio is 1).
        """
