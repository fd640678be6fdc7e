"""Scoring in a child with limits: what comes back, what is too much, and whose doing it was."""

import ctypes
import math
import os
import signal
import sys
import threading
import time

import pytest

from rolljax.envs.bounded import TooMuch, bounded, scored
from rolljax.errors import EnvError, InfraError

QUICK_S = 0.3
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")


def spin(text):
    while text == "spin":
        pass
    return len(text)


@pytest.mark.parametrize("value", [1.5, True, None, "x" * 300_000, [1, "a"], -math.inf], ids=lambda v: str(v)[:10])
def test_a_value_comes_back(value):
    assert bounded(lambda: value) == value


def test_time_ends_a_computation_that_never_looks_at_signals():
    assert bounded(lambda: 9**9**9**2, cpu_s=QUICK_S) == TooMuch("time")
    assert bounded(spin, "spin", cpu_s=QUICK_S) == TooMuch("time")


@linux
def test_memory_beyond_what_is_here_is_too_much():
    here = bytearray(2**26)
    assert bounded(lambda: len(bytearray(2**28)), memory_gib=0.5, cpu_s=60) == 2**28
    assert bounded(lambda: len(bytearray(2**28)), memory_gib=0.1, cpu_s=60) == TooMuch("memory")
    assert len(here) == 2**26


def test_a_crash_is_that_of_the_child():
    for crash in (os.abort, lambda: ctypes.string_at(0), lambda: sys.exit(0), lambda: os._exit(0)):
        assert bounded(crash) == TooMuch("crash")


def test_what_it_raises_says_what_it_was():
    with pytest.raises(EnvError, match="ZeroDivisionError: division by zero"):
        bounded(lambda: 1 / 0)
    with pytest.raises(EnvError, match="not JSON"):
        bounded(object)


def test_a_child_that_is_killed_or_waits_is_the_machines_failure():
    with pytest.raises(InfraError, match="SIGKILL"):
        bounded(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(InfraError, match="too little processor time"):
        bounded(lambda: time.sleep(1000), cpu_s=0.02)


def test_nothing_of_the_parent_is_in_reach_and_nothing_is_left_behind(capfd):
    read, write = os.pipe()
    seen = []
    assert bounded(lambda: [os.path.exists(f"/dev/fd/{fd}") for fd in (read, write)]) == [False, False]
    assert bounded(lambda: (seen.append(1), sys.stdout.write("dots\n"), os.write(2, b"dots"))[2]) == 4
    assert not seen and capfd.readouterr() == ("", "")
    os.close(read)
    os.close(write)
    pid = bounded(os.getpid)
    assert pid != os.getpid()
    with pytest.raises(ChildProcessError):  # nobody's child: it has been waited for
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.slow
def test_several_threads_score_side_by_side():
    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: bounded(lambda: n)})) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {n: n for n in range(8)}


def test_the_answer_is_to_blame_when_a_known_one_is_scored():
    assert scored(spin, "abc", "reference") == 3
    assert scored(spin, "spin", "reference", cpu_s=QUICK_S) == TooMuch("time")
    with pytest.raises(EnvError, match="known answer too"):
        scored(spin, "spin", "spin", cpu_s=QUICK_S)
