"""Kills the children of a process that has died: `python -I -S orphan_guard.py`, one for each process with children.

`child.py` starts it and writes a line `PID SECONDS` for each child: the seconds that the child may outlive its parent;
-1 once the child has ended. The end of the input is the end of the parent. A separate process does this because it also
reaches what the children have started, and because a parent that is killed cannot do anything itself.
"""

import contextlib
import os
import signal
import sys
import time

INTERVAL_S = 0.1


def main() -> None:
    """Take notes until the parent is gone; then kill the process groups of its children, each at its time."""
    children: dict[int, float] = {}
    for line in sys.stdin:
        pid, seconds = line.split()
        children[int(pid)] = float(seconds)
    now = time.monotonic()
    ends = {pid: now + seconds for pid, seconds in children.items() if seconds >= 0}
    while ends:
        for pid, end in list(ends.items()):
            try:
                os.kill(pid, 0 if time.monotonic() < end else signal.SIGKILL)
                if time.monotonic() < end:
                    continue
            except OSError:  # it has ended by itself
                pass
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            del ends[pid]
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
