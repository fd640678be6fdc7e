"""The command line of one sandbox: bubblewrap's mounts, the limits, and the data passed through descriptors."""

from __future__ import annotations

import dataclasses
import functools
import os
import posixpath
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolljax.errors import ConfigError
from rolljax.sandbox import seccomp
from rolljax.sandbox.profile import Profile
from rolljax.sandbox.supervisor.protocol import STATUS_FD

WORK = "/work"
INSIDE = "/run/rolljax"
"""Read-only folder inside for the programs of `rolljax.sandbox.inside` and private data."""
FIRST_DATA_FD = STATUS_FD + 1
MAX_FILES = 200
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
ENV = {
    "PATH": PATH,
    "HOME": WORK,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "USER": "user",
    "LOGNAME": "user",
    "TERM": "dumb",
}
ETC = {
    "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/work:/bin/bash\n",
    "/etc/group": b"root:x:0:\nuser:x:1000:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
FROM_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
ROOT_DIRS = ("root", "home", "opt", "srv", "mnt", "media", "var/tmp", "var/log", "var/lib", "run")
MERGED_USR = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")


@dataclasses.dataclass(frozen=True)
class SandboxCommand:
    """The parameters with which the supervisor starts a sandbox."""

    argv: list[str]
    env: dict[str, str]
    data: list[bytes]
    """Contents for descriptors `FIRST_DATA_FD`, `FIRST_DATA_FD + 1`, ..."""
    rlimits: dict[str, tuple[int, int]]
    """Soft and hard resource limits, by name."""
    tree: dict[str, Any] | None
    """The writable file system to mount first (`namespaces.mount_tree`)."""
    chdir: str = ""


@functools.cache
def bwrap() -> str:
    """Return the path of bubblewrap, empty if it is not installed."""
    return shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin:/bin") or ""


@functools.cache
def bwrap_has(option: str) -> bool:
    """Return whether this machine's bubblewrap has an option."""
    said = subprocess.run([bwrap(), "--help"], capture_output=True, text=True, env={}, timeout=30)
    return option in said.stdout + said.stderr


@functools.cache
def python() -> str:
    """Return the interpreter for sandboxes: one under /usr, else this process's own."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path
    return os.path.realpath(sys.executable)


def inside_path(name: str) -> str:
    """Return the path of a private file inside a sandbox."""
    return f"{INSIDE}/{name}"


def isolated_python() -> list[str]:
    """Return the command of the interpreter for programs of `inside`: only their own folder is on the path; environment
    variables and site packages are ignored."""
    return [python(), "-E", "-s", "-S", "-B"]


@functools.cache
def inside(name: str) -> bytes:
    """Return the text of a program that runs in a sandbox."""
    return (Path(__file__).parent / "inside" / name).read_bytes()


def limits(profile: Profile, own_uid: bool) -> dict[str, tuple[int, int]]:
    """Return soft and hard resource limits by name. A process over its soft limit of processor time ends by a signal
    that shows the cause. The number of processes is counted per user: it can only be limited here when the sandbox has
    a user of its own."""
    found = {
        "RLIMIT_NOFILE": profile.nofile,
        "RLIMIT_AS": profile.address_bytes,
        "RLIMIT_FSIZE": profile.tmpfs_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
        "RLIMIT_MEMLOCK": 65536,
    }
    if own_uid:
        found["RLIMIT_NPROC"] = profile.nproc
    return {"RLIMIT_CPU": (profile.cpu_s, profile.cpu_s + 1), **{name: (n, n) for name, n in found.items()}}


def isolated(
    argv: Sequence[str],
    files: Mapping[str, bytes],
    private: Mapping[str, bytes],
    profile: Profile,
    base: str,
    ptys: str,
    own_uid: bool,
    own_net: bool,
) -> SandboxCommand:
    """Return the bubblewrap command of a sandbox. `files` are writable copies in it; `private` ones are read-only in
    `INSIDE`.

    base: where the supervisor mounts the writable file system (bytes and number of files limited together); empty:
    bubblewrap makes one per directory, limited in bytes only. ptys: where the supervisor mounts pseudo-terminals of a
    limited number; empty: there are none. own_uid: the sandbox has a user id of its own. own_net:
    the supervisor makes the network name space.
    """
    if len(files) + len(private) > MAX_FILES:
        raise ConfigError(f"are more than {MAX_FILES}", setting="files", value=len(files) + len(private))
    root = profile.writable_root
    data: list[bytes] = [b"", seccomp.program()]
    line = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    line += ["--share-net"] if own_net else []
    line += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--json-status-fd", str(STATUS_FD)]
    line += ["--seccomp", str(FIRST_DATA_FD + 1)]
    if bwrap_has("--disable-userns"):
        line += ["--disable-userns"]
    line += _system(profile, base)
    line += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]  # only settings can be written there
    line += ["--dev-bind", "/dev/full", "/dev/zero"]  # reads the same; mappings of the real one have no limit
    no_ptys = ["--size", "4096", "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"]
    line += ["--dev-bind", ptys, "/dev/pts"] if ptys else no_ptys
    line += _writable(profile, base)
    line += ["--remount-ro", "/dev"]

    def add(option: str, path: str, content: bytes, *perms: str) -> None:
        line.extend([*perms, option, str(FIRST_DATA_FD + len(data)), path])
        data.append(content)

    line += ["--perms", "0755", "--dir", INSIDE]
    for path, content in ETC.items():
        add("--file" if root else "--ro-bind-data", path, content, "--perms", "0644")
    for name, content in private.items():
        add("--ro-bind-data", f"{INSIDE}/{name}", content, "--perms", "0444")
    for name, content in files.items():
        add("--file", _target(name), content, "--perms", "0755" if content[:2] == b"#!" else "0644")
    if not root:
        line += ["--remount-ro", "/"]
    line += ["--chdir", WORK]
    for key, value in ENV.items():
        line += ["--setenv", key, value]
    if not own_uid and os.access("/usr/bin/prlimit", os.X_OK):
        argv = ["/usr/bin/prlimit", f"--nproc={profile.nproc}:{profile.nproc}", *argv]
    tree = _tree(profile) if base else None
    data[0] = b"".join(os.fsencode(arg) + b"\0" for arg in line)  # not on a command line that code inside can read
    return SandboxCommand(
        [bwrap(), "--args", str(FIRST_DATA_FD), "--", *argv], {}, data, limits(profile, own_uid), tree
    )


def trusted(argv: Sequence[str], files: Mapping[str, bytes], folder: str, profile: Profile) -> SandboxCommand:
    """Return the command without isolation: a plain process in `folder`, with the limits that need no name space."""
    work = os.path.join(folder, "work")
    os.makedirs(work, exist_ok=True)
    for name, content in files.items():
        target = Path(work, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if content[:2] == b"#!" else 0o644)
    found = shutil.which(argv[0], path=PATH) if "/" not in argv[0] else argv[0]
    if found is None:
        found, argv = "/bin/sh", ["sh", "-c", 'echo "$0: not found" >&2; exit 127', argv[0]]
    env = {**ENV, "HOME": work, "TMPDIR": folder}
    keep = {k: v for k, v in limits(profile, own_uid=False).items() if k != "RLIMIT_FSIZE"}
    return SandboxCommand([found, *argv[1:]], env, [], keep, None, chdir=work)


def _target(name: str) -> str:
    """Return the path inside of a file from the host; the host's own code chose the name, but `..` is a mistake."""
    path = posixpath.normpath(posixpath.join(WORK, name))
    if "\0" in name or ".." in name.split("/") or path.startswith(("/proc", "/dev", "/usr", INSIDE)):
        raise ConfigError("is not a place for a file in a sandbox", setting="files", value=name)
    return path


def _system(profile: Profile, base: str) -> list[str]:
    """Mount programs and libraries of the host read-only, in a separate root directory if the profile needs one."""
    line = []
    if profile.writable_root:
        own = ["--bind", f"{base}/root", "/"]
        line += own if base else ["--perms", "0755", "--size", str(profile.tmpfs_bytes), "--tmpfs", "/"]
    line += ["--ro-bind", "/usr", "/usr"]
    if profile.writable_root and base:
        line += ["--bind", f"{base}/local-merged", "/usr/local"]
    for name in MERGED_USR:
        host = f"/{name}"
        if os.path.islink(host):
            line += ["--symlink", os.readlink(host), host]
        elif os.path.isdir(host):
            line += ["--ro-bind", host, host]
    prefix = os.path.dirname(os.path.dirname(python()))
    if not python().startswith("/usr/"):
        line += ["--ro-bind", prefix, prefix]
    line += ["--perms", "0755", "--dir", "/etc"]
    for path in FROM_ETC:
        line += ["--ro-bind-try", path, path]
    for path in profile.readable:
        line += ["--ro-bind", path, path]
    return line


def _writable(profile: Profile, base: str) -> list[str]:
    """Mount `/work`, `/tmp`, `/dev/shm`: parts of the supervisor's file system or of the writable root, or separate."""
    line, mounts = [], {WORK: "work", "/tmp": "tmp", "/dev/shm": "shm"}
    if profile.writable_root:
        line += [arg for name in ROOT_DIRS for arg in ("--dir", f"/{name}")]
        line += ["--perms", "0755", "--dir", WORK, "--perms", "1777", "--dir", "/tmp"]
        mounts = {"/dev/shm": "shm"}
    for path, name in mounts.items():
        if base:
            line += ["--bind", f"{base}/{name}", path]
        else:
            line += ["--perms", "1777", "--size", str(profile.tmpfs_bytes), "--tmpfs", path]
    return line


def _tree(profile: Profile) -> dict[str, Any]:
    root = profile.writable_root
    dirs = [["shm", 0o1777], *([["root", 0o755]] if root else [["work", 0o755], ["tmp", 0o1777]])]
    overlays = [["/usr/local", "local"]] if root else []
    return {"bytes": profile.tmpfs_bytes, "inodes": profile.inodes, "dirs": dirs, "overlays": overlays}
