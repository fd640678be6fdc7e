"""Turns a compiled program into the user's answers: whether it fits, and how long it takes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rolljax.aot.chips import Chip, links
from rolljax.aot.hlo import Kernel, ProgramWork

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """GiB of one device while a program runs."""

    own: Mapping[str, float]
    """The program's arguments and results, by name; with `temporaries` they are the peak that the compiler reports."""
    temporaries: float
    beside: Mapping[str, float]
    """Arrays in HBM that are not arguments of this program."""
    host: float
    """Arguments in host memory."""
    peak: float
    usable: float
    aliased: float = 0.0
    """Results that are an argument's own buffer."""

    @property
    def total(self) -> float:
        return self.peak + sum(self.beside.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


@dataclasses.dataclass(frozen=True)
class Time:
    """Roofline seconds of one execution."""

    compute_s: float
    """Seconds of all operations, limited by the chip's peak compute rate alone."""
    hbm_s: float
    """Seconds of all operations, limited by the chip's memory (HBM) alone."""
    chip_s: float
    """Seconds of all operations in sequence, each limited by the slower of compute and memory."""
    hidden_ici_s: float
    """Seconds of the collectives that the compiler starts asynchronously."""
    exposed_ici_s: float
    """Seconds of the collectives that the compiler does not start asynchronously."""

    @property
    def step_s(self) -> float:
        """Seconds of one execution. Asynchronous collectives overlap with the chip's work; the others add to it."""
        return max(self.chip_s, self.hidden_ici_s) + self.exposed_ici_s


@dataclasses.dataclass(frozen=True)
class CollectiveTraffic:
    """Collectives of one kind over the same mesh axes, GiB of one device."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    hidden: bool
    times: float
    payload_gib: float
    sent_gib: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """The findings about one program. `time` and the fields after it are None if the compiler refused the program."""

    program: str
    compile_s: float
    memory: Memory
    refused: str = ""
    time: Time | None = None
    flops: float = 0.0
    """FLOPs that one device computes, with Pallas kernels counted by formula."""
    kernel_flops: float = 0.0
    hbm_gib: float = 0.0
    collectives: tuple[CollectiveTraffic, ...] = ()
    model_flops: float = 0.0
    """FLOPs that the model requires, over all devices."""
    tokens: int = 0
    """Tokens that one execution computes."""
    mfu: float | None = None
    kernels: int = 0

    @property
    def fits(self) -> bool:
        return not self.refused and self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as a JSON value."""
        found = dataclasses.asdict(self)
        found["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        if self.time:
            found["time"]["step_s"] = self.time.step_s
        return found | {"fits": self.fits}


def kernel_work(kernel: Kernel, rows_used: float = 1.0) -> tuple[float, float]:
    """Return the matmul flops and HBM bytes of one call of a Pallas kernel that JAX ships, by its name and shapes.

    Splash attention: a row of full length without siblings, of which the blocks up to the diagonal are computed;
    `model.splash` makes two calls for it, and each counts as half. Its forward kernel has 2 products, dq has 3, dkv has
    4. Grouped matmuls: the fraction `rows_used` of their rows, and the experts of one layer. Attention over pages:
    every row at half of its longest context, bound by the pages that it reads. Others: their arrays, and no flops.
    """
    name, nbytes = kernel.name, float(kernel.nbytes)
    tables = [a.dims for a in kernel.operands if a.dtype == "s32"]
    floats = [a.dims for a in kernel.operands if a.dtype in ("bf16", "f32")]
    if "splash" in name:
        products = 2 if "fwd" in name else 3 if "dq" in name else 4
        q, keys = floats[0], floats[1][-2]
        blocks = max((d[-1] for d in tables if len(d) == 3), default=1)
        return products * 2.0 * math.prod(q) * keys * (blocks + 1) / (2 * blocks) / 2, nbytes
    if "gmm" in name:
        rows = [a.dims for a in (*kernel.operands, *kernel.results) if len(a.dims) == 2 and a.dtype != "s32"]
        experts = next((d[0] - 1 for d in tables if len(d) == 1 and d[0] > 1), 0)
        weights = next((a for a in kernel.operands if len(a.dims) == 3 and a.dtype != "s32"), None)
        if weights and experts < weights.dims[0]:  # those of all layers: one layer's are read
            nbytes -= weights.nbytes * (1 - experts / weights.dims[0])
        if len(rows) > 1:
            return 2.0 * math.prod(rows[0]) * rows[1][1] * rows_used, nbytes
    if "paged_attention" in name:
        pool = max((a for a in kernel.operands if len(a.dims) == 4), key=lambda a: a.size)
        table = max((d for d in tables if len(d) == 2), key=math.prod)
        q = max((d for d in floats if len(d) == 3), key=math.prod)
        pages = math.prod(table) / 2
        read = pages * pool.nbytes / pool.dims[0]
        tokens = pages / table[0] * pool.dims[1]
        return 4.0 * math.prod(q) * tokens, nbytes - pool.nbytes + read
    return 0.0, nbytes


def time_of(
    work: ProgramWork, chip: Chip, devices: Sequence[Any], rows_used: float = 1.0
) -> tuple[Time, tuple[CollectiveTraffic, ...], tuple[float, float]]:
    """Return seconds, collectives, and flops and HBM bytes of Pallas kernels. rows_used: see `kernel_work`."""
    kernels = [(*kernel_work(k, rows_used), k.times) for k in work.kernels]
    chip_s = sum(max(f / chip.bf16_flops, b / chip.hbm_bytes_s) * n for f, b, n in (*work.ops, *kernels))
    flops, nbytes = (sum(k[i] * k[2] for k in kernels) for i in (0, 1))
    sums: dict[tuple[str, tuple[str, ...], str, bool], list[float]] = defaultdict(lambda: [0.0] * 4)
    for c in work.collectives:
        seconds = c.sent_bytes / (links(chip, devices, c.group) * chip.link_bytes_s) if len(c.group) > 1 else 0.0
        for i, value in enumerate((c.times, c.payload_bytes / GIB, c.sent_bytes / GIB, seconds)):
            sums[c.kind, c.axes, c.dtype, c.hidden][i] += value
    found = [CollectiveTraffic(*key, *values) for key, values in sums.items()]
    time = Time(
        (work.matmul_flops + flops) / chip.bf16_flops,
        (work.hbm_bytes + nbytes) / chip.hbm_bytes_s,
        chip_s,
        sum(x.seconds for x in found if x.hidden),
        sum(x.seconds for x in found if not x.hidden),
    )
    return time, tuple(sorted(found, key=lambda x: -x.seconds)), (flops, nbytes)
