"""The channel to child processes: lines both ways, every way in which a child fails, and that nothing of it is left."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from rolljax.concurrency.child import (
    LAST_WORDS,
    LINE_ENDS,
    Child,
    ChildError,
    LinePipe,
    how_it_ended,
    python_path,
)

OUTER_S = 60
"""Outer limit of waits; none of them takes a second on a quiet machine."""
IMPORTS = "import json, os, signal, subprocess, sys, time\nsay = lambda *what: print(*what, flush=True)\n"
ECHO = "for line in sys.stdin: say(line.rstrip())"
FOREVER = "time.sleep(600)"
STARTS_ANOTHER = (
    "other = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\nsay(other.pid)\n"
)


@pytest.fixture
def start():
    """Start programs; none is left at the end."""
    children = []

    def make(code, **settings):
        children.append(Child([sys.executable, "-S", "-c", IMPORTS + code], **settings))
        return children[-1]

    yield make
    for child in children:
        child.stop()


def talk(child, face, deadline_s=OUTER_S):
    """Return the next line, by the blocking interface or by the coroutines."""
    if face == "threads":
        return child.receive(deadline_s)
    return asyncio.run(asyncio.wait_for(child.areceive(), OUTER_S))


def wait_until_gone(pid):
    """Wait until a process has ended (a zombie has)."""
    end = time.monotonic() + OUTER_S
    while True:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
        except OSError:
            return
        assert time.monotonic() < end, pid
        time.sleep(0.01)


faces = pytest.mark.parametrize("face", ["threads", "asyncio"])


@hypothesis.given(
    st.lists(st.binary(max_size=50).filter(lambda line: b"\n" not in line), max_size=8), st.integers(1, 60)
)
def test_lines_survive_any_cut(lines, step):
    stream, got = b"".join(line + b"\n" for line in lines) + b"rest", []
    read, write = os.pipe()
    pipe = LinePipe(read, write, 50)
    for i in range(0, len(stream), step):
        os.write(write, stream[i : i + step])
        assert pipe.read()
        while pipe.ready:
            got.append(pipe.take())
    os.close(write)
    assert pipe.read() and not pipe.open and not pipe.read()
    assert got == lines and bytes(pipe.rest) == b"rest"
    os.close(read)


def test_lines_before_one_that_is_too_long_are_given(start):
    child = start("say('first'); say('x' * 1001); " + FOREVER, max_bytes=1000)
    assert child.receive(OUTER_S) == b"first"
    with pytest.raises(ChildError, match="a line of 1001 bytes"):
        child.receive(OUTER_S)


@faces
def test_a_thousand_messages_arrive_in_their_order(start, face):
    child = start(ECHO)
    for i in range(1000):
        child.send(b"%d" % i)
    if face == "threads":
        got = [child.receive(OUTER_S) for _ in range(1000)]
    else:

        async def receive():
            return [await child.areceive() for _ in range(1000)]

        got = asyncio.run(asyncio.wait_for(receive(), OUTER_S))
    assert got == [b"%d" % i for i in range(1000)]
    assert [child.ask({"i": i, "text": "é\n\ud800"}, OUTER_S) for i in range(1000)][-1]["i"] == 999


@faces
def test_messages_larger_than_the_pipes_do_not_block_either_side(start, face):
    """The child writes before it has read everything, and the parent sends before it reads."""
    child = start("say('x' * 3000000)\n" + ECHO)
    child.send(b"y" * 3_000_000)
    assert [talk(child, face), talk(child, face)] == [b"x" * 3_000_000, b"y" * 3_000_000]


def test_a_task_that_waits_also_sends_for_another(start):
    child = start(ECHO)

    async def both():
        waiting = asyncio.ensure_future(child.areceive())
        await asyncio.sleep(0)
        child.send(b"z" * 3_000_000)
        return await asyncio.wait_for(waiting, OUTER_S)

    assert len(asyncio.run(both())) == 3_000_000


@faces
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.exit('no such door')", "ended with exit code 1 before it answered; its last words: no such door"),
        ("sys.exit(0)", "ended with exit code 0 before it answered"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed (SIGKILL) before it answered"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV) before it answered"),
        ("os.close(1); os.write(2, b'busy'); " + FOREVER, "closed its output before it answered; its last words: busy"),
    ],
)
def test_an_end_says_how_and_quotes_standard_error(start, face, code, text):
    with pytest.raises(ChildError) as e:
        talk(start(code), face)
    assert str(e.value) == text and e.value.kind == "ended"
    again = pickle.loads(pickle.dumps(e.value))
    assert (again.kind, str(again)) == ("ended", text)


def test_lines_before_the_end_are_received_and_the_rest_is_kept(start):
    child = start("sys.stdout.write('a\\nb\\nrest')")
    assert [child.receive(OUTER_S), child.receive(OUTER_S)] == [b"a", b"b"]
    for _ in range(2):
        with pytest.raises(ChildError, match="exit code 0") as e:
            child.receive(OUTER_S)
        assert e.value.line == b"rest"


def test_a_flood_of_errors_blocks_nothing_and_its_end_is_kept(start):
    with pytest.raises(ChildError, match="the end$") as e:
        start("sys.stderr.write('x' * 3000000 + ' the end'); sys.exit(3)").receive(OUTER_S)
    assert len(str(e.value)) < LAST_WORDS + 100


def test_a_log_gets_standard_error(start, tmp_path):
    with pytest.raises(ChildError, match=f"see {tmp_path}/log.txt"):
        start("sys.exit('why')", log=tmp_path / "log.txt").receive(OUTER_S)
    assert (tmp_path / "log.txt").read_text() == "why\n"


def test_silence_is_an_error_at_the_deadline(start):
    with pytest.raises(ChildError, match="has not answered for 0.05 s") as e:
        start(FOREVER).receive(0.05)
    assert e.value.kind == "silent"


@pytest.mark.parametrize("answer", [b"hello", b"{", b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_not_json_is_not_the_protocol(start, answer):
    child = start(f"sys.stdin.readline(); os.write(1, {answer!r} + b'\\n'); {FOREVER}")
    with pytest.raises(ChildError, match="which is not JSON") as e:
        child.ask({}, OUTER_S)
    assert e.value.kind == "protocol" and e.value.line == answer


@faces
@pytest.mark.parametrize("code", ["while True: os.write(1, b'x' * 10000)", "say('x' * 1001); " + FOREVER])
def test_a_line_that_is_too_long_is_an_error_at_once(start, face, code):
    child = start(code, max_bytes=1000)
    with pytest.raises(ChildError, match="the limit is 1000") as e:
        talk(child, face)
    assert e.value.kind == "long" and len(e.value.line) == 2 * LINE_ENDS


@faces
def test_a_line_that_is_too_long_can_be_skipped(start, face):
    child = start("say('a' * 5000000 + 'z')\n" + ECHO, max_bytes=1000, skip_long=True)
    child.send(b"next")
    with pytest.raises(ChildError, match="a line of 5000001 bytes; the limit is 1000") as e:
        talk(child, face)
    assert e.value.line == b"a" * (2 * LINE_ENDS - 1) + b"z"
    assert talk(child, face) == b"next"


def test_a_program_that_is_not_there():
    with pytest.raises(ChildError, match="no-such-program could not be started: .*No such file") as e:
        Child(["no-such-program"])
    assert e.value.kind == "start"


def test_only_named_variables_reach_it(start, monkeypatch):
    monkeypatch.setenv("ROLLJAX_API_KEY", "secret")
    env = start("say(json.dumps(dict(os.environ)))", env={"MODE": "fast"}).ask(0, OUTER_S)
    assert env["PATH"] == os.environ["PATH"] and env["MODE"] == "fast" and "ROLLJAX_API_KEY" not in env


@pytest.mark.parametrize("end", ["kill", "stop", "astop", "by itself"])
def test_what_a_child_started_ends_with_it(start, end):
    child = start(STARTS_ANOTHER + (FOREVER if end != "by itself" else "sys.exit(4)"))
    other = int(child.receive(OUTER_S))
    if end == "by itself":
        with pytest.raises(ChildError, match="exit code 4"):
            child.receive(OUTER_S)
    elif end == "kill":
        child.kill()
        with pytest.raises(ChildError, match="SIGKILL"):
            child.receive(OUTER_S)
    elif end == "stop":
        child.stop()
    else:
        asyncio.run(child.astop())
    wait_until_gone(other)
    with pytest.raises(ChildProcessError):  # nobody's child: it has been waited for
        os.waitpid(child.pid, os.WNOHANG)
    assert not child.alive and child.code is not None


def test_a_child_that_ends_although_what_it_started_holds_its_pipes(start):
    """A process in a session of its own is out of reach, and keeps the output open."""
    child = start(STARTS_ANOTHER.replace("])", "], start_new_session=True)") + "sys.exit(4)")
    other = int(child.receive(OUTER_S))
    try:
        with pytest.raises(ChildError, match="exit code 4"):
            child.receive(OUTER_S)
    finally:
        os.kill(other, signal.SIGKILL)


@faces
def test_a_child_may_end_in_order_within_its_grace(start, tmp_path, face):
    """Also when no process reads its output."""
    done = tmp_path / "done"
    child = start(f"sys.stdin.read(); say('x' * 3000000); open({str(done)!r}, 'w')")
    if face == "threads":
        child.stop(OUTER_S)
    else:
        asyncio.run(child.astop(OUTER_S))
    assert child.code == 0 and done.exists()
    with pytest.raises(ChildError, match="exit code 0"):
        child.receive(OUTER_S)
    child.send(b"to nobody")


def test_a_cancelled_wait_leaves_the_child_as_it_was(start):
    child = start(ECHO)

    async def cancel():
        waiting = asyncio.ensure_future(child.areceive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        child.send(b"still here")
        return await asyncio.wait_for(child.areceive(), OUTER_S)

    assert asyncio.run(cancel()) == b"still here"


def test_a_child_that_is_stopped_ends_the_wait_of_another_task(start):
    child = start(FOREVER)

    async def stop():
        waiting = asyncio.ensure_future(child.areceive())
        await asyncio.sleep(0)
        await child.astop()
        with pytest.raises(ChildError, match="SIGKILL"):
            await asyncio.wait_for(waiting, OUTER_S)

    asyncio.run(stop())


PARENT = """
import os, signal, sys
from rolljax.concurrency.child import Child
CODE = "import os, subprocess, sys, time; other = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']);"
CODE += "print(os.getpid(), other.pid, flush=True); time.sleep(600)"
pids = [Child([sys.executable, "-S", "-c", CODE], survives_s=s).receive(60).decode() for s in (0.0, 0.2)]
print(*pids, flush=True)
if pid := os.fork():  # a process that was forked does not keep the guard waiting
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


