"""The order of training tasks: Grain's shuffle, and the same order on a machine without Grain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")
ROUNDS, SHORTEST_BLOCK_BITS, WORD = 4, 16, 2**32 - 1
"""Parameters of the shuffling cipher: its rounds, its smallest block in bits, and the mask of a 32-bit word."""


def shuffled(num: int, seed: int, item: Callable[[int], T], keep: Callable[[T], bool]) -> Any:
    """Return an iterator over the items of `range(num)` in an order that depends on the seed. It repeats without end,
    each time in another order. It has Grain's `get_state` and `set_state`; the state is a small dict of JSON.

    Grain makes it where Grain is installed. Elsewhere `Shuffled` does, with the same items and the same states.

    Args:
      seed: at most 32 bits. item: of an index. keep: whether an item comes at all.
    """
    try:
        import grain
    except ModuleNotFoundError:
        return Shuffled(num, seed, item, keep)
    data = grain.MapDataset.range(num).shuffle(seed=seed).repeat().map(item).filter(keep)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=0)))


class Shuffled(Generic[T]):
    """The iterator that `shuffled` returns without Grain; the arguments are the same."""

    def __init__(self, num: int, seed: int, item: Callable[[int], T], keep: Callable[[T], bool]) -> None:
        self._num, self._seed, self._item, self._keep = num, seed, item, keep
        self._next = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            epoch, index = divmod(self._next, self._num)
            self._next += 1
            found = self._item(shuffled_index(index, self._num, (self._seed + epoch) & WORD))
            if self._keep(found):
                return found

    def get_state(self) -> dict[str, int]:
        """Return the position."""
        return {"next_index": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Go to a position."""
        self._next = state["next_index"]


def shuffled_index(index: int, num: int, seed: int) -> int:
    """Return the index that comes at place `index` of a shuffle of `range(num)`: that of Grain's `index_shuffle`.

    The block cipher Simon (Beaulieu et al. 2013, https://eprint.iacr.org/2013/404), with four rounds on blocks that are
    just large enough, is a permutation. It is applied again until it gives an index below `num` (cycle walking: Black
    and Rogaway 2002, https://www.cs.ucdavis.edu/~rogaway/papers/subset.pdf).
    """
    if num <= 1 << SHORTEST_BLOCK_BITS:
        return _whole_order(num, seed)[index]
    bits = ((num - 2).bit_length() + 1) // 2
    while (index := _enciphered(index, bits, seed)) >= num:
        pass
    return index


@functools.lru_cache(maxsize=16)
def _whole_order(num: int, seed: int) -> list[int]:
    """Return the shuffle of a short `range(num)`. In one whose blocks are much too large the walks are long, and they
    have no index in common: together they visit each block once."""
    after = _enciphered(np.arange(1 << SHORTEST_BLOCK_BITS), SHORTEST_BLOCK_BITS // 2, seed).tolist()
    order = []
    for found in after[:num]:
        while found >= num:
            found = after[found]
        order.append(found)
    return order


def _enciphered(block: Any, bits: int, seed: int) -> Any:
    """Encrypt a block of two words, or an array of blocks, with Simon. bits: size of a word."""
    keys, mask = _round_keys(seed), (1 << bits) - 1
    left, right = block >> bits & mask, block & mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ _mixed(right, bits, mask) ^ first & mask
        right = right ^ _mixed(left, bits, mask) ^ second & mask
    return left << bits | right


def _mixed(word: Any, bits: int, mask: int) -> Any:
    """Return Simon's round function of a word, without its key."""
    one, eight, two = ((word << n | word >> bits - n) & mask for n in (1, 8, 2))
    return one & eight ^ two


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return the keys of all rounds, as `std::seed_seq{seed}` generates them (C++'s standard, [rand.util.seedseq])."""
    out, n, given = [0x8B8B8B8B] * ROUNDS, ROUNDS, (1, seed)
    t = (n - 1) // 2
    p = (n - t) // 2
    q = p + t
    for k in range(n):
        here, near, far, last = k, (k + p) % n, (k + q) % n, (k - 1) % n
        x = out[here] ^ out[near] ^ out[last]
        r = 1664525 * (x ^ x >> 27) & WORD
        s = r + (given[0] if k == 0 else k + given[1] if k == 1 else k) & WORD
        out[near], out[far] = out[near] + r & WORD, out[far] + s & WORD
        out[here] = s
    for k in range(n):
        here, near, far, last = k, (k + p) % n, (k + q) % n, (k - 1) % n
        x = out[here] + out[near] + out[last] & WORD
        r = 1566083941 * (x ^ x >> 27) & WORD
        s = r - k & WORD
        out[near], out[far] = out[near] ^ r, out[far] ^ s
        out[here] = s
    return tuple(out)
