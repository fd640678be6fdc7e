"""Child processes that receive lines and answer with lines.

A `Child` has a clean environment, a session of its own, and a limit on the length of a line. Its standard error is read
while a caller waits for it, and the last lines are part of error messages. When a child ends or is killed, everything
that it started is killed too; when this process dies, `orphan_guard.py` kills its children.

The methods are for one thread at a time, or for one event loop: `receive` and `stop` block, `areceive` and `astop` are
coroutines. `kill` is for every thread.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rolljax.concurrency import orphan_guard
from rolljax.errors import InfraError

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that every child gets."""
LAST_WORDS = 2000
"""Characters of standard error that an error message quotes."""
LINE_ENDS = 200
"""Bytes that are kept of each end of a line that is too long."""
OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that come from someone else: an operator, the kernel when memory runs out."""
CHUNK = 2**18
"""Most bytes of one read."""
_LOOK_S = 0.5
"""Seconds between checks that a child is alive. Its pipes do not tell, since processes that it started may keep them
open."""
_STEP_S = 0.01
_ENDING_S = 1.0
"""Seconds that a child which has closed its output has to end, and its last words have to arrive."""


class ChildError(InfraError):
    """A child failed. kind: it could not start; ended; was silent for too long; sent a line that is too long; or sent a
    line that violates the protocol. line: the received bytes of a line that is unfinished, too long or wrong."""

    def __init__(
        self, text: str, kind: Literal["start", "ended", "silent", "long", "protocol"] = "ended", line: bytes = b""
    ) -> None:
        self.kind, self.line = kind, line
        super().__init__(text, stage="program")


class LinePipe:
    """Lines over descriptors of pipes or sockets, none of whose methods waits.

    skip_long: a line of more than `max_bytes` is an error when it is complete, and the next line can be taken; if
    False, it is an error at once.
    """

    def __init__(self, reads: int, writes: int, max_bytes: int, *, skip_long: bool = False) -> None:
        self._reads, self._writes, self._max_bytes, self._skip_long = reads, writes, max_bytes, skip_long
        for fd in (reads, writes):
            os.set_blocking(fd, False)
        self.open = True
        """Whether more input may arrive."""
        self.unsent, self.rest = bytearray(), bytearray()
        """Bytes not yet written, and the received bytes of an incomplete line (of a line that is too long, both
        ends)."""
        self.lines: collections.deque[tuple[bytes, int]] = collections.deque()
        self.rest_bytes = 0

    @property
    def ready(self) -> bool:
        """Return whether `take` would return a line, or raise for a line that is too long."""
        return bool(self.lines) or (self.rest_bytes > self._max_bytes and not self._skip_long)

    def send(self, line: bytes) -> None:
        """Send a line as far as there is room, and keep the rest for `write`."""
        self.unsent += line + b"\n"
        self.write()

    def write(self) -> None:
        """Write until the pipe is full."""
        try:
            while self.unsent:
                del self.unsent[: os.write(self._writes, self.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the other side has closed its end; its output or exit code tells more
            self.unsent.clear()

    def read(self) -> bool:
        """Read a chunk without waiting; return whether there was one, or the end."""
        if not self.open:
            return False
        try:
            data = os.read(self._reads, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.open = bool(data)
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._add(part)
            self.lines.append((bytes(self.rest), self.rest_bytes))
            self.rest, self.rest_bytes = bytearray(), 0
        self._add(rest)
        return True

    def take(self) -> bytes:
        """Return the next line; only when `ready`.

        Raises:
          ChildError: it is too long.
        """
        line, size = self.lines.popleft() if self.lines else (bytes(self.rest), self.rest_bytes)
        if size > self._max_bytes:
            raise ChildError(f"sent a line of {size} bytes; the limit is {self._max_bytes}", "long", line)
        return line

    def end_sending(self) -> None:
        """Send no more; the descriptor is the caller's to close."""
        self._writes = -1
        self.unsent.clear()

    def _add(self, part: bytes) -> None:
        self.rest += part
        self.rest_bytes += len(part)
        if self.rest_bytes > self._max_bytes:
            del self.rest[LINE_ENDS:-LINE_ENDS]


