"""Latent prefixes: fixed vectors in place of the embeddings of tokens, under token ids that follow the vocabulary.

Id `vocab_size + latent * L + i` is vector `i` of a latent. A prompt that starts with such ids is ordinary to sampler,
caches, packing and records. The output matrix has no such ids, so none is ever sampled. The vectors are constants of
the model's programs: no parameter, gradient, optimizer state, checkpoint or published weight holds them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path

import numpy as np

from rolljax.errors import ConfigError
from rolljax.model.shards import DTYPES, Shards, save_file

NAME = "prefixes"
"""Name of the tensor in a file."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prefixes:
    """Vectors of Z latents, each L long; equal if their bits are."""

    vectors_ZLD: np.ndarray
    """float32 `[Z, L, D]`, at the scale of the embedding."""

    @functools.cached_property
    def _digest(self) -> bytes:
        shape = str(self.vectors_ZLD.shape).encode()
        return hashlib.sha256(shape + self.vectors_ZLD.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefixes) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def latents(self) -> int:
        """The number Z of latents."""
        return int(self.vectors_ZLD.shape[0])

    @property
    def length(self) -> int:
        """The number L of vectors of a latent."""
        return int(self.vectors_ZLD.shape[1])

    @property
    def num_ids(self) -> int:
        """The number of token ids that the vectors take."""
        return self.latents * self.length

    @property
    def rows(self) -> np.ndarray:
        """The vectors in the order of their ids, `[Z * L, D]`."""
        return self.vectors_ZLD.reshape(self.num_ids, -1)


def save_prefixes(path: str | Path, prefixes: Prefixes) -> None:
    """Write latent prefixes as a safetensors file."""
    save_file(Path(path), {NAME: np.ascontiguousarray(prefixes.vectors_ZLD, np.float32)})


def read_prefixes(path: str | Path, hidden_size: int) -> Prefixes:
    """Read latent prefixes from a safetensors file (`save_prefixes`).

    Raises:
      ConfigError: there is no such file, or its vectors are not float32 of this size and finite.
      CheckpointError: the file is damaged.
    """
    path, remedy = Path(path), "make it from this model's embedding (rolljax/recipes/palette)"
    if path.suffix != ".safetensors" or not path.is_file():
        raise ConfigError("is not a safetensors file", setting="Recipe.prefixes", value=str(path), remedy=remedy)
    shards = Shards(path.parent, path.stem)
    stored = shards.tensors.get(NAME)
    if stored is None or DTYPES.get(stored.dtype) != np.float32 or len(stored.shape) != 3 or not all(stored.shape):
        raise ConfigError(
            f"holds no tensor `{NAME}` [latents, length, hidden size] of float32",
            setting="Recipe.prefixes",
            value=str(path),
            remedy=remedy,
        )
    if stored.shape[2] != hidden_size:
        raise ConfigError(
            f"holds vectors of {stored.shape[2]} numbers; the model's hidden size is {hidden_size}",
            setting="Recipe.prefixes",
            value=str(path),
            remedy=remedy,
        )
    vectors = shards.copy(shards.view(NAME), NAME)
    if not np.isfinite(vectors).all():
        raise ConfigError(
            "holds numbers that are not finite", setting="Recipe.prefixes", value=str(path), remedy=remedy
        )
    return Prefixes(vectors)
