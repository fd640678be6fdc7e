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
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rolljax.envs.base import EnvSpec
from rolljax.envs.pool import wire
from rolljax.envs.pool.fork_server import END_S, ORDER, OUTPUT_BYTES
from rolljax.envs.pool.link import Cause, LinkEvents
from rolljax.envs.pool.settings import PoolConfig
from rolljax.errors import ConfigError, needed

NUM_PROCESSES = max(8, min(64, 2 * (os.cpu_count() or 1)))
READ_BYTES = 262_144
LINGER_S = 0.2
"""A worker that closed its connection and lives on is killed after this time."""
SECRET = re.compile(r"(^|_)(API|AUTH|CREDENTIALS?|KEY|PASSWD|PASSWORD|PAT|SECRET|TOKEN)(_|$)", re.IGNORECASE)
OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that come from someone else: an operator, the kernel when memory runs out."""


def worker_environ(environ: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Variables for processes that run environments: ours, without what is named like a secret. JAX, should an
    environment use it, stays off the accelerators; numeric libraries start no threads, as workers are many."""
    kept = {k: v for k, v in environ.items() if k in pass_env or not SECRET.search(k)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return (
        threads
        | kept
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        }
    )


def spec_bytes(spec: EnvSpec) -> bytes:
    """The environment's settings for another process. Classes and functions that it cannot import (of a notebook or of
    the script that was started, lambdas, nested ones) travel along by value, with the globals that they use.

    Raises:
      ConfigError: they hold what cannot be sent: an open file, a lock, a connection; or cloudpickle is missing.
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
    """A worker as seen from here."""

    generation: int
    sock: socket.socket
    frames: wire.Frames
    unsent: bytearray = dataclasses.field(default_factory=bytearray)
    ready: bool = False
    writing: bool = False
    open: bool = True
    shut_s: float = 0.0
    """When its end of the connection was closed."""
    closed_itself: bool = False


class ProcessLink:
    """Worker processes, forked by one fork server."""

    def __init__(self, cfg: PoolConfig, spec: EnvSpec) -> None:
        self._cfg = cfg
        self.num_warm = 1
        memory_bytes = int(cfg.memory_gib * 2**30)
        self._first = pickle.dumps((spec_bytes(spec), cfg.max_observation_bytes, memory_bytes))
        self._peers: dict[int, _ProcessPeer] = {}
        self._failed: collections.deque[tuple[int, str]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._news = wire.Frames(0)
        self._output = b""

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
        except OSError as e:
            self._failed.append((generation, f"it could not be started: {e}"))
            return
        ours.setblocking(False)
        peer = _ProcessPeer(generation, ours, wire.Frames(wire.max_reply_bytes(self._cfg.max_observation_bytes)))
        self._peers[generation] = peer
        self._selector.register(ours, selectors.EVENT_READ, peer)

    def send(self, generation: int, requests: Sequence[wire.Request]) -> None:
        peer = self._peers.get(generation)
        if peer is not None and peer.open:
            peer.unsent += wire.requests_frame(requests)
            self._write(peer)

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
                    self._write(key.data)
                if mask & selectors.EVENT_READ and key.data.open:
                    self._read(key.data, events)
            elif key.fileobj is self._control:
                self._read_news(events)
            elif self._fork_server is not None and key.fileobj is self._fork_server.stdout:
                self._keep_output(key.fd)  # and nothing of a fork server that ended meanwhile

    def close(self) -> None:
        for generation in list(self._peers):
            self._shut(self._peers.pop(generation))
        self._end_fork_server()
        self._selector.close()
        self._woken.close()
        self._waker.close()

    # workers

    def _write(self, peer: _ProcessPeer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.sock.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; the fork server reports its end
            peer.unsent.clear()
        if bool(peer.unsent) != peer.writing:
            peer.writing = bool(peer.unsent)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writing else 0)
            self._selector.modify(peer.sock, mask, peer)

    def _read(self, peer: _ProcessPeer, events: LinkEvents) -> bool:
        """Pass on what a worker sent; False when there is nothing more to read now."""
        try:
            data = peer.sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # the fork server will tell how it ended
            self._shut(peer)
            return False
        try:
            for payload in peer.frames.feed(data):
                if peer.ready:
                    events.replied(peer.generation, payload)
                elif payload == wire.HELLO:
                    peer.ready = True
                    events.ready(peer.generation)
                else:
                    raise wire.ProtocolError("something before it was ready")
        except wire.ProtocolError as e:
            events.ended(peer.generation, f"it sent {e}", "crash")
        return peer.open

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
            self._fork_server = subprocess.Popen(
                [sys.executable, "-P", "-m", "rolljax.envs.pool.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=worker_environ(os.environ, self._cfg.pass_env),
                start_new_session=True,
            )
            on_failure.pop_all()
        assert self._fork_server.stdout is not None
        os.set_blocking(self._fork_server.stdout.fileno(), False)
        self._selector.register(self._fork_server.stdout, selectors.EVENT_READ)
        self._selector.register(ours, selectors.EVENT_READ)
        self._control = ours
        self._news = wire.Frames(8 * OUTPUT_BYTES)
        self._output = b""
        ours.sendall(wire.frame(self._first))

    def _read_news(self, events: LinkEvents) -> None:
        """News of workers that ended, or the end of the fork server itself."""
        assert self._control is not None
        try:
            data = self._control.recv(READ_BYTES)
            told = [json.loads(payload) for payload in self._news.feed(data)]
            news = [(int(t["generation"]), t["code"], str(t["output"])) for t in told]
        except (OSError, ValueError, KeyError, TypeError, wire.ProtocolError):
            data, news = b"", []
        for generation, code, output in news:
            peer = self._peers.get(generation)
            if peer is None:
                continue
            while peer.open and self._read(peer, events):  # what it said before it ended
                pass
            if generation in self._peers:
                why, cause = _why(code, peer.frames.rest)
                if peer.closed_itself:
                    why, cause = "it closed its connection", "crash"
                events.ended(generation, why, cause, output)
        if not data:
            self._end_fork_server()
            output = self._output.decode(errors="replace")
            for generation in list(self._peers):
                events.ended(generation, "the process that starts workers ended", "machine", output)

    def _keep_output(self, fd: int) -> None:
        """Keep the end of what the fork server prints."""
        try:
            data = os.read(fd, OUTPUT_BYTES)
        except BlockingIOError:
            return
        self._output = (self._output + data)[-OUTPUT_BYTES:]
        if not data:
            self._selector.unregister(fd)

    def _end_fork_server(self, grace_s: float = 3 * END_S) -> None:
        """Close its socket, which tells it to end its workers and itself; kill it if it does not."""
        server, control = self._fork_server, self._control
        self._fork_server = self._control = None
        if server is None or control is None or server.stdout is None:
            return
        self._selector.unregister(control)
        control.close()
        end = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < end:
            with contextlib.suppress(KeyError, ValueError):
                self._keep_output(server.stdout.fileno())
            time.sleep(0.002)
        if server.poll() is None:
            server.kill()
            server.wait()
        with contextlib.suppress(KeyError, ValueError):
            self._keep_output(server.stdout.fileno())
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(server.stdout)
        server.stdout.close()


def _why(code: int | None, rest: int) -> tuple[str, Cause]:
    """What an exit code says, and who did it."""
    cut = f", in the middle of a frame ({rest} bytes of it came)" if rest else ""
    if code is None:
        return "it could not be forked", "machine"
    if code >= 0:
        return f"it exited with code {code}{cut}", "crash"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code in OUTSIDE:
        return f"it was killed ({name}){cut}", "unknown"
    return f"it crashed ({name}){cut}", "crash"
