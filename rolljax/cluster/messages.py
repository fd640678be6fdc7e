"""The frames between a controller and a sampler, and how requests and tokens are packed into them.

| from, frame | fields and arrays | meaning |
|---|---|---|
| sampler `hello` | `software()`, name, process, host, kind | it joins, or connects again |
| controller `refuse` | reason | it may not join |
| controller `job` | see `SamplerJob` | what to build |
| sampler `state` | text | its work while it is not ready |
| controller `weights` | location, epoch, version | a snapshot to fetch, and to swap in |
| sampler `ready` | version, stats, load | the engine runs |
| sampler `swapped` | version | the weights in use |
| sampler `unfit` | version, text | weights that cannot be used |
| controller `submit` | requests | requests that start together |
| controller `abort` | numbers | requests to end |
| sampler `tokens` | new tokens, ended requests, stats, load | the results of one dispatch or several |
| both `score`, `warm_up` | number | a call, and its result under the same number |
| sampler `failed` | number, text | a call or a request failed |
| sampler `stopped` | text | the engine has stopped |
| controller `end` | | the run is over |
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import rolljax
from rolljax.errors import SamplerError
from rolljax.types import Sampled, SamplingParams

PROTOCOL = 3
"""Version of the frames."""
TABLE = {"tokens": "<i4", "sampler_logp": "<f4", "model_logp": "<f4", "versions": "<i4"}
"""Fields of `Sampled` with one number a token, and their types."""
OTHERS = ("top_ids", "top_sampler_logp", "top_model_logp", "experts")
"""Fields of `Sampled` with any number of entries a token, mostly none."""
Packed: TypeAlias = tuple[np.ndarray, tuple[np.ndarray, ...]]
"""Tokens of a request in a frame: rows of the table, and an array of each of `OTHERS`."""
NOTHING_ELSE = tuple(np.zeros((0,) * dims, dtype) for dims, dtype in ((2, "<i4"), (2, "<f4"), (2, "<f4"), (3, "u1")))
"""`OTHERS` without entries."""


@dataclasses.dataclass(frozen=True)
class SamplerJob:
    """The work of a sampler: everything that it needs but weights."""

    run: str
    """A random name of the run; a sampler that has built its engine keeps it when the same run's controller returns."""
    epoch: int
    """Number of the controller's start; a sampler refuses a lower one than it has seen."""
    settings: Mapping[str, Any]
    """The settings of the policy, resolved (`config.resolved`)."""
    longest_prompt: int | None
    """The requests for which programs are compiled in advance, see `sampler.client.Sampler`."""
    multi_turn: bool
    """The requests for which programs are compiled in advance, see `sampler.client.Sampler`."""
    heartbeat_s: float
    lost_s: float
    weights: Sequence[Sequence[Any]] = ()
    """Name, shape and dtype of each array of the weights, as the sampler must have them too."""


