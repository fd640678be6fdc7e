"""TokenBatch, and the packing that makes one out of trajectories.

A group shares its prompt: it is stored, embedded and attended to once, and every sibling's tokens branch off from it
(`model.attention.packed_mask`). The arithmetic per token is that of one sequence per sibling; only the repetition is
gone, which with G samples of a P-token prompt saves (G-1) P tokens of every forward and backward pass.

All per-token arrays are aligned to the token they describe. `prev` points to the token before, which for the first
token of a branch is the last token of the shared prompt: `update.token_logp` is the only place that follows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rolljax.errors import DataError
from rolljax.types import Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Packed rows of one optimizer update: M micro-batches of B rows of T tokens.

    Arrays are `[M, B, T]` (inside the update's loop `[B, T]`). Only the first `num_micro` micro-batches hold anything;
    the shapes stay the same from step to step, the work does not. The last four are scalars and leaves.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    """0 where padded; every group's part in the row has its own number."""
    branch_ids: jax.Array
    """0: shared prompt; 1, 2, ...: siblings."""
    prev: jax.Array
    """Index in the row of the token before this one; itself where there is none."""
    weights: jax.Array
    """float32 loss weight: 0 for prompts, observations and padding."""
    advantages: jax.Array
    sampler_logp: jax.Array
    num_micro: jax.Array
    num_tokens: jax.Array
    """Sum of `weights` over the whole update: the denominator of every token mean."""
    num_sequences: jax.Array
    temperature: jax.Array
    """Of the sampled law: trainer log-probs are taken at it."""

    ARRAYS = (
        "tokens",
        "positions",
        "segment_ids",
        "branch_ids",
        "prev",
        "weights",
        "advantages",
        "sampler_logp",
    )


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The fixed shape `[num_micro, micro_rows, row_len]` of a phase's batches."""

    num_micro: int
    micro_rows: int
    row_len: int


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory ready for packing; arrays `[T]`."""

    tokens: np.ndarray
    weights: np.ndarray
    sampler_logp: np.ndarray
    advantages: np.ndarray

    @staticmethod
    def of(trajectory: Trajectory, advantage: float) -> Sample:
        tokens, sampled, logp = trajectory.stream()
        return Sample(tokens, sampled.astype(np.float32), logp, np.where(sampled, advantage, 0).astype(np.float32))


def num_rows_bound(num_groups: int, group_size: int, prompt_tok: int, response_tok: int, row_len: int) -> int:
    """Rows that always suffice for `num_groups` groups with prompts and responses of at most so many tokens."""
    per_row = max(1, (row_len - prompt_tok) // max(response_tok, 1))
    alone = num_groups * -(-group_size // per_row)
    # first fit leaves at most one row no more than half full
    dense = 2 * num_groups * (-(-group_size // per_row) * prompt_tok + group_size * response_tok) // row_len + 1
    return max(1, min(alone, dense))


def pack(groups: Sequence[Sequence[Sample]], shape: PackShape, temperature: float) -> TokenBatch:
    """First-fit packing of groups into rows; siblings that do not fit beside their group start a new part of it.

    Raises:
      DataError: one sequence is longer than a row, or more rows are needed than the shape holds.
    """
    num_rows = shape.num_micro * shape.micro_rows
    arrays = {
        name: np.zeros((num_rows, shape.row_len), np.float32 if name in _FLOATS else np.int32)
        for name in TokenBatch.ARRAYS
    }
    arrays["prev"][:] = np.arange(shape.row_len)
    used = np.zeros(num_rows, np.int64)
    num_segments = np.zeros(num_rows, np.int32)
    open_rows = 0
    for group in groups:
        for prefix_len, siblings in _parts(group, shape.row_len):
            size = prefix_len + sum(len(s.tokens) - prefix_len for s in siblings)
            row = next((r for r in range(open_rows) if used[r] + size <= shape.row_len), open_rows)
            if row == num_rows:
                raise DataError(f"packing needs more than {num_rows} rows of {shape.row_len} tokens: a bound is wrong")
            open_rows = max(open_rows, row + 1)
            num_segments[row] += 1
            _write(arrays, row, int(used[row]), int(num_segments[row]), prefix_len, siblings)
            used[row] += size
    weights = arrays["weights"]
    return TokenBatch(
        **{k: v.reshape(shape.num_micro, shape.micro_rows, shape.row_len) for k, v in arrays.items()},  # type: ignore[arg-type]
        num_micro=np.int32(-(-open_rows // shape.micro_rows)),  # type: ignore[arg-type]
        num_tokens=np.float32(weights.sum()),  # type: ignore[arg-type]
        num_sequences=np.float32(sum(len(g) for g in groups)),  # type: ignore[arg-type]
        temperature=np.float32(temperature),  # type: ignore[arg-type]
    )


_FLOATS = frozenset({"weights", "advantages", "sampler_logp"})


def _shared_prefix(group: Sequence[Sample]) -> int:
    """Tokens at the start that all siblings have in common and none of them is trained on; at least 1."""
    shortest = min(len(s.tokens) for s in group)
    same = np.ones(shortest, bool)
    for s in group:
        same &= (s.tokens[:shortest] == group[0].tokens[:shortest]) & (s.weights[:shortest] == 0)
    prefix = int(np.argmin(same)) if not same.all() else shortest - 1
    if prefix < 1:
        raise DataError("a trajectory must start with at least one prompt token")
    return prefix


def _parts(group: Sequence[Sample], row_len: int) -> list[tuple[int, list[Sample]]]:
    """The group's siblings in lots that fit a row, each with the length of the prompt they share."""
    prefix = _shared_prefix(group)
    lots: list[tuple[int, list[Sample]]] = []
    room = 0
    for s in group:
        own = len(s.tokens) - prefix
        if prefix + own > row_len:
            raise DataError(f"a trajectory of {prefix + own} tokens is longer than a row of {row_len}")
        if own > room:
            lots.append((prefix, []))
            room = row_len - prefix
        lots[-1][1].append(s)
        room -= own
    return lots


def _write(
    arrays: dict[str, np.ndarray], row: int, start: int, segment: int, prefix: int, siblings: list[Sample]
) -> None:
    at = start
    for branch, s in enumerate(siblings):
        # the first sibling brings the shared prompt along as branch 0
        for lo, hi, branch_id in ((0, prefix, 0), (prefix, len(s.tokens), branch + 1)):
            if branch and lo == 0:
                continue
            span = slice(at, at + hi - lo)
            arrays["tokens"][row, span] = s.tokens[lo:hi]
            arrays["weights"][row, span] = s.weights[lo:hi]
            arrays["advantages"][row, span] = s.advantages[lo:hi]
            arrays["sampler_logp"][row, span] = s.sampler_logp[lo:hi]
            arrays["positions"][row, span] = np.arange(lo, hi)
            arrays["segment_ids"][row, span] = segment
            arrays["branch_ids"][row, span] = branch_id
            arrays["prev"][row, span] = np.arange(at - 1, at + hi - lo - 1)
            arrays["prev"][row, at] = at if lo == 0 else start + prefix - 1
            at += hi - lo
