"""The text of a compiled program, optimized HLO (`compiled.as_text()`): computations, instructions, shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "token": 0, "tuple": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|bf16|f16|f32|f64|f8\w+|[su](?:1|2|4|8|16|32|64)|c64|c128)\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    """Memory space; 0 is HBM."""

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = _BITS.get(self.dtype) or (8 if self.dtype.startswith("f8") else int(re.sub(r"\D", "", self.dtype)))
        return -(-self.size * bits // 8)


def arrays(shape: str) -> list[Array]:
    """Parse the arrays of a shape."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space[1]) if space else 0))
    return found


@dataclasses.dataclass(frozen=True)
class Instruction:
    """name = shape opcode(operands), attributes."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    argument: str
    """The text in the brackets, for constants and parameters."""
    root: bool

    def attribute(self, name: str) -> str | None:
        """Return an attribute that is a computation's name or a number."""
        found = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


class Computation:
    """Instructions by name, in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_name: dict[str, Instruction] = {}

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.by_name.values())

    @property
    def root(self) -> Instruction:
        return next((i for i in self if i.root), next(reversed(self.by_name.values())))

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The users of each instruction's result."""
        found: dict[str, list[Instruction]] = defaultdict(list)
        for one in self:
            for name in one.operands:
                found[name].append(one)
        return found

    def parameters(self) -> list[Instruction]:
        return sorted((i for i in self if i.opcode == "parameter"), key=lambda i: int(i.argument))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations by name, and the name of the entry."""
    found: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in text.splitlines():
        if (head := _HEAD.match(line)) and not line.startswith(" "):
            current = found[head[2]] = Computation(head[2])
            entry = head[2] if head[1] else entry
        elif line.startswith("}") and line.rstrip() == "}":
            current = None
        elif current is not None and (match := _LINE.match(line)):
            shape, rest = _split_shape(match[3])
            opcode, _, rest = rest.partition("(")
            inside, attributes = _split_brackets(rest)
            operands = tuple(re.findall(r"%([\w.\-]+)", inside))
            one = Instruction(match[2], shape, opcode.strip(), operands, attributes, inside, bool(match[1]))
            current.by_name[one.name] = one
    return found, entry


def _split_shape(text: str) -> tuple[str, str]:
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    head, tail = _split_brackets(text[1:])
    return f"({head})", tail.strip()


def _split_brackets(text: str) -> tuple[str, str]:
    """Return the text up to the bracket that closes an open one, and the rest."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return text[: match.start()], text[match.end() :]
    return text, ""


def replica_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Return the first group of a collective, in any of the three notations of groups."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        ids = np.arange(num_devices).reshape(_numbers(iota[3]))
        ids = ids.transpose(_numbers(iota[4])) if iota[4] else ids
        return tuple(ids.reshape(int(iota[1]), int(iota[2]))[0].tolist())
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}", attributes
    )
    if mesh:
        ids = np.arange(num_devices)
        ids = ids.reshape(_numbers(mesh[2])) if mesh[2] else ids
        ids = ids.transpose(_numbers(mesh[3])) if mesh[3] else ids
        sizes = {n: int(s) for n, s in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return _mesh_group(ids, sizes, re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", mesh[4]))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return tuple(_numbers(listed[1])) if listed and listed[1] else tuple(range(num_devices))


def _mesh_group(ids: np.ndarray, sizes: Mapping[str, int], parts: Sequence[tuple[str, str, str]]) -> tuple[int, ...]:
    """Return the first group. ids: of the devices, in the mesh's order. parts: an axis, or `(before, size)` of the part
    of an axis that groups span."""
    ids = ids.reshape(tuple(sizes.values()))
    index: list[slice] = []
    for name, size in sizes.items():
        found = next((p for p in parts if p[0] == name), None)
        if found is None:
            index.append(slice(0, 1))
        elif found[1]:
            step = size // (int(found[1]) * int(found[2]))
            index.append(slice(0, int(found[2]) * step, step))
        else:
            index.append(slice(None))
    return tuple(ids[tuple(index)].reshape(-1).tolist())


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
