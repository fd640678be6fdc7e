"""Drafts: the longest match decides, the newest of equal ones, and no draft goes past the end of a text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax.sampler.drafts import CONTEXT, MATCHES, ROOM, DraftIndex, Drafts, context

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=5)


def ids(text):
    return np.array(text, np.int32)


def added(index, texts):
    for text in texts:
        index.add(np.concatenate([context(ids([])), ids(text)]))


def draft(index, tail):
    found = index.find(context(ids(tail))[None])
    return found.tokens[0, : found.count[0]].tolist(), MATCHES[found.match[0]] if found.count[0] else 0


def by_search(texts, tail, most):
    """Return the draft that a search through all texts finds, and how many tokens it follows."""
    begun = [[-1] * CONTEXT + text for text in texts]
    tail = context(ids(tail)).tolist()
    for length in reversed(MATCHES):
        for text in reversed(begun):
            for end in range(len(text) - 1, CONTEXT - 1, -1):
                if text[end - length : end] == tail[-length:]:
                    return text[end : end + most], length
    return [], 0


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 9))
def test_a_draft_is_what_a_search_finds(texts, tail, most):
    index = DraftIndex(most)
    added(index, texts)
    assert draft(index, tail) == by_search(texts, tail, most)


def test_a_text_that_grows_is_found_across_its_parts():
    text = np.random.default_rng(0).integers(0, 99, 300)
    index = DraftIndex(7)
    index.add(np.concatenate([context(ids([])), ids(text[:100])]))
    index.add(np.concatenate([context(ids(text[:100])), ids(text[100:])]))
    for at in (50, 93, 100, 101, 250):
        assert draft(index, text[:at]) == (text[at : at + 7].tolist(), 32)
    assert draft(index, text[:99]) == (text[99:100].tolist(), 32), "the first part ends there"


def test_old_texts_make_room():
    """A text whose place was taken is not found, nor any mixture of it and the new one."""
    rng = np.random.default_rng(0)
    index, old = DraftIndex(7), rng.integers(0, 99, 200)
    added(index, [old])
    added(index, [rng.integers(100, 999, ROOM)])
    assert draft(index, old[:100]) == ([], 0)


def test_drafts_are_used_while_they_are_right():
    """Wrong drafts are tried seldom; once they are right, every time."""
    index, text = DraftIndex(7), np.arange(100)
    added(index, [text])
    tails, room = np.stack([context(ids(text[:50]))]), np.array([100])

    def tried(sampled):
        found = index.propose(tails, room, 2.0)
        return [] if found is None else [index.learn(found, np.array([sampled]))]

    wrong = [tried(1) for _ in range(1000)]
    assert wrong[0] == [0] and 20 < sum(map(len, wrong[500:])) < 100
    right = [tried(8) for _ in range(300)]
    assert all(r == [7] for r in right[200:])


def test_a_batch_must_gain_as_a_whole():
    index, text = DraftIndex(7), np.arange(100)
    added(index, [text])
    fits, not_ = context(ids(text[:50])), context(ids([500]))
    one_of = lambda n: index.propose(np.stack([fits, *[not_] * (n - 1)]), np.full(n, 100), 2.0)  # noqa: E731
    assert isinstance(one_of(1), Drafts) and isinstance(one_of(3), Drafts) and one_of(4) is None
    assert index.propose(np.stack([fits]), np.array([1]), 2.0) is None, "there is room for one token alone"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40])
def test_context_has_one_length(length):
    text = np.arange(length, dtype=np.int32)
    assert context(text).tolist() == ([-1] * CONTEXT + text.tolist())[-CONTEXT:]
