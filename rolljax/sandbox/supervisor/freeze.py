"""All processes of a sandbox stopped at once, so that they can be counted."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
from collections.abc import Collection
from typing import NoReturn

from rolljax.sandbox.supervisor.namespaces import CLONE_NEWPID, CLONE_NEWUSER, enter_namespace
from rolljax.sandbox.supervisor.procfs import kill

NS_GET_USERNS = 0xB701
PR_SET_PDEATHSIG = 1
ANSWER_S = 2.0


class Frozen:
    """The processes of a PID name space, all but its process 1, which stop when `stop` is called.

    A process of ours enters the name space and signals all others there with one system call, which the kernel does not
    interleave with forks: none can slip through by handing over to a child. A process that wakes up is stopped again by
    the next `stop`. Where the name space cannot be entered, `stop` does nothing.

    Args:
      inner: a process of the name space.
    """

    def __init__(self, inner: int) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(ANSWER_S)
        self._helper = -1
        with theirs, contextlib.suppress(OSError):  # without a child of ours nothing is stopped
            self._helper = os.fork()
            if self._helper == 0:
                _serve(theirs, inner)
        self.pid = int(self._answer() or -1)
        """Id of our process in the name space; -1: it could not enter."""

    def stop(self) -> None:
        """Stop every process."""
        self._signal(signal.SIGSTOP, [-1])

    def resume(self, pids: Collection[int], stopped: Collection[int]) -> None:
        """Continue processes, children before their parents, so that no shell finds a child stopped, and then all: a
        fork that was under way has a child by now, which was born stopped. stopped: processes that stay stopped."""
        self._signal(signal.SIGCONT, [*sorted(pids, reverse=True), -1])
        self._signal(signal.SIGSTOP, stopped)

    def close(self) -> None:
        """End our process in the name space."""
        if self._helper > 0:
            kill(self._helper)
            os.waitpid(self._helper, 0)
        self._ours.close()

    def _signal(self, number: signal.Signals, pids: Collection[int]) -> None:
        with contextlib.suppress(OSError):
            self._ours.send(" ".join(map(str, [int(number), *pids])).encode())
        self._answer()

    def _answer(self) -> bytes:
        try:
            return self._ours.recv(64)
        except OSError:  # it was stopped or killed, by the sandbox of an ordinary user: it is not used again
            self._ours.close()
            return b""


def _serve(orders: socket.socket, inner: int) -> NoReturn:
    """Start, from a forked child, another child inside the name space of `inner` that obeys the orders. It dies with
    this process."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        here = os.stat("/proc/self/ns/pid").st_ino
        space = os.open(f"/proc/{inner}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        there = os.fstat(space).st_ino
        if os.geteuid():
            owner = fcntl.ioctl(space, NS_GET_USERNS)
            enter_namespace(owner, CLONE_NEWUSER)
        enter_namespace(space, CLONE_NEWPID)
        keep = orders.fileno()
        os.closerange(0, keep)
        os.closerange(keep + 1, 1 << 16)
        if os.fork():
            signal.pause()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if there == here or os.stat("/proc/self/ns/pid").st_ino != there:  # never signal anybody else's processes
            os._exit(1)
        _obey(orders)
    finally:
        os._exit(1)


def _obey(orders: socket.socket) -> None:
    orders.send(str(os.getpid()).encode())
    while order := orders.recv(1 << 16):
        number, *pids = map(int, order.split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        orders.send(b".")
