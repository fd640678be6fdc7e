"""Attempts to get out of a sandbox. Each sets `ok` (contained) and may set `seen`; all run inside, each in a forked child
of one program. `HOST` holds the test's information about the host: its files, sockets, ports, secrets."""

PRELUDE = r"""
import array, ctypes, errno, fcntl, glob, json, mmap, os, platform, resource, signal, socket, stat, struct, subprocess, sys, time
HOST = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
NUMBERS = HOST["numbers"]

def fails(call, *args, **kw):
    "errno of a call that must not work, 0 when it did"
    try:
        call(*args, **kw)
    except OSError as e:
        return e.errno or 1
    return 0

def syscall(name, *args):
    "errno of a raw system call, 0 when it worked"
    ctypes.set_errno(0)
    result = libc.syscall(NUMBERS[name], *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return 0 if result >= 0 else ctypes.get_errno()

def read(path):
    try:
        with open(path, "rb") as f:
            return f.read(1 << 20)
    except OSError:
        return None

def pids():
    return [p for p in os.listdir("/proc") if p.isdigit()]

def dies(code):
    "signal that ends a child which runs `code`"
    pid = os.fork()
    if not pid:
        code()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def status(pid="self"):
    return dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
"""

RUNNER = r"""
for name, code in HOST["probes"]:
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(r)
        signal.alarm(20)
        space = dict(globals(), ok=None, seen="")
        try:
            exec(code, space)
            said = [name, space["ok"], str(space["seen"])[:500]]
        except BaseException as e:
            said = [name, None, f"{type(e).__name__}: {e}"]
        os.write(w, json.dumps(said).encode())
        os._exit(0)
    os.close(w)
    data = b""
    while part := os.read(r, 65536):
        data += part
    os.close(r)
    os.waitpid(pid, 0)
    print(data.decode() or json.dumps([name, None, "the probe died"]), flush=True)
"""

VISIBILITY = {
    "other processes": "seen = pids(); ok = len(seen) <= 6",
    "environment of process 1": "seen = read('/proc/1/environ'); ok = not seen",
    "command line of process 1": "seen = read('/proc/1/cmdline'); ok = b'rolljax-sandbox' not in (seen or b'')",
    "descriptors of process 1": """
seen = [(os.readlink(f), fails(os.open, f, os.O_RDWR)) for f in glob.glob('/proc/1/fd/*')]
ok = not any(not e and (s.startswith('socket') or s.startswith('/') and s != '/dev/null') for s, e in seen)""",
    "root of process 1": "seen = fails(os.listdir, '/proc/1/root') or os.listdir('/proc/1/root'); ok = seen == errno.EACCES or set(seen) == set(os.listdir('/'))",
    "secrets of the launcher": """
texts = [read(f'/proc/{p}/environ') or b'' for p in pids()] + [repr(dict(os.environ)).encode()]
ok = not any(HOST['secret'].encode() in t for t in texts)""",
    "inherited descriptors": "seen = sorted(os.listdir('/proc/self/fd')); ok = set(seen) - {'0', '1', '2', str(w)} == {max(set(seen) - {str(w)}, key=int)}",
    "host file through a symbolic link": "os.symlink(HOST['file'], '/work/link'); ok = fails(open, '/work/link') == errno.ENOENT",
    "host file through ..": "ok = fails(open, '/work/../../../../..' + HOST['file']) == errno.ENOENT",
    "host file through /proc/*/root": "ok = not any(read(f'/proc/{p}/{d}{HOST[\"file\"]}') for p in pids() for d in ('root', 'cwd', 'cwd/..'))",
    "hard link to a set-uid program": "seen = fails(os.link, HOST['suid'], '/work/su'); ok = bool(seen)",
    "bind targets": "seen = [d for d in ('/bindfile', '/newroot', '/oldroot', '/run/rolljax-sandbox') if os.path.exists(d)]; ok = not seen",
    "mount information": "seen = read('/proc/self/mountinfo'); ok = os.path.dirname(HOST['file']).encode() not in seen and b'rolljax-sandbox' not in seen",
    "other sandboxes' files": "seen = [f for d in ('/work', '/tmp', '/dev/shm') for f in os.listdir(d) if 'marker' in f]; ok = not seen",
    "abstract sockets of the host": "ok = bool(fails(socket.socket(socket.AF_UNIX).connect, '\\0' + HOST['abstract']))",
    "key rings": "seen = [syscall(n, 0, 0, 0, 0, 0) for n in ('keyctl', 'add_key', 'request_key')]; ok = set(seen) == {errno.EPERM}",
    "host name": "seen = socket.gethostname(); ok = seen == 'sandbox'",
}