@functools.cache
def code_digest() -> str:
    """Return a hash of rolljax's own source, which must be the same on both sides."""
    root, sha256 = Path(rolljax.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sha256.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return sha256.hexdigest()[:16]


def software() -> dict[str, Any]:
    """Return the versions that must be the same on both sides."""
    return {"protocol": PROTOCOL, "rolljax": rolljax.__version__, "code": code_digest()}


@dataclasses.dataclass(frozen=True, eq=False)
class WireRequest:
    """A request as it travels."""

    number: int
    prompt_ids: np.ndarray
    params: SamplingParams
    address: tuple[int, ...]
    priority: int
    resume: Sampled | None


def pack_requests(requests: Sequence[WireRequest]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the fields and arrays of a `submit` frame."""
    resumed = [r.resume for r in requests if r.resume is not None]
    sizes, columns = pack_sampled(resumed)
    lines = [
        [r.number, len(r.prompt_ids), _packed(r.params), list(r.address), r.priority, r.resume is not None]
        for r in requests
    ]
    prompts = np.concatenate([np.asarray(r.prompt_ids, np.int32) for r in requests])
    return {"requests": lines, "resumed": sizes}, [prompts, *columns]


def unpack_requests(fields: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> list[WireRequest]:
    """Return the requests of a `submit` frame."""
    prompts, *columns = arrays
    resumed, start, found = iter(unpack_sampled(fields["resumed"], columns)), 0, []
    for number, length, params, address, priority, is_resumed in fields["requests"]:
        prompt, start = prompts[start : start + length], start + length
        resume = next(resumed) if is_resumed else None
        found.append(WireRequest(number, prompt, _unpacked(params), tuple(address), priority, resume))
    return found


def _packed(params: SamplingParams) -> list[Any]:
    return [getattr(params, field.name) for field in dataclasses.fields(params)]


def _unpacked(values: Sequence[Any]) -> SamplingParams:
    given: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
    return SamplingParams(*given)


def pack_sampled(parts: Sequence[Sampled]) -> tuple[list[Any], list[np.ndarray]]:
    """Return the sizes of each part, and the tokens of all parts one after the other: a table `[T, 4]` of 32-bit words
    with a column of each of `TABLE`, then the others if there are any. A size is the number of tokens alone, or where
    there are others also those of likely tokens, layers, and experts."""
    if not parts:
        return [], []
    table = np.empty((sum(map(len, parts)), len(TABLE)), "<i4")
    for i, (name, dtype) in enumerate(TABLE.items()):
        table[:, i] = np.concatenate([getattr(p, name) for p in parts]).astype(dtype, copy=False).view("<i4")
    if not any(p.top_ids.size or p.experts.size for p in parts):
        return [len(p) for p in parts], [table]
    sizes = [[len(p), p.top_ids.shape[1], *p.experts.shape[1:]] for p in parts]
    return sizes, [table, *(np.concatenate([getattr(p, name).ravel() for p in parts]) for name in OTHERS)]


def packed_parts(sizes: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[Packed]:
    """Return the parts as slices of the arrays of `pack_sampled`, which `joined` turns into tokens when these are
    needed.

    Raises:
      SamplerError: sizes and arrays do not fit.
    """
    if not sizes:
        return []
    try:
        table, *others = arrays
        start, starts, found = 0, [0] * len(others), []
        for size in sizes:
            tokens, rest = size, NOTHING_ELSE
            if others:
                tokens, top, layers, experts = size
                shapes = [(tokens, top)] * 3 + [(tokens, layers, experts)]
                counts = [tokens * top] * 3 + [tokens * layers * experts]
                ends = [a + n for a, n in zip(starts, counts, strict=True)]
                each = zip(others, starts, ends, shapes, strict=True)
                rest, starts = tuple(x[a:b].reshape(shape) for x, a, b, shape in each), ends
            found.append((table[start : start + tokens], rest))
            start += tokens
        if table.dtype != np.int32 or table.shape != (start, len(TABLE)):
            raise ValueError(
                f"its table of tokens is {table.dtype}{list(table.shape)}, not int32[{start}, {len(TABLE)}]"
            )
    except (ValueError, TypeError) as e:
        raise SamplerError(f"the tokens of a frame are fewer or more than its sizes say: {e}") from None
    return found


def joined(parts: Sequence[Packed]) -> Sampled:
    """Return the tokens of one or several parts of one answer."""
    table = np.concatenate([part for part, _ in parts])
    columns = [table[:, i].copy().view(dtype) for i, dtype in enumerate(TABLE.values())]
    first = parts[0][1]
    if all(not x.size for x in first):
        return Sampled(*columns, *(np.zeros((len(table), *x.shape[1:]), x.dtype) for x in first))
    return Sampled(*columns, *(np.concatenate([rest[i] for _, rest in parts]) for i in range(len(first))))


def unpack_sampled(sizes: Sequence[Any], arrays: Sequence[np.ndarray]) -> list[Sampled]:
    """Return the parts that `pack_sampled` packed. Raises as `packed_parts` does."""
    return [joined([part]) for part in packed_parts(sizes, arrays)]
