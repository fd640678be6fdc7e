"""Limits, life cycle, live sessions, streams and groups of sandboxes."""

import base64
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.sandbox import (
    CODE,
    TERMINAL,
    Egress,
    Result,
    Sandbox,
    SandboxConfig,
    SandboxGone,
    SandboxGroup,
    SandboxHost,
    check_egress,
    collect,
    command_line,
    grade_python,
    popen,
    run,
    run_served,
    session,
    shared_host,
)
from rolljax.sandbox.profile import MIB
from rolljax.sandbox.supervisor import procfs
from tests.e2e.sandbox_support import as_ordinary_user, eventually, needs_root, needs_sandbox, running

pytestmark = needs_sandbox
INSIDE = Path(session.__file__).parent / "inside"
PYTHON = ["/usr/bin/python3", "-I", "-S", "-c"]
SMALL = dataclasses.replace(
    CODE, memory_bytes=64 * MIB, nproc=16, tmpfs_bytes=4 * MIB, inodes=200, wall_s=20.0, cpu_s=15, flood_bytes=8 * MIB
)
BRIEF = dataclasses.replace(SMALL, wall_s=1.0)
CYCLES = int(os.environ.get("ROLLJAX_SANDBOX_CYCLES", "100"))
DAEMON = """
import os, signal, time
for _ in range(2):
    if os.fork():
        os._exit(0)
    os.setsid()
for n in (1, 2, 3, 15):
    signal.signal(n, signal.SIG_IGN)
os.execv('/bin/sleep', ['sleep', MARK])
"""


@pytest.fixture(scope="module")
def host():
    with SandboxHost(SandboxConfig(slots=16)) as host:
        yield host


@pytest.fixture(scope="module")
def box(host):
    with Sandbox.open(host=host) as box:
        yield box


# one-shot programs


def test_a_program_gets_input_and_files_and_gives_both_outputs_and_its_code(host):
    script = "cat; cat data/x.txt; echo err >&2; exit 7"
    result = host.run(["sh", "-c", script], stdin=b"in ", files={"data/x.txt": b"file"})
    assert (result.returncode, result.stdout, result.stderr) == (7, b"in file", b"err\n")
    assert not (result.timed_out or result.killed_by or result.truncated) and result.ms > 0


def test_exit_codes_are_those_of_a_shell(host):
    assert host.run(["no-such-program"]).returncode == 127
    assert host.run(["sh", "-c", "kill -SEGV $$"]).returncode == 139
    assert host.run(["sh", "-c", "kill -ABRT $$"]).returncode == 134
    assert host.run(["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 5"]).returncode == 5


def test_scripts_are_executable_and_folders_made(host):
    assert host.run(["/opt/x/go"], files={"/opt/x/go": b"#!/bin/sh\npwd"}).text == "/work\n"
    for name in ("../x", "/usr/bin/ls", "/proc/x", "a\0b"):
        with pytest.raises(ConfigError):
            host.run(["true"], files={name: b""})
    with pytest.raises(ConfigError):
        host.run([])


def test_large_input_to_a_program_that_does_not_read(host):
    assert host.run(["true"], stdin=bytes(3 << 20)).returncode == 0
    assert host.run(["wc", "-c"], stdin=bytes(3 << 20)).text.strip() == str(3 << 20)