WRITING = {
    **{
        f"write to {path}": f"seen = [fails(os.mkdir, {path!r} + '/made'), fails(open, {path!r} + '/file', 'w')]; ok = all(seen)"
        for path in ("/", "/usr", "/usr/bin", "/usr/local/bin", "/etc", "/dev", "/proc", "/sys", "/run", "/run/rolljax")
    },
    "write to kernel settings": """
def write(name):
    with open('/proc/sys/kernel/' + name, 'w', buffering=1) as f:
        f.write('7\\n')
seen = [fails(write, n) for n in ('hostname', 'core_pattern', 'ns_last_pid')]; ok = all(seen)""",
    "write to /proc/sysrq-trigger": "ok = bool(fails(open, '/proc/sysrq-trigger', 'w'))",
    "overwrite a system file": "seen = [fails(open, f, 'r+b') for f in ('/usr/bin/env', '/etc/passwd', '/etc/ld.so.cache')]; ok = all(seen)",
    "set-uid bits": """
seen = [d for d in ('/work', '/tmp', '/dev/shm', '/usr', '/') if not os.statvfs(d).f_flag & os.ST_NOSUID]
ok = not seen""",
    "device nodes": "seen = [fails(os.mknod, '/work/null', stat.S_IFCHR | 0o666, os.makedev(1, 3)), fails(os.mknod, '/work/disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))]; ok = all(seen)",
    "immutable flags": """
open('/work/flags', 'w').close()
seen = fails(fcntl.ioctl, os.open('/work/flags', os.O_RDONLY), 0x40086602, struct.pack('l', 0x10)); ok = bool(seen)""",
    "remounting": "seen = syscall('mount', b'none', b'/', 0, 0x20 | 0x1000, 0); ok = seen == errno.EPERM",
}

PRIVILEGE = {
    "user and groups": "seen = (os.getresuid(), os.getresgid(), os.getgroups()); ok = seen == ((1000,) * 3, (1000,) * 3, []) or seen == ((1000,) * 3, (1000,) * 3, [1000])",
    "capabilities": "me = status(); seen = [me[k].strip() for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')]; ok = not any(int(s, 16) for s in seen)",
    "no new privileges": "ok = status()['NoNewPrivs'].strip() == '1'",
    "seccomp mode": "ok = status()['Seccomp'].strip() == '2'",
    "becoming root": "seen = [fails(os.setuid, 0), fails(os.setgid, 0), fails(os.setgroups, [0])]; ok = all(seen)",
    "su": "seen = subprocess.run(['su', '-c', 'id'], stdin=subprocess.DEVNULL, capture_output=True).returncode if os.path.exists('/usr/bin/su') else 1; ok = seen != 0",
    "unshare": "seen = [syscall('unshare', 1 << n) for n in (17, 25, 26, 27, 28, 29, 30)]; ok = set(seen) == {errno.EPERM}",
    "clone with name space flags": "seen = [syscall('clone', 17 | 1 << n, 0, 0, 0, 0) for n in (17, 25, 26, 27, 28, 29, 30)]; ok = set(seen) == {errno.EPERM}",
    "clone3": "seen = syscall('clone3', 0, 0); ok = seen == errno.ENOSYS",
    "setns": "seen = syscall('setns', os.open('/proc/self/ns/net', os.O_RDONLY), 0); ok = seen == errno.EPERM",
    "mounting": """
seen = [syscall(n, 0, 0, 0, 0, 0) for n in ('mount', 'umount2', 'pivot_root', 'chroot', 'fsopen', 'fsmount', 'fspick', 'open_tree', 'move_mount', 'mount_setattr')]
ok = set(seen) == {errno.EPERM}""",
    "files by handle": "seen = [syscall(n, 0, 0, 0, 0, 0) for n in ('open_by_handle_at', 'name_to_handle_at')]; ok = set(seen) == {errno.EPERM}",
    "tracing": "seen = [syscall('ptrace', 16, p, 0, 0) for p in (1, os.getppid())]; ok = set(seen) == {errno.EPERM}",
    "memory of others": "seen = [syscall(n, os.getppid(), 0, 0, 0, 0) for n in ('process_vm_readv', 'process_vm_writev', 'process_madvise', 'kcmp', 'pidfd_getfd')]; ok = set(seen) == {errno.EPERM}",
    "bpf and perf": "seen = [syscall(n, 0, 0, 0, 0, 0) for n in ('bpf', 'perf_event_open')]; ok = set(seen) == {errno.EPERM}",
    "io_uring": "seen = [syscall(n, 1, 0, 0, 0, 0) for n in ('io_uring_setup', 'io_uring_enter', 'io_uring_register')]; ok = set(seen) == {errno.EPERM}",
    "userfaultfd": "seen = syscall('userfaultfd', 0); ok = seen == errno.EPERM",
    "personality": "seen = syscall('personality', 0xffffffff); ok = seen == errno.EPERM",
    "kernel modules and kexec": "seen = [syscall(n, 0, 0, 0, 0, 0) for n in ('init_module', 'finit_module', 'delete_module', 'kexec_load', 'kexec_file_load', 'reboot')]; ok = set(seen) == {errno.EPERM}",
    "clocks": "seen = [syscall(n, 0, 0, 0) for n in ('settimeofday', 'clock_settime', 'adjtimex', 'clock_adjtime')]; ok = set(seen) == {errno.EPERM}",
    "kernel log": "seen = syscall('syslog', 3, 0, 0); ok = seen == errno.EPERM and not read('/dev/kmsg')",
    "x32 system calls": "seen = dies(lambda: libc.syscall(0x40000000 | 39)) if X86 else -signal.SIGSYS; ok = seen == -signal.SIGSYS",
    "32-bit system calls": """
def int80():
    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, 20; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
seen = dies(int80) if X86 else -signal.SIGSYS
ok = seen in (-signal.SIGSYS, -signal.SIGSEGV)""",
    "typing into the terminal": """
master, slave = os.openpty()
seen = [fails(fcntl.ioctl, slave, n, b'x') for n in (0x5412, 0x541C, 0x5423)]
ok = set(seen) == {errno.EPERM}""",
    "controlling terminal": "seen = fails(open, '/dev/tty'); ok = bool(seen)",
}

