"""The manifest of a snapshot: read back as it was written, refused where it is not whole; and the chunks of arrays."""

import dataclasses
import itertools
import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rolljax.cluster.manifest import Manifest, StoredArray, box_of, chunk_of, index_of, overlap
from rolljax.fields import Damaged

WHOLE = Manifest(
    epoch=3,
    version=12,
    base=11,
    arrays={
        "layers.w": StoredArray((4, 6), "bfloat16", 2**32 - 1, (2, 6), owners=(0, 1)),
        "scale": StoredArray((), "float32", 0, (), owners=(1,)),
    },
    stores=("http://a/", "http://b/"),
)
SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)


def test_a_manifest_is_read_back():
    alone = dataclasses.replace(
        WHOLE, base=None, stores=(), arrays={n: dataclasses.replace(x, owners=()) for n, x in WHOLE.arrays.items()}
    )
    for manifest in (WHOLE, alone):
        assert Manifest.from_json(manifest.to_json()) == manifest


@given(at=st.integers(0, len(WHOLE.to_json()) - 1), byte=st.integers(0, 255))
def test_another_byte_is_refused_or_seen(at, byte):
    damaged = bytearray(WHOLE.to_json())
    damaged[at] = byte
    for data in (bytes(damaged), bytes(damaged[:at])):
        try:
            assert Manifest.from_json(data) != WHOLE or json.loads(data) == json.loads(WHOLE.to_json())
        except Damaged:
            pass


@pytest.mark.parametrize(
    ("place", "bad", "said"),
    [
        (("format",), 2, "format is 2"),
        (("epoch",), -1, "epoch is -1"),
        (("version",), None, "version is null"),
        (("base",), 12, "base is 12"),
        (("stores",), [1, 2], "stores is a list of 2"),
        (("arrays",), [], "arrays is a list of 0"),
        (("arrays", "layers.w"), 1, r"arrays\.layers\.w is 1"),
        (("arrays", "layers.w", "shape"), [4, -6], "shape"),
        (("arrays", "layers.w", "shape"), [4, 2**60], "shape"),
        (("arrays", "layers.w", "chunk"), [0, 6], "chunk"),
        (("arrays", "layers.w", "chunk"), [3, 6], "chunk is a list of 2, not a divisor of the shape"),
        (("arrays", "layers.w", "chunk"), [2], "chunk is a list of 1, not a divisor of the shape"),
        (("arrays", "layers.w", "chunk"), [1, 6], "owners is a list of 2, not a process for each chunk"),
        (("arrays", "layers.w", "owners"), [0, 2], "owners"),
        (("arrays", "layers.w", "checksum"), 2**32, "checksum is 4294967296"),
        (("arrays", "layers.w", "checksum"), True, "checksum is True"),
    ],
)
def test_a_wrong_field_is_named(place, bad, said):
    value = json.loads(WHOLE.to_json())
    inside = value
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = bad
    with pytest.raises(Damaged, match=said):
        Manifest.from_json(json.dumps(value).encode())
    del inside[place[-1]]
    if place[-1] not in ("base", "layers.w"):  # without: full; an array less
        with pytest.raises(Damaged, match=f"{place[-1]} is missing"):
            Manifest.from_json(json.dumps(value).encode())


# ---- chunks


@given(shape=SHAPES, itemsize=st.sampled_from([1, 2, 4]), most=st.integers(1, 4000))
def test_chunks_fill_a_part_and_are_contiguous_in_it(shape, itemsize, most):
    chunk = chunk_of(shape, itemsize, most)
    assert all(size % step == 0 for size, step in zip(shape, chunk, strict=True))
    part = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    found = StoredArray(shape, "uint8", 0, chunk)
    pieces = [part[index_of(found.box(cell))] for cell in found.cells(box_of([slice(None)] * len(shape), shape))]
    assert all(piece.flags.c_contiguous for piece in pieces)
    assert sorted(itertools.chain(*(piece.ravel() for piece in pieces))) == list(range(part.size))


def test_chunks_are_about_as_large_as_asked():
    """A prime number of rows is not cut into single rows, and no axis of one."""
    mib = 2**20
    assert chunk_of((64, 640, 25_600), 2, 16 * mib) == (1, 320, 25_600)
    assert chunk_of((151_936, 640), 2, 16 * mib) == (9496, 640)
    assert chunk_of((151_937, 640), 2, 16 * mib) == (151_937, 640)
    assert chunk_of((), 4, mib) == () and chunk_of((0, 3), 4, mib) == (1, 3)


@given(data=st.data(), shape=SHAPES)
def test_boxes_meet_where_their_entries_do(data, shape):
    def box():
        ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
        return tuple((a, b) for a, b in ends)

    one, other = box(), box()
    common = overlap(one, other)
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = set(whole[index_of(one)].ravel()) & set(whole[index_of(other)].ravel())
    if found:
        assert set(whole[index_of(one)][index_of(common, one)].ravel()) == found
    else:
        assert any(a >= b for a, b in common)
