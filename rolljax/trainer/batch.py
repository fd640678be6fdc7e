"""TokenBatch, and the packing that makes one out of trajectories.

A group shares its prompt: it is stored, embedded and attended to once, and every sibling's tokens branch off from it
(`model.attention.packed_mask`). The arithmetic per token is that of one sequence per sibling; only the repetition is
gone, which with G samples of a P-token prompt saves (G-1) P tokens of every forward and backward pass.

All per-token arrays are aligned to the token they describe. `prev` points to the token before, which for the first
token of a branch is the last token of the shared prompt: `forward.py` is the only place that follows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from rolljax.errors import DataError
from rolljax.trainer.aggregation import Aggregation, token_scales
from rolljax.types import Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Packed rows of one optimizer update: M micro-batches of B rows of T tokens.

    Arrays are `[M, B, T]` (inside the update's loop `[B, T]`); those with a C have one more axis, the critics. Only the
    first `num_micro` micro-batches hold anything; the shapes stay the same from step to step, the work does not.
    Arrays from `trainer_logp` on are there (not None) in the phases whose algorithm asks for them. Scalars are leaves.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    """0 where padded; every group's part in the row has its own number."""
    branch_ids: jax.Array
    """0: shared prompt; 1, 2, ...: siblings."""
    prev: jax.Array
    """Index in the row of the token before this one; itself where there is none."""
    sequence_ids: jax.Array
    """Number of the sequence, within its row; 0 where no token is sampled. A sequence is never split over rows. A
    trajectory is one sequence, and one more for every restart of its stream."""
    turn_ids: jax.Array
    """The same for turns."""
    scale: jax.Array
    """float32 share of the token's loss in the update's loss, by the aggregation; 0 for all that is not trained on."""
    advantages: jax.Array
    sampler_logp: jax.Array
    num_micro: jax.Array
    num_tokens: jax.Array
    """Tokens with a scale in the whole update: the denominator of statistics."""
    num_computed: jax.Array
    """Number of tokens in the whole update without padding."""
    num_sequences: jax.Array
    temperature: jax.Array
    """Temperature at which tokens were sampled; the trainer's log-probs use it too."""
    kl_coef: jax.Array
    trainer_logp: jax.Array | None = None
    ref_logp: jax.Array | None = None
    weights: jax.Array | None = None
    """Factor of the surrogate."""
    entropy_weights: jax.Array | None = None
    rewards: jax.Array | None = None
    """Reward of the trajectory, at each of its tokens."""
    reference_points: jax.Array | None = None
    """Log-ratio to the reference, nats, from which the trajectory's own is measured, at each of its tokens."""
    returns: jax.Array | None = None
    old_values_C: jax.Array | None = None
    critic_weights_C: jax.Array | None = None
    expert_ids_Lk: jax.Array | None = None
    """`[..., L, k]` experts that the policy's forward pass takes instead of its routers' choice, -1: that choice."""
    sampler_ids: jax.Array | None = None
    """Number of the sampler, below `MAX_SAMPLERS`; 0: any other. Only there if samplers are compared."""

    def anchor(self, name: Literal["behaviour", "proximal"]) -> jax.Array:
        """Return the log-probs in the denominator of ratios."""
        return self.sampler_logp if name == "behaviour" else self.required("trainer_logp")

    def required(self, name: str) -> jax.Array:
        """Return an optional array. Raise `ValueError` if the batch was packed without it."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the objective uses {name}, but the batch was packed without it")
        return value

    def arrays(self) -> dict[str, jax.Array]:
        """Return the per-token arrays that the batch has, by name."""
        found = {n: getattr(self, n) for n in ARRAYS}
        return {n: a for n, a in found.items() if a is not None}

    def micro_batch(self, i: int | jax.Array) -> TokenBatch:
        """Return micro-batch `i`: its arrays without the axis M, all scalars unchanged. A Python int also works on host
        arrays."""

        def pick(array: jax.Array) -> jax.Array:
            return array[i] if isinstance(i, int) else jax.lax.dynamic_index_in_dim(array, i, keepdims=False)

        return dataclasses.replace(self, **{name: pick(array) for name, array in self.arrays().items()})


class Column(NamedTuple):
    """The properties of a per-token array of a `TokenBatch`."""

    source: Literal["packing", "sampler", "trainer", "credit"]
    """The part that computes the values: packing, the sampler, the trainer's forward passes before the step's first
    update, or credit."""
    dtype: type[np.generic] | None = np.float32
    """None: the model's own choice."""
    axes: str = ""
    """Letters of the axes after `[M, B, T]`: C critics, L layers, k experts of a token."""
    asked_by: str = ""
    """The field of `Needs` without which it is None; empty: there in every update, but for experts and samplers."""
    padding: int = 0
    """Value for padding and, in columns of sampled tokens, for other tokens."""
    clean: Literal["zero", "logp", ""] = ""
    """The value in the update's loss where the scale is 0: 0, the policy's own log-prob, or unchanged."""


