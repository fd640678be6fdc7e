"""Slots: numbers of sandboxes, each with a user id."""

import fcntl
import os

from rolljax.sandbox.supervisor.procfs import kill, pids, real_uid

MAX_SLOT = 65_536


class SandboxSlots:
    """The slots of this machine that this process holds.

    A slot is ours while we hold the lock of its file, and the kernel releases the lock when we die: what still runs
    under the user id of a lock that we got is a dead host's leftover.

    folder: of the lock files, shared by all hosts of this machine. own_uids: whether slot n has the user id
    `first_uid + n`.
    """

    def __init__(self, folder: str, first_uid: int, own_uids: bool) -> None:
        self.folder, self.first_uid, self.own_uids = folder, first_uid, own_uids
        self.locks: dict[int, int] = {}
        self.free: list[int] = []
        self.generation: dict[int, int] = {}

    def lock(self, number: int) -> bool:
        """Try to take the lock of a slot; return whether that succeeded."""
        path = os.path.join(self.folder, f"slot-{number}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self.locks[number] = fd
        return True

    def take(self) -> tuple[int, int]:
        """Return a free slot, and the number of its use (from 1)."""
        if not self.free:
            number = next(n for n in range(MAX_SLOT) if n not in self.locks and self.lock(n))
            self.sweep(number)
            self.free.append(number)
        number = self.free.pop()
        self.generation[number] = self.generation.get(number, 0) + 1
        return number, self.generation[number]

    def sweep(self, only: int = -1) -> int:
        """Kill processes that dead hosts left under slot user ids; return how many."""
        killed = 0
        for pid in pids() if self.own_uids else []:
            number = real_uid(pid) - self.first_uid
            if not 0 <= number < MAX_SLOT or (only >= 0 and number != only):
                continue
            mine = number in self.locks
            if only < 0 and (mine or not self.lock(number)):
                continue
            kill(pid)
            killed += 1
            if only < 0:
                os.close(self.locks.pop(number))
        return killed