LIMITS = {
    "memory of one process": (SMALL, [*PYTHON, "x = [bytes(1 << 20) + b'1' for _ in range(400)]; import time; time.sleep(15)"], "memory"),
    "memory of many processes": (
        SMALL,
        [*PYTHON, "import os, time\nfor _ in range(6): os.fork() or time.sleep(30) if 0 else None\n"
         "pids = [os.fork() for _ in range(3)]\nx = [bytes(1 << 20) + b'1' for _ in range(12)]; time.sleep(15)"],
        "memory",
    ),
    "processor time": (dataclasses.replace(SMALL, cpu_s=1), [*PYTHON, "while True: pass"], "cpu"),
    "forked processor time": (BRIEF, [*PYTHON, "import os\nfor _ in range(2): os.fork()\nwhile True: pass"], "wall"),
    "sleep": (BRIEF, ["sleep", "30"], "wall"),
    "dribbled output": (BRIEF, ["sh", "-c", "while :; do printf x; sleep 0.1; done"], "wall"),
    "closed output": (BRIEF, ["sh", "-c", "exec >&- 2>&-; sleep 30"], "wall"),
    "output flood": (SMALL, ["sh", "-c", "cat /dev/zero & cat /dev/zero >&2"], "output"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limit_kills(host, name):
    profile, argv, killed_by = LIMITS[name]
    result = host.run(argv, profile=profile)
    assert result.killed_by == killed_by, result
    assert result.timed_out == (killed_by == "wall")
    assert result.returncode != 0
    assert len(result.stdout) <= profile.output_bytes + 100


def test_processes_and_threads_are_limited(host):
    bomb = "import os, time\nn = 0\ntry:\n while True:\n  if not os.fork(): time.sleep(15); os._exit(0)\n  n += 1\nexcept OSError: print(n, flush=True)\nos.kill(0, 9)"
    forked = host.run([*PYTHON, bomb], profile=SMALL)
    threads = "import _thread, time\nn = 0\ntry:\n while True:\n  _thread.start_new_thread(time.sleep, (15,)); n += 1\nexcept RuntimeError: print(n, flush=True)\nimport os; os._exit(0)"
    threaded = host.run([*PYTHON, threads], profile=SMALL)
    assert 1 <= int(forked.text) <= SMALL.nproc and 1 <= int(threaded.text) <= SMALL.nproc
    assert host.run(["true"], profile=SMALL).returncode == 0


def test_disk_is_limited(host):
    result = host.run(["sh", "-c", "cat /dev/zero > /work/x; stat -c %s /work/x"], profile=SMALL)
    assert int(result.text.split()[-1]) <= SMALL.tmpfs_bytes


def test_one_huge_line_is_cut_in_the_middle(host):
    result = host.run([*PYTHON, "print('a' * 3_000_000 + 'z' * 3_000_000)"], profile=SMALL)
    assert result.truncated and result.stdout[:1] == b"a" and result.stdout[-2:] == b"z\n"
    assert b"bytes cut" in result.stdout and len(result.stdout) <= SMALL.output_bytes + 100


def test_sandboxes_do_not_take_each_others_processes(host):
    crowd = "import os, time\nfor _ in range(10):\n    if not os.fork(): time.sleep(1); os._exit(0)\nprint('ok')"
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: host.run([*PYTHON, crowd], profile=SMALL), range(4)))
    if os.geteuid() == 0:
        assert [r.text for r in results] == ["ok\n"] * 4


# life cycle


def test_a_daemon_does_not_outlive_its_sandbox(host):
    result = host.run([*PYTHON, DAEMON.replace("MARK", "'7654321.125'")])
    assert result.returncode == 0 and not running("7654321.125")
    with Sandbox.open(host=host) as box:
        box.run("(setsid nohup sleep 7654321.25 >/dev/null 2>&1 &)")
        assert eventually(lambda: len(running("7654321.25")) == 1)
    assert not running("7654321.25")


HOST_SCRIPT = textwrap.dedent("""
    import os, sys, time
    from rolljax.sandbox import Sandbox, SandboxHost
    host = SandboxHost()
    box = Sandbox.open(host=host)
    box.run("setsid sleep %s & sleep %s &")
    print(os.getpid(), host._launcher.process.pid, flush=True)
    time.sleep(600)
""")


@pytest.mark.parametrize("victim", ["host", "supervisor"])
def test_nothing_is_left_when_the_host_or_the_supervisor_is_killed(victim):
    mark = {"host": "7654321.5", "supervisor": "7654321.75"}[victim]
    process = subprocess.Popen([sys.executable, "-c", HOST_SCRIPT % (mark, mark)], stdout=subprocess.PIPE, text=True)
    try:
        host_pid, supervisor_pid = map(int, process.stdout.readline().split())
        assert eventually(lambda: len(running(mark)) == 2)
        os.kill({"host": host_pid, "supervisor": supervisor_pid}[victim], signal.SIGKILL)
        assert eventually(lambda: not running(mark))
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: not Path(f"/proc/{supervisor_pid}").exists() or victim == "host")


def test_a_host_starts_a_new_supervisor_after_the_first_died():
    with SandboxHost() as host:
        box = Sandbox.open(host=host)
        os.kill(host._launcher.process.pid, signal.SIGKILL)
        assert eventually(lambda: host._launcher.dead)
        with pytest.raises(InfraError):
            assert eventually(lambda: box.run("echo") is None)
        box.close()
        assert host.run(["echo", "again"]).text == "again\n"


@needs_root
def test_leftovers_of_a_dead_host_are_swept_and_those_of_a_live_one_are_not():
    config = SandboxConfig(first_uid=420_000)
    with SandboxHost(config) as live, Sandbox.open(host=live) as box:
        slot = box.stats()["slot"]
        box.run("sleep 8765432.125 &")
        assert eventually(lambda: running("8765432.125"))
        left = [
            subprocess.Popen(["sleep", "8765432.25"], user=config.first_uid + slot + n, extra_groups=[])
            for n in (0, 1000)
        ]
        try:
            with SandboxHost(config) as new:
                assert new.modes()["swept"] == 1
                assert new.run(["true"]).returncode == 0
            assert left[1].wait(10) == -signal.SIGKILL
            assert left[0].poll() is None and running("8765432.125") and box.run("echo on").output == "on\n"
        finally:
            for process in left:
                process.kill()
                process.wait()