COLUMNS: Mapping[str, Column] = {
    **dict.fromkeys(("tokens", "positions", "segment_ids", "branch_ids"), Column("packing", np.int32)),
    **dict.fromkeys(("prev", "sequence_ids", "turn_ids"), Column("packing", np.int32)),
    "scale": Column("packing"),
    "advantages": Column("credit", clean="zero"),
    "sampler_logp": Column("sampler", clean="logp"),
    "trainer_logp": Column("trainer", asked_by="trainer_logp", clean="logp"),
    "ref_logp": Column("trainer", asked_by="ref", clean="logp"),
    "weights": Column("credit", clean="zero"),
    "entropy_weights": Column("credit", asked_by="entropy_weights", clean="zero"),
    "rewards": Column("credit", asked_by="rewards", clean="zero"),
    "reference_points": Column("credit", asked_by="reference_points", clean="zero"),
    "returns": Column("credit", asked_by="critics", clean="zero"),
    "old_values_C": Column("trainer", axes="C", asked_by="critics"),
    "critic_weights_C": Column("credit", axes="C", asked_by="critics"),
    "expert_ids_Lk": Column("sampler", None, axes="Lk", padding=-1),
    "sampler_ids": Column("sampler", np.int32),
}
"""Every per-token array of a `TokenBatch`, in its order: packing, slicing, sharding, cleaning and planning go by this
table."""
ARRAYS = tuple(COLUMNS)
SCALARS = tuple(f.name for f in dataclasses.fields(TokenBatch) if f.name not in COLUMNS)
MAX_SAMPLERS = 1024
"""One more than the number of samplers that can be compared in a step."""


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The fixed shape `[num_micro, micro_rows, row_len]` of a phase's batches."""

    num_micro: int
    micro_rows: int
    row_len: int


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory ready for packing.

    tokens [T]: its full stream. indices [n]: positions of its n sampled tokens in it. turns [n]: the turn of each.
    """

    tokens: np.ndarray
    indices: np.ndarray
    turns: np.ndarray
    columns: Mapping[str, np.ndarray]
    """Arrays with a value for each sampled token, `[n]` or with further axes, by their names in `TokenBatch`; `mask`
    (bool) selects the tokens to train on."""
    starts: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    """Positions in `tokens` at which the trajectory's sequences begin (0 first)."""

    @property
    def mask(self) -> np.ndarray:
        """Which of the n sampled tokens count, bool `[n]`."""
        return self.columns["mask"]

    @staticmethod
    def of(
        trajectory: Trajectory, replay: np.ndarray | None = None, samplers: Mapping[str, int] | None = None
    ) -> Sample:
        """Return a trajectory whose tokens all count, without credit.

        Args:
          replay: `[L, k]` of -1, to replay the experts that its tokens used; None: no replay.
          samplers: numbers of samplers by name, to compare them; None: they are not compared.
        """
        tokens, sampled, logp = trajectory.stream()
        indices = np.flatnonzero(sampled)
        turns = np.repeat(np.arange(len(trajectory.turns)), [len(t.tokens) for t in trajectory.turns])
        columns = {"mask": np.ones(len(indices), bool), "sampler_logp": logp[indices]}
        if replay is not None:
            recorded = [
                np.broadcast_to(replay, (len(t.tokens), *replay.shape)) if t.experts is None else t.experts
                for t in trajectory.turns
            ]
            columns["expert_ids_Lk"] = np.concatenate(recorded) if recorded else replay[None][:0]
        if samplers is not None:
            own = np.array([samplers.get(t.sampler, 0) for t in trajectory.turns], np.int32)
            columns["sampler_ids"] = own[turns]
        return Sample(tokens, indices, turns, columns, trajectory.starts)

    def with_columns(self, **columns: np.ndarray) -> Sample:
        """Return the same trajectory with added or replaced columns."""
        return dataclasses.replace(self, columns={**self.columns, **columns})


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A batch, and where the sampled tokens of every sample are in it: flat indices into `[M, B, T]`, group by
    group."""

    batch: TokenBatch
    indices: list[list[np.ndarray]]

    def unpack(self, array: np.ndarray) -> list[np.ndarray]:
        """Return the values of a per-token array `[M, B, T]` at every sample's tokens, in the order of the samples."""
        flat = np.asarray(array).reshape(-1)
        return [flat[own] for group in self.indices for own in group]


