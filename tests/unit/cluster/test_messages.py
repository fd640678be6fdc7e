"""Frames, and their tokens: what was packed is unpacked, at once or in parts, and damaged frames are refused."""

import dataclasses
import io

import numpy as np
import pytest

from rolljax.cluster import wire
from rolljax.cluster.messages import joined, pack_sampled, packed_parts, unpack_sampled
from rolljax.errors import SamplerError
from rolljax.types import Sampled


def sampled(rng, tokens, top=0, layers=0, experts=0):
    likely = [rng.random((tokens, top), np.float32) for _ in range(2)]
    return Sampled(
        rng.integers(0, 99, tokens, np.int32),
        rng.random(tokens, np.float32),
        -rng.random(tokens, np.float32),
        rng.integers(0, 9, tokens, np.int32),
        rng.integers(0, 99, (tokens, top), np.int32),
        *likely,
        rng.integers(0, 9, (tokens, layers, experts), np.uint8),
    )


def assert_same(found, expected):
    for field in dataclasses.fields(Sampled):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs)


KINDS = [{}, {"top": 3}, {"layers": 2, "experts": 2}, {"top": 2, "layers": 1, "experts": 4}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_of_several_requests_are_those_that_were_packed(kind):
    rng = np.random.default_rng(0)
    parts = [sampled(rng, 5, **kind), sampled(rng, 0, **kind), sampled(rng, 1), sampled(rng, 8, **kind)]
    for found, expected in zip(unpack_sampled(*pack_sampled(parts)), parts, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parts_of_several_frames_are_joined(kind):
    rng = np.random.default_rng(1)
    parts = [sampled(rng, n, **kind) for n in (3, 8, 1)]
    slices = [packed_parts(*pack_sampled([part, sampled(rng, 4)]))[0] for part in parts]
    assert_same(joined(slices), Sampled.concatenate(parts))


@pytest.mark.parametrize("sizes", [[[4, 0, 0, 0]], [[2, 0, 0, 0]], [[3, 2, 0, 0]], [[3, 0]]], ids=str)
def test_sizes_that_do_not_fit_are_refused(sizes):
    _, arrays = pack_sampled([sampled(np.random.default_rng(0), 3)])
    with pytest.raises(SamplerError, match="fewer or more than its sizes say"):
        packed_parts(sizes, arrays)


def test_frames_are_read_one_after_the_other():
    frames = [wire.Frame("a", {"x": [1, "y"]}, [np.arange(6, dtype=np.int32).reshape(2, 3)]), wire.Frame("b")]
    data = b"".join(map(wire.encode, frames))
    stream = io.BytesIO(data + data[:-1])
    for frame in (*frames, frames[0]):
        found = wire.read(stream)
        assert (found.kind, found.fields) == (frame.kind, frame.fields)
        assert [x.tolist() for x in found.arrays] == [x.tolist() for x in frame.arrays]
    with pytest.raises(EOFError):
        wire.read(stream)


DAMAGE = {"too long": (3, 0xFF), "head": (8, 0xC1), "head is longer": (4, 0xFF), "head is shorter": (4, 1)}


@pytest.mark.parametrize(("place", "byte"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_frames_are_refused(place, byte):
    data = bytearray(wire.encode(wire.Frame("a", {"x": 1}, [np.arange(300, dtype=np.int32)])))
    data[place] = byte
    with pytest.raises(SamplerError, match=r"a frame of \d+ bytes"):
        wire.read(io.BytesIO(data))