def counts(host):
    """Open descriptors, processes under the supervisor, zombies of ours, mounts, threads."""
    supervisor = host._launcher.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    ours = Path("/proc/self/task")
    zombies = [
        p
        for t in ours.iterdir()
        for p in (t / "children").read_text().split()
        if "(zombie)" in Path(f"/proc/{p}/status").read_text()
    ]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "supervisor_fds": len(os.listdir(f"/proc/{supervisor}/fd"))
        if os.access(f"/proc/{supervisor}/fd", os.R_OK)
        else 0,
        "children": len(children),
        "zombies": len(zombies),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "threads": threading.active_count(),
    }


def rss_kib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def test_counts_stay_the_same_over_many_starts_and_stops(host):
    """ROLLJAX_SANDBOX_CYCLES=1000 for the long run."""
    for _ in range(3):
        host.run(["true"])
        Sandbox.open(host=host).close()
    supervisor = host._launcher.process.pid
    before, memory = counts(host), rss_kib(supervisor)
    for i in range(CYCLES):
        if i % 10:
            assert host.run(["true"]).returncode == 0
        else:
            Sandbox.open(host=host).close()
    assert eventually(lambda: counts(host) == before), (before, counts(host))
    assert rss_kib(supervisor) < memory + 4096


def test_slots_run_out_with_an_error_that_may_be_retried():
    with SandboxHost(SandboxConfig(slots=1, slot_wait_s=0.1)) as host:
        with Sandbox.open(host=host), pytest.raises(InfraError, match="slots"):
            host.run(["true"])
        assert host.run(["true"]).returncode == 0


def test_programs_have_a_limit_of_their_own():
    with SandboxHost(SandboxConfig(programs=1, slot_wait_s=0.2)) as host, ThreadPoolExecutor(1) as pool:
        with Sandbox.open(host=host), Sandbox.open(host=host):
            sleeper = pool.submit(host.run, ["sleep", "100"], profile=dataclasses.replace(CODE, wall_s=5.0))
            assert eventually(lambda: host.num_alive == 3)
            with pytest.raises(InfraError, match="SandboxConfig.programs"):
                host.run(["true"])
            with pytest.raises(InfraError, match="SandboxConfig.programs"):
                grade_python("def f(): return 1", "f", "def check(c): assert c() == 1", host=host)
        assert sleeper.result().timed_out
        assert host.run(["true"]).returncode == 0


