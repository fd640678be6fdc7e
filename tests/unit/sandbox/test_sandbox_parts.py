"""The parts of a sandbox that are plain functions: the system call filter, the data between two sandboxes, settings."""

import collections
import errno
import json
import math
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.errors import ConfigError, InfraError
from rolljax.sandbox import CODE, PROFILES, Profile, SandboxConfig, SandboxGone, command_line, seccomp
from rolljax.sandbox.host import ended_with
from rolljax.sandbox.inside.plain import Codec
from rolljax.sandbox.inside.wire import HeadTail, Lost, receive, send
from rolljax.sandbox.launcher import delegated_group
from rolljax.sandbox.supervisor import cgroup, procfs
from rolljax.sandbox.supervisor.look import look, proportional
from rolljax.sandbox.supervisor.watch import MOST_ENTRIES, SandboxWatch

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
KILL, ALLOW = "kill", "allow"
MACHINES = ("x86_64", "aarch64")


def decide(machine, number, args=(0, 0), arch=None):
    """Run the filter on a call, in a small BPF machine."""
    data = struct.pack("<iIQ", number, arch or seccomp.AUDIT_ARCH[machine], 0)
    data += b"".join(struct.pack("<Q", a) for a in (*args, 0, 0, 0, 0, 0, 0))
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    at = accumulator = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == seccomp.LD:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif op == seccomp.RET:
            kinds = {seccomp.KILL_PROCESS: KILL, seccomp.ALLOW: ALLOW}
            return kinds.get(k) or errno.errorcode.get(k & 0xFFFF, 0)
        else:
            true = {seccomp.JEQ: accumulator == k, seccomp.JGE: accumulator >= k, seccomp.JSET: bool(accumulator & k)}[
                op
            ]
            at += yes if true else no


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_decisions(machine):
    special = seccomp.SPECIAL[machine]
    assert decide(machine, 0, arch=0x40000003) == KILL
    assert decide(machine, special["clone3"]) == "ENOSYS"
    for flags in (17, 0x100 | 17, 0x4000 | 0x100 | 17, 0x3D0F00):  # fork, memory shared, vfork, a thread
        assert decide(machine, special["clone"], (flags, 0)) == ALLOW
    for flags in (0x8000 | 17, 0x3D0F00 & ~0x400):  # another one's child, a thread with descriptors of its own
        assert decide(machine, special["clone"], (flags, 0)) == "EPERM"
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert decide(machine, special["clone"], (17 | 1 << bit, 0)) == "EPERM"
    for call in ("socket", "socketpair"):
        allowed = [family for family in range(64) if decide(machine, special[call], (family, 1)) == ALLOW]
        assert allowed == [1, 2, 10]
        assert decide(machine, special[call], (40, 1)) == "EAFNOSUPPORT"
        protocols = [n for n in range(300) if decide(machine, special[call], (2, 1, n)) == ALLOW]
        assert protocols == [0, 1, 6, 17, 58]
        assert decide(machine, special[call], (2, 1, 262)) == "EPROTONOSUPPORT"
    assert decide(machine, special["ioctl"], (0, 0x5401)) == ALLOW
    for args, said in (((0, 1031), "EPERM"), ((0, 1032), ALLOW), ((0, 6), ALLOW)):
        assert decide(machine, special["fcntl"], args) == said
    for flags, said in (
        (0x21, "EPERM"),
        (0x23, "EPERM"),
        (0x4021, "EPERM"),
        (0x22, ALLOW),
        (0x01, ALLOW),
        (0x4022, ALLOW),
    ):
        assert decide(machine, special["mmap"], (0, 4096, 3, flags)) == said
    ignored = {
        (level, option)
        for level in (0, 1, 6)
        for option in range(64)
        if decide(machine, special["setsockopt"], (3, level, option)) == 0
    }
    assert ignored == {(1, option) for option in (7, 8, 32, 33)}
    for level, option, said in ((41, 20, "ENODEV"), (0, 35, "ENODEV"), (6, 20, ALLOW), (1, 20, ALLOW), (41, 26, ALLOW)):
        assert decide(machine, special["setsockopt"], (3, level, option)) == said
    for option, said in ((22, "EINVAL"), (78, "EINVAL"), (15, ALLOW), (4, ALLOW)):
        assert decide(machine, special["prctl"], (option, 0)) == said
    for flags, said in ((0, ALLOW), (4, ALLOW), (2, "EINVAL"), (6, "EINVAL")):
        assert decide(machine, special["close_range"], (3, 9, flags)) == said
    assert decide(machine, special["ioctl"], (0, 0x5412)) == "EPERM"
    assert decide(machine, special["ioctl"], (0, 1 << 32 | 0x5412)) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_is_refused_exactly_when_it_is_listed(machine):
    column = MACHINES.index(machine)
    listed = {pair[column] for pair in seccomp.DENIED.values() if pair[column] >= 0}
    special = set(seccomp.SPECIAL[machine].values())
    unsupported = {row[column]: errno.errorcode[row[2]] for row in seccomp.UNSUPPORTED.values()}
    assert not listed & special and not listed & unsupported.keys() and not special & unsupported.keys()
    for number in set(range(500)) - special:
        said = "EPERM" if number in listed else "ENOSYS" if number > seccomp.LAST else unsupported.get(number, ALLOW)
        assert decide(machine, number) == said, number
    assert machine != "x86_64" or decide(machine, seccomp.X32 | 39) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernel_headers(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header}")
    real = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
    ours = {
        name: pair[MACHINES.index(machine)] for name, pair in (seccomp.DENIED | seccomp.UNSUPPORTED).items()
    } | seccomp.SPECIAL[machine]
    checked = {name: number for name, number in ours.items() if name in real}
    assert len(checked) > 50
    assert checked == {name: int(real[name]) for name in checked}


