"""Embeddings from a model's own hidden states."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of
from rolljax.errors import ConfigError, Range, check_fields

Embedder = Callable[[Sequence[str]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class HiddenStates(Stage):
    """Write a vector for each record into a column, for `vectors.Embedding.vectors`: the mean of a decoder's last
    hidden states over the text's tokens, scaled to length 1. Computed in float32 on the first device."""

    folder: str = ""
    """A local Hugging Face folder."""
    key: str = ""
    """The column of the text; empty: `Pipeline.key`."""
    column: str = "vector"
    """Column to which the vectors are written."""
    max_tok: Annotated[int, Range(low=1)] = 512
    """Maximum number of tokens of a text; the rest of a longer text is ignored."""
    batch: Annotated[int, Range(low=1)] = 16
    """Number of texts per batch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not Path(self.folder, "config.json").is_file():
            raise ConfigError(
                "is no folder of a model", setting="HiddenStates.folder", value=self.folder, remedy="with a config.json"
            )

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        embed = embedder(self.folder, self.max_tok)
        records = iter(source)
        while block := list(itertools.islice(records, self.batch)):
            missing = [""] * (self.batch - len(block))  # programs exist for one number of rows
            vectors = embed([*(text_of(record, self.key) for record in block), *missing])
            for record, vector in zip(block, vectors, strict=False):
                yield {**record, self.column: [round(float(x), 6) for x in vector]}


def embedder(folder: str, max_tok: int) -> Embedder:
    """Return a function from texts to vectors: float32 `[texts, hidden_size]`, of length 1 (0 for a text without
    tokens).

    Raises:
      CheckpointError: the folder cannot be read.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from rolljax.model import hf
    from rolljax.model.attention import packed
    from rolljax.model.decoder import Model, Params
    from rolljax.model.tokenizer import load_tokenizer

    model = Model(hf.read_config(folder))
    here = SingleDeviceSharding(jax.devices()[0])
    params = hf.load(folder, model, jax.tree.map(lambda _: here, model.abstract()))
    tokenizer = load_tokenizer(folder)

    @jax.jit
    def means(params: Params, tokens_BT: jax.Array, real_BT: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        segments = real_BT.astype(jnp.int32)
        attend = packed(segments, jnp.zeros_like(segments), positions, model.attention)
        hidden = model.bind(params)(tokens_BT, positions, attend).hidden.astype(jnp.float32)
        total = jnp.where(real_BT[..., None], hidden, 0).sum(1) / jnp.maximum(real_BT.sum(1), 1)[:, None]
        norm = jnp.linalg.norm(total, axis=1, keepdims=True)
        return total / jnp.where(norm > 0, norm, 1)

    def embed(texts: Sequence[str]) -> np.ndarray:
        rows = [tokenizer.encode(text, add_special_tokens=False)[:max_tok] for text in texts]
        length = max(64, 1 << (max(map(len, rows)) - 1).bit_length())  # a few sizes of programs
        tokens, real = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
        for i, ids in enumerate(rows):
            tokens[i, : len(ids)], real[i, : len(ids)] = ids, True
        return np.asarray(means(params, tokens, real))

    return embed
