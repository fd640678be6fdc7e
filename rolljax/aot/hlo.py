"""The work of a compiled program, read from its text: matmuls, bytes, collectives, with every loop multiplied out.

XLA's `cost_analysis` counts the body of a loop once, and a training step consists of nested loops. This reader walks
the optimized HLO text (`compiled.as_text()`) from its entry, and multiplies by the trip counts. It knows these
transformations of the TPU compiler:

- matmuls become convolutions inside fusions;
- a collective that overlaps with matmuls is split into a start, some steps inside the matmuls' fusions, and a done. All
  of them name the whole collective and share a `chain_id`, so it is counted once;
- a reduce-scatter is an all-reduce inside a computation named `all-reduce-scatter*`;
- arrays in a memory space above 0 (`S(1)`: VMEM) are not in HBM.

Figures are of one device.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from rolljax.aot.hlo_text import Array, Computation, Instruction, arrays, parse, replica_group

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute")
_FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "partition-id", "after-all", "iota"),
    *("opt-barrier", "add-dependency", "replica-id", "get-dimension-size"),
}
_KERNEL = "tpu_custom_call"
_Key = tuple[str, tuple[str, ...], str, bool, tuple[int, ...]]
"""Key by which collectives are summed: kind, axes, dtype, hidden, group."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same mesh axes."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    hidden: bool
    """Whether the compiler made it asynchronous, so that it can overlap with matmuls."""
    times: float
    payload_bytes: float
    """Bytes on the larger side (inputs or outputs) of these collectives, summed over all executions."""
    sent_bytes: float
    """Bytes that each device sends with a ring algorithm, summed over all executions."""
    group: tuple[int, ...]
    """Devices of one group, by their index in the mesh."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Calls of one Pallas kernel: its name, and its arrays."""

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    times: float

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in HBM."""
        return sum(a.nbytes for a in self.operands + self.results if not a.space)


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """The work of one execution of a program on one device."""

    ops: tuple[tuple[float, float, float], ...]
    """One `(flops, HBM bytes, times)` per instruction that runs on the chip's cores, except Pallas kernels."""
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    unknown_loops: int
    """Number of loops whose length is known only at run time; they count as `trips` iterations (`read`)."""

    @property
    def matmul_flops(self) -> float:
        """Flops of matmuls outside Pallas kernels."""
        return sum(flops * times for flops, _, times in self.ops)

    @property
    def hbm_bytes(self) -> float:
        """HBM bytes read and written outside Pallas kernels."""
        return sum(nbytes * times for _, nbytes, times in self.ops)


def read(text: str, mesh_shape: Mapping[str, int], trips: float = 1) -> ProgramWork:
    """Read a compiled program's text.

    Args:
      mesh_shape: axes of the mesh it was compiled for, in order.
      trips: how often a loop runs whose length is not in the text; inside another such loop: once.
    """
    return _HloReader(text, mesh_shape, trips).work()


