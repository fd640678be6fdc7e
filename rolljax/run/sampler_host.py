"""A sampler in processes of its own: it joins a controller, builds the engine of its job, fetches weights, and samples.

When the controller is lost, the sampler keeps its engine and waits for the controller to return. Where a sampler has
several processes, the first one joins the controller, and the others follow its calls (`concurrency.lockstep`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import AuthenticationError
from typing import Any

import jax
import numpy as np

from rolljax.cluster.messages import SamplerJob, pack_sampled, software, unpack_requests
from rolljax.cluster.wire import Channel, Frame, Pulse, connect
from rolljax.concurrency.lockstep import SINGLE_PROCESS, Follower, Leader, SingleProcess
from rolljax.errors import ConfigError, InfraError, RolljaxError, SamplerError, boundary
from rolljax.model.axes import SLOT_AXES
from rolljax.run.policy import sampler_recipe
from rolljax.run.preflight import load_chat, resolve
from rolljax.run.weight_channel import PART_CALLS, StorePart, StoreSink, weight_list
from rolljax.sampler.client import Pending, Sampler
from rolljax.sampler.engine import LOCKSTEP_CALLS, Engine, EngineWorker
from rolljax.sampler.weights import Snapshot

RETRY_S = 0.5
"""Seconds between attempts to reach the controller."""
TOKENS_S = 0.02
"""Longest time that tokens of a request which continues wait for those of later dispatches, to travel in one frame."""


class SamplerHost:
    """Serves one controller after the other, until one ends the run.

    Args:
      address, key: of the controller. name: of this sampler.
      rejoin_s: longest time without a controller. say: shows a line of progress. team: the processes of the sampler.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        name: str,
        rejoin_s: float,
        say: Callable[[str], None],
        team: SingleProcess | Leader = SINGLE_PROCESS,
    ) -> None:
        self._address, self._key, self.name, self._rejoin_s, self.say = address, key, name, rejoin_s, say
        team.handshake(json.dumps(software()))
        self.part = _share(team)
        self.engine: BuiltSampler | None = None
        self.process = secrets.token_hex(8)
        """Random name of this process, by which a controller knows it when it connects again."""
        self._reached_s = -math.inf
        self.epoch = 0
        """Highest epoch of a controller so far."""

    def run(self) -> None:
        """Serve until the run is over.

        Raises:
          ConfigError: the controller refused this sampler. InfraError: no controller was there for `rejoin_s`.
          SamplerError: the engine has stopped.
        """
        try:
            while asyncio.run(self._serve(self._reach())):
                pass
        finally:
            if self.engine:
                self.engine.close()

    async def _serve(self, connection: socket.socket) -> bool:
        """Serve a controller; return whether to look for another one, because this one was lost."""
        session = _Session(self, connection)
        try:
            return await session.run()
        finally:
            session.close()

    def _reach(self) -> socket.socket:
        host, port = self._address
        end_s = time.monotonic() + self._rejoin_s
        time.sleep(max(0.0, self._reached_s + RETRY_S - time.monotonic()))  # its controllers end at once
        while True:
            try:
                connection = connect(self._address, self._key)
                self._reached_s = time.monotonic()
                return connection
            except AuthenticationError:
                raise ConfigError(f"is not the key of the controller at {host}:{port}", setting="--key_file") from None
            except (OSError, EOFError) as e:
                if time.monotonic() > end_s:
                    raise InfraError(f"no controller at {host}:{port} for {self._rejoin_s:.0f} s: {e}") from None
                time.sleep(RETRY_S)


class SamplerPart:
    """The part of a sampler in one of its processes: engine and weights of the devices of this process."""

    worker: EngineWorker
    weights: StorePart

    def __init__(self, team: SingleProcess | Leader | Follower) -> None:
        self._team = team

    def build(self, settings: Mapping[str, Any]) -> None:
        """Build the engine of a job with these settings (`run.policy.sampler_settings`), in place of the last one."""
        resolved = resolve(sampler_recipe(settings))
        model, mesh = resolved.model, resolved.sampler_mesh
        assert mesh is not None
        worker = EngineWorker(Engine(model.plain, resolved.recipe.sampler, mesh, SLOT_AXES))
        self.weights = self._team.share("weights", StorePart(model, mesh, worker, self._team), PART_CALLS)
        self.worker = self._team.share("engine", worker, LOCKSTEP_CALLS)


def _share(team: SingleProcess | Leader | Follower) -> SamplerPart:
    """Return this process's part of a sampler, shared with its other processes."""
    return team.share("sampler", SamplerPart(team), ("build",))


def follow(team: Follower) -> int:
    """Follow the first process of a sampler until it ends; return its exit code.

    Raises:
      ConfigError: this process has other software. InfraError: the first process is lost.
    """

    def check(theirs: str) -> None:
        if (ours := json.dumps(software())) != theirs:
            raise ConfigError(f"is {ours} here, and {theirs} in the sampler's first process", setting="rolljax")

    _share(team)
    team.serve(check)
    return team.code


