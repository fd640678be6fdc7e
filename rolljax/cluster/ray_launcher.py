"""Samplers on the nodes of a Ray cluster: an actor on each node of a sampler starts its process, and reports the lines.

Ray places the actors and shows them under their names. Requests and weights do not pass through Ray.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rolljax.cluster.launchers import ENDING_S, KEY, LaunchOrder, Restarts, command
from rolljax.cluster.placement import Ray, Remote
from rolljax.concurrency import distributed
from rolljax.concurrency.child import Child, ChildError, how_it_ended, python_path
from rolljax.concurrency.ray_connection import CONNECTION
from rolljax.errors import ConfigError

MAX_LINES = 1000
"""Lines of a sampler that its actor keeps until they are fetched; older ones are left out."""
LOOK_S = 1.0
"""Longest time in seconds that an actor waits for news before it answers."""
RESERVE_S = 5.0
"""Time in seconds for one attempt to get a TPU slice of several hosts."""
WORKER_LABEL = "ray.io/tpu-worker-id"
"""Label of a node: its number among the hosts of its TPU slice, which is the number of its process to JAX."""
OVER_FDS = 'exec "$@" 2>&1'
"""Shell command that starts a program with its standard error on its standard output."""


@dataclasses.dataclass(frozen=True)
class ActorNews:
    """What an actor reports of its sampler since the report before."""

    pid: int
    node: str
    """Address of the node."""
    lines: tuple[str, ...]
    left_out: int
    """Number of older lines that were not kept."""
    ended: str
    """How the sampler ended; empty while it runs."""


Place = tuple[int, int, str]
"""Number of a host in its TPU slice, number of its actor, and the address at which it could lead the others."""


class SamplerActor:
    """The class of the actors. Each starts a process of a sampler, which is killed when the actor ends."""

    def __init__(self, order: LaunchOrder, name: str) -> None:
        self._order, self._name = order, name
        self._news = threading.Condition()
        self._lines: collections.deque[str] = collections.deque()
        self._left_out, self._ended = 0, ""

    def place(self, number: int) -> Place:
        """Return the place of this actor, which has this number among those of its sampler."""
        import ray

        worker = int(str(ray.get_runtime_context().get_node_labels().get(WORKER_LABEL, 0)))
        self._reservation, port = distributed.reserve_port()
        return worker, number, f"{ray.util.get_node_ip_address()}:{port}"

    def start(self, number: int, *places: Place) -> None:
        """Start the process, given the places of all actors of the sampler."""
        ranked = sorted(places)
        env = {name: value for name, value in os.environ.items() if name not in distributed.VARIABLES}
        env |= distributed.variables(ranked[0][2], len(ranked), ranked.index(places[number]))
        env |= {KEY: self._order.key.hex(), "PYTHONPATH": python_path()}
        words = ["/bin/sh", "-c", OVER_FDS, "sh", *command(self._order, self._name)]
        self._child = Child(words, env, skip_long=True)
        threading.Thread(target=self._read, daemon=True).start()

    def look(self, wait_s: float) -> ActorNews:
        """Return the news, or after `wait_s` seconds that there are none."""
        import ray

        with self._news:
            self._news.wait_for(lambda: self._lines or self._ended, wait_s)
            lines, left_out = tuple(self._lines), self._left_out
            self._lines.clear()
            self._left_out = 0
            return ActorNews(self._child.pid, ray.util.get_node_ip_address(), lines, left_out, self._ended)

    def _read(self) -> None:
        while True:
            try:
                line = self._child.receive(float("inf")).decode(errors="replace")
            except ChildError as e:
                if e.kind != "long":
                    break
                line = str(e)
            with self._news:
                self._lines.append(line)
                if len(self._lines) > MAX_LINES:
                    self._lines.popleft()
                    self._left_out += 1
                self._news.notify_all()
        self._child.stop()
        with self._news:
            self._ended = how_it_ended(self._child.code or 0)
            self._news.notify_all()


@dataclasses.dataclass(eq=False)
class _Placed:
    """An actor, its next answer, and its last one."""

    actor: Any
    answer: Any
    seen: ActorNews | None = None


class RaySamplers:
    """Samplers on the nodes of a Ray cluster.

    Each has a placement group of its own for the whole run, which Ray moves to another node when its node is lost; a
    TPU slice of several hosts is given back, and another one asked for. Actors are replaced when one of them is lost,
    or when a process of their sampler has ended.
    """

    def __init__(self, settings: Ray, order: LaunchOrder, say: Callable[[str], None]) -> None:
        _join(settings)
        import ray

        self._ray, self._settings, self._say = ray, settings, say
        host = settings.host or ray.util.get_node_ip_address()
        self._order = dataclasses.replace(order, address=(host, order.address[1]))
        self._prefix = f"rolljax-{order.folder.parent.name}-"
        self._restarts = Restarts(order, settings.max_failures, say)
        self._lock, self._closed = threading.Lock(), False
        self._told_s = time.monotonic() + settings.placing_s
        self._threads = concurrent.futures.ThreadPoolExecutor(len(order.names), thread_name_prefix="rolljax-reserve")
        self._reserved: dict[str, concurrent.futures.Future[_Reserved | None]] = {}
        self._placed: dict[str, list[_Placed]] = {}
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self.close)
            _bundles(settings)
            self.check()
            unless_started.pop_all()

    def check(self) -> None:
        with self._lock:
            for name in () if self._closed else self._order.names:
                placed = self._placed.get(name)
                if placed is None:
                    if (reserved := self._reservation(name)) and self._restarts.is_due(name):
                        with contextlib.suppress(ValueError):  # Ray has not freed the name of the last actor yet
                            self._start(name, reserved)
                    continue
                how = next((how for each in placed if (how := self._ended(name, each))), "")
                if how or self._restarts.is_hung(name):
                    self._remove(name)
                    self._restarts.failed(name, how or "hangs, and was killed")
            if time.monotonic() > self._told_s and any(map(self._waits, self._order.names)):
                self._told_s = float("inf")
                lines = table(needs(self._settings, len(self._order.names)))
                self._say("\n".join(["no place for all samplers in the Ray cluster yet:", *lines]))

    def ready(self, name: str) -> None:
        self._restarts.ready(name)

    def lost(self, name: str, joined_s: float) -> None:
        self._restarts.lost(name, joined_s)

    def state(self, name: str) -> str:
        if self._waits(name):
            short = [need for need in needs(self._settings, len(self._order.names)) if need.is_short]
            return " ".join(["waits for a place in the Ray cluster", *(f"({need})" for need in short)])
        nodes = dict.fromkeys(each.seen.node for each in self._placed.get(name, ()) if each.seen)
        if not nodes:
            return "waits to be started again"
        return f"runs on {', '.join(nodes)}, and has not joined yet; see {self._order.log(name)}"

    def failure(self) -> str:
        return self._restarts.failure()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            end_s = time.monotonic() + ENDING_S
            running = [
                (name, each) for name, placed in self._placed.items() for each in placed if each.seen is not None
            ]
            while running and time.monotonic() < end_s:
                running = [(name, each) for name, each in running if not self._ended(name, each)]
                time.sleep(0.02)
            for name in list(self._placed):
                self._remove(name)
            self._threads.shutdown(wait=True, cancel_futures=True)
            for future in self._reserved.values():
                if not future.cancelled() and not future.exception() and (reserved := future.result()):
                    reserved.free()
        CONNECTION.leave()

    def _reservation(self, name: str) -> _Reserved | None:
        """Return the resources of a sampler, which a thread asks for; None: there are none yet."""
        future = self._reserved.get(name)
        if future is None or (future.done() and future.result() is None):
            self._reserved[name] = future = self._threads.submit(_reserve, self._settings, self._prefix + name)
        return future.result() if future.done() else None

    def _waits(self, name: str) -> bool:
        """Return whether a sampler has no place yet."""
        if placed := self._placed.get(name):
            return any(each.seen is None for each in placed)
        future = self._reserved.get(name)
        return future is None or not future.done() or future.result() is None

    def _start(self, name: str, reserved: _Reserved) -> None:
        cls = self._ray.remote(SamplerActor)
        actors: list[Any] = []
        with contextlib.ExitStack() as unless_all:
            for i in range(reserved.hosts):
                own_name = self._prefix + name + f"-{i}" * (i > 0)
                options = reserved.options(i)
                actors.append(cls.options(name=own_name, max_restarts=0, **options).remote(self._order, name))
                unless_all.callback(self._ray.kill, actors[-1])
            unless_all.pop_all()
        places = [actor.place.remote(i) for i, actor in enumerate(actors)]
        for i, actor in enumerate(actors):
            actor.start.remote(i, *places)
        self._placed[name] = [_Placed(actor, actor.look.remote(0.0)) for actor in actors]

    def _remove(self, name: str) -> None:
        """Kill the actors of a sampler, and give a slice of several hosts back: some of them may be gone."""
        for placed in self._placed.pop(name):
            self._ray.kill(placed.actor)
        reserved = self._reserved[name].result()
        if reserved and reserved.hosts > 1:
            reserved.free()
            del self._reserved[name]

    def _ended(self, name: str, placed: _Placed) -> str:
        """Take the answer of an actor, if there is one; return how it or its process has ended, empty if they run."""
        if not self._ray.wait([placed.answer], timeout=0)[0]:
            return ""
        try:
            seen = self._ray.get(placed.answer)
        except self._ray.exceptions.RayError as e:
            self._write(name, str(e))
            return f"has lost its actor; see {self._order.log(name)}"
        first = [f"process {seen.pid} on {seen.node}"] * (placed.seen is None)
        self._write(name, *first, *[f"({seen.left_out} lines are left out)"] * (seen.left_out > 0), *seen.lines)
        placed.seen = seen
        if seen.ended:
            return f"{seen.ended}; see {self._order.log(name)}"
        placed.answer = placed.actor.look.remote(LOOK_S)
        return ""

    def _write(self, name: str, *lines: str) -> None:
        with open(self._order.log(name), "a") as log:
            log.writelines(f"{line}\n" for line in lines)


@dataclasses.dataclass(frozen=True)
class _Reserved:
    """The resources of a sampler: a placement group with a bundle for each of its hosts."""

    group: Any
    bundle: Mapping[str, float]
    hosts: int
    free: Callable[[], None]
    """Give the resources back."""

    def options(self, host: int) -> dict[str, Any]:
        """Return the options of an actor that has all of the resources of a host."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {name: amount for name, amount in self.bundle.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.bundle["CPU"],
            "num_gpus": self.bundle.get("GPU", 0),
            "resources": others,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=host),
        }