class _HloReader:
    def __init__(self, text: str, mesh_shape: Mapping[str, int], trips: float) -> None:
        self.computations, self.entry = parse(text)
        self.mesh_shape, self.trips = mesh_shape, trips
        self.ops: list[tuple[float, float, float]] = []
        self.kernels: list[Kernel] = []
        self.sums: dict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.unknown = 0
        self.open = 0

    def work(self) -> ProgramWork:
        self._run(self.entry, 1.0, {})
        each = [
            Collective(kind, axes, dtype, hidden, times, payload, sent, group)
            for (kind, axes, dtype, hidden, group), (times, payload, sent) in self.sums.items()
        ]
        ordered = sorted(each, key=lambda c: -c.sent_bytes)
        return ProgramWork(tuple(self.ops), tuple(ordered), tuple(self.kernels), self.unknown)

    # ---- control flow -----------------------------------------------------------------------------------------------

    def _run(self, name: str, times: float, known: Mapping[int, int], hidden: bool = False) -> None:
        """Count all work of a computation. known: integer constants in the tuple that is its parameter."""
        computation = self.computations[name]
        chains: set[tuple[str, str]] = set()
        for one in computation:
            if one.opcode == "while":
                self._while(computation, one, times, known)
            elif one.opcode in ("call", "async-start", "call-start"):
                target = one.attribute("to_apply") or one.attribute("calls")
                if target in self.computations:
                    self._run(target, times, {}, hidden or one.opcode != "call")
            elif one.opcode == "conditional":
                for target in self._branches(one):
                    self._run(target, times, {}, hidden)
            elif one.opcode == "fusion":
                self._fusion(computation, one, times, chains, hidden)
            else:
                self._single(computation, one, times, hidden)

    def _branches(self, one: Instruction) -> list[str]:
        listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
        names += [one.attribute("true_computation") or "", one.attribute("false_computation") or ""]
        return [n for n in names if n in self.computations]

    def _while(self, computation: Computation, one: Instruction, times: float, known: Mapping[int, int]) -> None:
        body, condition = one.attribute("body"), one.attribute("condition")
        assert body and condition
        start = computation.by_name.get(one.operands[0])
        inner: dict[int, int] = {}
        if start is not None and start.opcode == "tuple":
            for i, operand in enumerate(start.operands):
                value = self._number(computation, operand, known)
                if value is not None:
                    inner[i] = value
        trips = self._trips(condition, body, inner)
        unknown = trips is None
        if trips is None:
            trips = 1 if self.open else self.trips
        self.unknown += unknown
        self.open += unknown
        kept = self._invariant(self.computations[body])
        self._run(body, times * trips, {i: v for i, v in inner.items() if i in kept})
        self.open -= unknown

    @staticmethod
    def _invariant(body: Computation) -> set[int]:
        """Return the indices of the loop's tuple that the body passes through unchanged."""
        if body.root.opcode != "tuple":
            return set()
        same = set()
        for i, name in enumerate(body.root.operands):
            one = body.by_name[name]
            if one.opcode == "get-tuple-element" and one.attribute("index") == str(i):
                same.add(i)
        return same

    def _number(self, computation: Computation, name: str, known: Mapping[int, int]) -> int | None:
        """Return an integer that is known before the program runs; None if it is not known."""
        one = computation.by_name.get(name)
        while one is not None and one.opcode in ("copy", "convert", "bitcast"):
            one = computation.by_name.get(one.operands[0])
        if one is None:
            return None
        if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.argument):
            return int(one.argument)
        if one.opcode == "get-tuple-element":
            return known.get(int(one.attribute("index") or -1))
        return None

    def _trips(self, condition: str, body: str, inner: Mapping[int, int]) -> float | None:
        """Return the trip count of a loop from one known number to another, by its body's increment; else None."""
        kept = self._invariant(self.computations[body])
        best: float | None = None
        for index, limit, inclusive in self._limits(condition, {i: v for i, v in inner.items() if i in kept}):
            step = self._step(self.computations[body], index)
            trips = max(0, math.ceil((limit + inclusive - inner.get(index, 0)) / step))
            best = trips if best is None else min(best, trips)
        return best

    def _limits(self, condition: str, known: Mapping[int, int]) -> Iterator[tuple[int, int, bool]]:
        """Yield (index of the counter, limit, whether the limit is inclusive) of the comparisons in a condition."""
        outer = self.computations[condition]
        scopes: list[tuple[Computation, dict[str, str]]] = [(outer, {})]
        for one in outer:
            called = self.computations.get(one.attribute("calls") or "") if one.opcode == "fusion" else None
            if called is not None:
                names = [p.name for p in called.parameters()]
                scopes.append((called, dict(zip(names, one.operands, strict=False))))
        for scope, outside in scopes:
            for one in scope:
                if one.opcode != "compare" or one.attribute("direction") not in ("LT", "LE"):
                    continue
                a, b = one.operands[:2]
                limit = self._number(outer if b in outside else scope, outside.get(b, b), known)
                counter = (outer if a in outside else scope).by_name[outside.get(a, a)]
                if limit is not None and counter.opcode == "get-tuple-element":
                    yield int(counter.attribute("index") or 0), limit, one.attribute("direction") == "LE"

    def _step(self, body: Computation, index: int) -> int:
        """Return the amount that a body adds to its counter."""
        if body.root.opcode != "tuple":
            return 1
        one = body.by_name[body.root.operands[index]]
        while one.opcode in ("copy", "bitcast"):
            one = body.by_name[one.operands[0]]
        home = body
        if one.opcode == "fusion":
            home = self.computations[one.attribute("calls") or ""]
            one = home.root
        if one.opcode == "add":
            numbers = [self._number(home, n, {}) for n in one.operands]
            return next((n for n in numbers if n), 1)
        return 1

    # ---- instructions -----------------------------------------------------------------------------------------------

    def _fusion(
        self, computation: Computation, one: Instruction, times: float, chains: set[tuple[str, str]], hidden: bool
    ) -> None:
        called = self.computations[one.attribute("calls") or ""]
        chained = False
        for inner in called:
            if self._kind(inner) is None:
                continue
            chain = re.search(r'chain_id="?(\w+)', inner.attributes)
            if chain:
                chained = True
                key = (chain[1], inner.attribute("channel_id") or "")
                if key in chains:
                    continue
                chains.add(key)
            scattered = called.name.startswith("all-reduce-scatter")
            self._collective(called, inner, times, hidden or chained, scattered)
        flops = sum(self._flops(called, i) for i in called)
        ends = any(i.opcode == "custom-call" and "AsyncCollective" in i.attributes for i in called)
        nbytes = 0 if chained and ends and not flops else self._fusion_bytes(computation, one, called, chained)
        if flops or nbytes:
            self.ops.append((flops, nbytes, times))

    def _single(self, computation: Computation, one: Instruction, times: float, hidden: bool) -> None:
        if self._kind(one):
            self._collective(computation, one, times, hidden or one.opcode.endswith("-start"), False)
            return
        if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
            return
        if one.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
            if target and target[1] == _KERNEL:
                self._kernel(computation, one, times)
            return
        if one.opcode == "copy-start":  # its result names the source, too
            nbytes: float = sum(a.nbytes for a in arrays(one.shape) if not a.space and a.dims)
        else:
            nbytes = self._plain_bytes(computation, one)
        flops = self._flops(computation, one)
        if flops or nbytes:
            self.ops.append((flops, nbytes, times))

    def _kernel(self, computation: Computation, one: Instruction, times: float) -> None:
        inputs = tuple(a for n in one.operands for a in self._arrays(computation, n))
        results = tuple(arrays(one.shape))
        name = re.search(r'kernel_name\W+"?([\w.\-]+)', one.attributes)
        name = name or re.search(r'op_name="([^"]*)"', one.attributes)
        self.kernels.append(Kernel(name[1] if name else one.name, inputs, results, times))

    def _arrays(self, computation: Computation, name: str) -> list[Array]:
        one = computation.by_name.get(name)
        return arrays(one.shape) if one is not None else []

    def _plain_bytes(self, computation: Computation, one: Instruction) -> float:
        out = sum(a.nbytes for a in arrays(one.shape) if not a.space)
        inputs = [sum(a.nbytes for a in self._arrays(computation, n) if not a.space) for n in one.operands]
        if one.opcode in ("dynamic-slice", "slice", "gather", "slice-start"):
            return 2 * out
        if one.opcode == "dynamic-update-slice":
            return 2 * inputs[1]
        if one.opcode == "scatter":
            return sum(inputs[1:]) + inputs[-1]
        return out + sum(inputs)

    def _fusion_bytes(self, computation: Computation, one: Instruction, called: Computation, chained: bool) -> float:
        """Return the HBM traffic of a fusion: of slices and in-place updates only the slice, not the whole array."""
        total = 0.0
        for parameter, name in zip(called.parameters(), one.operands, strict=False):
            found = self._arrays(computation, name)
            if any(a.space for a in found) or (chained and self._only_moved(called, parameter)):
                continue
            total += self._read_bytes(called, parameter, sum(a.nbytes for a in found))
        outputs = arrays(one.shape)
        roots = [called.by_name[n] for n in called.root.operands] if called.root.opcode == "tuple" else [called.root]
        for i, out in enumerate(outputs):
            if out.space or (chained and i < len(roots) and roots[i].opcode in ("parameter", "custom-call")):
                continue
            total += self._written_bytes(called, roots[i], out.nbytes) if i < len(roots) else out.nbytes
        return total

    def _only_moved(self, called: Computation, one: Instruction) -> bool:
        """Return whether a fusion's parameter only serves a collective that passes through."""
        users = called.users[one.name]
        return all(self._kind(u) or u.opcode in ("custom-call", "tuple") for u in users)

    def _read_bytes(self, home: Computation, one: Instruction, nbytes: int) -> float:
        """Return the bytes that a fusion reads of a parameter of `nbytes`."""
        total = 0.0
        for user in home.users[one.name]:
            if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == one.name:
                total += sum(a.nbytes for a in arrays(user.shape))
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == one.name:
                continue
            elif user.opcode in ("bitcast", "get-tuple-element") or self._renames(user):
                total += self._read_bytes(home, user, nbytes)
            elif user.opcode == "fusion":
                inner = self.computations[user.attribute("calls") or ""]
                own = [p for p, n in zip(inner.parameters(), user.operands, strict=False) if n == one.name]
                total += sum(self._read_bytes(inner, parameter, nbytes) for parameter in own)
            else:
                return nbytes
        return min(total, nbytes)

    def _renames(self, one: Instruction) -> bool:
        """Return whether an instruction inside a fusion is a copy to the same memory, in a layout of another name."""
        if one.opcode != "fusion" or "output_to_operand_aliasing" not in one.attributes:
            return False
        return self.computations[one.attribute("calls") or ""].root.opcode == "copy"

    def _written_bytes(self, home: Computation, root: Instruction | None, nbytes: int) -> float:
        """Return the bytes that a fusion writes of a result of `nbytes`."""
        while root is not None and root.opcode in ("bitcast", "copy", "fusion"):
            if root.opcode == "fusion":
                home = self.computations[root.attribute("calls") or ""]
                root = home.root
            else:
                root = home.by_name.get(root.operands[0])
        if root is not None and root.opcode in ("dynamic-update-slice", "scatter"):
            return sum(a.nbytes for a in self._arrays(home, root.operands[-1 if root.opcode == "scatter" else 1]))
        return nbytes

    # ---- matmuls ----------------------------------------------------------------------------------------------------

    def _flops(self, computation: Computation, one: Instruction) -> float:
        if one.opcode == "dot":
            return self._dot(computation, one)
        if one.opcode == "convolution":
            return self._convolution(computation, one)
        called = one.attribute("calls") if one.opcode == "fusion" else None
        if called:
            inner = self.computations[called]
            return sum(self._flops(inner, i) for i in inner)
        return 0.0

    def _dot(self, computation: Computation, one: Instruction) -> float:
        left = self._arrays(computation, one.operands[0])[0]
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        summed = math.prod(left.dims[int(i)] for i in axes[1].split(",") if i) if axes else 1
        return 2.0 * arrays(one.shape)[0].size * summed

    def _convolution(self, computation: Computation, one: Instruction) -> float:
        """Return the flops without products with padding: twice the pairs of output and window indices that hit the
        input."""
        left, right = (self._arrays(computation, n)[0].dims for n in one.operands[:2])
        out = arrays(one.shape)[0].dims
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
        assert labels
        window = dict(re.findall(r"(\w+)=([\w\-]+)", (re.search(r"window=\{([^}]*)\}", one.attributes) or [""] * 2)[1]))
        total = 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * right[labels[2].index("i")]
        for i in range(sum(c.isdigit() for c in labels[1])):
            pad = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
            size, stride, spread_in, spread_window = (
                int(window[key].split("x")[i]) if key in window else 1
                for key in ("size", "stride", "lhs_dilate", "rhs_dilate")
            )
            num_in, num_out = left[labels[1].index(str(i))], out[labels[3].index(str(i))]
            hit = np.arange(num_out)[:, None] * stride + np.arange(size) * spread_window - pad
            total *= int(((hit >= 0) & (hit <= (num_in - 1) * spread_in) & (hit % spread_in == 0)).sum())
        groups = re.search(r"batch_group_count=(\d+)", one.attributes)
        return total / (int(groups[1]) if groups else 1)

    # ---- collectives ------------------------------------------------------------------------------------------------

    @staticmethod
    def _kind(one: Instruction) -> str | None:
        kind = one.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    def _collective(
        self, computation: Computation, one: Instruction, times: float, hidden: bool, scattered: bool
    ) -> None:
        kind = self._kind(one)
        assert kind
        if scattered and kind == "all-reduce":
            kind = "reduce-scatter"
        inputs = [a for n in one.operands for a in self._arrays(computation, n)]
        into, out = sum(a.nbytes for a in inputs), sum(a.nbytes for a in arrays(one.shape))
        if one.opcode.endswith("-start") and one.shape.startswith("("):
            marks = sum(a.nbytes for a in arrays(one.shape) if not a.dims)
            out = max(out - into - marks, 0) if kind != "all-reduce" else out
        axes, group = self._axes(one)
        share = (len(group) - 1) / max(len(group), 1)
        sent = {
            "all-gather": out * share,
            "reduce-scatter": into * share,
            "all-reduce": 2 * into * share,
            "all-to-all": into * share,
            "ragged-all-to-all": into * share,
            "collective-permute": into,
        }[kind]
        dtype = inputs[0].dtype if inputs else ""
        sums = self.sums[kind, axes, dtype, hidden, group]
        for i, value in enumerate((1.0, max(into, out), sent)):
            sums[i] += times * value

    def _axes(self, one: Instruction) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the mesh axes of a collective's groups, and one of its groups."""
        sizes = tuple(self.mesh_shape.values())
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", one.attributes)
        if pairs:
            each = [tuple(map(int, p.split(","))) for p in re.findall(r"(\d+,\d+)", pairs[1])]
            moves = [tuple(np.unravel_index(p, sizes)) for p in each if p[0] != p[1]]
            axes = tuple(n for i, n in enumerate(self.mesh_shape) if any(m[i][0] != m[i][1] for m in moves))
            return axes, each[0]
        group = replica_group(one.attributes, math.prod(sizes))
        coords = np.array(np.unravel_index(np.array(group), sizes))
        axes = tuple(name for name, row in zip(self.mesh_shape, coords, strict=True) if len(set(row)) > 1)
        return axes, group
