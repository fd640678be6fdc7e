"""The pool's end of the link to worker processes, used by the dispatcher's thread. The other end: `fork_server.py`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pickle
import re
import selectors
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from rolljax import sandbox
from rolljax.concurrency.child import OUTSIDE, Child, ChildError, LinePipe, how_it_ended, pickled, python_path
from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import wire
from rolljax.envs.pool.fork_server import END_S, ORDER, OUTPUT_BYTES
from rolljax.envs.pool.link import Cause, LinkEvents
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import ConfigError, needed

NUM_PROCESSES = max(8, min(64, 2 * (os.cpu_count() or 1)))
LINGER_S = 0.2
"""Seconds after which a worker that closed its connection but still runs is killed."""
SECRET = re.compile(r"(^|_)(API|AUTH|CREDENTIALS?|KEY|PASSWD|PASSWORD|PAT|SECRET|TOKEN)(_|$)", re.IGNORECASE)


def worker_environ(environ: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Return the variables for processes that run environments: ours, without names that look like secrets. If an
    environment uses JAX, it stays off the accelerators; numeric libraries start no threads, as workers are many."""
    kept = {k: v for k, v in environ.items() if k in pass_env or not SECRET.search(k)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return (
        threads
        | kept
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": python_path(),
        }
    )


def spec_bytes(spec: EnvSpec) -> bytes:
    """Serialize the environment's settings for another process.

    Classes and functions that it cannot import (of a notebook or of the started script, lambdas, nested ones) are sent
    by value, with the globals that they use.

    Raises:
      ConfigError: the settings hold an object that cannot be sent (an open file, a lock, a connection); or cloudpickle
        is missing.
    """
    with needed("cloudpickle", "PoolConfig.where", otherwise="set PoolConfig.where = 'thread'"):
        import cloudpickle

    cls, remedy = type(spec), "open what cannot be sent in reset, or PoolConfig.where = 'thread'"
    try:
        return bytes(cloudpickle.dumps(spec))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as e:
        raise ConfigError(f"cannot be sent to worker processes: {e}", setting=cls.__qualname__, remedy=remedy) from e


@dataclasses.dataclass(eq=False)
class _ProcessPeer:
    """The pool's end of the connection to a worker."""

    generation: int
    sock: socket.socket
    pipe: LinePipe
    ready: bool = False
    writing: bool = False
    open: bool = True
    shut_s: float = 0.0
    """Time at which the connection to the worker was closed."""
    closed_itself: bool = False


