"""TPU chips: the assumed properties of each, and their topologies, without a device.

libtpu compiles for a topology ("v5e:2x4") on any x86 Linux machine: `pip install 'rolljax[tpu]'`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rolljax.errors import ConfigError, boundary

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # these two only keep libtpu from complaining; the topology is named in the call
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process on this machine is refused
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Assumed properties of one JAX device: a chip, or half of one if `cores` is 2."""

    name: str
    bf16_flops: float
    """Peak bfloat16 FLOPs per second of one device."""
    hbm_bytes_s: float
    """Peak HBM bandwidth of one device, in bytes per second."""
    link_bytes_s: float
    """One link of the interconnect, one way."""
    dcn_bytes_s: float
    """The device's share of its host's network bandwidth, one way, in bytes per second."""
    usable_hbm_gib: float
    """HBM in GiB that libtpu 0.0.42 lets a program use, measured by programs that it refuses."""
    ring: int
    """A dimension of the torus closes into a ring where its length is a multiple of this; else it is a line."""
    source: str
    cores: int = 1

    @property
    def usable_hbm_bytes(self) -> float:
        return self.usable_hbm_gib * 2**30


_DOCS = "docs.cloud.google.com/tpu/docs"
CHIPS = {
    c.name: c
    for c in (
        # 2400 Gbps over 6 links; of its network nothing is documented: as v5e's
        Chip("v4", 275e12 / 2, 1228e9 / 2, 50e9 / 2, 3.125e9 / 2, 15.25, 4, f"{_DOCS}/v4", cores=2),
        # 1600 Gbps over 4 links; 200 Gbps of network for 8 chips
        Chip("v5e", 197e12, 819e9, 50e9, 3.125e9, 15.75, 16, f"{_DOCS}/v5e"),
        # 1200 GB/s both ways over 6 links; 50 Gbps of network
        Chip("v5p", 459e12, 2765e9, 100e9, 6.25e9, 95.74, 4, f"{_DOCS}/v5p"),
        # 3200 Gbps over 4 links; 800 Gbps of network for 8 chips
        Chip("v6e", 918e12, 1600e9, 100e9, 12.5e9, 31.25, 16, f"{_DOCS}/v6e"),
        # 1200 GB/s both ways over 6 links; 100 Gbps of network
        Chip("tpu7x", 2307e12 / 2, 7380e9 / 2, 100e9 / 2, 12.5e9 / 2, 94.75, 4, f"{_DOCS}/tpu7x", cores=2),
    )
}


def chip(topology: str) -> Chip:
    """Return the chip of a topology.

    Raises:
      ConfigError: the chip is unknown.
    """
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ConfigError(
            "names no TPU known here",
            setting="topology",
            value=topology,
            remedy=f"one of {', '.join(CHIPS)}, then its shape: v5e:2x4, v5p:2x2x2",
        )
    return CHIPS[name]


def devices(topology: str) -> list[jax.Device]:
    """Return the devices of a TPU topology, to compile for. This process itself computes on CPU.

    Raises:
      ConfigError: libtpu is not installed, the name is unknown, or this process holds an accelerator already.
    """
    chip(topology)

    def bad(message: str, remedy: str) -> ConfigError:
        return ConfigError(message, setting="topology", value=topology, remedy=remedy)

    if importlib.util.find_spec("libtpu") is None:
        raise bad("needs the TPU compiler, libtpu is not installed", "pip install 'rolljax[tpu]'")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise bad("is compiled for on CPU, but this process runs on an accelerator", "set JAX_PLATFORMS=cpu")
    from jax.experimental import topologies

    # a single chip is not a complete host, which libtpu asks for
    name, _, shape = topology.partition(":")
    sides = [s for s in shape.split("x") if s]
    single = {"chips_per_host_bounds": (1, 1, 1)} if sides and all(s == "1" for s in sides) else {}
    try:
        with boundary(ConfigError, "is refused by libtpu"):
            return list(topologies.get_topology_desc(topology_name=topology, platform="tpu", **single).devices)
    except ConfigError as error:
        first = str(error.__cause__).strip().splitlines()[0]
        raise bad(f"is refused by libtpu: {first}", "a shape of complete hosts, such as v5e:2x4") from error.__cause__


def links(chip: Chip, every: Sequence[Any], group: Sequence[int]) -> float:
    """Return the number of links of each device that a collective over a group of devices can use at once.

    A dimension of the torus that the group spans gives two links where it closes into a ring, else one. Groups that
    skip devices share their links with the groups in between. A group inside one chip counts as one link.

    Args:
      every: the devices of the mesh, in its order. group: indices of the group's devices among them.
    """
    coords = np.array([tuple(d.coords) for d in every])
    sides = coords.max(0) - coords.min(0) + 1
    own = coords[list(group)]
    total = 0.0
    for axis, side in enumerate(sides):
        values = sorted(set(own[:, axis].tolist()))
        if len(values) < 2:
            continue
        stride = math.gcd(*np.diff(values).tolist())
        spanned = len(values) * stride >= side
        total += (2 if spanned and side % chip.ring == 0 else 1) / stride
    return total or 1.0
