"""The parent of `train --restarts`, over small programs that write steps and end in some way."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rolljax.commands import restarts
from rolljax.commands.restarts import pause_s, supervise, without
from tests.unit.concurrency.test_child import wait_until_gone

CHILD = """
import json, os, signal, sys
plan, run_dir = json.loads(sys.argv[1]), sys.argv[3]
with open(run_dir + "/calls", "a+") as calls:
    calls.seek(0)
    number = len(calls.readlines())
    calls.write(json.dumps({"argv": sys.argv[2:], "after": os.environ.get("ROLLJAX_RESTARTED_AFTER")}) + "\\n")
rows, end = plan[number]
with open(run_dir + "/starts.jsonl", "a") as file:
    file.write("{}\\n" * (rows is not None))
with open(run_dir + "/metrics.jsonl", "a") as file:
    for _ in range(rows or 0):
        file.write(json.dumps({"step": 1, "number": os.urandom(8).hex()}) + "\\n")
    file.write('{"step": 1')
if isinstance(end, str):
    os.kill(os.getpid(), signal.Signals[end])
os._exit(end)
"""
"""Arguments: a plan, which has for each start the number of steps to make (None: it dies before its run begins) and an
exit code or a signal; then those of the command."""
PARENT = """
import sys
from pathlib import Path
from rolljax.commands import restarts
restarts.PAUSE_S = 60.0
sys.exit(restarts.supervise(sys.argv[3:], Path(sys.argv[2]), 3, [sys.executable, "-c", sys.argv[1]]))
"""
OUTER_S = 60


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a plan; it returns exit code, the calls of the program, and what the parent said."""
    monkeypatch.setattr(restarts, "PAUSE_S", 0.01)

    def run(plan, most=3, flags=()):
        program = [sys.executable, "-S", "-c", CHILD, json.dumps(plan)]
        code = supervise(["--run_dir", str(tmp_path), *flags], tmp_path, most, program)
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        return code, calls, capsys.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", 3, 4, 7])
def test_a_child_is_restarted(run, end):
    code, calls, (line,) = run([(2, end), (0, 0)])
    assert code == 0 and [call["after"] is None for call in calls] == [True, False]
    how = f"({end})" if isinstance(end, str) else f"exit code {end}"
    assert how in calls[1]["after"] and calls[1]["after"].endswith(" after step 2")
    assert f"the run {calls[1]['after']}; restart 1 of 3 in 0.01 s" in line


@pytest.mark.parametrize("end", [0, 1, 2, 5, 6, 8, 74, 75, 130, "SIGTERM"])
def test_a_child_is_not_restarted(run, end):
    code, calls, said = run([(2, end)])
    assert code == (143 if end == "SIGTERM" else end) and len(calls) == 1 and not said


def test_a_child_is_not_restarted_twice_without_a_step(run):
    code, calls, said = run([(1, "SIGKILL"), (2, 4), (0, 3)])
    assert code == 3 and len(calls) == 3
    assert "after step 3, and has made no step since its restart" in said[-1] and len(said) == 3


def test_before_its_first_step_it_is_restarted_once(run):
    code, calls, _ = run([(0, "SIGKILL"), (0, "SIGKILL")])
    assert code == 128 + signal.SIGKILL and len(calls) == 2


def test_the_number_of_restarts_is_the_limit(run):
    code, calls, said = run([(1, 7)] * 3, most=2)
    assert code == 7 and len(calls) == 3 and "allows no more restarts" in said[-1]
    assert "restart 1 of 2 in 0.01 s" in said[0] and "restart 2 of 2 in 0.02 s" in said[1]


def test_a_restart_deletes_no_run(run):
    """The earlier run is deleted by the first process that gets so far, and by no other."""
    flags = ("--gin", "a.gin", "--fresh", "--set", "A.b = 1", "--restarts", "3")
    code, calls, _ = run([(None, 3), (1, 3), (1, 3), (0, 0)], flags=flags)
    assert code == 0
    kept = ["--gin", "a.gin", "--set", "A.b = 1"]
    given = [call["argv"][2:] for call in calls]
    assert given[:2] == [[*kept[:2], "--fresh", *kept[2:]]] * 2 and given[2:] == [kept] * 2


@pytest.mark.parametrize("flag", ["--restarts 2", "--restarts=2", "--rest 2"])
def test_its_flag_is_taken_away_in_every_form(flag):
    assert without("--restarts", ["--gin", "a", *flag.split(), "--set", "b = -1"], has_value=True) == [
        "--gin", "a", "--set", "b = -1",
    ]  # fmt: skip


def test_pauses_double_up_to_a_minute():
    assert [pause_s(n) for n in (1, 2, 3, 6, 7, 8, 10**6)] == [1, 2, 4, 32, 60, 60, 60]


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Start a parent of the program `code`, which gets the run folder as its argument. It is killed in the end."""
    parents = []

    def start(code):
        command = [sys.executable, "-c", PARENT, code, str(tmp_path), str(tmp_path)]
        parents.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return parents[-1]

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


def wait_for(path):
    end = time.monotonic() + OUTER_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < end, path
        time.sleep(0.01)
    return path.read_text()


STOPS = """
import os, signal, sys, threading
got = []
def handle(number, _):
    got.append(number)
    if number == signal.SIGTERM:
        os._exit(75)
    if len(got) == 2:
        os._exit(130)
    open(sys.argv[1] + "/interrupted", "w").write("once")
signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGINT, handle)
open(sys.argv[1] + "/pid", "w").write(str(os.getpid()))
while True:
    signal.pause()
"""


def test_sigterm_is_passed_on(start, tmp_path):
    parent = start(STOPS)
    child = int(wait_for(tmp_path / "pid"))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(OUTER_S) == 75 and parent.stderr.read() == ""
    wait_until_gone(child)


def test_a_second_ctrl_c_ends_it(start, tmp_path):
    """The child gets each of them once: it is in a session of its own."""
    parent = start(STOPS)
    child = int(wait_for(tmp_path / "pid"))
    assert os.getsid(child) == child
    parent.send_signal(signal.SIGINT)
    wait_for(tmp_path / "interrupted")
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    assert parent.wait(OUTER_S) == 130
    wait_until_gone(child)


def test_a_child_that_handles_no_signals_yet_is_stopped_too(start, tmp_path):
    parent = start("import os, sys, time; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(600)")
    child = int(wait_for(tmp_path / "pid"))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(OUTER_S) == 75
    wait_until_gone(child)


def test_a_signal_ends_the_pause_before_a_restart(start, tmp_path):
    parent = start("import os; os.kill(os.getpid(), 9)")
    assert "after step 0; restart 1 of 3 in 60 s" in parent.stderr.readline()
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(OUTER_S) == 75 and "stopped; the same command continues" in parent.stderr.read()


def test_nothing_is_left_when_the_parent_is_killed(start, tmp_path):
    parent = start(STOPS)
    child = int(wait_for(tmp_path / "pid"))
    parent.kill()
    parent.wait()
    wait_until_gone(child)


def test_what_the_child_leaves_in_its_session_is_ended(start, tmp_path):
    parent = start(
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1] + '/pid', 'w').write(str(other.pid))\n"
        "sys.exit(2)"
    )
    assert parent.wait(OUTER_S) == 2
    wait_until_gone(int((tmp_path / "pid").read_text()))
