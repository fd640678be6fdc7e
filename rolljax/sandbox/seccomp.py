"""The system call filter as a classic BPF program, written out in pure Python for x86-64 and aarch64.

Default is allow, up to the last system call that was reviewed; newer ones do not exist here (ENOSYS). Refused with
EPERM: everything that mounts, traces, loads, changes time or namespaces, reaches other processes' memory, or allocates
memory that no limit of a sandbox counts (memfd, System V shared memory, shared memory without a file, pages given to
pipes, larger pipes, rules of Landlock). If programs can do without a call, it fails as in a kernel
that does not have it: access lists of files, filters of system calls, larger tables for locks. A request for larger
socket buffers succeeds and changes nothing, as in the kernel past its own limit. Sockets are UNIX, INET or INET6, and
of the protocols TCP, UDP and ICMP; they join no multicast groups. Threads share their descriptors, and a child is the
child of the process that made it. `clone3` does not exist (libraries fall back to `clone`, whose flags a filter can
read). A foreign instruction set kills the process.

Calls that allocate kernel memory and are allowed, and what bounds them: `clone`, `fork` (number of processes; copies of
mappings are estimated); `mmap`, `mremap`, `brk`, `mprotect`, `madvise` (memory, page tables, estimated mappings);
`open`, `pipe`, `eventfd`, `epoll_create`, `dup` and the like, `socket`, `accept` (each descriptor is counted);
`epoll_ctl`, locks of files, reads of `/proc` (estimated; the kernel bounds watched descriptors per user);
`timer_create`, `sigqueue` (256 per user); `mkdir`, `link`, `write`, `fallocate` (size of the file system and number of
files); `splice`, `tee`, `sendfile` (pipes, each counted); `mlock` (64 KiB).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence

from rolljax.errors import ConfigError

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARG0, ARG1, ARG2, ARG3 = 0, 4, 16, 24, 32, 40
"""Offsets in `struct seccomp_data` (arguments: low halves, little endian)."""

NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
CLONE_PARENT, CLONE_THREAD, CLONE_FILES = 0x8000, 0x10000, 0x400
FAMILIES = (1, 2, 10)  # UNIX, INET, INET6
PROTOCOLS = (
    0,
    1,
    6,
    17,
    58,
)  # any, ICMP (and UNIX), TCP, UDP, ICMPv6; the kernel's own sockets of others are uncounted
IOCTLS = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD
BUFFERS = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their FORCE twins
MULTICAST_LEVELS, MULTICAST = (0, 41), (20, 27, 35, 39, 41, 42, 46, 48)  # joins of groups and lists of their sources
SOL_SOCKET, F_SETPIPE_SZ, MAP_SHARED, MAP_ANONYMOUS = 1, 1031, 0x01, 0x20
CLOSE_RANGE_UNSHARE = 2
PRCTLS = (22, 78)  # PR_SET_SECCOMP, PR_FUTEX_HASH
X32 = 0x40000000

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SPECIAL = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "socket": 41,
        "socketpair": 53,
        "ioctl": 16,
        "fcntl": 72,
        "mmap": 9,
        "setsockopt": 54,
        "prctl": 157,
        "close_range": 436,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "socket": 198,
        "socketpair": 199,
        "ioctl": 29,
        "fcntl": 25,
        "mmap": 222,
        "setsockopt": 208,
        "prctl": 167,
        "close_range": 436,
    },
}
DENIED: dict[str, tuple[int, int]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "personality": (135, 92),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "vmsplice": (278, 75),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "memfd_secret": (447, 447),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "lsm_set_self_attr": (460, 460),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "modify_ldt": (154, -1),
    "uselib": (134, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "ustat": (136, -1),
    "sysfs": (139, -1),
    "_sysctl": (156, -1),
}
"""System call -> its number on x86-64 and on aarch64 (-1: not there)."""
UNSUPPORTED: dict[str, tuple[int, int, int]] = {
    "setxattr": (188, 5, errno.EOPNOTSUPP),
    "lsetxattr": (189, 6, errno.EOPNOTSUPP),
    "fsetxattr": (190, 7, errno.EOPNOTSUPP),
    "setxattrat": (463, 463, errno.EOPNOTSUPP),
    "seccomp": (317, 277, errno.EINVAL),
}
"""System calls that fail with an error other than EPERM, which tells programs that the call is not available."""
LAST = 469
"""The newest system call whose allocations were reviewed (Linux 6.17)."""


def program(machine: str = "") -> bytes:
    """Return the filter for `machine` (this one's by default) as an array of `struct sock_filter`.

    Raises:
      ConfigError: there is no table for the machine.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise ConfigError(
            "has no system call table", setting="machine", value=machine, remedy="x86_64 or aarch64, with 64-bit Python"
        )
    special, column = SPECIAL[machine], ("x86_64", "aarch64").index(machine)
    code = [_op(LD, ARCH), _op(JEQ, AUDIT_ARCH[machine], 1, 0), _op(RET, KILL_PROCESS), _op(LD, NR)]
    if machine == "x86_64":
        code += [_op(JGE, X32, 0, 1), _op(RET, KILL_PROCESS)]
    code += [_op(JGE, LAST + 1, 0, 1), _op(RET, ERRNO | errno.ENOSYS)]
    code += _refuse(special["clone3"], errno.ENOSYS)
    code += [_op(JEQ, special["clone"], 0, 6), _op(LD, ARG0), _op(JSET, NAMESPACE_FLAGS | CLONE_PARENT, 3, 0)]
    code += [_op(JSET, CLONE_THREAD, 0, 1), _op(JSET, CLONE_FILES, 0, 1), _op(RET, ALLOW)]
    code += [_op(RET, ERRNO | errno.EPERM)]
    for call in ("socket", "socketpair"):
        code += _only(special[call], ((ARG0, FAMILIES, errno.EAFNOSUPPORT), (ARG2, PROTOCOLS, errno.EPROTONOSUPPORT)))
    code += _none_of(special["ioctl"], ARG1, IOCTLS, errno.EPERM)
    code += _none_of(special["prctl"], ARG0, PRCTLS, errno.EINVAL)
    code += _memory(special)
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            code += _refuse(numbers[column], errno.EPERM)
    for *pair, error in UNSUPPORTED.values():
        code += _refuse(pair[column], error)
    return b"".join([*code, _op(RET, ALLOW)])


def _memory(special: Mapping[str, int]) -> list[bytes]:
    """Reject arguments with which allowed calls would allocate memory that no limit counts."""
    code = [_op(JEQ, special["fcntl"], 0, 4), _op(LD, ARG1), _op(JEQ, F_SETPIPE_SZ, 0, 1)]
    code += [_op(RET, ERRNO | errno.EPERM), _op(RET, ALLOW)]
    code += [
        _op(JEQ, special["mmap"], 0, 5),
        _op(LD, ARG3),
        _op(JSET, MAP_ANONYMOUS, 0, 2),
        _op(JSET, MAP_SHARED, 0, 1),
    ]
    code += [_op(RET, ERRNO | errno.EPERM), _op(RET, ALLOW)]
    code += [_op(JEQ, special["close_range"], 0, 4), _op(LD, ARG2), _op(JSET, CLOSE_RANGE_UNSHARE, 0, 1)]
    code += [_op(RET, ERRNO | errno.EINVAL), _op(RET, ALLOW)]
    options = _one_of(ARG2, BUFFERS, ERRNO | 0)
    groups = _one_of(ARG2, MULTICAST, ERRNO | errno.ENODEV)
    body = [_op(LD, ARG1), _op(JEQ, SOL_SOCKET, 0, len(options)), *options]
    body += [_op(JEQ, level, len(MULTICAST_LEVELS) - i, 0) for i, level in enumerate(MULTICAST_LEVELS)]
    body += [_op(RET, ALLOW), *groups]
    return [*code, _op(JEQ, special["setsockopt"], 0, len(body)), *body]


def _one_of(argument: int, values: Sequence[int], then: int) -> list[bytes]:
    """Apply `then` if an argument is one of `values`; otherwise allow the call."""
    code = [_op(LD, argument), *(_op(JEQ, value, len(values) - i, 0) for i, value in enumerate(values))]
    return [*code, _op(RET, ALLOW), _op(RET, then)]


def _none_of(number: int, argument: int, values: Sequence[int], error: int) -> list[bytes]:
    """Fail the call if an argument is one of `values`."""
    body = _one_of(argument, values, ERRNO | error)
    return [_op(JEQ, number, 0, len(body)), *body]


def _only(number: int, rules: Sequence[tuple[int, Sequence[int], int]]) -> list[bytes]:
    """Allow the call if each of some arguments is one of its values; otherwise fail with the error of the first that is
    not."""
    body = []
    for argument, values, error in rules:
        body += [_op(LD, argument), *(_op(JEQ, value, len(values) - i, 0) for i, value in enumerate(values))]
        body += [_op(RET, ERRNO | error)]
    body += [_op(RET, ALLOW)]
    return [_op(JEQ, number, 0, len(body)), *body]


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, k)


def _refuse(number: int, error: int) -> list[bytes]:
    return [_op(JEQ, number, 0, 1), _op(RET, ERRNO | error)]