class BuiltSampler:
    """The engine of a job, and the sampler over it once there are weights.

    Args:
      part: of this process.
    """

    def __init__(self, job: SamplerJob, part: SamplerPart) -> None:
        resolved = resolve(sampler_recipe(job.settings))
        self.job, self.vocabulary = job, load_chat(resolved).vocabulary
        for theirs, ours in zip(job.weights, map(list, weight_list(resolved.model)), strict=False):
            if ours != theirs:
                raise ConfigError(f"has other weights here: {ours}, the trainer's are {theirs}", setting="Recipe.model")
        part.build(job.settings)
        self.worker, self.sink = part.worker, StoreSink(part.weights)
        self.sampler: Sampler | None = None

    def take(self, snapshot: Snapshot) -> None:
        """Use weights that were fetched. The first ones start the sampler, which compiles its programs."""
        if self.sampler is not None:
            self.sampler.swap(snapshot.version)
            return
        self.sink.swap(snapshot.version)
        self.sampler = Sampler(
            self.worker.engine,
            None,
            snapshot.version,
            vocabulary=self.vocabulary,
            longest_prompt=self.job.longest_prompt,
            multi_turn=self.job.multi_turn,
            worker=self.worker,
            sink=self.sink,
        )

    def close(self) -> None:
        """Stop the sampler."""
        if self.sampler:
            self.sampler.close()


