"""The way of weights from the trainer's devices to the sampler's, where each has its own: bytes and seconds."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rolljax.aot.chips import Chip
from rolljax.aot.report import GIB
from rolljax.trainer.publish import Reshard


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The way of one publish.

    gib: of all devices together. parts: that weights are cut into on the way. link: between chips of one slice (one
    link of each), or the network between slices. seconds: of the busiest device.
    """

    gib: float
    parts: int
    link: Literal["ICI", "DCN"]
    seconds: float

    @staticmethod
    def of(reshard: Reshard, chip: Chip, *, one_slice: bool) -> Transfer:
        """one_slice: both sides are chips of one slice."""
        bytes_s = chip.link_bytes_s if one_slice else chip.dcn_bytes_s
        # each part leaves from one device, for all that receive it
        busiest = reshard.moved_bytes / reshard.parts
        return Transfer(reshard.moved_bytes / GIB, reshard.parts, "ICI" if one_slice else "DCN", busiest / bytes_s)
