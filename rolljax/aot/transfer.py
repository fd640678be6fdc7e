"""Bytes and seconds of the weight transfer from the trainer's devices to the sampler's, if these are separate."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rolljax.aot.chips import Chip
from rolljax.aot.report import GIB
from rolljax.trainer.publish import Reshard


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The way of one publish."""

    gib: float
    """GiB transferred by all devices together."""
    parts: int
    """Number of parts that the weights are cut into for the transfer."""
    link: Literal["ICI", "DCN"]
    """Link that the weights cross: `ICI` between chips of one slice (one link of each chip), `DCN` for the network
    between slices."""
    seconds: float
    """Transfer time of the busiest device, in seconds."""

    @staticmethod
    def of(reshard: Reshard, chip: Chip, *, one_slice: bool) -> Transfer:
        """Estimate the transfer of a resharding. one_slice: both sides are chips of one slice."""
        bytes_s = chip.link_bytes_s if one_slice else chip.dcn_bytes_s
        # each part leaves from one device, for all that receive it
        busiest = reshard.moved_bytes / reshard.parts
        return Transfer(reshard.moved_bytes / GIB, reshard.parts, "ICI" if one_slice else "DCN", busiest / bytes_s)


@dataclasses.dataclass(frozen=True)
class Push:
    """The way of one push through a store, from the trainer's slice to the slices of samplers in other processes.

    Seconds are of the network alone: of the store nothing is known here.
    """

    gib: float
    """GiB of a full snapshot."""
    delta_gib: float
    """GiB of a snapshot of changes, of the fraction `changed_frac` of all weights."""
    changed_frac: float
    write_s: float
    """Seconds to write a full snapshot, by all hosts of the trainer at their peak rate."""
    read_s: float
    """Seconds of each sampler to read a full snapshot, by all of its hosts at their peak rate."""
    delta_write_s: float
    delta_read_s: float

    @staticmethod
    def of(full: float, delta: float, changed_frac: float, write_bytes_s: float, read_bytes_s: float) -> Push:
        """Estimate a push. full, delta: bytes. write_bytes_s, read_bytes_s: of the trainer's and of one sampler's
        hosts."""
        times = (full / write_bytes_s, full / read_bytes_s, delta / write_bytes_s, delta / read_bytes_s)
        return Push(full / GIB, delta / GIB, changed_frac, *times)

    @property
    def seconds(self) -> float:
        """Seconds from the trainer's copy to the samplers' devices, of a full snapshot."""
        return self.write_s + self.read_s