@dataclasses.dataclass(frozen=True)
class Need:
    """A resource that samplers want, and where it is."""

    resource: str
    each: float
    """Amount on one host of a sampler."""
    hosts: int
    """Number of hosts of a sampler."""
    wanted: float
    present: float
    on_one: float
    """Largest amount on one node."""
    free: float
    taken: Mapping[str, float]
    """Amounts by the names of placement groups; `others` stands for everything else."""

    @property
    def is_short(self) -> bool:
        """Whether a further sampler cannot have it."""
        return self.each > self.on_one or self.each * self.hosts > self.free

    def __str__(self) -> str:
        return (
            f"{self.resource}: wanted {self.wanted:g}, present {self.present:g}, at most {self.on_one:g} on one node, "
            f"free {self.free:g}, taken by {self.takers()}"
        )

    def takers(self) -> str:
        """Return who has it."""
        return ", ".join(f"{name} {amount:g}" for name, amount in self.taken.items()) or "nobody"


def needs(settings: Ray, samplers: int) -> list[Need]:
    """Return every resource that the samplers want, as it is in the cluster now."""
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    found = []
    hosts, bundle = _bundles(settings)
    for name, each in bundle.items():
        has = [float(node.get(name, 0.0)) for node in nodes]
        taken: collections.Counter[str] = collections.Counter()
        for group in groups:
            amount = sum(bundle.get(name, 0.0) for bundle in group["bundles"].values())
            if amount:
                taken[group["name"] or "a group without a name"] += amount
        if (others := round(sum(has) - free.get(name, 0.0) - sum(taken.values()), 4)) > 0:
            taken["others"] = others
        wanted, most = each * hosts * samplers, max(has, default=0.0)
        found.append(Need(name, each, hosts, wanted, sum(has), most, free.get(name, 0.0), taken))
    return found


