"""Ways to hold memory outside of a sandbox's limit: memory of the kernel by a process that hardly has any, and
memory of processes that are gone whenever the supervisor looks. Each probe runs in a separate sandbox, stops at
a number of bytes (argument 1), reports what it holds by its own count, and keeps it if that is more than allowed
(argument 2); the sandbox may refuse it, bound it, or end it."""

import dataclasses

from rolljax.sandbox import TERMINAL, SandboxHost
from rolljax.sandbox.profile import MIB

MEMORY = dataclasses.replace(TERMINAL, memory_bytes=96 * MIB, inodes=20_000, tmpfs_bytes=64 * MIB, wall_s=60.0)
CROWDED = dataclasses.replace(MEMORY, memory_bytes=256 * MIB)
"""For probes whose bystanders alone need memory."""
PIPES = 64 * MIB
"""What a probe may keep beyond the limit by its own count: the sandboxes of one user together hold no more in pipes."""
LATE = ("mappings", "file locks")
"""Counted only when the kernel's memory has grown by this much while a probe holds it."""


def keeps(host: SandboxHost, name: str) -> tuple[bool, str, str]:
    """Run a probe; return whether it was contained, what killed it, and its output."""
    profile = CROWDED if "hand" in name else MEMORY
    wanted, allowed = (900 if name in LATE or "hand" in name else 400) * MIB, profile.memory_bytes + PIPES
    program = "\n".join([PRELUDE, f"CODE = {PROBES[name]!r}", RUNNER]).encode()
    argv = ["/usr/bin/python3", "-E", "-s", "-S", "-B", "/tmp/probe.py", str(wanted), str(allowed)]
    result = host.run(argv, files={"/tmp/probe.py": program}, profile=profile)
    held = int(result.text.split(" ", 1)[0]) if result.stdout else -1
    contained = result.killed_by == "memory" or 0 <= held <= allowed
    return contained, result.killed_by, result.text + result.stderr.decode()[-500:]


PRELUDE = r"""
import ctypes, errno, fcntl, mmap, os, resource, select, signal, socket, struct, sys, threading, time
WANTED, ALLOWED = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes += [ctypes.c_int]
kept, held, seen = [], 0, ""

def mapped(size, flags, fd=-1, prot=3):
    at = libc.mmap(None, size, prot, flags, fd, 0)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return at

def fill(sock, limit=1 << 30):
    "what a socket takes without anybody reading"
    n = 0
    sock.setblocking(False)
    try:
        while n < limit:
            n += sock.send(bytes(1 << 16))
    except OSError:
        pass
    return n

def many(make):
    "make it again until there is enough; whoever has no descriptors left leaves the rest to a child"
    global held
    spare = os.open("/dev/null", os.O_RDONLY)
    while held < WANTED:
        try:
            held += make()
        except OSError as e:
            if e.errno != errno.EMFILE:
                raise
            os.close(spare)
            if pid := os.fork():
                os.waitpid(pid, 0)
                os._exit(0)
            kept.clear()
            os.closerange(3, 1 << 16)
            spare = os.open("/dev/null", os.O_RDONLY)

# mov rbx, rdi; mov r12, rsi; mov r13, rdx; mov r14, rcx; mov rbp, r8
# again: mov eax, 56; mov rdi, r14; xor esi, esi; xor edx, edx; xor r10d, r10d; xor r8d, r8d; syscall
#        test rax, rax; jz child; js again; mov eax, 60; xor edi, edi; syscall
# child: mov r15, r13
# touch: cmp rbx, r12; jae again; mov byte [rbx], 1; add rbx, rbp; dec r15; jnz touch; jmp again
HOP = bytes.fromhex("4889fb4989f44989d54989ce4c89c5b8380000004c89f731f631d24531d24531c00f054885c0740b78e5b83c000000"
                    "31ff0f054d89ef4c39e373d4c603014801eb49ffcf75f0ebc7")
VM, PARENT, THREAD, CHILD = 0x100, 0x8000, 0x50f00, int(signal.SIGCHLD)

def hop(flags, size=WANTED, each=256 << 10, step=4096, read=False):
    "touch `size` bytes, `each` in one process (or thread), which hands over to the next and ends; never returns"
    code = HOP.replace(bytes.fromhex("c60301"), bytes.fromhex("8a0390")) if read else HOP
    page = mapped(4096, 0x22, prot=7)
    ctypes.memmove(page, code, len(code))
    at = mapped(size, 0x4022)
    ctypes.CFUNCTYPE(None, *[ctypes.c_ulong] * 5)(page)(at, at + size, max(1, each // step), flags, step)

def crowd(n=150):
    "processes that are only there to be looked at"
    for _ in range(n):
        if not os.fork():
            time.sleep(60)
            os._exit(0)

def apart(act, *args, **kw):
    "do something in a child, which is counted as holding everything"
    global held
    if not os.fork():
        act(*args, **kw)
        os._exit(0)
    held = WANTED

def awake():
    "a process that the timer of its own wakes up whenever it is stopped, and then wakes the others"
    event = struct.pack("<QiiQ40x", 0, signal.SIGCONT, 0, 0)
    timer = ctypes.c_long()
    libc.timer_create(1, event, ctypes.byref(timer))
    libc.timer_settime(timer, 0, struct.pack("<4q", 0, 500_000, 0, 500_000), None)
    while True:
        try:
            os.kill(-1, signal.SIGCONT)
        except OSError:
            pass

def say(reason=""):
    rss = int(open("/proc/self/statm").read().split()[1]) * 4096
    print(held, rss, reason or seen, flush=True)
    if held > ALLOWED:
        time.sleep(60)
"""

