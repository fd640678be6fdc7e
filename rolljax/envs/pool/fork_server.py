"""The processes that environments run in: `python -m rolljax.envs.pool.fork_server FD`, started by `processes.py`.

The process that is started is the fork server. It loads the environment (`EnvSpec.warm`), once, and forks workers from
that state when the pool asks: a worker costs milliseconds, and nothing was ever forked from a process that holds a
device. The fork server keeps the last output of each worker, says how each ended, and when the pool is gone it ends
them all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Any, TextIO

from rolljax import sandbox
from rolljax.concurrency.child import kill_group, unpickled
from rolljax.envs.pool import wire

ORDER = struct.Struct("!cI")
"""An order of the pool: `F` (fork; the message carries the worker's socket) or `K` (kill), and the worker's generation
number, which is unique."""

OUTPUT_BYTES = 65_536
"""Maximum number of bytes that are kept of the output of each process."""

END_S = 1.0
"""Seconds that workers have to close their episodes after the pool is gone."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Child:
    """A worker as the fork server sees it."""

    def __init__(self, generation: int, pid: int, output: int) -> None:
        self.generation, self.pid, self.output = generation, pid, output
        self.tail = b""

    def drain(self) -> bool:
        """Read the available output and keep its end; False at the end of the output."""
        try:
            data = os.read(self.output, OUTPUT_BYTES)
        except BlockingIOError:
            return True
        self.tail = (self.tail + data)[-OUTPUT_BYTES:]
        return bool(data)


class ForkServer:
    """Forks, watches and reaps workers.

    A line of its input says what to run. It sends a line of JSON, `{"generation", "code", "output"}`, for each worker
    that ended, with the exit code as `subprocess` has it; `code` is null when it could not be forked.

    Args:
      pool: a socket for orders. news: for the lines.
    """

    def __init__(self, pool: socket.socket, news: TextIO) -> None:
        self._pool, self._news = pool, news
        spec, self._max_bytes, self._memory_bytes, sandboxes = unpickled(sys.stdin.buffer.readline())
        sandbox.configure(sandboxes)
        self._spec = pickle.loads(spec)
        with contextlib.suppress(Exception):  # a failure to load raises again in resets
            self._spec.warm()
        self._children: dict[int, _Child] = {}  # by process id
        self._selector = selectors.DefaultSelector()
        self._wake, self._alarm = socket.socketpair()
        for s in (self._wake, self._alarm):
            s.setblocking(False)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(pool, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Serve until the pool is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(4096)
                elif key.fileobj is self._pool:
                    if not self._order():
                        return
                elif key.data.output >= 0 and not key.data.drain():
                    self._selector.unregister(key.fd)
            self._reap()

    def end(self) -> None:
        """Wait briefly for the workers, which notice that the pool is gone, then kill the remaining ones."""
        end = time.monotonic() + END_S
        while self._children and time.monotonic() < end:
            for child in self._children.values():
                child.drain()
            self._reap()
            time.sleep(0.005)
        end = time.monotonic() + END_S
        while (pids := {*self._children, *_children()}) and time.monotonic() < end:
            for pid in pids:  # orphans of a worker become our children when the worker is gone: look again
                _kill(pid)
            time.sleep(0.005)
            self._reap()

    def _order(self) -> bool:
        try:
            order, fds, _, _ = socket.recv_fds(self._pool, ORDER.size, 1)
        except ConnectionResetError:
            return False
        while order and len(order) < ORDER.size:
            more = self._pool.recv(ORDER.size - len(order))
            if not more:
                return False
            order += more
        if not order:
            return False
        what, generation = ORDER.unpack(order)
        if what == b"F":
            self._fork(generation, socket.socket(fileno=fds[0]))
        else:
            for child in self._children.values():
                if child.generation == generation:
                    _kill(child.pid)
        return True

    def _fork(self, generation: int, sock: socket.socket) -> None:
        output, write = os.pipe()
        os.set_blocking(output, False)
        try:
            pid = os.fork()
        except OSError as e:  # EAGAIN, ENOMEM
            os.close(output)
            os.close(write)
            sock.close()
            self._say(generation, None, f"fork: {e}")
            return
        if pid == 0:
            self._become_worker(sock, output, write)
        os.close(write)
        sock.close()
        child = self._children[pid] = _Child(generation, pid, output)
        self._selector.register(output, selectors.EVENT_READ, child)

    def _become_worker(self, sock: socket.socket, output: int, write: int) -> None:
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            self._selector.close()
            for fd in (self._pool, self._news, self._wake, self._alarm):
                fd.close()
            for fd_number in (output, *(c.output for c in self._children.values() if c.output >= 0)):
                os.close(fd_number)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (write, 1), (write, 2)):
                os.dup2(source, target)
            os.close(null)
            os.close(write)
            faulthandler.enable()
            _limit(self._memory_bytes)
            serve(sock, wire.WorkerEpisodes(self._spec, self._max_bytes))
            code = 0
        finally:
            if sys.exc_info()[0] is not None:  # nothing above this frame shows an error of this process
                sys.excepthook(*sys.exc_info())
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._children:
                _kill(pid)  # the processes that it started: its process group still exists
            _, status = os.waitpid(pid, 0)
            child = self._children.pop(pid, None)
            if child is None:
                continue  # an orphan of a worker
            with contextlib.suppress(KeyError):
                self._selector.unregister(child.output)
            child.drain()
            os.close(child.output)
            child.output = -1
            self._say(child.generation, os.waitstatus_to_exitcode(status), child.tail.decode(errors="replace"))

    def _say(self, generation: int, code: int | None, output: str) -> None:
        news: dict[str, Any] = {"generation": generation, "code": code, "output": output}
        with contextlib.suppress(OSError):
            print(json.dumps(news), file=self._news, flush=True)  # noqa: T201


def serve(sock: socket.socket, episodes: wire.WorkerEpisodes) -> None:
    """Answer requests until the pool closes its end, then close the open episodes."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    try:
        sock.sendall(wire.HELLO + b"\n")
        for line in sock.makefile("rb"):
            for request in unpickled(line):
                sock.sendall(episodes.answer(request) + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        pass
    episodes.close()


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # when memory runs out, a worker goes before the trainer


def _prctl(option: int, value: int) -> None:
    """Set a process option on Linux; elsewhere do nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill(pid: int) -> None:
    """Kill a worker and its process group; a process that leads no group alone."""
    if not kill_group(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return orphaned processes of workers that this process has adopted."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            return [int(pid) for pid in f.read().split()]
    except OSError:
        return []


def main() -> None:
    """Serve the pool on the socket whose descriptor is the first argument, until the pool closes it. Standard output
    goes to standard error, so that the pool never reads what environments print."""
    news = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])), news)
    try:
        server.run()
    finally:
        server.end()


if __name__ == "__main__":
    main()
