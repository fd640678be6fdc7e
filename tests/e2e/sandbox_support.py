"""What the sandbox tests share."""

import os
import time
from pathlib import Path

import pytest

from rolljax.sandbox import available

needs_sandbox = pytest.mark.skipif(bool(available()), reason=f"this machine cannot isolate: {available()}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: user ids per sandbox, mounts")


def running(mark):
    """Processes of the whole machine whose command line has `mark` as an argument."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


def eventually(condition, seconds=30.0):
    """Whether `condition` comes true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
