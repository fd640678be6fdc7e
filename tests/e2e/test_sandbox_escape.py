"""Every escape of the list is tried from inside a sandbox: as a one-shot program, and next to a live shell."""

import dataclasses
import json
import os
import platform
import re
import signal
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from rolljax.sandbox import CODE, Sandbox, SandboxHost, command_line, seccomp
from rolljax.sandbox.profile import MIB
from rolljax.sandbox.supervisor import procfs
from rolljax.sandbox.supervisor.look import look
from rolljax.sandbox.supervisor.watch import SandboxWatch, stopped
from tests.e2e import sandbox_memory_probes as memory
from tests.e2e.sandbox_probes import PRELUDE, PROBES, RUNNER
from tests.e2e.sandbox_support import as_ordinary_user, eventually, needs_root, needs_sandbox, needs_x86, running

pytestmark = needs_sandbox
PYTHON = ["/usr/bin/python3", "-E", "-s", "-S", "-B", "-"]
PROFILE = dataclasses.replace(CODE, wall_s=120.0, cpu_s=60, inodes=5_000, output_bytes=1 << 20)
NEEDS_MOUNTS = {"uses: number of files", "uses: deep folders", "uses: disk bytes, all directories together"}
ROOT = os.geteuid() == 0


@pytest.fixture(scope="module")
def host():
    os.environ["ROLLJAX_TEST_SECRET"] = "correct-horse-battery"
    os.environ["HTTP_PROXY"] = "http://192.0.2.7:3128"
    with SandboxHost() as host:
        yield host
    del os.environ["ROLLJAX_TEST_SECRET"], os.environ["HTTP_PROXY"]