class _Session:
    """The time with one controller. Frames are handled on the event loop; building and weights have a thread."""

    def __init__(self, host: SamplerHost, connection: socket.socket) -> None:
        self._host, self._loop = host, asyncio.get_running_loop()
        self._over: asyncio.Future[bool] = self._loop.create_future()
        self._blocking = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="rolljax-weights")
        self._channel = Channel(connection, "the controller", self._arrived, self._lost)
        self._pulse: Pulse | None = None
        self._newest: Snapshot | None = None
        self._told_ready = False
        self._pending: dict[int, Pending] = {}
        self._parts: list[tuple[int, Any]] = []
        self._ended: list[tuple[int, str, float, float, int]] = []
        self._failed: list[tuple[int, str]] = []
        self._flushing: asyncio.Handle | None = None
        """The next `_flush`, while only tokens wait for it."""
        self._flush_is_due = False
        """Whether the next `_flush` comes at once."""
        self._lock = threading.Lock()

    async def run(self) -> bool:
        """Work until the controller is lost (True) or ends the run (False)."""
        self._channel.start()
        self._channel.send(
            "hello",
            {
                **software(),
                "name": self._host.name,
                "process": self._host.process,
                "host": socket.gethostname(),
                "kind": jax.devices()[0].device_kind,
            },
        )
        return await self._over

    def close(self) -> None:
        """End the connection and all requests of this controller."""
        if self._pulse:
            self._pulse.close()
        self._channel.end("the sampler has left")
        for pending in self._pending.values():
            pending.abort()
        self._blocking.shutdown(wait=True, cancel_futures=True)

    # ---- what comes from other threads

    def _arrived(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._handle, frame)

    def _lost(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the session is over
            self._loop.call_soon_threadsafe(self._end, True, f"the controller is lost: {reason}")

    def _end(self, again: bool, text: str) -> None:
        if not self._over.done():
            self._host.say(text)
            self._over.set_result(again)

    def _fail(self, error: BaseException) -> None:
        """Report an error to the controller, and end this process with it."""
        text = str(error) if isinstance(error, RolljaxError) else f"{type(error).__name__}: {error}"
        self._channel.send("stopped", {"text": text})
        self._channel.finish()
        if not self._over.done():
            self._over.set_exception(error)

    # ---- frames

    def _handle(self, frame: Frame) -> None:
        try:
            with boundary(SamplerError, f"a frame `{frame.kind}` of the controller"):
                self._handle_frame(frame)
        except RolljaxError as e:
            self._fail(e)

    def _handle_frame(self, frame: Frame) -> None:
        fields, kind = frame.fields, frame.kind
        if kind == "refuse":
            raise ConfigError(f"refuses this sampler: {fields['reason']}", setting="the controller")
        if kind == "job":
            self._start(SamplerJob(**fields))
        elif kind == "weights":
            with self._lock:
                self._newest = Snapshot(fields["version"], location=fields["location"], epoch=fields["epoch"])
            self._in_thread(self._take_weights)
        elif kind == "submit":
            self._submit(frame)
        elif kind == "abort":
            for number in fields["numbers"]:
                if pending := self._pending.get(number):
                    pending.abort()
        elif kind in ("score", "warm_up"):
            asyncio.ensure_future(self._call(frame))
        elif kind == "end":
            self._end(False, "the run is over")

    def _start(self, job: SamplerJob) -> None:
        host = self._host
        if job.epoch < host.epoch:
            self._channel.send("stopped", {"text": f"it serves a later controller, of epoch {host.epoch}"})
            self._channel.finish()
            return
        host.epoch = job.epoch
        self._pulse = Pulse(job.heartbeat_s, job.lost_s, self._heartbeat)
        self._pulse.watch(self._channel)
        self._in_thread(self._build, job)

    def _submit(self, frame: Frame) -> None:
        sampler = self._sampler()
        release = sampler.hold()
        for request in unpack_requests(frame.fields, frame.arrays):
            number = request.number
            try:
                pending = sampler.submit(
                    request.prompt_ids,
                    request.params,
                    request.address,
                    priority=request.priority,
                    resume=request.resume,
                    on_tokens=lambda part, number=number: self._sampled(number, part),  # type: ignore[misc]
                )
            except SamplerError as e:
                self._failed.append((number, str(e)))
                self._flush_soon()
                continue
            self._pending[number] = pending
            pending.completion.add_done_callback(lambda future, number=number: self._completed(number, future))  # type: ignore[misc]
        release()

    async def _call(self, frame: Frame) -> None:
        number = frame.fields["number"]
        try:
            if frame.kind == "score":
                self._channel.send("score", {"number": number}, [await self._sampler().score(frame.arrays[0])])
                return
            await self._sampler().warm_up(
                lambda done, total: self._channel.send("progress", {"number": number, "done": done, "total": total})
            )
            self._channel.send("warm_up", {"number": number})
        except SamplerError as e:
            self._channel.send("failed", {"number": number, "text": str(e)})

    def _sampler(self) -> Sampler:
        engine = self._host.engine
        if engine is None or engine.sampler is None:
            raise SamplerError("the sampler is not ready")
        return engine.sampler

    # ---- the thread of weights

    def _in_thread(self, work: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            if self._channel.is_open:
                with boundary(SamplerError, work.__name__.strip("_")):
                    work(*args)

        def report(future: concurrent.futures.Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()):
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._fail, error)

        self._blocking.submit(run).add_done_callback(report)

    def _build(self, job: SamplerJob) -> None:
        host = self._host
        if host.engine is None or (host.engine.job.run, host.engine.job.settings) != (job.run, job.settings):
            self._say("building the engine")
            if host.engine:
                host.engine.close()
            host.engine = BuiltSampler(job, host.part)
        self._say("waiting for weights")

    def _take_weights(self) -> None:
        with self._lock:
            snapshot, self._newest = self._newest, None
        engine = self._host.engine
        if snapshot is None or engine is None:  # a newer snapshot came before this one was read
            return
        if self._told_ready and engine.sampler is not None and engine.sampler.version >= snapshot.version:
            return
        try:
            engine.sink.prepare(snapshot)
        except SamplerError as e:
            self._host.say(str(e))
            self._channel.send("unfit", {"version": snapshot.version, "text": str(e)})
            return
        if engine.sampler is None:
            self._say("compiling")
        engine.take(snapshot)
        sampler = engine.sampler
        assert sampler is not None
        if self._told_ready:
            self._channel.send("swapped", {"version": sampler.version})
            return
        self._told_ready = True
        self._host.say(f"ready, with weights of version {sampler.version}")
        self._channel.send("ready", {"version": sampler.version, **_numbers(sampler)})

    def _say(self, text: str) -> None:
        self._host.say(text)
        self._channel.send("state", {"text": text})

    # ---- results

    def _heartbeat(self) -> dict[str, Any]:
        engine = self._host.engine
        if not self._told_ready or engine is None or engine.sampler is None:
            return {}
        return _numbers(engine.sampler)

    def _sampled(self, number: int, part: Any) -> None:
        self._parts.append((number, part))
        if not self._flush_is_due and self._flushing is None:
            self._flushing = self._loop.call_later(TOKENS_S, self._flush)

    def _completed(self, number: int, future: asyncio.Future[Any]) -> None:
        self._pending.pop(number, None)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._failed.append((number, str(error)))
        elif not future.cancelled():
            done = future.result()
            self._ended.append((number, done.finish_reason, done.queue_s, done.sample_s, done.cached_tok))
        self._flush_soon()
        if (stopped := self._sampler().error) is not None:
            self._fail(stopped)

    def _flush_soon(self) -> None:
        """Send everything in one frame: the ends of a dispatch come one turn of the loop after its tokens."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._loop.call_soon, self._flush)

    def _flush(self) -> None:
        if self._flushing:
            self._flushing.cancel()
        self._flushing, self._flush_is_due = None, False
        parts, self._parts = self._parts, []
        ended, self._ended = self._ended, []
        failed, self._failed = self._failed, []
        sizes, columns = pack_sampled([part for _, part in parts])
        fields = {"numbers": [number for number, _ in parts], "sizes": sizes, "ended": ended, "failed": failed}
        self._channel.send("tokens", {**fields, **_numbers(self._sampler())}, columns)


def _numbers(sampler: Sampler) -> dict[str, Any]:
    """Return the totals and the load of a sampler, as frames carry them: values in the order of the fields."""
    totals = [value.item() if isinstance(value, np.generic) else value for value in vars(sampler.stats).values()]
    return {"stats": totals, "load": dataclasses.astuple(sampler.load())}