def test_a_sandbox_that_is_killed_from_outside_is_no_fault_of_the_code_in_it():
    """The outer process of bubblewrap cannot be reached from inside."""
    with SandboxHost() as host, Sandbox.open(host=host) as box:
        parents = procfs.process_table().items()
        (outer,) = [pid for pid, (parent, _) in parents if parent == host._launcher.process.pid]
        os.kill(outer, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(InfraError, match="killed from outside"):
                assert eventually(lambda: box.run("echo") is None)


def test_teardown_of_a_busy_sandbox_is_bounded(host):
    box = Sandbox.open(host=host)
    box.run("trap '' INT TERM HUP; for i in 1 2 3 4 5 6 7 8; do (trap '' TERM; while :; do :; done) & done")
    start = time.monotonic()
    box.close()
    assert time.monotonic() - start < 20
    box.close()
    with pytest.raises(EnvError):
        box.run("echo")


def test_a_closed_host_says_so():
    host = SandboxHost()
    host.run(["true"])
    host.close()
    with pytest.raises(InfraError):
        host.run(["true"])


def test_the_shared_host_is_one_per_process_and_setting():
    assert shared_host() is shared_host("bwrap")
    assert shared_host("none") is not shared_host()
    assert run(["echo", "hi"]).text == "hi\n"


# live sandboxes


def test_a_shell_keeps_its_state(box):
    assert box.run("cd /tmp; export A=5; f() { echo fn $A; }").returncode == 0
    assert box.run("pwd; f; (exit 3)").output == "/tmp\nfn 5\n"
    assert box.run("false").returncode == 1


SHELL_LINES = {
    "syntax error": ("echo 'a", 2, None),
    "here document": ("cat <<EOF\nx $((1+1))\nEOF", 0, "x 2\n"),
    "reads nothing": ("read x; echo got $x", 0, "got\n"),
    "both streams": ("echo a; echo b >&2", 0, "a\nb\n"),
    "quotes and unicode": ("echo 'q' \"d\" \\\\ '!x' ünï \t. $'\\x41'", 0, "q d \\ !x ünï . A\n"),
    "comment": ("echo a # ' \" (", 0, "a\n"),
    "several lines": ("for i in 1 2\ndo echo $i\ndone", 0, "1\n2\n"),
    "NUL": ("echo a\0b", 2, None),
    "not unicode": ("printf '\\377'", 0, "\ufffd"),
    "fakes": ("echo '3 0 /tmp'; printf '99 0 /\\0' >&9", 1, None),
    "empty": ("", 0, ""),
}


@pytest.mark.parametrize("name", SHELL_LINES)
def test_shell_line(box, name):
    line, code, output = SHELL_LINES[name]
    result = box.run(line)
    assert result.returncode == code and not result.restarted, result
    assert output is None or result.output == output
    assert box.run("echo on").output == "on\n"


def test_background_jobs_do_not_hold_a_command_up(box):
    start = time.monotonic()
    assert box.run("sleep 100 & echo $(( 1 + 1 ))").output.endswith("2\n")
    assert time.monotonic() - start < 50
    box.run("kill %1")


@pytest.mark.parametrize(
    "line",
    ["sleep 100", "while :; do :; done", "python3 -c 'import signal, time; signal.signal(2, 1); time.sleep(99)'"],
)
def test_a_timeout_ends_the_command_and_keeps_the_state(box, line):
    box.run("cd /tmp; KEPT=yes; sleep 4444 &")
    result = box.run(line, timeout_s=0.3)
    assert result.timed_out and not result.restarted and result.returncode in (130, 137)
    after = box.run("echo $KEPT $PWD; kill -0 $! && echo background; kill $!")
    assert after.output.startswith("yes /tmp\nbackground\n"), after


def test_a_shell_that_cannot_be_interrupted_is_replaced_and_flagged(host):
    with Sandbox.open(host=host) as box:
        box.run("cd /opt")
        result = box.run("trap '' INT; while :; do :; done", timeout_s=0.3)
        assert result.timed_out and result.restarted and result.returncode == 137
        assert box.run("pwd").output == "/opt\n"


def test_a_shell_that_exits_is_replaced_and_flagged(host):
    with Sandbox.open(host=host) as box:
        for line, code in {"exit 3": 3, "kill -9 $$": 137, "exec sh -c 'exit 4'": 4, "set -e; false": 1}.items():
            result = box.run(line)
            assert (result.returncode, result.restarted, result.timed_out) == (code, True, False), line
            assert box.run("echo on").output == "on\n"


def test_huge_output_is_cut_in_the_middle(box):
    result = box.run("head -c 20000000 /dev/zero | tr '\\0' x; echo end")
    assert result.truncated and result.output.endswith("xend\n")
    assert len(result.output) <= TERMINAL.output_bytes + 100


def test_files_go_in_and_out(box):
    data = os.urandom(3 << 20)
    box.put("deep/er/file.bin", data)
    assert box.get("deep/er/file.bin", 4 << 20) == data and box.get("/work/deep/er/file.bin", 4 << 20) == data
    box.put("run.sh", b"#!/bin/sh\necho ran", 0o755)
    assert box.execute(["/work/run.sh"]).text == "ran\n"


def test_only_regular_files_come_out(box):
    box.run(
        "cd /work; ln -sf /etc/passwd link; mkfifo fifo; mkdir -p dir; echo x > fine; head -c 5000 /dev/zero > big; python3 -c 'import socket; socket.socket(1).bind(\"sock\")'"
    )
    for path in ("link", "fifo", "dir", "/dev/zero", "missing", "sock", "/proc/1/environ/x", "a\0b"):
        with pytest.raises(EnvError):
            box.get(path)
    with pytest.raises(EnvError, match="5000"):
        box.get("big", max_bytes=4999)
    with pytest.raises(EnvError):
        box.put("/usr/bin/ls", b"")
    with pytest.raises(EnvError):
        box.put("fifo", b"x")
    assert collect(box, ["link", "fine", "fifo", "big", "no"], max_bytes=100) == {"fine": b"x\n"}


def test_execute_has_a_time_limit_and_separate_streams(box):
    result = box.execute(["sh", "-c", "cat; echo e >&2; exit 3"], b"in")
    assert (result.returncode, result.stdout, result.stderr) == (3, b"in", b"e\n")
    late = box.execute(["sh", "-c", "sleep 4321.5 & sleep 4321.5"], timeout_s=0.3)
    assert late.timed_out and late.killed_by == "wall"
    assert eventually(lambda: not running("4321.5"))
    assert box.execute(["no-such-program"]).returncode == 127


def test_a_program_in_the_background(box):
    """Its output is complete, however it is waited for, and shells work meanwhile."""
    box.start(["sh", "-c", "cat; echo e >&2; until [ -e /work/go ]; do sleep 0.01; done; exit 3"], b"in" * 40_000)
    with pytest.raises(EnvError, match="another program"):
        box.start(["true"])
    assert box.wait(0.1) is None
    assert box.run("touch /work/go").returncode == 0
    result = box.wait(30.0)
    assert (result.returncode, len(result.stdout), result.stderr) == (3, 80_000, b"e\n")
    with pytest.raises(EnvError, match="no program"):
        box.wait(0.1)
    box.start(["sh", "-c", "echo first; sleep 4322.5 & sleep 4322.5"])
    late = box.wait(0.3, stop=True)
    assert late.timed_out and late.stdout == b"first\n"
    assert eventually(lambda: not running("4322.5"))


class Echo:
    """A server that sends back what it receives."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        with connection:
            while part := connection.recv(1 << 16):
                connection.sendall(part)


TALK = """
import os, socket, sys, threading
def talk(text, n):
    with socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))) as s:
        for _ in range(n):
            s.sendall(text)
            said = b""
            while len(said) < len(text):
                said += s.recv(1 << 16)
            assert said == text
