"""Mounts and networks of a sandbox's own, made in the forked child before it becomes bubblewrap."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEWNS, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x20000, 0x4000, 1 << 18, 2, 4, 8
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NET_LIMITS = {"ipv4/tcp_rmem": "4096 65536 131072", "ipv4/tcp_wmem": "4096 65536 131072"}
"""Least, first and largest buffer of a TCP socket in a sandbox."""
PTS, MAX_PTYS = "pts", 64
"""Folder of the pseudo-terminals of one sandbox, and how many it has; a machine has some thousands for all."""

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    if libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount {kind} on {target}: {os.strerror(ctypes.get_errno())}")


def unshare(flags: int) -> None:
    """Move into new name spaces of the kinds in `flags`."""
    if libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))


def enter_namespace(fd: int, kind: int) -> None:
    """Move into the name space that `fd` is open on; into a PID name space only future children go."""
    if libc.setns(fd, kind):
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


def mount_tree(base: str, tree: dict[str, Any], uid: int) -> None:
    """Mount a file system of a fixed size and number of files on `base`, seen by this process alone, and make its
    directories and overlays.

    Args:
      tree: bytes, inodes; dirs: (name, mode); overlays: (folder below, name).
    """
    unshare(CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    options = f"size={tree['bytes']},nr_inodes={tree['inodes']},mode=0711"
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, mode in tree["dirs"]:
        path = os.path.join(base, name)
        os.mkdir(path)
        os.chmod(path, mode)
        os.chown(path, uid, uid)
    os.mkdir(os.path.join(base, PTS))
    mount_ptys(os.path.join(base, PTS))
    for lower, name in tree["overlays"]:
        mount_overlay(base, lower, name, uid)


def mount_ptys(folder: str) -> None:
    """Mount a separate set of pseudo-terminals, at most `MAX_PTYS`, on `folder`."""
    mount("devpts", folder, "devpts", MS_NOSUID | MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=620,max={MAX_PTYS}")


def mount_users_ptys(folder: str) -> None:
    """Call `mount_ptys` for an ordinary user, in a user name space that keeps the user's id."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{uid} {uid} 1")
    write("/proc/self/gid_map", f"{gid} {gid} 1")
    mount_ptys(folder)


def mount_overlay(base: str, lower: str, name: str, uid: int) -> None:
    """Make the folder `lower` writable at `NAME-merged` of `base`: changes go to `NAME-upper`."""
    parts = {part: os.path.join(base, f"{name}-{part}") for part in ("upper", "work", "merged")}
    for path in parts.values():
        os.mkdir(path, 0o755)
    os.chown(parts["upper"], uid, uid)
    for entry in os.scandir(lower):
        if entry.is_dir(follow_symlinks=False):
            os.mkdir(os.path.join(parts["upper"], entry.name), 0o755)
            os.chown(os.path.join(parts["upper"], entry.name), uid, uid)
    options = f"lowerdir={lower},upperdir={parts['upper']},workdir={parts['work']}"
    mount("overlay", parts["merged"], "overlay", MS_NOSUID | MS_NODEV, options)


def write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)


def private_net() -> None:
    """Move into a separate network that contains only a loopback, with small buffers."""
    unshare(CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
    for name, value in NET_LIMITS.items():
        write(f"/proc/sys/net/{name}", value)


def in_child(call: Callable[[], None]) -> bool:
    """Run a function in a child process; return whether it succeeds there."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
