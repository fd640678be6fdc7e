"""Shared tools of the sandbox tests."""

import os
import platform
import subprocess
import time
from pathlib import Path

import pytest

from rolljax.sandbox import available

needs_sandbox = pytest.mark.skipif(bool(available()), reason=f"this machine cannot isolate: {available()}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: user ids per sandbox, mounts")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the probe is written in x86-64 machine code")


def as_ordinary_user(script):
    """Run Python as a user who is not root; skips where that user can make no sandboxes."""
    me = {"user": 54_321, "group": 54_321, "extra_groups": []}
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}

    def python(code):
        return subprocess.run(["/usr/bin/python3", "-c", code], env=env, cwd="/", capture_output=True, text=True, **me)

    if python("import rolljax.sandbox").returncode:
        pytest.skip("another user cannot read this checkout, or has another Python")
    if python("import rolljax.sandbox as s; assert not s.available(), s.available()").returncode:
        pytest.skip("user name spaces are for root only here")
    return python(script)


def running(mark):
    """Return the processes of the whole machine that have `mark` as a command-line argument."""
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
    """Wait until `condition` holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
