"""The processes of one run, in lock step: the first leads; the others run the same calls on their devices.

A program whose arrays lie on a mesh of several processes runs when all of them start it, and all must start theirs in
one order. Every process constructs the same objects and shares them under the same names. In the leader `share` gives a
proxy, which broadcasts a method's name and arguments before it calls that method (`Lockstep`); the others call the
method of their own object (`Follower.serve`). Only the leader has environments, a scheduler and a run folder to write;
the data that the others need from these is sent as arguments.

A process that is lost cannot be replaced, and work that it took part in may wait for it forever: the others end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, TypeVar, cast

from rolljax.concurrency.waits import Inbox
from rolljax.errors import InfraError, RolljaxError, TrainerError

JOIN_S = 300.0
"""Longest wait for all processes to connect."""
GRACE_S = 30.0
"""Time for a process to end in order once it must; then it is killed, wherever it waits."""
NOTICE_S = 2.0
"""A failure caused by a lost process may be seen before the loss: the loss is awaited for this long."""
CALL, HANDSHAKE, SAYS, STOP, FAILED, RAISE, END = "call", "handshake", "says", "stop", "failed", "raise", "end"
_KEY_BYTES, _ADDRESS_BYTES = 32, 256
T = TypeVar("T")


class SingleProcess:
    """The only process of a run: there are no others to notify."""

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Wrap all work of the run: notify the other processes of a failure, and turn a failure caused by a lost
        process into an error that names this cause."""
        return contextlib.nullcontext()

    def share(self, name: str, own: T, calls: Collection[str]) -> T:
        """Return the object to use in place of this process's `own`; every process has one under this name.

        A call of a method named in `calls` is repeated in all processes. Calls from all threads of this process have
        one order, which the others keep; the results are those of this process. All other attributes are accessed in
        this process alone.

        Raises (as do methods of the result):
          InfraError: a process is lost.
        """
        return own

    def handshake(self, text: str) -> None:
        """Wait until all others have found `text` in order."""

    def collect(self, name: str, own: str) -> list[str]:
        """Return, in the first process, the texts that all processes give under this name; the others do not wait, and
        get an empty list. No call is held up: any one thread of each process may use a name.

        Raises:
          InfraError: a process is lost.
        """
        return [own]

    def should_stop(self, is_told: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns whether this process (`is_told`) or another one was asked to stop.

        Raises (as does the result):
          InfraError: a process is lost.
        """
        return is_told

    def end(self, code: int) -> None:
        """End the run; called last. The others end with the same exit code."""


SINGLE_PROCESS = SingleProcess()


class _Member:
    """Common part of leaders and followers: connections, each read by a thread, and the handling of a lost one."""

    def __init__(self, at_once: bool = False) -> None:
        self._grace_s = 0.0 if at_once else GRACE_S
        self._loss = ""
        self._is_lost = threading.Event()
        self._has_ended = False

    def _listen(self, connection: Connection, other: str) -> None:
        try:
            while True:
                self._take(other, *connection.recv())
        except (EOFError, OSError):
            loss = f"{other} ended before the run did"
        except Exception as e:  # border: the thread ends
            loss = f"what {other} said cannot be read: {type(e).__name__}: {e}"
        if not self._has_ended:
            self._lose(loss)

    def _take(self, other: str, kind: str, payload: Any) -> None:
        raise NotImplementedError

    def _start(self, connection: Connection, other: str) -> None:
        threading.Thread(target=self._listen, args=(connection, other), daemon=True).start()

    def _lose(self, text: str) -> None:
        if not self._is_lost.is_set():
            self._loss = text
            self._cut_off(f"{InfraError.owner} error: {text}", InfraError.exit_code, self._grace_s)
            self._is_lost.set()

    def _check(self) -> None:
        if self._is_lost.is_set():
            raise InfraError(self._loss)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # border: the loss of a process may be the cause
            if self._is_lost.wait(NOTICE_S):
                raise InfraError(self._loss) from e
            self._failed(e)
            raise

    def _failed(self, error: Exception) -> None:
        """Note that this process has failed by itself."""

    def _cut_off(self, text: str, code: int, after_s: float) -> None:
        """End this process before long: the main thread may wait for a device that waits for another process."""

        def cut() -> None:
            if text:
                print(text, file=sys.stderr)  # noqa: T201
            _exit(code)

        timer = threading.Timer(after_s, cut)
        timer.daemon = True
        timer.start()


class Leader(_Member):
    """The first process; `SingleProcess` documents the methods."""

    def __init__(self, connections: dict[int, Connection], at_once: bool = False) -> None:
        super().__init__(at_once)
        self._lock = threading.Lock()
        self._connections = connections
        self._stop = threading.Event()
        self._said: dict[str, Inbox[str]] = {}
        for number, connection in connections.items():
            self._start(connection, f"process {number}")

    def _take(self, other: str, kind: str, payload: Any) -> None:
        if kind == STOP:
            self._stop.set()
        elif kind == SAYS:
            name, text = payload
            self._inbox(name).put(text)
        else:
            self._lose(f"{other} failed: {payload}")

    def _send(self, kind: str, payload: Any) -> None:
        data = pickle.dumps((kind, payload), protocol=pickle.HIGHEST_PROTOCOL)
        for number, connection in self._connections.items():
            try:
                connection.send_bytes(data)
            except OSError:
                self._lose(f"process {number} ended before the run did")
                self._check()

    def share(self, name: str, own: T, calls: Collection[str]) -> T:
        return cast(T, Lockstep(self, name, own, calls))

    @contextlib.contextmanager
    def broadcast(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Wrap this process's own call of a method: the others learn of it, and no other call starts meanwhile.

        Raises:
          InfraError: a process is lost.
        """
        with self._lock:
            self._check()
            self._send(CALL, (name, method, args, kwargs))
            yield

    def handshake(self, text: str) -> None:
        self._send(HANDSHAKE, text)
        self.collect(HANDSHAKE, "")

    def collect(self, name: str, own: str) -> list[str]:
        said = [own]
        while len(said) <= len(self._connections):
            self._check()
            with contextlib.suppress(queue.Empty):
                said.append(self._inbox(name).take(0.1))
        return said

    def _inbox(self, name: str) -> Inbox[str]:
        return self._said.setdefault(name, Inbox("the leader"))

    def should_stop(self, is_told: Callable[[], bool]) -> Callable[[], bool]:
        def asked() -> bool:
            self._check()
            return self._stop.is_set() or is_told()

        return asked

    def end(self, code: int) -> None:
        self._has_ended = True
        if self._is_lost.is_set():
            _exit(code)  # in order it would wait for the lost one
        with contextlib.suppress(InfraError):
            self._send(END, code)
        self._cut_off("", code, GRACE_S)


class Lockstep:
    """The leader's way to an object that every process has one of: methods in `calls` are broadcast, then called."""

    def __init__(self, leader: Leader, name: str, own: Any, calls: Collection[str]) -> None:
        self._leader, self._name, self._own, self._calls = leader, name, own, calls

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._own, attribute)
        if attribute not in self._calls:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._leader.broadcast(self._name, attribute, args, kwargs):
                return found(*args, **kwargs)

        return call