talk(b"hello", 2)
threads = [threading.Thread(target=talk, args=(bytes([i]) * 300_000, 1)) for i in range(20)]
[t.start() for t in threads]
[t.join() for t in threads]
print(sys.stdin.read(), os.getcwd())
REST
"""


def served(box, address, rest="", deadline_s=60.0, **settings):
    code = TALK.replace("REST", rest)
    port = lambda url: {"PORT": url.rpartition(":")[2]}  # noqa: E731
    stdin = lambda url: b"for " + url[:17].encode()  # noqa: E731
    return run_served(
        box, [*PYTHON, code], address, port, stdin=stdin, folder="/tmp", deadline_s=deadline_s, **settings
    )


def test_a_served_program_reaches_one_server_and_nothing_else(box):
    here, other = Echo(), Echo()
    probe = (
        f"\ntry:\n    socket.create_connection({other.address!r})\nexcept OSError as e:\n    print(type(e).__name__)"
    )
    result = served(box, here.address, probe)
    assert result.returncode == 0, result.stderr.decode()
    assert result.text == "for http://127.0.0.1: /tmp\nConnectionRefusedError\n"
    closed = box.execute([*PYTHON, "import os; print(sum(1 for _ in open('/proc/net/tcp') if ' 0A ' in _))"])
    assert closed.stdout == b"0\n", "the socket is closed"


def test_excluded_seconds_are_not_the_programs(box):
    asked = []

    def excluded_s():
        asked.append(time.monotonic())
        return 1.0

    here, start = Echo(), time.monotonic()
    hang = "\nimport time; print('there', flush=True); time.sleep(1000)"
    result = served(box, here.address, hang, deadline_s=2.0, excluded_s=excluded_s)
    assert result.timed_out and b"there" in result.stdout and result.ms >= 3000
    assert asked and asked[0] - start >= 2.0
    assert box.run("echo").output == "\n"


def test_a_server_that_is_gone_is_not_the_programs_fault(box):
    gone = Echo()
    gone.listener.shutdown(socket.SHUT_RDWR)
    gone.listener.close()
    with pytest.raises(InfraError, match="cannot be reached"):
        served(box, gone.address)


TUNNEL = """
import http.client, os, socket, sys
def ask(host, port, text):
    proxy = http.client.HTTPConnection(os.environ["HTTPS_PROXY"].removeprefix("http://"))
    proxy.set_tunnel(host, port)
    try:
        proxy.connect()
    except OSError as e:
        return str(e)
    proxy.sock.sendall(text)
    return proxy.sock.recv(100)
"""


def tunnelled(box, way, code):
    sets = [f"{name}={value}" for name, value in way.variables.items()]
    result = box.execute(["/usr/bin/env", *sets, *PYTHON, TUNNEL + code])
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_a_proxy_opens_tunnels_to_allowed_servers_and_nothing_else(box):
    here, other = Echo(), Echo()
    way = Egress(box, (f"LOCALHOST:{here.address[1]}",))
    said = tunnelled(
        box,
        way,
        f"""
print(ask("localhost", {here.address[1]}, b"hi"))
print(ask("localhost", {other.address[1]}, b"hi"))
print(ask("127.0.0.1", {here.address[1]}, b"hi"))
plain = http.client.HTTPConnection(os.environ["HTTPS_PROXY"].removeprefix("http://"))
plain.request("GET", "http://localhost:{here.address[1]}/")
print(plain.getresponse().status)
try:
    socket.create_connection(("127.0.0.1", {here.address[1]}))
except OSError as e:
    print(type(e).__name__)
""",
    )
    refused = "Tunnel connection failed: 403 Forbidden\n"
    assert said == f"b'hi'\n{refused}{refused}405\nConnectionRefusedError\n"
    assert way.num_refused == 2
    way.close()
    assert "Connection refused" in tunnelled(box, way, "print(ask('localhost', 1, b''))")


def test_a_proxy_answers_whatever_it_is_asked(box):
    gone = Echo()
    gone.listener.shutdown(socket.SHUT_RDWR)
    gone.listener.close()
    way = Egress(box, (f"localhost:{gone.address[1]}",))
    said = tunnelled(
        box,
        way,
        f"""
def raw(sent):
    with socket.create_connection(("127.0.0.1", int(os.environ["HTTPS_PROXY"].rpartition(":")[2]))) as s:
        s.sendall(sent)
        s.shutdown(socket.SHUT_WR)
        return s.recv(100).split(b"\\r\\n")[0].decode()