def num_rows_bound(
    num_groups: int,
    group_size: int,
    prompt_tok: int,
    response_tok: int,
    row_len: int,
    *,
    unsplit_groups: bool = False,
    restarts: int = 0,
) -> int:
    """Return a number of rows that always suffices for `num_groups` groups with prompts and responses of these lengths.

    Args:
      unsplit_groups: no group is split. restarts: how often the stream of a trajectory may restart.
    """
    per_row = max(1, (row_len - prompt_tok) // max(response_tok, 1))
    later = group_size * restarts
    alone = num_groups * (1 if unsplit_groups else -(-group_size // per_row) + later)
    tokens = -(-group_size // per_row) * prompt_tok + group_size * response_tok + later * (prompt_tok + response_tok)
    # first fit leaves at most one row no more than half full
    dense = 2 * num_groups * tokens // row_len + 1
    return max(1, min(alone, dense))


def pack(
    groups: Sequence[Sequence[Sample]],
    shape: PackShape,
    temperature: float,
    *,
    aggregation: Aggregation = "token-mean",
    limit_tok: int = 1,
    kl_coef: float = 0.0,
    unsplit_groups: bool = False,
    first_latent_id: int | None = None,
) -> Packed:
    """Pack first-fit, largest first; siblings that do not fit into the row of their group start a new part of it.

    Fuller rows come first, so that the rows a micro-batch spreads over the mesh cost about the same.

    Args:
      limit_tok: most tokens of an answer, for `seq-sum-norm` and `turn-sum-norm`.
      unsplit_groups: no group may be split.
      first_latent_id: first token id of latent prefixes (`model.prefixes`). Siblings that begin with different ones
        share nothing. None: there are no such ids.

    Raises:
      DataError: one sequence (or unsplit group) is longer than a row, or more rows are needed than the shape holds.
    """
    limits = (shape.row_len, unsplit_groups, first_latent_id)
    parts = [part for index, group in enumerate(groups) for part in _parts(index, group, *limits)]
    rows = _first_fit(parts, shape)
    arrays = _empty_arrays(shape, groups[0][0].columns if groups else {"sampler_logp": np.zeros(0, np.float32)})
    indices = [[np.zeros(len(s.indices), np.int64) for s in g] for g in groups]
    masks = [[s.mask for s in g] for g in groups]
    scales = token_scales(masks, aggregation, limit_tok, [[s.turns for s in g] for g in groups])
    for row, members in enumerate(rows):
        writer = _RowWriter(arrays, row)
        for part in members:
            writer.write(part, scales[part.group], indices[part.group])
    scalars = {
        "num_micro": np.int32(-(-len(rows) // shape.micro_rows)),
        "num_tokens": np.float32(sum(int(m.sum()) for g in masks for m in g)),
        "num_computed": np.float32((arrays["segment_ids"] > 0).sum()),
        "num_sequences": np.float32(sum(bool(m.any()) for g in masks for m in g)),
        "temperature": np.float32(temperature),
        "kl_coef": np.float32(kl_coef),
    }
    micro = {n: a.reshape(shape.num_micro, shape.micro_rows, *a.shape[1:]) for n, a in arrays.items()}
    return Packed(TokenBatch(**micro, **scalars), indices)  # type: ignore[arg-type]


def _empty_arrays(shape: PackShape, sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return rows without a token, `[rows, row_len]` and further axes. sample: columns of any sample, as all have the
    same."""
    lead = (shape.num_micro * shape.micro_rows, shape.row_len)
    always = [name for name, column in COLUMNS.items() if column.source == "packing"]
    arrays = {}
    for name in (*always, "advantages", *(n for n in sample if n != "mask")):
        tail = np.shape(sample[name])[1:] if name in sample else ()
        dtype = COLUMNS[name].dtype or sample[name].dtype
        arrays[name] = np.full((*lead, *tail), COLUMNS[name].padding, dtype)
    arrays["prev"][:] = np.arange(shape.row_len)
    return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class _Stream:
    """One sequence of a trajectory: `tokens[lo:hi]`, which contains the sampled tokens `first` to `last - 1`."""

    sample: Sample
    member: int
    lo: int
    hi: int
    first: int
    last: int

    @property
    def tokens(self) -> np.ndarray:
        return self.sample.tokens[self.lo : self.hi]

    @property
    def indices(self) -> np.ndarray:
        """The indices of its sampled tokens in `tokens`."""
        return self.sample.indices[self.first : self.last] - self.lo

    def __len__(self) -> int:
        return self.hi - self.lo

    @staticmethod
    def all_of(sample: Sample, member: int) -> list[_Stream]:
        ends = [*sample.starts[1:], len(sample.tokens)]
        border = [0, *np.searchsorted(sample.indices, ends)]
        each = zip(sample.starts, ends, border, border[1:], strict=False)
        return [_Stream(sample, member, int(lo), int(hi), int(a), int(b)) for lo, hi, a, b in each]


@dataclasses.dataclass(frozen=True, eq=False)
class _RowPart:
    """Sequences of one group in one row, after the prompt that they share."""

    group: int
    prefix: int
    members: tuple[_Stream, ...]

    @property
    def size(self) -> int:
        return self.prefix + sum(len(s) - self.prefix for s in self.members)


def _parts(index: int, group: Sequence[Sample], row_len: int, unsplit: bool, latents: int | None) -> list[_RowPart]:
    streams = [_Stream.all_of(sample, member) for member, sample in enumerate(group)]
    siblings, later = [s[0] for s in streams], [one for s in streams for one in s[1:]]
    if unsplit and later:
        raise DataError("trajectories are compared as wholes, and one of them is more than one sequence")
    alike: dict[int, list[_Stream]] = {}
    for one in siblings:
        first = int(one.tokens[0]) if len(one) else -1
        alike.setdefault(first if latents is not None and first >= latents else -1, []).append(one)
    if unsplit and len(alike) > 1:
        raise DataError("a group must stay together, and its trajectories begin with different latent prefixes")
    parts = [part for some in alike.values() for part in _side_by_side(index, some, row_len, unsplit)]
    return parts + [part for one in later for part in _side_by_side(index, [one], row_len, unsplit)]


def _side_by_side(index: int, group: Sequence[_Stream], row_len: int, unsplit: bool) -> list[_RowPart]:
    """Split siblings into parts that each hold the shared prompt and as many siblings as fit."""
    prefix = _shared_prefix(group)
    own = [len(s) - prefix for s in group]
    if prefix + max(own) > row_len:
        raise DataError(f"a sequence of {prefix + max(own)} tokens is longer than a row of {row_len}")
    if unsplit and prefix + sum(own) > row_len:
        raise DataError(
            f"a group of {prefix + sum(own)} tokens, that must stay together, is longer than a row of {row_len}"
        )
    members: list[list[_Stream]] = []
    free_tok = 0
    for stream, length in zip(group, own, strict=True):
        if not members or length > free_tok:
            members.append([])
            free_tok = row_len - prefix
        members[-1].append(stream)
        free_tok -= length
    return [_RowPart(index, prefix, tuple(streams)) for streams in members]


def _shared_prefix(group: Sequence[_Stream]) -> int:
    """Return the length of the prefix that all siblings share and none of them sampled; at least 1."""
    shortest = min(min(len(s.tokens), int(s.indices[0]) if len(s.indices) else len(s.tokens) - 1) for s in group)
    first = group[0].tokens[:shortest]
    same = np.ones(shortest, bool)
    for s in group[1:]:
        same &= s.tokens[:shortest] == first
    prefix = shortest if same.all() else int(np.argmin(same))
    if prefix < 1:
        raise DataError("a trajectory must start with at least one prompt token")
    return prefix


def _first_fit(parts: Sequence[_RowPart], shape: PackShape) -> list[list[_RowPart]]:
    """Pack parts into rows, the largest part first."""
    rows: list[list[_RowPart]] = []
    used = np.zeros(shape.num_micro * shape.micro_rows, np.int64)
    for part in sorted(parts, key=lambda p: -p.size):
        fits = used[: len(rows)] + part.size <= shape.row_len
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(used):
            raise DataError(f"packing needs more than {len(used)} rows of {shape.row_len} tokens: a bound is wrong")
        if row == len(rows):
            rows.append([])
        rows[row].append(part)
        used[row] += part.size
    order = np.argsort(-used[: len(rows)], kind="stable")
    return [rows[r] for r in order]


class _RowWriter:
    """Writes parts into one row, one after the other.

    end: tokens written so far. segment, sequence, turn: how many of each.
    """

    def __init__(self, arrays: dict[str, np.ndarray], row: int) -> None:
        self.arrays = {n: a[row] for n, a in arrays.items()}
        self.offset = row * len(self.arrays["tokens"])
        self.end = self.segment = self.sequence = self.turn = 0

    def write(self, part: _RowPart, scales: Sequence[np.ndarray], indices: list[np.ndarray]) -> None:
        self.segment += 1
        start = self.end
        self._span(part.members[0].tokens, 0, part.prefix, branch=0, first_prev=start)
        for branch, s in enumerate(part.members):
            sampled = s.indices + self.end - part.prefix
            self._span(s.tokens, part.prefix, len(s), branch + 1, first_prev=start + part.prefix - 1)
            self._columns(s, scales[s.member], sampled)
            indices[s.member][s.first : s.last] = sampled + self.offset

    def _span(self, tokens: np.ndarray, lo: int, hi: int, branch: int, first_prev: int) -> None:
        span = slice(self.end, self.end + hi - lo)
        a = self.arrays
        a["tokens"][span] = tokens[lo:hi]
        a["positions"][span] = np.arange(lo, hi)
        a["segment_ids"][span] = self.segment
        a["branch_ids"][span] = branch
        a["prev"][span] = np.arange(span.start - 1, span.stop - 1)
        if hi > lo:
            a["prev"][span.start] = first_prev
        self.end = span.stop

    def _columns(self, s: _Stream, scale: np.ndarray, sampled: np.ndarray) -> None:
        own = slice(s.first, s.last)
        turns = s.sample.turns[own] - s.sample.turns[own][:1]
        self.sequence += 1
        self.arrays["sequence_ids"][sampled] = self.sequence
        self.arrays["turn_ids"][sampled] = self.turn + 1 + turns
        self.turn += int(turns.max(initial=-1)) + 1
        self.arrays["scale"][sampled] = scale[own]
        for name, values in s.sample.columns.items():
            if name != "mask":
                self.arrays[name][sampled] = values[own]
