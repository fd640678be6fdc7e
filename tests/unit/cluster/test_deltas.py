"""Changes between two arrays of bit patterns: applied, they give the new one to the bit; damaged ones are refused."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rolljax.cluster import deltas
from rolljax.fields import Damaged

DTYPES = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


def pair(size, share, dtype=np.uint16, seed=0):
    """Return random bits, and the same ones with about that share of them changed."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, size, dtype)
    return old, np.where(rng.random(size) < share, old ^ 1, old)


def test_four_percent_changed_are_six_percent_of_the_bytes():
    """ROSE's case: the same bits, less than 15 % of the bytes; here 1.5 bytes a changed byte, and a head."""
    old, new = pair(1_000_000, 0.04)
    delta = deltas.encode(old, new)
    assert len(delta) < 0.062 * new.nbytes
    deltas.decode_into(old, delta)
    assert (old == new).all()


@given(
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.25, 0.4, 1.0]),
    dtype=DTYPES,
    seed=st.integers(0, 9),
)
def test_a_delta_gives_the_new_array_or_is_not_worth_it(size, share, dtype, seed):
    old, new = pair(size, share, dtype, seed)
    delta, before = deltas.encode(old, new), old.copy()
    assert (old == before).all()
    if delta is None:
        least = 32 + np.count_nonzero(old != new) * (1 + new.itemsize)
        assert 2 * (least + 4 * np.count_nonzero(np.diff(np.flatnonzero(old != new), prepend=-1) > 255)) > new.nbytes
    else:
        assert 2 * len(delta) <= new.nbytes
        deltas.decode_into(old, delta)
        assert (old == new).all()


@pytest.mark.parametrize("gaps", [[254], [255], [256], [0, 254, 255, 256, 257], [70_000, 0], [65_535, 65_536, 300]])
def test_distances_around_the_longest_of_a_byte(gaps):
    places = np.cumsum(np.array(gaps) + 1) - 1
    old = np.zeros(200_000, np.uint16)
    new = old.copy()
    new[places] = 7
    deltas.decode_into(old, deltas.encode(old, new))
    assert (old == new).all()


def test_parts_of_arrays_of_several_axes():
    old, new = (x.reshape(20, 10, 50) for x in pair(10_000, 0.1))
    deltas.decode_into(old[3:5], deltas.encode(old[3:5], new[3:5]))
    assert (old[3:5] == new[3:5]).all() and not (old == new).all()


# ---- damaged

OLD, NEW = pair(5000, 0.02, seed=3)
DELTA = deltas.encode(OLD, NEW)


def refused_or_within(delta, size=OLD.size, dtype=OLD.dtype):
    """Apply a delta; return whether it was refused. An array that refuses one is as it was."""
    guard = np.full(size + 200, 9, dtype)  # what lies around the array is not written
    array = guard[100:-100]
    array[:] = 5
    try:
        deltas.decode_into(array, delta)
    except Damaged:
        assert (array == 5).all()
        return True
    finally:
        assert (guard[:100] == 9).all() and (guard[-100:] == 9).all()
    return False


@given(cut=st.integers(0, len(DELTA) - 1))
def test_a_truncated_one_is_refused(cut):
    assert refused_or_within(DELTA[:cut]) and refused_or_within(DELTA + DELTA[:cut] + b"0")


@given(at=st.integers(0, len(DELTA) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_writes_nothing_elsewhere(at, bit):
    """In the head it is refused; in a value it cannot be noticed here: checksums of the arrays do."""
    damaged = bytearray(DELTA)
    damaged[at] ^= 1 << bit
    assert refused_or_within(bytes(damaged)) or at >= 32


@given(data=st.binary(max_size=200), size=st.integers(0, 300), dtype=DTYPES)
def test_any_bytes_are_refused(data, size, dtype):
    assert refused_or_within(data, size, dtype)
    assert refused_or_within(b"RJD1" + data, size, dtype) or data[:4] == np.dtype(dtype).itemsize.to_bytes(4, "little")


@pytest.mark.parametrize("distance", [1000, 2**32 - 1])
def test_a_place_past_the_end_is_named(distance):
    old, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
    new[700] = 1
    delta = bytearray(deltas.encode(old, new))
    assert delta[32:36] == (700).to_bytes(4, "little")
    delta[32:36] = distance.to_bytes(4, "little")
    with pytest.raises(Damaged, match=f"changes entry {distance} of 1000"):
        deltas.decode_into(old, bytes(delta))


def test_of_another_array_it_is_refused():
    for old in (OLD[:-1], OLD.astype(np.uint32)):
        with pytest.raises(Damaged, match=f"no delta of {old.size} entries of {old.itemsize} bytes"):
            deltas.decode_into(old.copy(), DELTA)