NETWORK = {
    "connect (IPv4)": "seen = fails(socket.socket().connect, ('192.0.2.1', 80)); ok = seen == errno.ENETUNREACH",
    "connect (IPv6)": "seen = fails(socket.socket(socket.AF_INET6).connect, ('2001:db8::1', 80)); ok = seen in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)",
    "UDP": "seen = fails(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b'x', ('192.0.2.1', 53)); ok = seen == errno.ENETUNREACH",
    "names": "ok = bool(fails(socket.getaddrinfo, 'example.com', 80))",
    "raw sockets": "seen = fails(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1); ok = seen == errno.EPERM",
    **{
        f"socket family {name}": f"seen = fails(socket.socket, {number}, {kind}); ok = seen == errno.EAFNOSUPPORT"
        for name, number, kind in (
            ("packet", 17, 3),
            ("netlink", 16, 3),
            ("vsock", 40, 1),
            ("bluetooth", 31, 3),
            ("alg", 38, 5),
            ("key", 15, 3),
            ("tipc", 30, 5),
        )
    },
    "pairs of other families": "seen = syscall('socketpair', 30, 5, 0, array.array('i', [0, 0]).buffer_info()[0]); ok = seen == errno.EAFNOSUPPORT",
    "ports of the host": "seen = fails(socket.create_connection, ('127.0.0.1', HOST['port']), 2); ok = bool(seen)",
    "unix sockets of the host": "seen = fails(socket.socket(socket.AF_UNIX).connect, HOST['unix']); ok = seen == errno.ENOENT",
    "metadata address": "seen = fails(socket.create_connection, ('169.254.169.254', 80), 2); ok = seen == errno.ENETUNREACH",
    "proxies in the environment": "seen = [k for k in os.environ if 'proxy' in k.lower()]; ok = not seen",
    "interfaces": "seen = socket.if_nameindex() if not fails(socket.if_nameindex) else []; ok = {n for _, n in seen} <= {'lo'}",
}