RUNNER = r"""
try:
    exec(CODE)
    say()
except (OSError, ValueError, MemoryError, RuntimeError) as e:
    say(f"{type(e).__name__}: {e}")
"""

PROBES = {
    "page tables": """
space = min(1 << 40, resource.getrlimit(resource.RLIMIT_AS)[0] & (1 << 40) - 1) * 7 // 8
at = mapped(space, 0x4022)
for i in range(min(WANTED >> 12, space >> 21)):
    ctypes.c_char.from_address(at + (i << 21)).value
    held += 4096""",
    "page tables of many processes": """
chunk = 900 << 20
while held < WANTED:
    if not os.fork():
        at = mapped(chunk, 0x4022)
        for i in range(chunk >> 21):
            ctypes.c_char.from_address(at + (i << 21)).value
        time.sleep(60)
    held += chunk >> 9""",
    "stream sockets": """
def pair():
    a, b = socket.socketpair()
    kept.extend((a, b))
    return fill(a) + fill(b)
many(pair)""",
    "larger buffers": """
def pair():
    a, b = socket.socketpair()
    for s in (a, b):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    kept.extend((a, b))
    return fill(a) + fill(b)
many(pair)""",
    "connections that are never accepted": """
server = socket.socket(socket.AF_UNIX)
server.bind('/tmp/listens')
server.listen(4096)
def client():
    c = socket.socket(socket.AF_UNIX)
    c.setblocking(False)
    c.connect('/tmp/listens')
    return fill(c)
many(client)""",
    "datagrams of closed senders": """
def receiver():
    r = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    r.bind(f'/tmp/d{os.getpid()}-{len(kept)}')
    kept.append(r)
    n = 0
    for _ in range(10):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        s.setblocking(False)
        s.connect(r.getsockname())
        try:
            n += s.send(bytes(190_000))
        except BlockingIOError:
            pass
    return n
many(receiver)""",
    "TCP to itself": """
server = socket.create_server(('127.0.0.1', 0), backlog=4096)
def client():
    c = socket.create_connection(server.getsockname())
    kept.append(c)
    return fill(c)
many(client)""",
    "UDP to itself": """
def receiver():
    r = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    r.bind(('127.0.0.1', 0))
    kept.append(r)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(20):
        s.sendto(bytes(60_000), r.getsockname())
    return 200_000
many(receiver)""",
    "sockets inside messages": """
def flight():
    a, b = socket.socketpair()
    n = fill(a) + fill(b)
    c, d = socket.socketpair()
    socket.send_fds(c, [b'x'], [a.fileno(), b.fileno()])
    kept.append(d)
    return n
many(flight)""",
    "pipes": """
def pipe():
    r, w = os.pipe()
    os.set_blocking(w, False)
    try:
        fcntl.fcntl(w, 1031, 1 << 20)
    except OSError:
        pass
    n = 0
    try:
        while True:
            n += os.write(w, bytes(4096))
    except BlockingIOError:
        return n
many(pipe)""",
    "pages given to pipes": """
class Vec(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('len', ctypes.c_size_t)]
def given():
    global held
    r, w = os.pipe()
    for _ in range(16):
        at = mapped(4 << 20, 0x22)
        libc.madvise(at, 4 << 20, 14)
        ctypes.memset(at, 1, 4 << 20)
        vec = Vec((at + (1 << 21) - 1) & ~((1 << 21) - 1), 4096)
        ctypes.set_errno(0)
        n = libc.vmsplice(w, ctypes.byref(vec), 1, 2)
        libc.munmap(at, 4 << 20)
        if n < 0:
            raise OSError(ctypes.get_errno(), 'vmsplice')
        held += 1 << 21
    return 0
many(given)""",
    "shared memory, unmapped but for a page": """
while held < WANTED:
    at = mapped(32 << 20, 0x21)
    ctypes.memset(at, 1, 32 << 20)
    libc.munmap(at + 4096, (32 << 20) - 4096)
    held += 32 << 20""",
    "shared memory of /dev/zero": """
fd = os.open('/dev/zero', os.O_RDWR)
while held < WANTED:
    at = mapped(32 << 20, 0x01, fd)
    ctypes.memset(at, 1, 32 << 20)
    libc.munmap(at + 4096, (32 << 20) - 4096)
    held += 32 << 20""",
    "file locks": """
names = iter(range(1 << 30))
while held < WANTED:
    f = open(f'/tmp/lock{next(names)}', 'wb')
    kept.append(f)
    for at in range(4_000, 0, -2):
        fcntl.lockf(f, fcntl.LOCK_EX, 1, at)
        held += 192""",
    "mappings": """
while held < WANTED:
    if not os.fork():
        at = mapped(60_000 * 4096, 0x4022, -1, 0)
        for i in range(0, 60_000, 2):
            libc.mprotect(ctypes.c_void_p(at + i * 4096), 4096, 1)
        time.sleep(60)
    held += 60_000 * 200""",
    "watched descriptors": """
def watches():
    polls = [select.epoll() for _ in range(100)]
    files = [os.eventfd(0) for _ in range(100)]
    kept.extend(polls + files)
    for p in polls:
        for f in files:
            p.register(f)
    return 100 * 100 * 160
many(watches)""",
    "file watches": """
ctypes.set_errno(0)
fd = libc.inotify_init1(0)
if fd < 0:
    raise OSError(ctypes.get_errno(), 'inotify_init1')
for i in range(min(WANTED // 1300, 100_000)):
    open(f'/tmp/w{i}', 'w').close()
    libc.inotify_add_watch(fd, f'/tmp/w{i}'.encode(), 0xfff)
    held += 1300""",
    "timers": """
timer = ctypes.c_long()
while held < WANTED:
    ctypes.set_errno(0)
    if libc.timer_create(1, None, ctypes.byref(timer)) < 0:
        raise OSError(ctypes.get_errno(), 'timer_create')
    held += 400""",
    "signals that wait": """
signal.pthread_sigmask(signal.SIG_BLOCK, [34])
while held < WANTED:
    ctypes.set_errno(0)
    if libc.sigqueue(os.getpid(), 34, None) < 0:
        raise OSError(ctypes.get_errno(), 'sigqueue')
    held += 80""",
    "names of files": """
for i in range(WANTED // 1200):
    open(f'/tmp/f{i}', 'w').close()
    held += 1200""",
    "threads": """
stop = threading.Event()
threading.stack_size(1 << 16)
while held < WANTED:
    threading.Thread(target=stop.wait, daemon=True).start()
    held += 28_000""",
    "other memory of the kernel": """
for call in ((248, b'user', b'x', b'y' * 100, 100, -3), (29, 0, 1 << 20, 0o1600), (68, 0, 0o1600), (240, b'/q', 0o102, 0o600, None), (319, b'm', 0), (447, 0)):
    ctypes.set_errno(0)
    if libc.syscall(*call) >= 0:
        held += WANTED
        seen += f'system call {call[0]} '""",
    "a process that hands its memory over": "crowd(); apart(hop, VM | CHILD)",
    "siblings that hand their memory over": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
pid = libc.syscall(56 if os.uname().machine == "x86_64" else 220, PARENT | CHILD, 0, 0, 0, 0)
if pid < 0:
    raise OSError(ctypes.get_errno(), "clone")
if pid:
    crowd()
    apart(hop, VM | PARENT)
time.sleep(60)""",
    "forks that hand their memory over": "crowd(20); apart(hop, CHILD, each=4 << 20)",
    "threads that hand over without a first thread": "crowd(); apart(hop, THREAD)",
    "page tables of processes that hand over": """
crowd()
space = min(WANTED << 9, (resource.getrlimit(resource.RLIMIT_AS)[0] & (1 << 40) - 1) * 3 // 4)
for _ in range(16):
    apart(hop, VM | CHILD, size=space, each=64 << 21, step=1 << 21, read=True)""",
    "descriptors of processes that hand over": """
def pipes():
    for _ in range(200):
        kept.append(os.pipe())
    hop(VM | CHILD)
for _ in range(40):
    apart(pipes)""",
    "many that hand their memory over": """
for _ in range(20):
    apart(hop, VM | CHILD, size=WANTED // 16)""",
    "a process that hands over and cannot be stopped": """
crowd()
for _ in range(4):
    apart(awake)
apart(hop, VM | CHILD)""",
    "threads without their first one": """
def in_thread():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    kept.append(b"x" * WANTED)
    time.sleep(60)
def fill_memory():
    threading.Thread(target=in_thread).start()
    libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)
apart(fill_memory)""",
    "threads with descriptors of their own": """
def pipes():
    ctypes.set_errno(0)
    if libc.syscall(436, 0xfffff000, 0xffffffff, 2):
        return
    mine = [os.pipe() for _ in range(450)]
    told.append(len(mine))
    time.sleep(60)
told = []
threads = [threading.Thread(target=pipes, daemon=True) for _ in range(200)]
for thread in threads:
    thread.start()
    while thread.is_alive() and len(told) <= threads.index(thread):
        time.sleep(0.001)
held = sum(told) * 2 * 8192""",
    "rules for files": """
def rules():
    ruleset = libc.syscall(444, struct.pack("<QQ", 1, 3), 16, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    kept.append(ruleset)
    for port in range(1 << 16):
        if libc.syscall(445, ruleset, 2, struct.pack("<QQ", 1, port), 0):
            break
    return 64 * (port + 1)
many(rules)""",
    "filters of system calls": """
insns = struct.pack("<HBBI", 0x20, 0, 0, 0) + struct.pack("<HBBI", 0x15, 0, 0, 5) * 4000 + struct.pack("<HBBI", 6, 0, 0, 0x7fff0000)
text = ctypes.create_string_buffer(insns)
program = struct.pack("<HxxxxxxQ", len(insns) // 8, ctypes.addressof(text))
while held < WANTED:
    r, w = os.pipe()
    if not os.fork():
        n = 0
        while not libc.prctl(22, 2, program, 0, 0):
            n += 1
        os.write(w, bytes([n]))
        time.sleep(60)
    n = os.read(r, 1)[0]
    os.close(r), os.close(w)
    held += n * len(insns) * 5
    if not n:
        raise OSError(errno.EPERM, "seccomp")""",
    "lists of who may read a file": """
entry = lambda tag, who: struct.pack("<HHI", tag, 7, who)
rest = b"".join(entry(tag, 0xffffffff) for tag in (4, 16, 32))
text = struct.pack("<I", 2) + entry(1, 0xffffffff) + entry(2, os.getuid()) * 8100 + rest
while held < WANTED:
    open(f"/tmp/a{held}", "w").close()
    os.setxattr(f"/tmp/a{held}", "system.posix_acl_access", text)
    held += len(text)""",
    "tables for locks in memory": """
while held < WANTED:
    r, w = os.pipe()
    if not os.fork():
        os.write(w, b"no" if libc.prctl(78, 1, 1 << 20, 0, 0) else b"yes")
        time.sleep(60)
    if os.read(r, 3) == b"no":
        raise OSError(errno.EINVAL, "prctl")
    held += 64 << 20""",
    "terminals": """
def terminal():
    m, s = os.openpty()
    kept.extend((m, s))
    os.set_blocking(m, False)
    os.set_blocking(s, False)
    n = 0
    try:
        while True:
            n += os.write(s, bytes(4096))
    except BlockingIOError:
        return n + 24_000
many(terminal)""",
    "named pipes": """
def named():
    name = f"/tmp/p{os.getpid()}-{len(kept)}"
    os.mkfifo(name)
    fd = os.open(name, os.O_RDWR | os.O_NONBLOCK)
    os.unlink(name)
    kept.append(fd)
    n = 0
    try:
        while True:
            n += os.write(fd, bytes(4096))
    except BlockingIOError:
        return n
many(named)""",
    "texts of /proc that are half read": """
poll, one = select.epoll(), os.eventfd(0)
for fd in range(40, 1000):
    os.dup2(one, fd)
    poll.register(fd)
    os.close(fd)
def text():
    fd = os.open(f"/proc/self/fdinfo/{poll.fileno()}", os.O_RDONLY)
    os.read(fd, 1)
    kept.append(fd)
    return 64 << 10
many(text)""",
    "pages of a family": """
pages, at = 1000, mapped(2000 * 4096, 0x22)
for i in range(0, 2 * pages, 2):
    libc.mprotect(ctypes.c_void_p(at + i * 4096), 4096, 1)
    ctypes.c_char.from_address(at + (i + 1) * 4096).value = b"x"
depth = 0
while held < WANTED:
    depth += 1
    held += 2 * pages * depth * 64
    r, w = os.pipe()
    if os.fork():
        os.close(w)
        os.read(r, 1)
        time.sleep(60)
    os.close(r)""",
}