def table(found: list[Need]) -> list[str]:
    """Return the lines of a table of resources."""
    lines = [f"{'resource':12}{'wanted':>8}{'present':>9}{'on a node':>11}{'free':>8}  taken by"]
    for need in found:
        numbers = f"{need.wanted:8g}{need.present:9g}{need.on_one:11g}{need.free:8g}"
        lines.append(f"{need.resource:12}{numbers}  {need.takers()}")
    return lines


def describe(placement: Remote) -> list[str]:
    """Return the lines of `table` before a run; none if Ray does not start its samplers."""
    launcher = placement.launcher
    if not isinstance(launcher, Ray):
        return []
    _join(launcher)
    try:
        return table(needs(launcher, placement.samplers))
    finally:
        CONNECTION.leave()


def _join(settings: Ray) -> None:
    CONNECTION.join(settings.address, "Ray.address", "Remote.launcher = @Ray()", "choose @Processes()")


def _bundles(settings: Ray) -> tuple[int, dict[str, float]]:
    """Return the number of hosts of a sampler, and the resources on each of them.

    Raises:
      ConfigError: there is no slice of this topology.
    """
    bundle = {"CPU": settings.cpus, **settings.resources}
    if not settings.topology:
        return 1, bundle
    from ray.util.tpu import get_tpu_worker_resources

    try:
        hosts, found = get_tpu_worker_resources(settings.topology, settings.generation, bundle)
    except ValueError as e:
        raise ConfigError(str(e), setting="Ray.topology", value=settings.topology) from None
    return hosts, dict(found)


def _reserve(settings: Ray, name: str) -> _Reserved | None:
    """Ask for the resources of a sampler; Ray gives them when it has them. None: there is no slice of several hosts
    now."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.tpu import slice_placement_group

    hosts, bundle = _bundles(settings)
    if settings.topology:
        own = {key: amount for key, amount in bundle.items() if key != "TPU"}
        try:
            found = slice_placement_group(
                settings.topology,
                settings.generation,
                resources_per_bundle=own,
                name=name,
                head_reservation_timeout_s=RESERVE_S,
            )
        except (TimeoutError, RuntimeError):
            return None
        return _Reserved(found.slice_placement_group, bundle, hosts, found.shutdown)
    group = placement_group([bundle], name=name)
    return _Reserved(group, bundle, hosts, lambda: remove_placement_group(group))
