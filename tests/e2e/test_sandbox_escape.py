"""Every line of the list of escapes is tried from inside a sandbox: as a one-shot program, and next to a live shell."""

import dataclasses
import json
import os
import platform
import re
import socket
from pathlib import Path

import pytest

from rolljax.sandbox import CODE, TERMINAL, Sandbox, SandboxHost, seccomp
from rolljax.sandbox.profile import MIB
from tests.e2e import sandbox_memory_probes as memory
from tests.e2e.sandbox_probes import PRELUDE, PROBES, RUNNER
from tests.e2e.sandbox_support import eventually, needs_root, needs_sandbox, running

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
    """Every probe's answer, by how the program was started."""
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
def test_contained(answers, how, name):
    if name in NEEDS_MOUNTS and not ROOT:
        pytest.skip("needs root: one limit for files of all directories")
    ok, seen = answers[how][name]
    assert ok is True, seen


MEMORY = dataclasses.replace(TERMINAL, memory_bytes=96 * MIB, inodes=20_000, tmpfs_bytes=64 * MIB, wall_s=60.0)
HELD = 160 * MIB
"""What a probe may keep by its own count: the limit, and pipes, whose first 64 MiB no sandbox of a user goes beyond."""
QUICK = (
    "page tables",
    "connections that nobody accepts",
    "shared memory, unmapped but for a page",
    "pages given to pipes",
)
LATE = ("mappings", "file locks")
"""Counted only when the kernel's memory has grown by so much that something holds it."""


def keeps(host, name, wanted):
    """How much memory of the kernel a probe holds at its end, and how it ended."""
    code = memory.PROBES[name]
    program = "\n".join([memory.PRELUDE, f"CODE = {code!r}", memory.RUNNER]).encode()
    argv = [*PYTHON[:-1], "/tmp/probe.py", str(wanted), str(HELD)]
    result = host.run(argv, files={"/tmp/probe.py": program}, profile=MEMORY)
    held = int(result.text.split(" ", 1)[0]) if result.stdout else -1
    return held, result.killed_by, result.text + result.stderr.decode()[-500:]


def contained(held, killed_by):
    return killed_by == "memory" or 0 <= held <= HELD


@pytest.mark.parametrize("name", QUICK)
def test_memory_of_the_kernel_is_contained(host, name):
    held, killed_by, said = keeps(host, name, 400 * MIB)
    assert contained(held, killed_by), said


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in memory.PROBES if name not in QUICK])
def test_all_memory_of_the_kernel_is_contained(host, name):
    held, killed_by, said = keeps(host, name, (900 if name in LATE else 400) * MIB)
    assert contained(held, killed_by) or name in LATE and killed_by == "wall", said


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
