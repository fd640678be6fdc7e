"""`python -m rolljax.sandbox`: try to break out of a sandbox, and report what is isolated and what is not, with
remedies."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from pathlib import Path
from typing import get_args

from rolljax.errors import RolljaxError
from rolljax.sandbox import command_line
from rolljax.sandbox.containers import Engine, engine_available
from rolljax.sandbox.host import INSTALL, SandboxHost
from rolljax.sandbox.profile import CODE, MIB, TERMINAL

APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
MAX_USERNS = Path("/proc/sys/user/max_user_namespaces")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the table."""

    name: str
    ok: bool | None
    """Whether the check passes; None: for information only."""
    detail: str
    cure: str = ""
    """The remedy if the check fails."""


PROBE = r"""
import ctypes, errno, glob, mmap, os, resource, socket, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def row(name, ok, detail=""):
    print(name, int(bool(ok)), detail, sep="\t")
def refused(call, *args):
    try:
        call(*args)
    except OSError as e:
        return e.errno
    return 0
me = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
row("other processes are hidden", len([p for p in os.listdir("/proc") if p.isdigit()]) < 8)
row("no secrets in the environment", not open("/proc/1/environ").read() and "SECRET" not in "".join(os.environ))
row("no inherited descriptors", set(os.listdir("/proc/self/fd")) <= {"0", "1", "2", "3"})
row("no capabilities", int(me["CapEff"], 16) == int(me["CapBnd"], 16) == 0)
row("no new privileges", me["NoNewPrivs"].strip() == "1")
row("system call filter", me["Seccomp"].strip() == "2")
row("no new user name spaces", libc.unshare(0x10000000) == -1)
row("no tracing", libc.ptrace(16, 1, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM)
row("no memory outside the limits", refused(os.memfd_create, "x") == refused(mmap.mmap, -1, 4096) == errno.EPERM)
adj = "/proc/self/oom_score_adj"
lowered = refused(lambda: open(adj, "w", 1).write("0\n"))
row("first to go when the machine's memory ends", lowered and open(adj).read() == "1000\n")
row("address space is limited", resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY)
elsewhere = ("/root/.ssh", "/home/user", "/var/lib/dpkg", "/sys", "/boot", "/etc/shadow")
row("no host files", not any(os.path.exists(p) for p in elsewhere))
system = ("/usr", "/usr/bin", "/etc", "/dev", "/proc/sys", "/")
row("system is read-only", all(refused(os.mkdir, p + "/probe") for p in system))
try:
    socket.create_connection(("192.0.2.1", 80), 2); network = False
except OSError as e:
    network = e.errno == errno.ENETUNREACH
row("no network", network)
row("no other socket families", refused(socket.socket, 40, 1) and refused(socket.socket, 16, 3))
"""
SOCKETS = """
import socket, time
held = []
for _ in range(100):
    held += socket.socketpair()
    held[-1].setblocking(False)
    try:
        while True: held[-1].send(bytes(65536))
    except BlockingIOError: pass
while True: time.sleep(1)
"""
FORKS = "import os, time\nwhile os.fork(): pass\ntime.sleep(3)"


def main() -> int:
    """Print the table; return 0 if untrusted code can be run here, else 2."""
    rows = examine()
    width = max(len(row.name) for row in rows)
    for row in rows:
        mark = {True: "ok  ", False: "FAIL", None: "note"}[row.ok]
        sys.stdout.write(f"{mark}  {row.name:<{width}}  {row.detail}\n")
        if row.cure:
            sys.stdout.write(f"      {'':<{width}}  cure: {row.cure}\n")
    broken = any(row.ok is False for row in rows)
    sys.stdout.write("untrusted code is refused here\n" if broken else "untrusted code can be run here\n")
    return 2 if broken else 0


def examine() -> list[Finding]:
    """Run all checks; later ones are skipped if no sandbox can start."""
    rows = [Finding("Linux", sys.platform == "linux", f"{platform.system()} {platform.release()} {platform.machine()}")]
    if sys.platform != "linux":
        return rows
    if not command_line.bwrap():
        return [*rows, Finding("bubblewrap", False, "not installed", INSTALL)]
    rows.append(Finding("bubblewrap", True, command_line.bwrap()))
    try:
        with SandboxHost(checked=True) as host:
            return [*rows, *_tried(host), *_engines()]
    except RolljaxError as e:
        return [*rows, Finding("a sandbox starts", False, str(e).replace("\n", "; "), cure(str(e)))]


