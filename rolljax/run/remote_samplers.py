"""Opens the samplers of a run that are processes of their own (`cluster.placement.Remote`)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from rolljax.cluster.group import SamplerGroup, sampler_name
from rolljax.cluster.launchers import LaunchOrder, launch, listening
from rolljax.cluster.messages import SamplerJob
from rolljax.cluster.placement import Remote
from rolljax.cluster.wire import Port
from rolljax.concurrency.event_loop import Stopped
from rolljax.concurrency.lockstep import SINGLE_PROCESS, Leader, SingleProcess
from rolljax.concurrency.waits import Watchdog
from rolljax.errors import ConfigError
from rolljax.model.decoder import Params
from rolljax.run.policy import sampler_settings
from rolljax.run.preflight import Preflight, ResolvedRecipe
from rolljax.run.weight_channel import StorePublisher, StoreSource, weight_list
from rolljax.sampler.client import SamplerLimits
from rolljax.storage import durable
from rolljax.storage.layout import SAMPLERS


@dataclasses.dataclass(frozen=True)
class RemoteRun:
    """What samplers of other processes need to know of a run."""

    folder: Path
    """The run folder."""
    epoch: int
    """Number of this start of the controller."""
    say: Callable[[str], None]
    """Shows a permanent line."""


@dataclasses.dataclass(frozen=True)
class _Door:
    """The way to the controller of a run, the same in all its starts."""

    run: str
    """Random name of the run."""
    key: bytes
    port: int


def open_samplers(
    preflight: Preflight,
    weights: Callable[[], Params],
    run: RemoteRun,
    watchdog: Watchdog,
    should_stop: Callable[[], bool],
    version: int,
    team: SingleProcess | Leader = SINGLE_PROCESS,
) -> tuple[SamplerGroup, StorePublisher]:
    """Start the samplers of a run, and return them when they are ready, with the channel of weights to them.

    Args:
      weights: returns the policy's weights, as `Model.bind` takes them; published first as `version`.
      should_stop: True ends the wait. team: the processes of the trainer.

    Raises:
      InfraError: too few samplers became ready. Stopped: `should_stop` returned True. StorageError: the weights cannot
        be written.
    """
    recipe, placement = preflight.recipe, preflight.recipe.placement
    assert isinstance(placement, Remote)
    folder = run.folder / SAMPLERS
    folder.mkdir(exist_ok=True)
    door, (host, fixed) = _door(folder), listening(placement.launcher)
    longest, multi_turn = preflight.compiled_requests
    job = SamplerJob(
        door.run,
        run.epoch,
        sampler_settings(recipe),
        longest,
        multi_turn,
        placement.heartbeat_s,
        placement.lost_s,
        weight_list(preflight.model),
    )
    limits = SamplerLimits(recipe.sampler.max_context, recipe.sampler.slots, preflight.model.num_ids)
    group = SamplerGroup(placement, job, limits, run.say)
    port = _listen(host, fixed, door, group)
    _keep(folder, dataclasses.replace(door, port=port.number))
    names = [sampler_name(i) for i in range(placement.samplers)]
    order = LaunchOrder((host, port.number), door.key, names, folder, placement.rejoin_s)
    with contextlib.ExitStack() as unless_launched:
        unless_launched.callback(group.close)
        unless_launched.callback(port.close)
        group.open(port, launch(placement.launcher, order, run.say))
        unless_launched.pop_all()
    channel = StorePublisher(store_source(preflight, weights, run.folder), team, group, watchdog)
    is_to_stop = channel.should_stop(should_stop)

    def check() -> None:
        if is_to_stop():
            raise Stopped

    with contextlib.ExitStack() as unless_ready:
        unless_ready.callback(channel.close)
        unless_ready.callback(group.close)
        channel.begin(run.epoch, version)
        with watchdog.waiting_for("the samplers to be ready"):
            group.wait_ready(recipe.wait_s, check)
        group.swap(version)
        unless_ready.pop_all()
    return group, channel


def store_source(resolved: ResolvedRecipe, weights: Callable[[], Params], folder: Path) -> StoreSource:
    """Return this process's source of weights for samplers of other processes; folder: the run folder."""
    placement = resolved.recipe.placement
    assert isinstance(placement, Remote)
    place = placement.weights or str((folder / "weights").absolute())
    return StoreSource(resolved.mesh, resolved.model, weights, place)


def _listen(host: str, fixed: int, door: _Door, group: SamplerGroup) -> Port:
    """Listen on a fixed port, or on that of an earlier start, or on any if another program has taken it meanwhile."""
    for port in [fixed] if fixed else [door.port, 0]:
        try:
            return Port((host, port), door.key, group.welcome)
        except OSError as e:
            error = e
    raise ConfigError(f"cannot listen: {error}", setting="Remote.launcher", value=f"{host}:{fixed}") from error


def _door(folder: Path) -> _Door:
    """Return name, key and port of a run: those of its earlier starts, so that its samplers find it again."""
    try:
        stored = json.loads((folder / "controller.json").read_text())
        return _Door(str(stored["run"]), bytes.fromhex(stored["key"]), int(stored["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _Door(secrets.token_hex(8), secrets.token_bytes(32), 0)


def _keep(folder: Path, door: _Door) -> None:
    """Store the door for later starts, and the key for people who start samplers; both for their owner alone."""
    for name, text in (
        ("controller.json", json.dumps({"run": door.run, "key": door.key.hex(), "port": door.port})),
        ("key", door.key.hex()),
    ):
        path = folder / name
        durable.write(path, text.encode())
        os.chmod(path, 0o600)
