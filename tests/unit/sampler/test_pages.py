"""The tree of cached beginnings, against a plain list of what was put in."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.sampler.pages import PageCache

SIZE, CHUNK = 4, 8


def data_of(tokens):
    return np.array(tokens, np.int32).tobytes()


def put(cache, tokens):
    """Take pages for a sequence as a request does, and leave them to the tree."""
    data = data_of(tokens)
    found = cache.find(data, len(tokens) - 1)
    cache.lock(found.nodes)
    pages = cache.take(-(-len(tokens) // SIZE) - len(found.nodes))
    if pages is None:
        cache.unlock(found.nodes)
        return False
    nodes = [*found.nodes, *cache.keep(found.nodes, data[len(found.nodes) * SIZE * 4 :], pages)]
    cache.unlock(nodes)
    return True


def allowed(rule, sequences, tokens, limit):
    """Return the number of reusable tokens, by comparing with every sequence ever inserted."""
    best = 0
    for other in sequences:
        n = 0
        while n < min(len(other), len(tokens), limit) and other[n] == tokens[n]:
            n += 1
        if rule == "any":
            best = max(best, n)
        elif rule == "turns":
            best = max(best, n if n == len(other) else n // CHUNK * CHUNK)
    return best


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=22)


@pytest.mark.parametrize("rule", ["turns", "any", "off"])
@given(sequences=st.lists(token_lists, max_size=12), wanted=token_lists)
def test_find_is_the_longest_that_the_rule_allows(rule, sequences, wanted):
    cache = PageCache(200, SIZE, rule, CHUNK)
    for tokens in sequences:
        assert put(cache, tokens)
    found = cache.find(data_of(wanted), len(wanted) - 1)
    assert found.length == allowed(rule, sequences, wanted, len(wanted) - 1)
    held = b"".join(node.data for node in found.nodes) + (found.tail.data if found.tail else b"")
    assert held[: found.length * 4] == data_of(wanted)[: found.length * 4]
    assert len(found.nodes) == found.length // SIZE and (found.tail is None) == (found.length % SIZE == 0)
    assert cache.num_used == cache.num_shared == 0


@given(sequences=st.lists(token_lists, max_size=40), room=st.integers(6, 12))
def test_pages_are_neither_lost_nor_given_twice(sequences, room):
    cache = PageCache(room, SIZE, "any", CHUNK)
    for i, tokens in enumerate(sequences):
        held = cache.take(i % 3) or []
        assert len(set(held)) == len(held) and cache.num_used == len(held)
        put(cache, tokens)
        cache.release(held)
        assert cache.num_used == 0 and cache.num_available == room
    everything = cache.take(room)
    assert sorted(everything) == list(range(room)) and cache.take(1) is None and cache.num_cached == 0


def test_the_least_recently_used_goes_first_and_what_is_locked_stays():
    cache = PageCache(4, SIZE, "any", CHUNK)
    for start in (10, 20, 30, 40):
        put(cache, [start, 1, 1, 1])
    cache.lock(cache.find(data_of([10, 1, 1, 1, 5]), 4).nodes)  # used again, and held
    again = cache.find(data_of([20, 1, 1, 1, 5]), 4).nodes
    cache.lock(again)
    cache.unlock(again)  # used again
    cache.take(2)
    left = [s for s in (10, 20, 30, 40) if cache.find(data_of([s, 1, 1, 1, 5]), 4).length == 4]
    assert left == [10, 20]
    assert cache.take(2) is None and cache.num_available == 1


def test_clear_keeps_what_is_in_use_out_of_reach_and_gets_it_back():
    cache = PageCache(6, SIZE, "any", CHUNK)
    put(cache, [1] * 8)
    put(cache, [2] * 4)
    held = cache.find(data_of([1] * 9), 8).nodes
    cache.lock(held)
    cache.clear()
    assert cache.find(data_of([1] * 9), 8).length == 0 and cache.num_used == 2 and cache.num_cached == 0
    put(cache, [1] * 8)
    cache.unlock(held)
    assert cache.num_used == 0 and cache.num_available == 6