class Child:
    """A running program.

    Args:
      command: its path or name, and its arguments. env: variables that it gets besides those in `INHERITED`.
      max_bytes, skip_long: of a line that it sends (`LinePipe`). fds: descriptors that it gets.
      log: file for its standard error. survives_s: seconds that it may outlive this process.

    Raises:
      ChildError: it could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        max_bytes: int = 2**24,
        skip_long: bool = False,
        fds: Sequence[int] = (),
        log: Path | None = None,
        survives_s: float = 0.0,
    ) -> None:
        self._log, self._owner = log, os.getpid()
        with contextlib.ExitStack() as files:
            try:
                errors = subprocess.PIPE if log is None else files.enter_context(open(log, "ab"))
                _guard.start()
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=_clean_environ() | dict(env or {}),
                    pass_fds=fds,
                    start_new_session=True,
                )
            except (OSError, ValueError) as e:
                raise ChildError(f"{command[0]} could not be started: {e}", "start") from e
        self.pid = self._process.pid
        _guard.tell(self.pid, survives_s)
        stdin, stdout, self._errors = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None
        self._stdin, self._stdout, self._words = stdin, stdout, b""
        self._pipe = LinePipe(stdout.fileno(), stdin.fileno(), max_bytes, skip_long=skip_long)
        self._errors_open = self._errors is not None
        if self._errors is not None:
            os.set_blocking(self._errors.fileno(), False)
        self._wake: asyncio.Event | None = None
        self._closed = False

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while the child runs. Once it has ended, the processes that it started
        are killed."""
        if self._owner == os.getpid() and self._process.returncode is None and self._process.poll() is not None:
            kill_group(self.pid)
            _guard.tell(self.pid, -1)
        return self._process.returncode

    @property
    def alive(self) -> bool:
        """Return whether the child runs and belongs to this process, not to the process that this one was forked
        from."""
        return self._owner == os.getpid() and self.code is None

    @property
    def outputs(self) -> list[int]:
        """Descriptors that have something to read when `arrived` has something to do."""
        pipes = [(self._pipe.open, self._stdout), (self._errors_open, self._errors)]
        return [pipe.fileno() for is_open, pipe in pipes if is_open and pipe is not None]

    def state(self, running: str = "is running", when: str = "") -> str:
        """Describe whether the child runs or how it ended, with its log file or the end of its standard error."""
        how = running if self.code is None else how_it_ended(self.code)
        words = " ".join(self._words.decode(errors="replace").split())[-LAST_WORDS:]
        more = f"; see {self._log}" if self._log is not None else f"; its last words: {words}" if words else ""
        return how + when + more

    def send(self, line: bytes) -> None:
        """Send a line. Never waits: the part that does not fit into the pipe is sent while an answer is awaited."""
        self._pipe.send(line)
        if self._wake is not None:  # another task waits for pipes whose state has changed
            self._wake.set()

    def flush(self) -> None:
        """Wait until everything is sent or the child has ended."""
        while self._pipe.unsent and self.alive:
            self._wait(_LOOK_S)
            self._move()

    def arrived(self) -> list[bytes]:
        """Return the lines received so far, without waiting.

        Raises:
          ChildError: see `receive`.
        """
        self._move()
        if not self._pipe.ready and (not self._pipe.open or self.code is not None):
            raise self._over()
        lines = []
        while self._pipe.ready:
            lines.append(self._pipe.take())
        return lines

    def receive(self, deadline_s: float) -> bytes:
        """Return the next line.

        Raises:
          ChildError: there is none within `deadline_s`; it is too long; the child has ended.
        """
        end = time.monotonic() + deadline_s
        for wait_s in self._until_line():
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise ChildError(f"has not answered for {deadline_s:g} s", "silent")
            self._wait(min(wait_s, left_s))
        return self._take()

    async def areceive(self) -> bytes:
        """Return the next line.

        Raises:
          ChildError: it is too long, or the child has ended.
        """
        for wait_s in self._until_line():
            await self._await(wait_s)
        return self._take()

    def ask(self, message: Any, deadline_s: float) -> Any:
        """Send a message as JSON, and return the answer, which is JSON too.

        Raises:
          ChildError: see `receive`; or the answer is not JSON.
        """
        self.send(json.dumps(message).encode())
        line = self.receive(deadline_s)
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as e:
            raise ChildError(f"answered with {line[:80]!r}, which is not JSON", "protocol", line) from e

    def kill(self) -> None:
        """Kill it and everything that it started."""
        if self.alive:
            kill_group(self.pid)

    def stop(self, grace_s: float = 0.0) -> None:
        """Close the child's input, give it `grace_s` seconds to end, kill it, and wait for its end. No process or pipe
        of it is left."""
        try:
            for wait_s in self._until_end(grace_s):
                self._wait(wait_s)
        finally:
            self._close()

    async def astop(self, grace_s: float = 0.0) -> None:
        """Stop the child as `stop` does, without blocking the event loop."""
        try:
            for wait_s in self._until_end(grace_s):
                await self._await(wait_s)
        finally:
            self._close()

    def _until_line(self) -> Iterator[float]:
        """Give seconds to wait for the pipes, until there is a line, or one is too long, or the child has ended."""
        while not self._pipe.ready and self._pipe.open and self.code is None:
            yield _LOOK_S
            self._move()
        end = time.monotonic() + _ENDING_S
        while not self._pipe.ready and time.monotonic() < end:
            if not self._move():
                if self.code is not None:
                    return
                yield _STEP_S

    def _until_end(self, grace_s: float) -> Iterator[float]:
        self._pipe.end_sending()
        with contextlib.suppress(OSError):
            self._stdin.close()
        end = time.monotonic() + grace_s
        while self.alive:
            if time.monotonic() >= end:
                kill_group(self.pid)
            yield _STEP_S
            self._move()
            self._pipe.lines.clear()

    def _take(self) -> bytes:
        if not self._pipe.ready:
            raise self._over()
        return self._pipe.take()

    def _over(self) -> ChildError:
        return ChildError(self.state("closed its output", " before it answered"), "ended", bytes(self._pipe.rest))

    def _move(self) -> bool:
        """Write as much as the pipe takes and read the available output; return whether anything was read."""
        self._pipe.write()
        came = self._pipe.read()
        if self._errors is not None and self._errors_open:
            with contextlib.suppress(BlockingIOError):
                data = os.read(self._errors.fileno(), CHUNK)
                self._words = (self._words + data)[-4 * LAST_WORDS :]
                self._errors_open, came = bool(data), True
        return came

    def _wait(self, seconds: float) -> None:
        """Wait until a pipe is ready."""
        poll = select.poll()
        for fd in self.outputs:
            poll.register(fd, select.POLLIN)
        if self._pipe.unsent:
            poll.register(self._stdin, select.POLLOUT)
        poll.poll(seconds * 1000)

    async def _await(self, seconds: float) -> None:
        """Wait until a pipe is ready; a second task only waits, because an event loop watches a pipe for one."""
        if self._wake is not None:
            await asyncio.sleep(_STEP_S)
            return
        loop, reads, self._wake = asyncio.get_running_loop(), self.outputs, asyncio.Event()
        writes = [self._stdin.fileno()] if self._pipe.unsent else []
        for fd in reads:
            loop.add_reader(fd, self._wake.set)
        for fd in writes:
            loop.add_writer(fd, self._wake.set)
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        finally:
            self._wake = None
            for fd in reads:
                loop.remove_reader(fd)
            for fd in writes:
                loop.remove_writer(fd)
            if self._closed:
                self._close()

    def _close(self) -> None:
        """Kill it if it runs, wait for its end, and close the pipes, unless an event loop watches them."""
        self._closed = True
        while self.alive:
            kill_group(self.pid)
            time.sleep(0.001)
        self._pipe.open = self._errors_open = False
        if self._wake is not None:
            self._wake.set()
            return
        for pipe in (self._stdin, self._stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def attached(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that has the standard streams of this process. At the end of the context, or when this process
    dies, it is killed with everything in its session.

    Its session is its own: a Ctrl-C on the terminal reaches this process alone.

    Args:
      command: its path, and its arguments. env: all of its environment variables.
    """
    _guard.start()
    process = subprocess.Popen(command, env=env, start_new_session=True)
    _guard.tell(process.pid, 0.0)
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait()
        _guard.tell(process.pid, -1)


def answer_messages(reply: Callable[[Any], Any]) -> None:
    """Answer, in a child, each message (`Child.ask`) until the input ends. The output of libraries and of started
    processes goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for line in requests:
        if line.endswith(b"\n"):  # otherwise the parent was killed while it wrote
            replies.write(json.dumps(reply(json.loads(line))) + "\n")
            replies.flush()


def kill_group(pid: int) -> bool:
    """Kill the process group that a process leads, if there is one; return whether there was."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def pickled(value: Any) -> str:
    """Return a value as text for a message to a process that trusts this one."""
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode()


def unpickled(text: str | bytes) -> Any:
    """Return the value that `pickled` was given."""
    return pickle.loads(base64.b64decode(text))


def how_it_ended(code: int) -> str:
    """Explain an exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed ({name})" if -code in OUTSIDE else f"crashed ({name})"


def python_path() -> str:
    """Return this interpreter's module path, for PYTHONPATH."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _clean_environ() -> dict[str, str]:
    return {name: os.environ[name] for name in INHERITED if name in os.environ}


class _Guard:
    """The process that kills the children of this process when it dies; started with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Start it unless it runs."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", orphan_guard.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_clean_environ(),
                    cwd="/",
                    start_new_session=True,
                    bufsize=0,
                )

    def tell(self, pid: int, survives_s: float) -> None:
        """Note a child, and how many seconds it may survive this process; -1: it has ended."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(b"%d %g\n" % (pid, survives_s))

    def _forget(self) -> None:
        """Close the guard in a forked process: it is the parent's, and must notice the parent's end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.returncode = 0
        self._lock, self._process = threading.Lock(), None


_guard = _Guard()