class Follower(_Member):
    """Any other process."""

    code = 0
    """The leader's exit code."""

    def __init__(self, connection: Connection, at_once: bool = False) -> None:
        super().__init__(at_once)
        self._connection, self._saying = connection, threading.Lock()
        self._inbox: Inbox[tuple[str, Any]] = Inbox("the main thread")
        self._shared: dict[str, Any] = {}
        self._start(connection, "process 0")

    def _take(self, other: str, kind: str, payload: Any) -> None:
        self._has_ended |= kind == END
        self._inbox.put((kind, payload))

    def _lose(self, text: str) -> None:
        super()._lose(text)
        self._inbox.put((FAILED, text))

    def ask_to_stop(self) -> None:
        """Ask the leader to end the run after this step."""
        self._say(STOP)

    def share(self, name: str, own: T, calls: Collection[str]) -> T:
        """Let the leader's calls of the object that it shares under this name be made of `own`."""
        self._shared[name] = own
        return own

    def serve(self, check: Callable[[str], None]) -> None:
        """Repeat the leader's calls, one after the other, until it ends the run.

        A `TrainerError` of a call is ignored here: the leader has the same error, reports it and ends the run.

        Args:
          check: called with the text of the handshake; raises if this process does not match the leader.

        Raises:
          InfraError: the leader is lost. Also all exceptions of `check` and of the calls, and those given to `fail`.
        """
        while True:
            kind, payload = self._inbox.take()
            if kind == END:
                self.code = payload
                return
            self._check()
            if kind == RAISE:
                raise payload
            if kind == HANDSHAKE:
                check(payload)
                self.collect(HANDSHAKE, "")
            else:
                name, method, args, kwargs = payload
                with contextlib.suppress(TrainerError):
                    getattr(self._shared[name], method)(*args, **kwargs)

    def collect(self, name: str, own: str) -> list[str]:
        self._say(SAYS, (name, own))
        return []

    def fail(self, error: BaseException) -> None:
        """End the run because of an error of another thread of this process, after the call under way."""
        self._inbox.put((RAISE, error))

    def _failed(self, error: Exception) -> None:
        self._say(FAILED, str(error) if isinstance(error, RolljaxError) else f"{type(error).__name__}: {error}")

    def _say(self, kind: str, payload: Any = None) -> None:
        with self._saying, contextlib.suppress(OSError):  # a leader that is gone is noticed where it is listened to
            self._connection.send((kind, payload))

    def end(self, code: int) -> None:
        if self._has_ended:
            self._cut_off("", code, GRACE_S)
        else:
            _exit(code)


