"""Ways to hold memory of the kernel with next to none of one's own. Each probe runs in a sandbox of its own, stops at
so many bytes (argument 1), says what it holds by its own count, and keeps it if that is more than it should get
(argument 2); the sandbox may refuse it, bound it, or end it."""

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
    "connections that nobody accepts": """
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
}
