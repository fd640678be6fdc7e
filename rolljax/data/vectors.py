"""Embeddings of records, duplicates by them, and a selection that covers them.

Vectors come from a column, or are hashed TF-IDF: counts of words and pairs of words in bins, by how few records have
them. Both are scaled to length 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of, value_of
from rolljax.data.texts import hashed_counts
from rolljax.errors import Checked, ConfigError, DataError, Range

MAX_BYTES = 512 << 20
"""Maximum size in bytes of the vectors in memory."""


@dataclasses.dataclass(frozen=True)
class Embedding(Checked):
    """The source of vectors: hashed TF-IDF of a text, or a column."""

    key: str = ""
    """The column of the text; empty: `Pipeline.key`."""
    vectors: str = ""
    """Column of lists of numbers that is used instead of the text, such as the output of an encoder."""
    dim: Annotated[int, Range(low=8)] = 512
    """Number of bins of hashed TF-IDF."""

    def weights(self, source: RecordSource) -> np.ndarray:
        """Compute inverse document frequencies `[dim]`, in one pass; ones if vectors are a column."""
        if self.vectors:
            return np.ones(0, np.float32)
        having = np.zeros(self.dim, np.int64)
        num = 0
        for record in source:
            having += hashed_counts(text_of(record, self.key), self.dim) > 0
            num += 1
        return np.log((1 + num) / (1 + having)).astype(np.float32) + 1

    def of(self, record: Record, weights: np.ndarray) -> np.ndarray:
        """Return the vector of a record, of length 1 (or 0); float32 `[dim]`.

        Raises:
          DataError: the column holds no numbers.
        """
        if self.vectors:
            value = value_of(record, self.vectors)
            try:
                vector = np.asarray(value, np.float32)
            except (TypeError, ValueError):
                vector = np.full(1, np.nan, np.float32)
            if vector.ndim != 1 or not len(vector) or not np.isfinite(vector).all():
                raise DataError(f"{self.vectors!r} is no list of finite numbers: {str(value)[:80]}")
        else:
            vector = np.log1p(hashed_counts(text_of(record, self.key), self.dim)) * weights
        norm = float(np.linalg.norm(vector))
        return vector / norm if norm else vector


def by_bucket(source: RecordSource, bucket: str) -> dict[str, np.ndarray]:
    """Return the numbers of the records of each bucket; one bucket if no column is named."""
    found: dict[str, list[int]] = {}
    for i, record in enumerate(source):
        found.setdefault(str(value_of(record, bucket)) if bucket else "", []).append(i)
    return {name: np.array(numbers) for name, numbers in found.items()}


def matrix(
    source: RecordSource, numbers: np.ndarray, embedding: Embedding, weights: np.ndarray, stage: str
) -> np.ndarray:
    """Return the vectors of some records; float32 `[n, dim]`.

    Raises:
      ConfigError: the vectors do not fit into memory. DataError: they differ in length.
    """
    first = embedding.of(source.record(int(numbers[0])), weights)
    if first.nbytes * len(numbers) > MAX_BYTES:
        raise ConfigError(
            f"makes a bucket of {len(numbers)} records, whose vectors of {len(first)} numbers need more than "
            f"{MAX_BYTES >> 20} MiB",
            setting=f"{stage}.bucket",
            remedy="name a column with more values, or remove other duplicates first",
        )
    found = np.zeros((len(numbers), len(first)), np.float32)
    for row, i in enumerate(numbers):
        vector = embedding.of(source.record(int(i)), weights)
        if vector.shape != first.shape:
            raise DataError(f"{embedding.vectors!r} holds vectors of different lengths: {len(first)} and {len(vector)}")
        found[row] = vector
    return found


@dataclasses.dataclass(frozen=True)
class EmbeddingDedup(Checked, Stage):
    """Leave out records whose vector is nearly equal to that of an earlier kept record of the same bucket."""

    embedding: Embedding = Embedding()
    """Embedding from which the vectors are made."""
    threshold: Annotated[float, Range(above=-1, below=1)] = 0.92
    """Cosine similarity above which a record is a duplicate."""
    bucket: str = ""
    """Column of the bucket; only records with equal values are compared. Empty: all records are compared."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        weights = self.embedding.weights(source)
        keep = np.zeros(len(source), bool)
        for numbers in by_bucket(source, self.bucket).values():
            vectors = matrix(source, numbers, self.embedding, weights, "EmbeddingDedup")
            keep[numbers[first_of_kind(vectors, self.threshold)]] = True
        yield from _kept(source, keep, place, "near_duplicate")


def first_of_kind(vectors: np.ndarray, threshold: float) -> np.ndarray:
    """Return the kept rows, in order: those whose cosine with every earlier kept row is at most `threshold`."""
    kept = np.zeros_like(vectors)
    numbers: list[int] = []
    for i, vector in enumerate(vectors):
        if not numbers or float((kept[: len(numbers)] @ vector).max()) <= threshold:
            kept[len(numbers)] = vector
            numbers.append(i)
    return np.array(numbers, np.int64)


@dataclasses.dataclass(frozen=True)
class KCenter(Checked, Stage):
    """Keep records that cover the others: K-center greedy. In each bucket, it starts with the first record and
    repeatedly adds the record that is farthest from all chosen ones."""

    embedding: Embedding = Embedding()
    """Embedding from which the vectors are made."""
    num: Annotated[int | None, Range(low=1)] = None
    """Number of records kept per bucket; None: the share `frac` of the bucket."""
    frac: Annotated[float, Range(above=0, high=1)] = 0.5
    """Share of each bucket to keep, rounded up."""
    bucket: str = ""
    """Column of the bucket; empty: all records are one bucket."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        weights = self.embedding.weights(source)
        keep = np.zeros(len(source), bool)
        for numbers in by_bucket(source, self.bucket).values():
            vectors = matrix(source, numbers, self.embedding, weights, "KCenter")
            num = self.num if self.num is not None else -int(-len(numbers) * self.frac // 1)
            keep[numbers[k_center(vectors, num)]] = True
        yield from _kept(source, keep, place, "covered")


def k_center(vectors: np.ndarray, k: int, start: int = 0) -> Sequence[int]:
    """Return the rows that K-center greedy takes, in order: `start`, then always the one farthest from all taken ones
    (Euclidean distance; the first of several). vectors `[n, dim]`."""
    taken = [start]
    distance = np.linalg.norm(vectors - vectors[start], axis=1)
    distance[start] = -1
    while len(taken) < min(k, len(vectors)):
        taken.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(vectors - vectors[taken[-1]], axis=1))
        distance[taken] = -1
    return taken


def _kept(source: RecordSource, keep: np.ndarray, place: Place, why: str) -> Iterator[Record]:
    for record, stays in zip(source, keep, strict=True):
        if stays:
            yield record
        else:
            place.drop(record, why)