def test_children_and_what_they_started_die_with_a_parent_that_is_killed():
    """A process that was forked from the parent lives on, and does not hide the parent's death."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": python_path()}) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        fork = int(parent.stdout.readline())
        assert parent.wait() == -signal.SIGKILL and len(children) == 4
    try:
        for pid in children:
            wait_until_gone(pid)
        os.kill(fork, 0)
    finally:
        os.kill(fork, signal.SIGKILL)


FORKS = """
import os, sys
from rolljax.concurrency.child import Child
child = Child([sys.executable, "-S", "-c", "import sys\\nfor line in sys.stdin: print(line.rstrip(), flush=True)"])
pid = os.fork()
if pid == 0:
    seen = child.alive
    child.stop()
    os._exit(int(seen))
assert os.waitpid(pid, 0)[1] == 0
print(child.ask("hello", 60))
child.stop()
"""


def test_a_forked_process_leaves_the_children_of_its_parent_alone():
    command, env = (
        [sys.executable, "-c", FORKS],
        {"PYTHONPATH": python_path()},
    )  # no threads of JAX, so that it may fork
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=OUTER_S)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_exit_codes_in_words():
    assert [how_it_ended(code) for code in (3, -9, -6, -99)] == [
        "ended with exit code 3",
        "was killed (SIGKILL)",
        "crashed (SIGABRT)",
        "crashed (signal 99)",
    ]
