"""What the update carries from step to step."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from rolljax.model.decoder import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParamState:
    """Parameters, optimizer state and the number of optimizer updates taken (int32 scalar).

    Of the critics every leaf has a leading axis M: they are one stack, and one program.
    """

    params: Params
    opt_state: Any
    num_updates: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The policy, and the critics when there are any."""

    policy: ParamState
    critics: ParamState | None = None

    @property
    def params(self) -> Params:
        """The policy's parameters."""
        return self.policy.params


def on_host(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """The full array, wherever its shards lie."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


def fingerprint(tree: Any) -> str:
    """SHA-256 over the bytes of every leaf, in tree order: equal only if all leaves are bitwise equal.

    All processes that the leaves lie on call it.

    Raises:
      TypeError: a leaf is no array of numbers.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = on_host(leaf)
        if array.dtype == object:  # its bytes would be an address
            raise TypeError(f"a fingerprint is of arrays: {type(leaf).__name__} is none")
        digest.update(f"{array.shape}{array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
