"""Paths of few large flows through a network with several spines: planned as in C4P (arXiv 2406.04594), or hashed, as
switches do by default."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Literal

from rolljax.errors import Checked, Range


@dataclasses.dataclass(frozen=True)
class Route:
    """A way from one host to another."""

    id: int
    links: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bytes that one host sends to another, on one of several paths."""

    name: str
    size: float
    paths: tuple[Route, ...]


def healthy(flow: Flow, failed: Collection[str]) -> list[Route]:
    """Return the paths of a flow that use no failed link.

    Raises:
      ValueError: there is none.
    """
    found = [p for p in flow.paths if not any(link in failed for link in p.links)]
    if not found:
        raise ValueError(f"no path is left for {flow.name}")
    return found


def allocate(
    flows: Iterable[Flow], failed: Collection[str] = (), kept: Mapping[str, Route] | None = None
) -> dict[str, Route]:
    """Choose a path for each flow, the largest flow first: the one whose most loaded link has the least load. Among
    several, their next loaded links decide, so that a busy port does not hide a busy spine; then the smallest id.

    Args:
      failed: links that no path may use.
      kept: paths of an earlier allocation. They stay unless they use a failed link, so that a failure moves only the
        flows that it hits.
    """
    flows, load = list(flows), defaultdict[str, float](float)
    chosen: dict[str, Route] = {}
    for flow in flows:
        path = (kept or {}).get(flow.name)
        if path and not any(link in failed for link in path.links):
            chosen[flow.name] = path
            _add(load, path, flow.size)
    for flow in sorted((f for f in flows if f.name not in chosen), key=lambda f: (-f.size, f.name)):
        path = min(healthy(flow, failed), key=lambda p: (_sorted_loads(p, load), p.id))
        chosen[flow.name] = path
        _add(load, path, flow.size)
    return chosen


def hashed(flows: Iterable[Flow], failed: Collection[str] = (), seed: int = 0) -> dict[str, Route]:
    """Choose a path for each flow by a hash of its name, as equal-cost multipath routing does."""
    chosen = {}
    for flow in flows:
        paths = healthy(flow, failed)
        digest = hashlib.sha256(f"{seed} {flow.name}".encode()).digest()
        chosen[flow.name] = paths[int.from_bytes(digest[:8], "big") % len(paths)]
    return chosen


def loads(flows: Iterable[Flow], chosen: Mapping[str, Route]) -> dict[str, float]:
    """Return the bytes on each link."""
    load = defaultdict[str, float](float)
    for flow in flows:
        _add(load, chosen[flow.name], flow.size)
    return load


def _sorted_loads(path: Route, load: dict[str, float]) -> list[float]:
    return sorted((load[link] for link in path.links), reverse=True)


def _add(load: dict[str, float], path: Route, size: float) -> None:
    for link in path.links:
        load[link] += size


# ---- the network of a run


@dataclasses.dataclass(frozen=True)
class NetworkTimings(Checked):
    """The network from the trainer's hosts to the sampler's replicas: every host has bonded ports, and every port
    reaches all spines. It replaces `TrainerTimings.publish_s`."""

    push_bytes: Annotated[float, Range(above=0)] = 1e9
    """Bytes of new weights that each replica reads; every trainer host sends an equal part."""
    hosts: Annotated[int, Range(low=1)] = 1
    """Hosts of the trainer."""
    ports: Annotated[int, Range(low=1)] = 2
    """Ports of each host. What leaves a host on one of them arrives on the same port of the other."""
    spines: Annotated[int, Range(low=1)] = 4
    """Spines that the flows are spread over."""
    failed_spines: Annotated[int, Range(low=0)] = 0
    """Spines that have failed."""
    port_bytes_s: Annotated[float, Range(above=0)] = 25e9
    """Bytes per second of a host's port."""
    spine_bytes_s: Annotated[float, Range(above=0)] = 100e9
    """Bytes per second of each spine, for one port."""
    paths: Literal["planned", "hashed"] = "planned"
    """`planned`: C4P's allocation. `hashed`: each flow takes a random path, for comparison."""


def push_flows(network: NetworkTimings, replicas: int) -> list[Flow]:
    """Return the flows of a push from each trainer host to each replica."""
    found = []
    for host in range(network.hosts):
        for replica in range(replicas):
            paths = tuple(
                Route(
                    spine * network.ports + port,
                    (f"host {host} port {port}", f"spine {spine} port {port}", f"replica {replica} port {port}"),
                )
                for spine in range(network.spines)
                for port in range(network.ports)
            )
            found.append(Flow(f"host {host} to replica {replica}", network.push_bytes / network.hosts, paths))
    return found


def push_s(network: NetworkTimings, replicas: int) -> float:
    """Return the seconds until all replicas have the weights of a push: those of the busiest link."""
    flows = push_flows(network, replicas)
    failed = {f"spine {s} port {p}" for s in range(network.failed_spines) for p in range(network.ports)}
    chosen = (allocate if network.paths == "planned" else hashed)(flows, failed)
    return max(
        size / (network.spine_bytes_s if link.startswith("spine") else network.port_bytes_s)
        for link, size in loads(flows, chosen).items()
    )