class ProcessLink:
    """Worker processes, forked by one fork server."""

    def __init__(self, cfg: PoolConfig, spec: EnvSpec) -> None:
        self._cfg = cfg
        memory_bytes = int(cfg.memory_gib * 2**30)
        self._first = pickled((spec_bytes(spec), cfg.max_observation_bytes, memory_bytes, sandbox.settings()))
        self._peers: dict[int, _ProcessPeer] = {}
        self._failed: collections.deque[tuple[int, str]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._fork_server: Child | None = None
        self._control: socket.socket | None = None

    @property
    def num_workers(self) -> int:
        return self._cfg.workers or NUM_PROCESSES

    def is_oversized(self, generation: int) -> bool:
        return False

    def start(self, generation: int) -> None:
        try:
            self._start_fork_server()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [ORDER.pack(b"F", generation)], [theirs.fileno()])
        except (OSError, ChildError) as e:
            self._failed.append((generation, f"it could not be started: {e}"))
            return
        max_bytes = wire.max_reply_bytes(self._cfg.max_observation_bytes)
        peer = _ProcessPeer(generation, ours, LinePipe(ours.fileno(), ours.fileno(), max_bytes))
        self._peers[generation] = peer
        self._selector.register(ours, selectors.EVENT_READ, peer)

    def send(self, generation: int, requests: Sequence[wire.Request]) -> None:
        peer = self._peers.get(generation)
        if peer is not None and peer.open:
            peer.pipe.send(pickled(list(requests)).encode())
            self._watch(peer)

    def kill(self, generation: int) -> None:
        peer = self._peers.pop(generation, None)
        if peer is None:
            return
        self._shut(peer)
        self._order_kill(generation)
        if not peer.ready and not any(p.ready for p in self._peers.values()):  # none ready: replace it
            self._end_fork_server(grace_s=0.0)
            self._failed.extend((g, "the process that starts workers did not answer") for g in self._peers)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full, or closed: either way no wake-up is needed
            self._waker.send(b"\0")

    def poll(self, timeout_s: float, events: LinkEvents) -> None:
        while self._failed:
            generation, why = self._failed.popleft()
            events.ended(generation, why, "machine")
            timeout_s = 0.0
        for peer in self._peers.values():
            if not peer.open and not peer.closed_itself:
                timeout_s = min(timeout_s, LINGER_S)
                if time.monotonic() - peer.shut_s > LINGER_S:
                    peer.closed_itself = True
                    self._order_kill(peer.generation)
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif isinstance(key.data, _ProcessPeer):
                if mask & selectors.EVENT_WRITE and key.data.open:
                    key.data.pipe.write()
                    self._watch(key.data)
                if mask & selectors.EVENT_READ and key.data.open:
                    self._read(key.data, events)
            elif key.data is self._fork_server:  # and not a fork server that has ended
                self._read_news(events)
                if key.data is self._fork_server and key.fd not in key.data.outputs:  # an environment has closed it
                    self._selector.unregister(key.fd)

    def close(self) -> None:
        for generation in list(self._peers):
            self._shut(self._peers.pop(generation))
        self._end_fork_server()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    # workers

    def _watch(self, peer: _ProcessPeer) -> None:
        """Watch for room in the pipe while there is unsent data."""
        if bool(peer.pipe.unsent) != peer.writing:
            peer.writing = bool(peer.pipe.unsent)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writing else 0)
            self._selector.modify(peer.sock, mask, peer)

    def _read(self, peer: _ProcessPeer, events: LinkEvents) -> bool:
        """Forward a worker's output; return False if there is nothing more to read now."""
        came = peer.pipe.read()
        try:
            while peer.pipe.ready:
                line = peer.pipe.take()
                if peer.ready:
                    events.replied(peer.generation, line)
                elif line == wire.HELLO:
                    peer.ready = True
                    events.ready(peer.generation)
                else:
                    raise ChildError("sent something before it was ready", "protocol")
        except ChildError as e:
            events.ended(peer.generation, f"it {e}", "crash")
        if not peer.pipe.open:  # the fork server will tell how it ended
            self._shut(peer)
        return came and peer.open

    def _shut(self, peer: _ProcessPeer) -> None:
        if peer.open:
            peer.open, peer.shut_s = False, time.monotonic()
            self._selector.unregister(peer.sock)
            peer.sock.close()

    def _order_kill(self, generation: int) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.sendall(ORDER.pack(b"K", generation))

    # the fork server

    def _start_fork_server(self) -> None:
        if self._fork_server is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            fd = theirs.fileno()
            self._fork_server = child = Child(
                [sys.executable, "-P", "-m", "rolljax.envs.pool.fork_server", str(fd)],
                worker_environ(os.environ, self._cfg.pass_env),
                fds=[fd],
                max_bytes=8 * OUTPUT_BYTES,
                survives_s=3 * END_S,
            )
            on_failure.pop_all()
        for fd in child.outputs:
            self._selector.register(fd, selectors.EVENT_READ, child)
        self._control = ours
        child.send(self._first.encode())
        child.flush()

    def _read_news(self, events: LinkEvents) -> None:
        """Read the news of ended workers, or the end of the fork server itself."""
        assert self._fork_server is not None
        try:
            told = [json.loads(line) for line in self._fork_server.arrived()]
            news = [(int(t["generation"]), t["code"], str(t["output"])) for t in told]
        except (ValueError, KeyError, TypeError, ChildError):
            state = self._end_fork_server()
            for generation in list(self._peers):
                events.ended(generation, f"the process that starts workers {state}", "machine")
            return
        for generation, code, output in news:
            peer = self._peers.get(generation)
            if peer is None:
                continue
            while peer.open and self._read(peer, events):  # the lines that it sent before it ended
                pass
            if generation in self._peers:
                why, cause = _why(code, peer.pipe.rest_bytes)
                if peer.closed_itself:
                    why, cause = "it closed its connection", "crash"
                events.ended(generation, why, cause, output)

    def _end_fork_server(self, grace_s: float = 3 * END_S) -> str:
        """Close the fork server's socket, upon which it ends its workers and itself; kill it if it does not. Return how
        it ended."""
        child, control = self._fork_server, self._control
        self._fork_server = self._control = None
        if child is None or control is None:
            return ""
        for fd, key in list(self._selector.get_map().items()):
            if key.data is child:
                self._selector.unregister(fd)
        control.close()
        child.stop(grace_s)
        return child.state()


def _why(code: int | None, rest: int) -> tuple[str, Cause]:
    """Return the explanation of an exit code, and its cause. rest: bytes of an incomplete line from the worker."""
    if code is None:
        return "it could not be forked", "machine"
    cut = f", in the middle of a line ({rest} bytes of it came)" if rest else ""
    return f"it {how_it_ended(code)}{cut}", "unknown" if -code in OUTSIDE else "crash"
