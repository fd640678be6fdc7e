"""Settings of samplers in other processes: how many, who starts them, and where they fetch weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from rolljax.errors import Checked, ConfigError, Range, check_fields


@dataclasses.dataclass(frozen=True)
class Processes(Checked):
    """Start the samplers as processes of this machine, and start those again that end."""

    processes: Annotated[int, Range(low=1)] = 1
    """Number of processes of one sampler, each with its own devices: a sampler of several hosts, tried on one."""
    max_failures: Annotated[int, Range(low=1)] = 5
    """Number of times in a row that a sampler may end before it was ready, until the run ends."""


@dataclasses.dataclass(frozen=True)
class Join(Checked):
    """Wait for samplers that others start: `python -m rolljax.sampler_host --join HOST:PORT`, with the key in the run
    folder (docs/cluster.md)."""

    host: str = "0.0.0.0"  # noqa: S104
    """Address to listen on. The connection is authenticated, but not encrypted: use a private network."""
    port: Annotated[int, Range(low=0, high=65535)] = 8477
    """Port to listen on; 0: a free one."""


@dataclasses.dataclass(frozen=True)
class Ray:
    """Start each sampler on a node of a Ray cluster that has the resources, and start those again that end. Ray places
    and shows samplers; requests and weights do not pass through it. The samplers end with the run's process."""

    address: str = ""
    """Address of a running Ray cluster; empty: the cluster that this process is connected to, otherwise a new one on
    this host."""
    cpus: Annotated[float, Range(above=0)] = 1.0
    """Number of CPUs that a sampler reserves, on each of its hosts."""
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other resources that a sampler reserves on its node, such as `{'GPU': 1}` or `{'TPU': 4}`. It sees these devices
    alone."""
    topology: str = ""
    """Topology of a TPU slice that each sampler has as a whole, such as `2x4`, or `4x8` on several hosts."""
    generation: str = ""
    """TPU generation of the slice, such as `v6e`."""
    host: str = ""
    """Address of this machine for the samplers; empty: its address in the Ray cluster. The connection is authenticated,
    but not encrypted: use a private network."""
    port: Annotated[int, Range(low=0, high=65535)] = 0
    """Port to listen on; 0: a free one."""
    placing_s: Annotated[float, Range(above=0)] = 30.0
    """Seconds without a place for a sampler until the run prints which resources are wanted, present and taken."""
    max_failures: Annotated[int, Range(low=1)] = 5
    """Number of times in a row that a sampler may end before it was ready, until the run ends."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, amount in self.resources.items():
            if name == "CPU" or not amount > 0:
                raise ConfigError(
                    f"has {name} {amount:g}",
                    setting="Ray.resources",
                    value=self.resources,
                    remedy="numbers above 0; Ray.cpus has the CPUs",
                )
        if bool(self.topology) != bool(self.generation):
            raise ConfigError("needs Ray.generation, and the other way round", setting="Ray.topology")
        if self.topology and "TPU" in self.resources:
            raise ConfigError("has TPU, which Ray.topology says already", setting="Ray.resources", value=self.resources)


Launcher = Processes | Join | Ray
"""Starts samplers."""


@dataclasses.dataclass(frozen=True)
class ServedWeights(Checked):
    """Each process of the trainer writes its part of the weights to a folder of its own machine and serves it over
    HTTP, for trainers and samplers without a store in common. The URLs have a random key, but the connections are not
    encrypted: use a private network."""

    folder: str
    """Folder on the machine of each process, of this run alone, such as `/dev/shm/weights` (in memory). It holds the
    newest two snapshots, and the snapshots they build on, also after the run."""
    port: Annotated[int, Range(low=0, high=65535)] = 0
    """Port of each process; 0: any that is free. Several processes of one machine need 0."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """Samplers are processes of their own, each with its own devices; the trainer has all devices of its processes.

    Requests go to the samplers over TCP. The trainer writes new weights to a store, from which each sampler fetches
    them; it waits for none. A lost sampler's requests are resumed at the others.
    """

    samplers: Annotated[int, Range(low=1)] = 1
    """Number of samplers that the run waits for at its start. With `Join` more may come at any time."""
    launcher: Launcher = Processes()
    """Starts the samplers: `Processes` on this machine, `Ray` on a cluster, `Join` for samplers that are started
    elsewhere."""
    weights: str | ServedWeights = ""
    """Address of the store of weights, as TensorStore knows it, such as `gs://bucket/path`: all processes of the
    trainer and all samplers must reach it. Empty: the folder `weights` in the run folder. `ServedWeights`: there is no
    such store."""
    min_samplers: Annotated[int, Range(low=1)] = 1
    """Number of ready samplers with which the run starts, if the others have not come within `Recipe.wait_s`."""
    heartbeat_s: Annotated[float, Range(above=0)] = 0.5
    """Seconds between signs of life, in both directions."""
    lost_s: Annotated[float, Range(above=0)] = 10.0
    """A sampler that has been silent for this long is lost, even if its connection is open."""
    max_gap_nat: Annotated[float, Range(above=0)] = 0.05
    """Mean distance of a sampler's log-probs from the trainer's, in nats, above which it is drained in favour of the
    others, if theirs is less than half as large. It is started again; the second time, it gets no more requests."""
    rejoin_s: Annotated[float, Range(above=0)] = 60.0
    """Seconds that a sampler without a controller keeps its engine and waits for one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_samplers > self.samplers:
            raise ConfigError(
                f"is more than Remote.samplers = {self.samplers}",
                setting="Remote.min_samplers",
                value=self.min_samplers,
            )
        if self.lost_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"must be at least two heartbeats of {self.heartbeat_s:g} s", setting="Remote.lost_s", value=self.lost_s
            )