def test_an_unknown_machine_is_refused():
    with pytest.raises(ConfigError, match="x86_64 or aarch64"):
        seccomp.program("riscv64")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.text())
    ),
    max_leaves=12,
)


def through(value):
    return Codec().decode(json.loads(json.dumps(Codec().encode(value))))


def exact(value):
    """Return the value with every type spelled out."""
    if isinstance(value, dict):
        return dict, [(exact(k), exact(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [exact(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    return type(value), repr(value)


@given(plain)
def test_plain_data_keep_values_and_types(value):
    assert exact(through(value)) == exact(value)


def test_odd_data():
    assert math.isnan(through(float("nan"))) and through(float("-inf")) == -math.inf
    assert math.copysign(1, through(-0.0)) == -1 and through(10**5000) == 10**5000
    assert through(range(1, 9, 2)) == range(1, 9, 2) and list(through(iter([1, 2]))) == [1, 2]
    assert list(through({1: 2}.items())) == [(1, 2)] and through("\ud800") == "\ud800"
    assert through(collections.deque([1])) == collections.deque([1])
    assert type(through(collections.Counter("aab"))) is dict


class Sly(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__

    def __index__(self):
        return 7

    __int__ = __index__


class SlyText(str):
    __hash__ = str.__hash__

    def __eq__(self, other):
        return True

    def __str__(self):
        return self


def test_what_arrives_has_no_behaviour_of_its_own():
    assert exact(through([Sly(3), SlyText("x"), collections.OrderedDict(a=1)])) == exact([3, "x", {"a": 1}])


def test_data_that_cannot_be_sent():
    deep = []
    for _ in range(2000):
        deep = [deep]
    loop = []
    loop.append(loop)
    for value in (deep, loop, itertools_forever()):
        with pytest.raises(ValueError):
            through(value)
    with pytest.raises(TypeError):
        through(object())


def itertools_forever():
    while True:
        yield 1


def test_objects_go_by_number():
    thing = object()
    sender = Codec(lambda value: (5, type(value).__name__))
    assert sender.encode([thing]) == ["list", ["object", 5, "object"]]
    assert Codec(resolve=lambda number, kind: (number, kind)).decode(["object", 5, "object"]) == (5, "object")


def test_frames_and_their_limits():
    r, w = os.pipe()
    try:
        send(w, {"a": 1}, b"blob")
        assert receive(r) == ({"a": 1}, b"blob")
        send(w, {}, bytes(100))
        with pytest.raises(Lost):
            receive(r, max_blob=99)
    finally:
        os.close(r)
        os.close(w)
    for text in (b"[]", b"nonsense", b"[" * 100_000, b"\xff"):
        r, w = os.pipe()
        os.set_blocking(w, False)
        os.write(w, struct.pack(">II", len(text), 0))
        os.write(w, text[:60_000])
        os.close(w)
        with pytest.raises(Lost):
            receive(r)
        os.close(r)


@given(st.lists(st.binary(max_size=40)), st.integers(2, 60))
def test_head_and_tail(parts, limit):
    kept, whole = HeadTail(limit), b"".join(parts)
    for part in parts:
        kept.add(part)
    half = limit // 2
    if len(whole) <= 2 * half:
        assert kept.value() == whole and not kept.truncated
    else:
        assert kept.truncated and kept.value().startswith(whole[:half]) and kept.value().endswith(whole[-half:])


@pytest.mark.parametrize(
    "wrong",
    [{"memory_bytes": 0}, {"wall_s": -1.0}, {"nproc": 2}, {"cpu_s": 0}, {"output_bytes": 0}, {"address_bytes": 0}],
)
def test_profiles_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"Profile.{next(iter(wrong))}"):
        Profile("mine", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "docker"},
        {"slots": 0},
        {"slots": 64, "warm": 64},
        {"warm": -1},
        {"first_uid": 0},
        {"cgroup": "/nowhere"},
    ],
)
def test_hosts_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError):
        delegated_group(SandboxConfig(**wrong).cgroup)


def test_presets():
    assert set(PROFILES) == {"score", "code", "terminal", "mcp"}
    assert PROFILES["terminal"].writable_root
    for profile in PROFILES.values():
        hard = {name: pair[1] for name, pair in command_line.limits(profile, own_uid=True).items()}
        assert 0 < hard["RLIMIT_AS"] <= 32 << 30 and hard["RLIMIT_NOFILE"] <= 1024
        assert hard["RLIMIT_SIGPENDING"] <= 256 and hard["RLIMIT_MEMLOCK"] <= 65536 and not hard["RLIMIT_MSGQUEUE"]


def test_own_user_decides_where_processes_are_counted():
    assert "RLIMIT_NPROC" in command_line.limits(CODE, own_uid=True)
    assert "RLIMIT_NPROC" not in command_line.limits(CODE, own_uid=False)


def test_a_delegated_group_is_used_when_it_limits_its_children(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert delegated_group(str(tmp_path)) == str(tmp_path)
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(ConfigError, match="subtree_control"):
        delegated_group(str(tmp_path))


def test_a_sandbox_in_a_control_group_has_no_swap_and_dies_whole(tmp_path):
    """On files that stand for the kernel's."""
    group = Path(cgroup.path_of(str(tmp_path), os.getppid(), 3))
    group.mkdir()
    (group / "memory.swap.max").write_text("max")
    cgroup.enter(str(group), memory_bytes=5 << 20, nproc=9)
    said = {path.name: path.read_text() for path in group.iterdir()}
    assert said.pop("cgroup.procs") == str(os.getpid())
    assert said == {"memory.max": str(5 << 20), "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "9"}


def test_what_the_machine_killed_for_want_of_memory_is_the_machines_fault():
    class Over:
        exit = {"code": 137, "started": True, "killed_by": "machine", "error": ""}

    with pytest.raises(InfraError, match="ran out of memory"):
        ended_with(Over(), b"")
    Over.exit["killed_by"] = "memory"
    assert ended_with(Over(), b"") == 137


# ---- what a look reads


def proc_folder(path, *, processes, mappings, resident=1):
    """Write files like those of /proc."""
    stat = "S 1 " + "0 " * 15 + "1 0 0 " + f"{1 << 20} {resident} 0\n"
    for pid in range(2, 2 + processes):
        (path / str(pid) / "fd").mkdir(parents=True)
        (path / str(pid) / "stat").write_text(f"{pid} (x) {stat}")
        (path / str(pid) / "status").write_text("Name: x\nVmPTE: 4 kB\n")
        (path / str(pid) / "maps").write_text("0-1 rw-p 0 0:0 0\n" * mappings)
        (path / str(pid) / "smaps_rollup").write_text("0-1\nPss: 4 kB\n")
    return procfs.ProcFolder(str(path))


def test_a_look_ends_where_too_much_is_to_be_read(tmp_path):
    """It counts lines, names, files and pages, and no seconds. A file is read no further than a piece of 64 KiB."""
    proc = proc_folder(tmp_path, processes=40, mappings=20_000)
    assert look(proc, proc.numbers, 1 << 40).guessed == 40 * 20_000 * (procfs.MAPPING_BYTES + 40 * procfs.COPY_BYTES)
    proc.left = 100_000
    with pytest.raises(procfs.TooMuchToRead):
        look(proc, proc.numbers, 1 << 40)
    assert -(1 << 16) < proc.left < 0
    proc.left = 10_000
    assert look(proc, proc.numbers).whole and 0 < proc.left < 10_000, "mappings are read only if they are asked for"


def test_pages_that_many_processes_share_count_for_each_of_them(tmp_path):
    pages = 1 << 18
    proc = proc_folder(tmp_path, processes=40, mappings=1, resident=pages)
    seen = look(proc, proc.numbers)
    assert seen.resident == 40 * pages * procfs.PAGE
    proc.left = 41 * pages // procfs.ENTRY_PAGES
    assert proportional(proc, seen) == (40 * 4096, True)
    proc.left = 39 * pages // procfs.ENTRY_PAGES
    with pytest.raises(procfs.TooMuchToRead):
        proportional(proc, seen)


def test_three_looks_in_a_row_that_are_too_long_are_a_violation():
    """Of a real process, this one, and whoever it started; in between what is used up is not known."""
    watch = SandboxWatch(0, os.getpid(), memory_bytes=1 << 40, cpu_s=1e9)
    assert watch.entries > MOST_ENTRIES == SandboxWatch(0, os.getpid(), memory_bytes=1, cpu_s=1e9).entries
    enough = watch.entries
    for entries, over in ((enough, ""), (10, ""), (10, ""), (enough, ""), (10, ""), (10, ""), (10, "memory")):
        watch.entries = entries
        assert watch.over(1 << 40) == over
        assert (watch.used() == {}) == (entries == 10)
    watch.close()


def test_a_lost_sandbox_can_be_pickled():
    import pickle

    assert pickle.loads(pickle.dumps(SandboxGone("memory"))).killed_by == "memory"


PAGE = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text()


def test_the_page_lists_every_system_call_that_is_refused():
    section = PAGE.split("### System calls", 1)[1].split("\n## ", 1)[0]
    told = set(re.findall(r"`(\w+)`", section.split("|---|---|", 1)[1]))
    assert told == seccomp.DENIED.keys() | seccomp.UNSUPPORTED.keys()
    assert f"up to number {seccomp.LAST} " in PAGE


def test_every_limit_on_the_page_names_its_test():
    table = PAGE.split("| resource | limit |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"`(test_\w+\.py)`: \*(.+?)\* \|$", table, re.M)
    assert len(rows) == table.count("\n") - 1 > 20
    folder = Path(__file__).parents[2] / "e2e"
    probes = "".join((folder / f"sandbox_{name}.py").read_text() for name in ("probes", "memory_probes"))
    for file, name in rows:
        assert name in (folder / file).read_text() + probes, name