RESOURCES = {
    "memfd": "seen = fails(os.memfd_create, 'x'); ok = seen == errno.EPERM",
    "System V memory": "seen = [syscall(n, 0, 4096, 0o1600) for n in ('shmget', 'msgget', 'semget')]; ok = set(seen) == {errno.EPERM}",
    "memfd_secret, POSIX and System V queues": "seen = [syscall(n, 0, 0, 0, 0) for n in ('memfd_secret', 'mq_open', 'msgget')]; ok = set(seen) == {errno.EPERM}",
    "shared memory without a file": "seen = [fails(mmap.mmap, -1, 4096, flags=f) for f in (0x21, 0x23)]; ok = set(seen) == {errno.EPERM} and not fails(mmap.mmap, -1, 4096, flags=0x22)",
    "shared memory of /dev/zero": """
zero = os.open('/dev/zero', os.O_RDWR)
seen = [fails(mmap.mmap, zero, 4096, flags=f) for f in (0x01, 0x02)]
ok = all(seen) and os.read(zero, 5) == bytes(5)""",
    "pages given to pipes": "seen = syscall('vmsplice', 1, 0, 0, 0); ok = seen == errno.EPERM",
    "larger pipes": "r, wr = os.pipe(); seen = (fails(fcntl.fcntl, wr, 1031, 1 << 20), fcntl.fcntl(wr, 1032)); ok = seen[0] == errno.EPERM and seen[1] <= 65536",
    "larger buffers of sockets": """
a, b = socket.socketpair()
before = [a.getsockopt(socket.SOL_SOCKET, n) for n in (7, 8)]
for n in (7, 8, 32, 33):
    a.setsockopt(socket.SOL_SOCKET, n, 4 << 20)
seen = [a.getsockopt(socket.SOL_SOCKET, n) for n in (7, 8)]; ok = seen == before""",
    "file watches": "seen = [syscall(n, 0) for n in ('inotify_init1', 'fanotify_init')]; ok = set(seen) == {errno.EPERM}",
    "address space": "seen = resource.getrlimit(resource.RLIMIT_AS); ok = 0 < seen[0] == seen[1] <= 32 << 30 and bool(fails(mmap.mmap, -1, 64 << 30, flags=0x4022))",
    "signals and timers that wait": "seen = resource.getrlimit(resource.RLIMIT_SIGPENDING); ok = seen == (256, 256)",
    "memory that is locked": "seen = resource.getrlimit(resource.RLIMIT_MEMLOCK); ok = seen[1] <= 65536",
    "leaving the front of the queue for the OOM killer": """
def lower(name, text):
    with open(f'/proc/self/{name}', 'w') as f:
        f.write(text)
seen = [fails(lower, 'oom_score_adj', n) for n in ('0', '-1000', '999')] + [fails(lower, 'oom_adj', '-17')]
ok = all(seen) and {read(f'/proc/{p}/oom_score_adj') for p in pids()} == {b'1000\\n'}""",
    "sparse file": "f = open('/work/sparse', 'wb'); seen = fails(f.truncate, 1 << 43); ok = seen == errno.EFBIG",
    "long names": "seen = fails(open, '/work/' + 'n' * 300, 'w'); ok = seen == errno.ENAMETOOLONG",
    "open files": """
seen = fails(lambda: [os.open('/dev/null', os.O_RDONLY) for _ in range(5000)])
ok = seen == errno.EMFILE""",
    "pipes": "seen = fails(lambda: [os.pipe() for _ in range(5000)]); ok = seen == errno.EMFILE",
    "raising limits": """
hard = [resource.getrlimit(n)[1] for n in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC)]
def rise():
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))
    except ValueError:
        raise OSError(1, 'refused')
seen = hard; ok = resource.RLIM_INFINITY not in hard and bool(fails(rise))""",
    "core dumps": "dies(lambda: os.abort()); seen = os.listdir('/work'); ok = not [f for f in seen if 'core' in f]",
    "kill 1": "os.kill(1, 9); os.kill(1, 15); time.sleep(0.05); ok = os.path.exists('/proc/1')",
    "priority": "seen = fails(os.setpriority, os.PRIO_PROCESS, 0, -10); ok = bool(seen)",
    "deep folders": """
os.mkdir('/tmp/deep'); os.chdir('/tmp/deep')
def dig():
    for _ in range(30_000):
        os.mkdir('d'); os.chdir('d')
seen = fails(dig); ok = seen in (errno.ENOSPC, errno.ENAMETOOLONG, errno.ENOENT)""",
    "number of files": """
seen = fails(lambda: [open(f'/tmp/f{i}', 'w').close() for i in range(30_000)])
ok = seen == errno.ENOSPC""",
    "disk bytes, all directories together": """
def fill():
    for i in range(200):
        with open(('/work/', '/tmp/', '/dev/shm/')[i % 3] + f'fill{i}', 'wb') as f:
            f.write(bytes(1 << 20))
seen = fails(fill); ok = seen == errno.ENOSPC""",
}
PROBES = {
    f"{area}: {name}": code
    for area, rows in {
        "sees": VISIBILITY,
        "writes": WRITING,
        "may": PRIVILEGE,
        "network": NETWORK,
        "uses": RESOURCES,
    }.items()
    for name, code in rows.items()
}