print(raw(b"CONNECT localhost:{gone.address[1]} HTTP/1.1\\r\\n\\r\\n"))
print(raw(b"CONNECT localhost:\\xff HTTP/1.1\\r\\n\\r\\n"))
print(raw(b"CONNECT\\r\\n\\r\\n"))
print(raw(b"\\r\\n\\r\\n"))
print(raw(b"x" * 8192))
print(raw(b"CONNECT localhost:{gone.address[1]}") or "nothing")
""",
    )
    assert said.splitlines() == [
        "HTTP/1.1 502 Bad Gateway",
        "HTTP/1.1 403 Forbidden",
        "HTTP/1.1 403 Forbidden",
        "HTTP/1.1 405 Method Not Allowed",
        "HTTP/1.1 431 Request Header Fields Too Large",
        "nothing",
    ]
    way.close()


def test_a_domain_on_the_list_allows_its_hosts(box):
    way = Egress(box, ("*.example.org:443", "pypi.org:443"))
    allowed = ("a.example.org", "b.a.Example.org", "pypi.org", "PyPI.org.")
    assert all(way.allows(host, 443) for host in allowed)
    assert not any(way.allows(host, 443) for host in ("example.org", "badexample.org", "x.pypi.org", "org", ""))
    assert not any(way.allows(host, 80) for host in allowed)
    way.close()


@pytest.mark.parametrize(
    "place", ["pypi.org", "pypi.org:0", "pypi.org:99999", "*:443", "a b:1", "https://pypi.org:443"]
)
def test_a_list_of_servers_names_hosts_and_ports(place):
    with pytest.raises(ConfigError, match="is no server"):
        check_egress((place,), "egress")


def test_readable_folders_can_be_read_and_not_written(host):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "agent.sh").write_text("echo $((6*7))")
        with Sandbox.open(dataclasses.replace(TERMINAL, readable=(folder,)), host=host) as box:
            assert box.run(f"sh {folder}/agent.sh").output == "42\n"
            assert box.run(f"echo x > {folder}/agent.sh").returncode != 0


def test_several_shells(box):
    box.open_shell("second")
    box.run("X=1")
    assert box.run("echo .$X", shell="second").output == ".\n"
    with pytest.raises(EnvError):
        box.open_shell("second")
    box.close_shell("second")
    for name in ("second", "none"):
        with pytest.raises(EnvError):
            box.run("echo", shell=name)


@pytest.mark.parametrize("line", ["kill -9 -1", "kill -9 $PPID"])
def test_a_command_that_kills_its_own_sandbox_ends_it(host, line):
    with Sandbox.open(host=host) as box:
        assert box.run(line).killed_by == "agent" and not box.alive
        with pytest.raises(SandboxGone) as gone:
            box.run("echo")
        assert gone.value.killed_by == "agent"


def test_a_live_sandbox_over_its_memory_or_its_time_is_gone(host):
    hungry = "python3 -c \"x = [bytes(1 << 20) + b'1' for _ in range(300)]; import time; time.sleep(60)\""
    with Sandbox.open(dataclasses.replace(TERMINAL, memory_bytes=64 * MIB), host=host) as box:
        assert box.run(hungry).killed_by == "memory"
    with Sandbox.open(dataclasses.replace(TERMINAL, session_s=2.0), host=host) as box:
        assert box.run("sleep 100").killed_by == "wall"
        with pytest.raises(SandboxGone):
            box.get("x")


HOSTILE = """
import os, time
from wire import receive, send
while True:
    order, blob = receive(0)
    if order["op"] != "run":
        send(0, {"ready": True})
    else:
        ANSWER