def join(processes: int, at_once: bool = False) -> SingleProcess | Leader | Follower:
    """Connect the processes that `distributed.start` has joined; all of them call it.

    Args:
      at_once: end without `GRACE_S` when another process is lost: this one has nothing to save.

    The channel is TCP from the first process to each other one. Its address and a random key reach them over the mesh.

    Raises:
      InfraError: they do not find each other.
    """
    if processes == 1:
        return SINGLE_PROCESS
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    told = np.zeros(_KEY_BYTES + _ADDRESS_BYTES, np.uint8)
    if jax.process_index() == 0:
        key = secrets.token_bytes(_KEY_BYTES)
        with Listener(("", 0), backlog=processes, authkey=key) as listener:
            text = key + f"{own_host()}:{listener.address[1]}".encode()
            told[: len(text)] = np.frombuffer(text, np.uint8)
            broadcast_one_to_all(told)
            return Leader(accept(listener, processes - 1), at_once)
    data = np.asarray(broadcast_one_to_all(told)).astype(np.uint8).tobytes()
    key, address = data[:_KEY_BYTES], data[_KEY_BYTES:].rstrip(b"\0").decode()
    host, port = address.rsplit(":", 1)
    try:
        return Follower(connect((host, int(port)), key, jax.process_index()), at_once)
    except (OSError, EOFError, AuthenticationError) as e:
        raise InfraError(f"process 0 cannot be reached at {address}: {type(e).__name__}: {e}") from e


def accept(listener: Listener, count: int) -> dict[int, Connection]:
    """Accept the connections of `count` other processes, by process number; a peer without the key is rejected."""
    found: dict[int, Connection] = {}
    has_all, too_late = threading.Event(), threading.Event()

    def run() -> None:
        while len(found) < count and not too_late.is_set():
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                connection = _without_delay(listener.accept())
                found[connection.recv()] = connection
        has_all.set()

    threading.Thread(target=run, daemon=True).start()
    if not has_all.wait(JOIN_S):
        too_late.set()
        raise InfraError(f"only {len(found)} of {count} other processes have connected within {JOIN_S:.0f} s")
    return found


def connect(address: tuple[str, int], key: bytes, process: int) -> Connection:
    """Connect to one of the others."""
    connection = _without_delay(Client(address, authkey=key))
    connection.send(process)
    return connection


def _without_delay(connection: Connection) -> Connection:
    """Send small messages at once; by default those of a turn would wait for the receipt of the last one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def own_host() -> str:
    """Return a name or address of this machine that the others can reach."""
    import jax

    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[0]
    if coordinator and jax.process_index() == 0:
        return coordinator
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((coordinator or "10.255.255.255", 1))  # sends nothing: it only picks the interface
        return s.getsockname()[0]


def gather(text: str) -> list[str]:
    """Return the texts of all processes, which call it at the same time; each has at most `_ADDRESS_BYTES` bytes."""
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    told = np.frombuffer(text.encode().ljust(_ADDRESS_BYTES, b"\0"), np.uint8)
    return [
        row.astype(np.uint8).tobytes().rstrip(b"\0").decode()
        for row in np.reshape(process_allgather(told), (-1, len(told)))
    ]


def barrier(name: str, timeout_s: float) -> Callable[[], None]:
    """Return a function that returns when all processes have called it, for any one thread of each: it runs no program
    on their devices. Its name is used once.

    The function raises:
      InfraError: some have not called it within `timeout_s`.
    """
    import jax

    if jax.process_count() == 1:
        return lambda: None
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    meet, numbers = get_barrier_sync_fn(), itertools.count()

    def wait() -> None:
        try:
            meet(key=f"{name}, {next(numbers)}", timeout_ms=int(1000 * timeout_s))
        except jax.errors.JaxRuntimeError as e:
            raise InfraError(f"waited {timeout_s:g} s for the other processes: {name}: {e}") from e

    return wait


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