@pytest.fixture(scope="module")
def answers(host, tmp_path_factory):
    """Return every probe's answer, by the way the program was started."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret.txt").write_text("of the host")
    table = dict(zip(seccomp.DENIED, (pair[seccomp_column()] for pair in seccomp.DENIED.values()), strict=True))
    facts = {
        "secret": "correct-horse-battery",
        "file": str(folder / "secret.txt"),
        "suid": "/usr/bin/su",
        "abstract": f"rolljax-test-{os.getpid()}",
        "unix": str(folder / "socket"),
        "numbers": {**table, **seccomp.SPECIAL[platform.machine()]},
        "probes": list(PROBES.items()),
    }
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_server(("127.0.0.1", 0)) as server,
        Sandbox.open(host=host) as neighbour,
    ):
        abstract.bind("\0" + facts["abstract"])
        abstract.listen()
        unix.bind(facts["unix"])
        unix.listen()
        facts["port"] = server.getsockname()[1]
        assert neighbour.run("touch /work/marker /tmp/marker /dev/shm/marker").returncode == 0
        program = "\n".join([PRELUDE, RUNNER]).encode()
        found = {
            "run": host.run(
                [*PYTHON[:-1], "/work/probe.py"],
                stdin=json.dumps(facts).encode(),
                files={"probe.py": program},
                profile=PROFILE,
            )
        }
        with Sandbox.open(PROFILE, files={"probe.py": program}, host=host) as box:
            found["session"] = box.execute([*PYTHON[:-1], "/work/probe.py"], json.dumps(facts).encode(), 120.0)
    said = {}
    for how, result in found.items():
        assert result.returncode == 0, (how, result.stderr[-2000:])
        said[how] = {name: (ok, seen) for name, ok, seen in map(json.loads, result.text.splitlines())}
        assert len(said[how]) == len(PROBES)
    return said


def seccomp_column():
    return ("x86_64", "aarch64").index(platform.machine())


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("how", ["run", "session"])
def test_an_escape_is_contained(answers, how, name):
    if name in NEEDS_MOUNTS and not ROOT:
        pytest.skip("needs root: one limit for files of all directories")
    ok, seen = answers[how][name]
    assert ok is True, seen


QUICK = (
    "page tables",
    "connections that are never accepted",
    "shared memory, unmapped but for a page",
    "pages given to pipes",
    "a process that hands its memory over",
    "a process that hands over and cannot be stopped",
    "threads without their first one",
    "siblings that hand their memory over",
    "threads with descriptors of their own",
    "rules for files",
    "filters of system calls",
    "lists of who may read a file",
    "tables for locks in memory",
    "terminals",
)
WAYS = (
    *QUICK,
    "forks that hand their memory over",
    "threads that hand over without a first thread",
    "page tables of processes that hand over",
    "descriptors of processes that hand over",
    "many that hand their memory over",
    "texts of /proc that are half read",
)
"""Ways to hold memory outside of the limit, which the sweep tries repeatedly."""


@pytest.mark.parametrize("name", QUICK)
def test_memory_of_the_kernel_is_contained(host, name):
    contained, _, said = memory.keeps(host, name)
    assert contained, said


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in memory.PROBES if name not in QUICK])
def test_all_memory_of_the_kernel_is_contained(host, name):
    contained, killed_by, said = memory.keeps(host, name)
    assert contained or name in memory.LATE and killed_by == "wall", said


@pytest.mark.sweep
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("run", range(10))
def test_twenty_ways_to_hold_memory_are_contained_every_time(host, run, name):
    contained, _, said = memory.keeps(host, name)
    assert contained, said


@needs_root
def test_an_ordinary_users_sandbox_is_contained_too():
    """Without root, another way leads to the processes of a sandbox, to count them and to stop them."""
    names = ("a process that hands its memory over", "a process that hands over and cannot be stopped", "terminals")
    script = textwrap.dedent(f"""
        import json
        from rolljax.sandbox import SandboxHost
        from tests.e2e.sandbox_memory_probes import keeps
        with SandboxHost() as host:
            print(json.dumps([keeps(host, name) for name in {names}]))
    """)
    done = as_ordinary_user(script)
    assert done.returncode == 0, done.stderr
    assert [contained for contained, *_ in json.loads(done.stdout)] == [True] * len(names), done.stdout


def inside(host, body, **limits):
    """Run Python that may use what probes use."""
    program = "\n".join([memory.PRELUDE, textwrap.dedent(body)]).encode()
    profile = dataclasses.replace(memory.CROWDED, **limits)
    argv = [*PYTHON[:-1], "/tmp/probe.py", str(200 * MIB), "0"]
    return host.run(argv, files={"/tmp/probe.py": program}, profile=profile)


BURNS = {
    "one after the other": """
        while True:
            if not os.fork():
                while time.process_time() < 0.05: pass
                os._exit(0)
            os.wait()""",
    "handing over": """
        crowd(10)
        if not os.fork(): hop(VM | CHILD)
        time.sleep(60)""",
    "several at once": """
        for _ in range(3): os.fork()
        while True: pass""",
}


@pytest.mark.parametrize("name", BURNS)
def test_processor_time_of_all_processes_is_limited(host, name):
    result = inside(host, BURNS[name], total_cpu_s=1.0, memory_bytes=1024 * MIB)
    assert result.killed_by == "cpu", result


def test_many_short_processes_are_no_violation(host):
    loop = "for i in $(seq 1500); do n=$((n + $(/bin/echo $i))); done; echo $n"
    assert host.run(["bash", "-c", loop], profile=memory.CROWDED).text == "1125750\n"


def test_a_stopped_process_stays_stopped_when_the_others_continue(host):
    result = inside(
        host,
        """
        stopped = os.fork()
        if not stopped:
            while True: pass
        os.kill(stopped, signal.SIGSTOP)
        os.waitpid(stopped, os.WUNTRACED)
        if not os.fork(): hop(VM | CHILD, size=1 << 20)
        def ticks():
            return int(open(f"/proc/{stopped}/stat").read().rpartition(")")[2].split()[11])
        before = ticks()
        time.sleep(3)  # while it is looked at
        print("stopped" if ticks() - before < 50 else "ran", flush=True)
        os.kill(os.getpid(), 9)
        """,
    )
    assert result.text == "stopped\n", result


@needs_root
def test_a_look_that_is_too_long_ends_and_the_processes_continue():
    """Also a look at stopped processes: all continue but the one that was stopped before."""

    def process(mark):
        """Return the `sleep` process with this argument, and its state."""
        pid = next(iter(running(mark)), 0)
        return pid, pid and procfs.stat_of(every, str(pid)).state

    every = procfs.ProcFolder("/proc")
    # A name space without a supervisor, whose own looks would also stop the processes.
    name_space = "--unshare-pid --die-with-parent --ro-bind / / --proc /proc --dev /dev --".split()
    script = "sleep 1234567.625 & sleep 1234567.875 & wait"
    shell = subprocess.Popen([command_line.bwrap(), *name_space, "sh", "-c", script])
    try:
        assert eventually(lambda: process("1234567.625")[1] == process("1234567.875")[1] == "S")
        os.kill(process("1234567.875")[0], signal.SIGSTOP)
        assert eventually(lambda: process("1234567.875")[1] == "T")
        watch = SandboxWatch(process("1234567.625")[0], 0, memory_bytes=1 << 30, cpu_s=1e9)
        before = look(watch.proc, watch.pids)
        assert len(stopped(before)) == 1
        assert watch.frozen(before, 0)[1] > 0
        watch.proc.left = procfs.OPEN_ENTRIES
        with pytest.raises(procfs.TooMuchToRead):
            watch.frozen(before, 0)
        assert eventually(lambda: (process("1234567.625")[1], process("1234567.875")[1]) == ("S", "T"))
        watch.close()
    finally:
        shell.kill()
        shell.wait()
        every.close()


@needs_x86
def test_memory_that_is_lent_to_a_child_counts_once(host):
    """As in `vfork` and `posix_spawn`."""
    result = inside(
        host,
        """
        mine = b"x" * (150 << 20)
        if not os.fork(): hop(VM | 0x4000 | CHILD, size=4096)
        time.sleep(3)
        print("alive", flush=True)
        os.kill(os.getpid(), 9)
        """,
        nproc=16,
    )
    assert result.text == "alive\n", result


def test_probes_can_fail(host):
    """Without isolation the same probes report what they see."""
    from rolljax.sandbox import SandboxConfig

    names = ["sees: environment of process 1", "may: no new privileges", "uses: memfd", "network: interfaces"]
    facts = {"numbers": seccomp.SPECIAL[platform.machine()], "probes": [(n, PROBES[n]) for n in names]}
    with SandboxHost(SandboxConfig(backend="none")) as bare:
        program = "\n".join([PRELUDE, RUNNER]).encode()
        result = bare.run([*PYTHON[:-1], "probe.py"], stdin=json.dumps(facts).encode(), files={"probe.py": program})
    answers = [json.loads(line) for line in result.text.splitlines()]
    assert [ok for _, ok, _ in answers].count(True) <= 1, answers


@needs_root
def test_each_sandbox_has_a_user_of_its_own(host):
    def uids(mark):
        return {
            int(re.search(r"^Uid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1]) for pid in running(mark)
        }

    with Sandbox.open(host=host) as a, Sandbox.open(host=host) as b:
        for box, mark in ((a, "1234567.25"), (b, "1234567.5")):
            box.run(f"sleep {mark} &")
        assert eventually(lambda: uids("1234567.25") and uids("1234567.5"))  # the shell went on before they began
        first, second = uids("1234567.25"), uids("1234567.5")
        assert len(first) == len(second) == 1 and first != second
        assert min(first | second) >= host.config.first_uid