"""
LIES = {
    "noise": "os.write(0, b'\\xff' * 100)",
    "a header too large": "os.write(0, b'\\0\\1\\0\\1' * 2)",
    "not an object": "os.write(0, b'\\0\\0\\0\\2\\0\\0\\0\\0[]')",
    "brackets": "send(0, {}) if 0 else os.write(0, b'\\0\\0\\xff\\xff\\0\\0\\0\\0' + b'[' * 65535)",
    "more output than allowed": "send(0, {'code': 0}, bytes(10 << 20))",
    "dribble": "os.write(0, b'\\0\\0\\xff\\xff\\0\\0\\0\\0')\n        while True: os.write(0, b' '); time.sleep(0.05)",
    "silence": "time.sleep(1000)",
}


@pytest.mark.parametrize("lie", LIES)
def test_an_agent_that_lies_is_the_end_of_its_sandbox_alone(host, monkeypatch, lie):
    """Output from inside a sandbox is not trusted."""
    hostile = HOSTILE.replace("ANSWER", LIES[lie].replace("\\\\", "\\")).encode()
    monkeypatch.setattr(
        command_line, "inside", lambda name: hostile if name == "agent.py" else (INSIDE / name).read_bytes()
    )
    monkeypatch.setattr(session, "ANSWER_S", 0.3)
    with Sandbox.open(CODE, host=host) as box:
        assert box.run("echo", timeout_s=0.2).killed_by == "agent"
        with pytest.raises(SandboxGone):
            box.run("echo")


NO_SOCKETS = {
    "nothing": "time.sleep(1000)",
    "a byte alone": "os.write(0, b's')",
    "a file": "socket.send_fds(s, [b's'], [os.open('/dev/null', 0)])",
    "a socket that does not listen": "socket.send_fds(s, [b's'], [socket.socket().fileno()])",
    "a socket of its own file system": "u = socket.socket(socket.AF_UNIX); u.bind('/work/u'); u.listen(); "
    "socket.send_fds(s, [b's'], [u.fileno()])",
}


@pytest.mark.parametrize("what", NO_SOCKETS)
def test_a_sandbox_that_gives_no_listening_socket_is_ended(host, monkeypatch, what):
    sent = f"send(0, {{'port': 1}}); import socket; s = socket.socket(fileno=0); {NO_SOCKETS[what]}; time.sleep(1000)"
    hostile = HOSTILE.replace('"run"', '"listen"').replace("ANSWER", sent).encode()
    monkeypatch.setattr(
        command_line, "inside", lambda name: hostile if name == "agent.py" else (INSIDE / name).read_bytes()
    )
    box = Sandbox.open(CODE, host=host)
    monkeypatch.setattr(session, "START_S", 3.0)
    with box, pytest.raises(SandboxGone):
        box.listen()


def test_an_agent_without_an_exit_code_is_an_error(host, monkeypatch):
    hostile = HOSTILE.replace("ANSWER", "send(0, {'code': '0'})").encode()
    monkeypatch.setattr(
        command_line, "inside", lambda name: hostile if name == "agent.py" else (INSIDE / name).read_bytes()
    )
    with Sandbox.open(CODE, host=host) as box, pytest.raises(EnvError, match="code"):
        box.run("echo")


def test_a_forgotten_sandbox_frees_its_slot():
    with SandboxHost(SandboxConfig(slots=1, slot_wait_s=30.0)) as host:
        box = Sandbox.open(CODE, host=host)
        del box
        assert host.run(["true"]).returncode == 0


def test_writable_root_of_the_terminal_profile(box):
    local = "/usr/local/bin/x" if os.geteuid() == 0 else "/opt/y"
    made = box.run(f"mkdir /data && touch /etc/x /opt/x {local} /var/log/x /root/x && ls /data /usr/bin/env")
    assert made.returncode == 0, made.output
    assert box.run("touch /usr/bin/x").returncode == 1


def test_warm_sandboxes_are_fresh_and_not_given_twice():
    with SandboxHost(SandboxConfig(warm=2)) as host:
        Sandbox.open(CODE, host=host).close()
        assert eventually(lambda: host.num_alive == 2)
        boxes = [Sandbox.open(CODE, files={"x": b"1"}, host=host) for _ in range(3)]
        slots = {box.stats()["slot"] for box in boxes}
        assert len(slots) == 3 and all(box.run("ls").output == "x\n" for box in boxes)
        with Sandbox.open(TERMINAL, host=host) as other:
            assert other.run("mkdir /new").returncode == 0
        for box in boxes:
            box.close()
    assert host.num_alive == 0


def test_many_threads_share_a_host(host):
    def work(i):
        with Sandbox.open(CODE, host=host) as box:
            return box.run(f"echo {i}").output

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [f"{i}\n" for i in range(8)]


# streams


def test_a_stream_passes_bytes_both_ways(host):
    server = "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(line.upper()); sys.stdout.flush()\nsys.stderr.write('bye'); sys.exit(3)"
    with host.popen([*PYTHON, server]) as stream:
        for word in (b"one\n", b"two\n"):
            stream.stdin.write(word)
            assert stream.stdout.read(100) == word.upper()
        assert stream.wait(0.0) is None
        stream.stdin.close()
        assert stream.wait(30) == 3 and stream.stderr() == b"bye"


def test_a_stream_can_be_killed(host):
    with popen(["sleep", "100"], host=host) as stream:
        stream.kill()
        assert stream.wait(30) == 137 and stream.killed_by == "host"
    assert stream.stdout.closed


def test_a_command_line_runs_a_program_on_its_own_streams(tmp_path):
    (tmp_path / "data.txt").write_text("file ")
    command = [sys.executable, "-m", "rolljax.sandbox", "run", "--file", f"{tmp_path}/data.txt:d.txt", "--"]
    done = subprocess.run([*command, "sh", "-c", "cat d.txt -; exit 4"], input="in", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (4, "file in", "")


# the doctor, the trusted backend, the group


def test_the_doctor_passes_here():
    done = subprocess.run([sys.executable, "-m", "rolljax.sandbox"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "no network" in done.stdout and "untrusted code can be run here" in done.stdout


def test_without_bubblewrap_untrusted_code_is_refused(tmp_path):
    script = "from rolljax.sandbox import Sandbox\nSandbox.open()"
    env = {**os.environ, "PATH": str(tmp_path)}
    hide = "import rolljax.sandbox.command_line as r; r.bwrap = lambda: ''\n"
    done = subprocess.run([sys.executable, "-c", hide + script], env=env, capture_output=True, text=True)
    assert "ConfigError" in done.stderr and "apt-get install bubblewrap" in done.stderr


def test_trusted_backend_has_the_same_interface():
    with SandboxHost(SandboxConfig(backend="none")) as host:
        result = host.run(["sh", "-c", "cat; cat x"], stdin=b"in ", files={"x": b"file"})
        assert isinstance(result, Result) and result.stdout == b"in file"
        assert host.run(["sleep", "30"], profile=BRIEF).killed_by == "wall"
        assert host.run(["no-such-program"]).returncode == 127
        with Sandbox.open(files={"a": b"1"}, host=host) as box:
            assert box.run("cd ..; cat work/a; A=1").output == "1" and box.get("a") == b"1"
            box.run("sleep 5432100.5 &")
        assert eventually(lambda: not running("5432100.5"))


def test_a_group_has_the_verbs_of_rock(host):
    with SandboxGroup(2, start_concurrency=2, profile=CODE, host=host) as group:
        first, second = group.start()
        assert sorted(group.ids) == sorted([first, second]) and group.is_alive(first) == {"is_alive": True}
        group.create_session(first)
        assert group.run_in_session(first, "cd /tmp; echo hi")["output"] == "hi\n"
        told = group.run_in_session(first, "pwd; exit 4")
        assert told["output"].startswith("/tmp\n") and told["exit_code"] == 4
        content = base64.b64encode(b"data").decode()
        group.upload(first, "up/x", content)
        assert group.read_file(first, "up/x") == {"path": "up/x", "size": 4, "content": content}
        assert group.execute(first, "cat up/x; exit 2")["exit_code"] == 2
        assert group.execute(second, ["ls", "up"])["exit_code"] != 0
        assert group.run_in_session(first, "sleep 50", timeout_s=0.3)["failure_reason"] == "timeout"
        done = group.run_in_session(first, "echo a; echo b >&2; exit 3", mode="nohup", timeout_s=20)
        assert (done["output"], done["exit_code"]) == ("a\nb\n", 3)
        capped = group.run_in_session(first, "seq 1000", mode="nohup", timeout_s=20, max_output_bytes=10)
        assert capped["output"] == "1\n2\n3\n4\n5\n" and capped["truncated"]
        sized = group.run_in_session(first, "seq 1000", mode="nohup", timeout_s=20, ignore_output=True)
        assert (
            sized["size"] == 3893 and base64.b64decode(group.read_file(first, sized["path"])["content"])[:2] == b"1\n"
        )
        going = group.run_in_session(first, "echo on; sleep 50", mode="nohup", timeout_s=0.4)
        assert going["exit_code"] is None and going["failure_reason"] == "still running" and going["output"] == "on\n"
        assert json.dumps(group.statistics(first))
        group.close_session(first)
        with pytest.raises(EnvError):
            group.run_in_session(first, "echo")
        group.remove(second)
        assert group.is_alive(second) == {"is_alive": False} and group.ids == [first]
        with pytest.raises(EnvError):
            group.execute("sandbox-99", "true")
    assert group.ids == []


@needs_root
def test_an_ordinary_user_gets_the_same_with_less():
    """Without root: no user id per sandbox, bytes limited per directory, processes counted inside."""
    script = textwrap.dedent("""
        import dataclasses, json, subprocess, sys
        from rolljax.sandbox import CODE, Sandbox, SandboxHost
        with SandboxHost() as host:
            modes = host.modes()
            few = dataclasses.replace(CODE, nproc=16)
            forks = host.run(["python3", "-c", "import os, time\\nn = 0\\ntry:\\n while os.fork(): n += 1\\n time.sleep(3)\\nexcept OSError: print(n)"], profile=few)
            with Sandbox.open(host=host) as box:
                root = box.run("mkdir /new && echo made; touch /usr/x").output
            print(json.dumps([modes["own_uid"], int(forks.text), root.splitlines()[0], host.run(["cat", "/etc/shadow"]).returncode]))
    """)
    done = as_ordinary_user(script)
    assert done.returncode == 0, done.stderr
    own_uid, forks, made, shadow = json.loads(done.stdout)
    assert (own_uid, made, shadow) == (False, "made", 1) and 1 <= forks <= 16


@needs_root
def test_a_delegated_control_group_gets_one_group_per_sandbox(tmp_path):
    """A folder replaces the control group: limits are plain files in it."""
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    with SandboxHost(SandboxConfig(cgroup=str(tmp_path))) as host:
        assert host.modes()["memory"] == f"control group {tmp_path}"
        assert host.run(["echo", "hi"], profile=SMALL).text == "hi\n"
        (group,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
        files = {f.name: f.read_text() for f in group.iterdir()}
        assert files.pop("cgroup.procs").isdigit()
        (group / "cpu.stat").write_text(f"usage_usec {int(SMALL.total_cpu_s * 1e6) + 1}\nuser_usec 0\n")
        assert host.run(["sleep", "30"], profile=SMALL).killed_by == "cpu"
        assert files == {"memory.max": str(SMALL.memory_bytes), "memory.oom.group": "1", "pids.max": str(SMALL.nproc)}
