"""Duplicates: equal texts, and texts that are nearly equal. The first of them stays."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Annotated

import numpy as np

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of
from rolljax.data.files import FileSource
from rolljax.data.texts import Unit, jaccard, normalised, shingles
from rolljax.errors import ConfigError, Range, check_fields, needed

BLOCK = 4096
"""Number of records whose signatures are computed at a time."""


@dataclasses.dataclass(frozen=True)
class Exact(Stage):
    """Leave out records with a text that came before. 16 bytes and their place in a set are kept of each."""

    key: str = ""
    """The column; empty: `Pipeline.key`."""
    normalise: bool = True
    """Whether to ignore case, punctuation and white space."""
    against: tuple[str, ...] = ()
    """Files of earlier stages of training, with the same column, whose records are left out too."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        earlier = {self._digest(record) for path in self.against for record in FileSource(path, "Exact.against")}
        seen: set[bytes] = set()
        for record in source:
            known = self._digest(record)
            if known in seen or known in earlier:
                place.drop(record, "duplicate" if known in seen else "seen_in_an_earlier_stage")
            else:
                seen.add(known)
                yield record

    def _digest(self, record: Record) -> bytes:
        text = text_of(record, self.key)
        plain = normalised(text) if self.normalise else text
        return hashlib.blake2b(plain.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class MinHash(Stage):
    """Leave out records whose text is nearly that of one before it that stays: MinHash signatures (datasketch), bands
    of them to find candidates (LSH), and the Jaccard similarity of the texts' shingles itself to decide. Kept of each
    record is 8 bytes a band; signatures are made in blocks."""

    key: str = ""
    """The column; empty: `Pipeline.key`."""
    threshold: Annotated[float, Range(above=0, below=1)] = 0.8
    """Jaccard similarity above which a record is a duplicate."""
    unit: Unit = "char"
    """Unit of the shingles, which are runs of `n` characters or words of the normalised text."""
    n: Annotated[int, Range(low=1)] = 5
    """Length of a shingle, in characters or words (see `unit`) of the normalised text."""
    num_perm: Annotated[int, Range(low=1)] = 128
    """Length of a signature; longer ones miss fewer duplicates."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.unit not in ("char", "word"):
            raise ConfigError("is no unit", setting="MinHash.unit", value=self.unit, remedy="'char' or 'word'")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        bands = self._bands(source)
        place.number("bands", bands.shape[1])
        groups = [_groups(bands[:, b]) for b in range(bands.shape[1])]
        del bands
        kept: list[collections.defaultdict[int, list[int]]] = [collections.defaultdict(list) for _ in groups]
        cached: collections.OrderedDict[int, set[str]] = collections.OrderedDict()

        def shingles_of(i: int) -> set[str]:
            if i not in cached:
                cached[i] = shingles(text_of(source.record(i), self.key), self.unit, self.n)
                if len(cached) > BLOCK:
                    cached.popitem(last=False)
            return cached[i]

        for i, record in enumerate(source):
            mine = [(kept[b], int(group[i])) for b, group in enumerate(groups) if group[i] >= 0]
            candidates = {j for table, g in mine for j in table[g]} if mine else set()
            if candidates:
                own = shingles(text_of(record, self.key), self.unit, self.n)
                if any(jaccard(own, shingles_of(j)) > self.threshold for j in sorted(candidates)):
                    place.drop(record, "near_duplicate")
                    continue
            for table, g in mine:
                table[g].append(i)
            yield record

    def _bands(self, source: RecordSource) -> np.ndarray:
        """Return a hash for each band of each record's signature; uint64 `[records, bands]`."""
        with needed("datasketch", "MinHash", install="rolljax[data]"):
            import datasketch
        # false candidates are harmless, as the similarity itself decides; a missing candidate is a missed duplicate
        lsh = datasketch.MinHashLSH(threshold=self.threshold, num_perm=self.num_perm, weights=(0.1, 0.9))
        factors = np.random.default_rng(0).integers(1, 2**63, (lsh.b, lsh.r), np.uint64) | np.uint64(1)
        bands = np.zeros((len(source), lsh.b), np.uint64)
        permutations = datasketch.MinHash(num_perm=self.num_perm, seed=1)
        block = np.zeros((BLOCK, lsh.b * lsh.r), np.uint64)
        start = filled = 0
        with np.errstate(over="ignore"):
            for record in source:
                sketch = permutations.copy()
                sketch.update_batch(
                    [s.encode(errors="surrogatepass") for s in shingles(text_of(record, self.key), self.unit, self.n)]
                )
                block[filled] = sketch.hashvalues[: lsh.b * lsh.r]
                filled += 1
                if filled == BLOCK:
                    bands[start : start + filled] = _hashes(block, factors)
                    start, filled = start + filled, 0
            bands[start : start + filled] = _hashes(block[:filled], factors)
        return bands[: start + filled]


def _hashes(block: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Compute multiply-and-add hashes of bands, modulo 2^64; `[n, b * r]`, `[b, r]` -> `[n, b]`."""
    mixed = ((block.reshape(len(block), *factors.shape) + np.uint64(1)) * factors).sum(-1, dtype=np.uint64)
    return mixed ^ (mixed >> np.uint64(29))


def _groups(hashes: np.ndarray) -> np.ndarray:
    """Return a number for each record with a shared hash; -1 for the rest. int32 `[records]`."""
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.where(counts[inverse] > 1, inverse, -1).astype(np.int32)
