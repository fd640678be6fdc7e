"""Scoring text of a policy by code that the text may keep busy: in a forked child, with limits on time and memory.

A scorer that parses, evaluates or searches can be made to run forever, to take all memory or to crash. `bounded` runs
it where that ends only a child process; `scored` says whose doing it was: when a known answer to the same task is
scored within the same limits, the new one is to blame, and it is wrong.

Limits count the child's processor time, so a busy machine makes no answer wrong. A fork costs a few milliseconds, in
proportion to the memory of the process that forks: call this in worker processes, not in the trainer's.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar

from rolljax.concurrency.child import OUTSIDE, how_it_ended
from rolljax.errors import EnvError, InfraError

T = TypeVar("T")

CPU_S = 1.0
MEMORY_GIB = 0.5
WALL_FACTOR = 100.0
"""Limit on wall time, as a multiple of the limit on processor time; a child that reaches it first means that the
machine has failed."""

_MEMORY = b'{"too_much": "memory"}'
_MAX_FDS = 1 << 20


def or_default(score: Callable[[], T], default: T, *, raises: tuple[type[Exception], ...] = ()) -> T:
    """Return the score of a library's scorer; `default` if it raises: such a text is not an answer.

    raises: exceptions that are passed on.
    """
    try:
        return score()
    except Exception as e:  # border: some libraries parse unchecked text
        if isinstance(e, raises):
            raise
        return default


@dataclasses.dataclass(frozen=True)
class TooMuch:
    """A call that was ended."""

    what: Literal["time", "memory", "crash"]
    """time or memory: the limit that was passed; crash: the process died."""


def scored(
    score: Callable[[str], Any], answer: str, known: str, *, cpu_s: float = CPU_S, memory_gib: float = MEMORY_GIB
) -> Any | TooMuch:
    """Compute `score(answer)` within limits; return `TooMuch` if the answer itself exceeded them.

    known: an answer to the same task that must be scored within the limits, preferably the reference answer. It is
    scored only if `answer` exceeded them.

    Raises:
      EnvError: the known answer exceeds the limits as well, so the scorer is to blame; or see `bounded`.
      InfraError: see `bounded`.
    """
    result = bounded(score, answer, cpu_s=cpu_s, memory_gib=memory_gib)
    if isinstance(result, TooMuch):
        control = bounded(score, known, cpu_s=cpu_s, memory_gib=memory_gib)
        if isinstance(control, TooMuch):
            raise EnvError(f"the scorer passes its limit of {control.what} on a known answer too")
    return result


def bounded(fn: Callable[..., Any], *args: Any, cpu_s: float = CPU_S, memory_gib: float = MEMORY_GIB) -> Any | TooMuch:
    """Compute `fn(*args)` in a forked child; the result must be JSON.

    cpu_s: processor time. memory_gib: address space beyond this process's (on Linux; elsewhere unlimited). The child
    has none of this process's open files, and its output is lost.

    Raises:
      EnvError: `fn` raised an exception.
      InfraError: the child could not be started, was killed from outside, or got no processor.
    """
    read, write = os.pipe()
    try:
        pid = os.fork()
    except OSError as e:
        os.close(read)
        os.close(write)
        raise InfraError(f"no process to score an answer in: {e}") from e
    if pid == 0:
        _become_child(write, fn, args, cpu_s, memory_gib)
    os.close(write)
    ended = False
    try:
        data = _read(read, time.monotonic() + WALL_FACTOR * cpu_s)
        ended = True
    finally:
        os.close(read)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    return _outcome(data, os.waitstatus_to_exitcode(status))


def _outcome(data: bytes, code: int) -> Any | TooMuch:
    if code == 0 and data:
        said = json.loads(data)
        if "too_much" in said:
            return TooMuch(said["too_much"])
        if "error" in said:
            raise EnvError(f"the scorer raised {said['error']}")
        return said["value"]
    if code == -signal.SIGPROF:
        return TooMuch("time")
    if -code in OUTSIDE:
        raise InfraError(f"the process that scores answers {how_it_ended(code)}")
    return TooMuch("crash")


def _read(fd: int, end_s: float) -> bytes:
    """Return the child's whole output."""
    poll, data = select.poll(), bytearray()
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            raise InfraError("scoring an answer came to no end and was given too little processor time")
        chunk = os.read(fd, 65_536)
        if not chunk:
            return bytes(data)
        data += chunk


def _become_child(
    write: int, fn: Callable[..., Any], args: tuple[Any, ...], cpu_s: float, memory_gib: float
) -> NoReturn:
    try:
        _isolate(write)
        _limit(cpu_s, memory_gib)
        try:
            reply = json.dumps({"value": fn(*args)}).encode()
        except MemoryError:
            reply = _MEMORY
        except Exception as e:  # border: told to the parent, who raises it
            reply = json.dumps({"error": f"{type(e).__name__}: {e}"[:500]}).encode()
        while reply:
            reply = reply[os.write(write, reply) :]
        os._exit(0)
    finally:  # whatever else happens, this process never returns into its parent's code
        os._exit(1)


def _isolate(write: int) -> None:
    """Close, reset or redirect everything shared with the parent."""
    gc.freeze()
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGPROF, signal.SIGCHLD, *(OUTSIDE - {signal.SIGKILL})):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, write)
    os.closerange(write + 1, _MAX_FDS)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in {0, 1, 2} - {null}:
        os.dup2(null, fd)
    sys.stdin = sys.stdout = sys.stderr = os.fdopen(null, "r+")


def _limit(cpu_s: float, memory_gib: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as f:
            used = int(f.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *(n for n in (soft, hard) if n >= 0)]), hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
