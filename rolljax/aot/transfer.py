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