def cure(error: str) -> str:
    """Return the usual remedies for a failed start."""
    if _reads(APPARMOR) == "1":
        return "AppArmor restricts user name spaces: give bwrap a profile that allows 'userns', or run as root"
    if _reads(MAX_USERNS) == "0":
        return f"echo 10000 > {MAX_USERNS}"
    if "namespace" in error or "RTM_NEWADDR" in error or "Operation not permitted" in error:
        return (
            "user name spaces are refused: start a container with a seccomp profile that allows unshare and mount "
            "(docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or --privileged)"
        )
    return "see the error; sandboxes need bubblewrap, user name spaces and seccomp"


def _tried(host: SandboxHost) -> list[Finding]:
    os.environ["ROLLJAX_DOCTOR_SECRET"] = "SECRET"
    try:
        said = host.run([*command_line.isolated_python(), "-c", PROBE])
    finally:
        del os.environ["ROLLJAX_DOCTOR_SECRET"]
    rows = [Finding("a sandbox starts", True, f"{said.ms:.0f} ms for a Python program")]
    for line in said.text.splitlines():
        name, ok, detail = line.split("\t")
        rows.append(Finding(name, ok == "1", detail))
    if said.returncode:
        rows.append(Finding("the probe ran to its end", False, said.stderr[-300:].decode(errors="replace")))
    small = dataclasses.replace(CODE, nproc=16, tmpfs_bytes=4 * MIB, memory_bytes=64 * MIB, wall_s=10.0)
    forks = host.run([*command_line.isolated_python(), "-c", FORKS], profile=small)
    rows.append(Finding("processes are limited", b"BlockingIOError" in forks.stderr, f"{small.nproc} processes"))
    disk = host.run(["sh", "-c", "head -c 8M /dev/zero > /work/x; stat -c %s /work/x"], profile=small)
    rows.append(Finding("disk is limited", disk.text.strip().isdigit() and int(disk.text) <= small.tmpfs_bytes, ""))
    hungry = "x = [bytes(1 << 20) + b'1' for _ in range(300)]\nwhile True: pass"
    memory = host.run([*command_line.isolated_python(), "-c", hungry], profile=small)
    sockets = host.run(
        [*command_line.isolated_python(), "-c", SOCKETS], profile=dataclasses.replace(small, memory_bytes=32 * MIB)
    )
    rows.append(Finding("memory of the kernel is limited", sockets.killed_by == "memory", "50 MiB in sockets"))
    rows.append(Finding("memory is limited", memory.killed_by == "memory", str(host.modes()["memory"])))
    return rows + _notes(host)


def _notes(host: SandboxHost) -> list[Finding]:
    """Return the protections that depend on this machine, with a remedy for each weaker one."""
    modes, rows = host.modes(), []
    if modes["own_uid"]:
        rows.append(Finding("a user id per sandbox", True, f"from {host.config.first_uid} on"))
    else:
        rows.append(
            Finding("a user id per sandbox", None, "no: all sandboxes run as your user", "run the host as root for it")
        )
    counts_files = modes["file_limits"] == "bytes and inodes"
    rows.append(
        Finding(
            "number of files is limited",
            True if counts_files else None,
            "" if counts_files else "no, only bytes, and those per directory",
            "" if counts_files else "run the host as root with the right to mount",
        )
    )
    if modes["memory"] == "watchdog":
        rows.append(
            Finding(
                "memory by control group",
                None,
                "no: a watchdog measures every quarter second, and estimates the kernel's part",
                "SandboxConfig.cgroup, or start under `systemd-run --property=Delegate=yes`",
            )
        )
    else:
        rows.append(Finding("memory by control group", True, f"{modes['memory']}: the kernel's part too, no swap"))
    rows.append(
        Finding(
            "small buffers of TCP",
            True if modes["own_net"] else None,
            "" if modes["own_net"] else "no: those of the machine",
            "" if modes["own_net"] else "run the host as root, with a writable /proc/sys",
        )
    )
    rows.append(
        Finding(
            "pseudo-terminals are limited",
            True if modes["ptys"] else None,
            "" if modes["ptys"] else "there are none",
            "" if modes["ptys"] else "run the host as root, or allow user name spaces to Python",
        )
    )
    writable = host.run(["sh", "-c", "mkdir /probe && echo yes"], profile=TERMINAL).text == "yes\n"
    rows.append(Finding("writable root (terminal profile)", True if writable else None, "yes" if writable else "no"))
    return rows


def _engines() -> list[Finding]:
    """Return whether sandboxes can be made from images."""
    reasons = {engine: engine_available(engine) for engine in get_args(Engine)}
    return [Finding(f"images with {engine}", not why or None, why or "yes") for engine, why in reasons.items()]


def _reads(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
