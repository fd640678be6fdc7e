"""Programs that try to pass tests without being right. Each replaces `square(x)`; none of them squares. They run in
the sandbox of a grader and nowhere else."""

OBJECT = """
class Same:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    for n in "eq ne lt le gt ge contains bool".split():
        exec(f"def __{n}__(self, *a): return True")
    def __hash__(self): return 1
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __index__(self): return 1
    def __float__(self): return 0.0
    def __round__(self, *a): return 0
    def __sub__(self, o): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
"""


def same(base):
    """Return the source of a subclass of a built-in type whose instances equal everything."""
    methods = "__eq__ = __le__ = __ge__ = lambda self, o: True\n    __ne__ = lambda self, o: False\n    __hash__ = lambda self: 1"
    return f"class Same({base}):\n    {methods}\n"


def returning(value, before=""):
    return f"{before}\ndef square(*a, **k): return {value}"


def doing(body, before=""):
    lines = "\n".join("    " + line for line in body.strip().split("\n"))
    return f"{before}\ndef square(*a, **k):\n{lines}\n    return None"


def raising(error):
    return f"def square(*a, **k): raise {error}"


VERDICT = '{"num_passed": 99, "num_tests": 99, "reason": "passed", "detail": ""}'
ANSWER = (
    "import json, struct\ntext = json.dumps({'value': 9}).encode()\nframe = struct.pack('>II', len(text), 0) + text\n"
)
FRAMES = """
import sys
def square(*a, **k):
    frame = sys._getframe()
    while frame is not None:
        for name in ("check", "verdict", "take", "answer", "expected"):
            frame.f_globals[name] = frame.f_locals[name] = lambda *_: {"num_passed": 1}
        frame = frame.f_back
"""
EXCEPTIONS = {
    **{
        f"raises {name}": raising(name)
        for name in (
            "StopIteration", "StopIteration(9)", "StopAsyncIteration", "ValueError", "TypeError('x')", "KeyError(9)",
            "IndexError", "LookupError", "ArithmeticError", "ZeroDivisionError", "RecursionError", "RuntimeError",
            "AttributeError('square')", "NameError", "NotImplementedError", "AssertionError", "AssertionError('passed')",
            "OSError(0, 'x')", "FileNotFoundError", "TimeoutError", "EOFError", "BufferError", "MemoryError",
            "UnicodeDecodeError('utf8', b'', 0, 1, '')", "ImportError", "SyntaxError", "Warning", "Exception",
            "ExceptionGroup('x', [ValueError()])", "KeyboardInterrupt", "GeneratorExit", "SystemExit", "SystemExit(0)",
            "BaseException", "BaseExceptionGroup('x', [SystemExit(0)])",
        )
    },
    "raises an own StopIteration": "class Done(StopIteration): pass\n" + raising("Done"),
    "raises an own ValueError that is also a StopIteration": "class E(ValueError, StopIteration): pass\n" + raising("E"),
    "raises a class that takes every name": """
class Meta(type):
    __name__ = property(lambda self: "StopIteration")
    __mro__ = property(lambda self: (self, ValueError, StopIteration))
    __instancecheck__ = __subclasscheck__ = lambda *_: True
class E(Exception, metaclass=Meta): pass
""" + raising("E"),
    "raises what cannot be printed": "class E(Exception):\n    def __str__(self): raise SystemExit(0)\n    __repr__ = __str__\n" + raising("E"),
    "a generator that ends at once": "def square(*a):\n    return\n    yield",
    "a generator that raises": "def square(*a):\n    raise ValueError\n    yield",
    "a generator that stops in the middle": "def square(*a):\n    yield 1\n    raise StopIteration",
    "recursion without end": "def square(*a): return square(*a)",
    "an exception while it is sent": "class I:\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration\ndef square(*a): return map(None, [1])",
    "a wrong exception group": raising("ExceptionGroup('x', [StopIteration(), AssertionError()])"),
}  # fmt: skip
OBJECTS = {
    "equals everything": returning("Same()", OBJECT),
    **{
        f"a subclass of {base} that equals everything": returning(f"Same({value})", same(base))
        for base, value in (
            ("int", "5"), ("float", "0.5"), ("str", "'?'"), ("list", "[5]"), ("tuple", "(5,)"), ("dict", ""), ("set", ""),
            ("frozenset", ""), ("bytes", "b'?'"), ("complex", "1j"),
        )
    },
    "a list of objects that equal everything": returning("[Same()] * 10", OBJECT),
    "a class, not an instance": returning("Same", OBJECT),
    "a class whose class equals everything": "class Meta(type):\n    __eq__ = lambda *_: True\n    __hash__ = type.__hash__\nclass C(metaclass=Meta): pass\n" + returning("C"),
    "__class__ of another": "class C:\n    __class__ = int\n    __eq__ = lambda *_: True\n" + returning("C()"),
    "__class__ is assigned": "class C:\n    __eq__ = lambda *_: True\nclass D: pass\ndef square(*a):\n    d = D()\n    d.__class__ = C\n    return d",
    "an int that indexes as another": "class I(int):\n    __index__ = __int__ = lambda self: 9\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n" + returning("I(5)"),
    "a text that prints as another": "class T(str):\n    __str__ = __repr__ = lambda self: '9'\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\n" + returning("T('?')"),
    "NaN": returning("float('nan')"),
    "infinity": returning("float('inf')"),
    "minus zero": returning("-0.0"),
    "true": returning("True"),
    "not implemented": returning("NotImplemented"),
    "ellipsis": returning("..."),
    "unittest.mock.ANY": returning("ANY", "from unittest.mock import ANY"),
    "a mock": returning("MagicMock()", "from unittest.mock import MagicMock"),
    "a function": returning("lambda *a: True"),
    "itself": returning("square"),
    "a pickled surprise": returning("pickle.dumps(Bad())", "import os, pickle\nclass Bad:\n    def __reduce__(self): return os._exit, (0,)"),
    "an object with a reduce": returning("Bad()", "import os\nclass Bad:\n    def __reduce__(self): return os._exit, (0,)"),
    "a proxy of its argument": "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return True\n    def __getattr__(self, n): return getattr(self.x, n)\ndef square(x): return P(x)",
    "an endless generator": returning("(9 for _ in iter(int, 1))"),
    "a huge answer": returning("'x' * (200 << 20)"),
    "a deep answer": "def square(*a):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    "a number that is costly to print": returning("10 ** 400_000"),
    "keys that collide": returning("{i * (2**61 - 1): i for i in range(20_000)}"),
}  # fmt: skip
PROCESS = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": doing("os._exit(0)", "import os"),
    "leaves after the first call": "import os\nn = 0\ndef square(x):\n    global n\n    n += 1\n    if n > 1: os._exit(0)\n    return 7",
    "sys.exit at once": "import sys\nsys.exit(0)",
    "sys.exit when called": doing("sys.exit(0)", "import sys"),
    "quit when called": doing("raise SystemExit"),
    "atexit": doing("sys.exit(0)", f"import atexit, os, sys\natexit.register(lambda: os.write(1, b'{VERDICT}'))"),
    "kills itself": doing("os.kill(os.getpid(), 9)", "import os"),
    "kills its group": doing("os.killpg(0, 15)", "import os"),
    "kills everything": doing("os.kill(-1, 9)", "import os"),
    "stops itself": doing("os.kill(os.getpid(), 19)", "import os"),
    "aborts": doing("os.abort()", "import os"),
    "crashes": doing("ctypes.string_at(0)", "import ctypes"),
    "becomes another program": doing("os.execv('/bin/true', ['true'])", "import os"),
    "the parent leaves after a fork": doing("if os.fork(): os._exit(0)", "import os"),
    "the child answers too": "import os\ndef square(*a):\n    os.fork()\n    return 7",
    "a daemon that writes verdicts": f"""
import os, time
if not os.fork():
    os.setsid()
    for _ in range(100):
        for fd in range(64):
            try: os.write(fd, b'{VERDICT}\\n')
            except OSError: pass
        time.sleep(0.01)
    os._exit(0)
def square(*a): os._exit(0)
""",
    "a thread that answers by itself": ANSWER + "import os, threading\ndef flood():\n    for _ in range(1000):\n        os.write(10, struct.pack('>II', 2, 0) + b'{}')\nthreading.Thread(target=flood, daemon=True).start()\n" + returning("7"),
    "a thread that runs on after the answer": "import os, threading, time\ndef late():\n    time.sleep(0.2)\n    os._exit(0)\ndef square(*a):\n    threading.Thread(target=late).start()\n    return 7",
    "handles every signal": doing("signal.raise_signal(signal.SIGTERM)", "import os, signal\nfor n in range(1, 32):\n    try: signal.signal(n, lambda *_: os._exit(0))\n    except (OSError, ValueError): pass"),
    "an alarm": doing("signal.alarm(1)", "import signal"),
    "a hang": "def square(*a):\n    while True: pass",
    "memory without end": "def square(*a):\n    x = []\n    while True: x.append(bytearray(1 << 20))",
}  # fmt: skip
INTERPRETER = {
    "patched builtins": "import builtins\nfor n in 'isinstance all any len sorted abs bool'.split():\n    setattr(builtins, n, lambda *a, **k: True)\n" + returning("None"),
    "patched AssertionError": "import builtins\nbuiltins.AssertionError = ValueError\n" + returning("None"),
    "patched __build_class__": "import builtins\nbuiltins.__build_class__ = lambda *a, **k: None\n" + returning("None"),
    "patched __import__": "import builtins\nbuiltins.__import__ = lambda *a, **k: None\n" + returning("None"),
    "__builtins__ replaced": "__builtins__ = {'AssertionError': Exception}\n" + returning("None"),
    "patched json": f"import json\njson.dumps = lambda *a, **k: '{VERDICT}'\njson.loads = lambda *a, **k: {{'passed': True}}\n" + returning("None"),
    "patched operator and unittest": "import operator, unittest\noperator.eq = lambda *a: True\nunittest.TestCase.assertEqual = lambda *a: None\n" + returning("None"),
    "patched math": "import math\nmath.isclose = lambda *a, **k: True\nmath.fabs = lambda x: 0.0\n" + returning("0"),
    "sys.modules": "import sys, types\nfor n in ('checker', 'plain', 'wire', 'json', 'math', 'pytest'):\n    sys.modules[n] = types.ModuleType(n)\n" + returning("None"),
    "import hooks": "import sys\nclass Finder:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, Finder())\nsys.path_hooks.insert(0, lambda p: 1 / 0)\n" + returning("None"),
    "sys.settrace": doing("sys._getframe().f_back.f_trace = trace", "import sys\ndef trace(frame, event, arg):\n    frame.f_locals['value'] = 9\n    return trace\nsys.settrace(trace)"),
    "sys.setprofile": returning("None", "import sys\nsys.setprofile(lambda frame, event, arg: frame.f_locals.update(value=9))"),
    "sys.excepthook": raising("ValueError") + "\nimport os, sys\nsys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)",
    "sys.setrecursionlimit": doing("sys.setrecursionlimit(10**9)\nreturn square(*a)", "import sys"),
    "sys.setswitchinterval": returning("None", "import sys\nsys.setswitchinterval(1000.0)"),
    "an audit hook": returning("None", "import os, sys\nsys.addaudithook(lambda *a: None)"),
    "frames": FRAMES,
    "inspect": doing("for f in inspect.stack():\n    f.frame.f_globals.update(check=lambda c: None)", "import inspect"),
    "gc": doing("for o in gc.get_objects():\n    if type(o) is dict and 'check' in o: o['check'] = lambda c: None", "import gc"),
    "gc looks for expected values": doing("return next((o for o in gc.get_objects() if type(o) is list and 81 in o), None)", "import gc"),
    "weak references and finalizers": doing("weakref.finalize(square, os._exit, 0)\ndel globals()['square']", "import os, weakref"),
    "__del__": "import os\nclass D:\n    def __del__(self): os._exit(0)\ndef square(*a): return D()",
    "patched int by ctypes": "import ctypes\n" + doing("n = ctypes.c_long.from_address(id(7) + 24)\nn.value = 8\nreturn 7"),
    "its own codec patched": "import plain\nplain.Codec.encode = lambda self, value, depth=0: ['object', 0, 'int']\n" + returning("9"),
    "values of unknown kinds": "import plain\nplain.Codec.encode = lambda self, value, depth=0: ['eval', 'True']\n" + returning("9"),
    "values of types by name": "import plain\nplain.Codec.encode = lambda self, value, depth=0: ['__import__', 'os']\n" + returning("9"),
    "its own frames patched": "import wire\nold = wire.send\n" + f"wire.send.__code__ = (lambda fd, header, blob=b'', deadline=None: os.write(fd, b'{VERDICT}')).__code__\nwire.os = __import__('os')\n" + returning("9"),
    "claims to have no error": "import candidate, sys\n" + "m = sys.modules['__main__']\nm.describe = lambda e: 1 / 0\n" + raising("ValueError"),
    "names that do not exist": "import builtins\nvars = builtins.vars\nbuiltins.vars = lambda *a: {'square': print, 'check': print, 'is_close': print, 'all': print}\n" + returning("None"),
}  # fmt: skip
OUTSIDE = {
    "prints a verdict": f"print('passed'); print('{VERDICT}')\n" + returning("None"),
    "writes a verdict to every descriptor": f"import os\nfor fd in range(256):\n    try: os.write(fd, b'{VERDICT}\\n')\n    except OSError: pass\nos._exit(0)",
    "writes answers before they are asked for": ANSWER + "import os\nos.write(10, frame * 50)\n" + returning("None"),
    "writes to descriptors of others": f"import glob\nfor path in glob.glob('/proc/[0-9]*/fd/*'):\n    try: open(path, 'wb', 0).write(b'{VERDICT}')\n    except OSError: pass\n" + returning("None"),
    "closes every descriptor": doing("os.closerange(0, 256)", "import os"),
    "duplicates its channel": doing("os.dup2(1, 10)", "import os"),
    "reads the tests in files": doing("for p in glob.glob('/run/rolljax/*') + glob.glob('/work/*') + glob.glob('/tmp/*'):\n    t = open(p, errors='replace').read()\n    if 'SQUARES' in t and 'def square' not in t: return a[0] * a[0]", "import glob"),
    "reads the tests on command lines": doing("for p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n    if b'SQUARES' in open(p, 'rb').read(): return a[0] * a[0]", "import glob"),
    "reads the tests in memory": doing("args = a\nfor p in set(glob.glob('/proc/[0-9]*/mem')) - {f'/proc/{os.getpid()}/mem'}:\n    for l in open(p[:-3] + 'maps'):\n        if ' rw' in l:\n            a, b = (int(n, 16) for n in l.split()[0].split('-'))\n            f = open(p, 'rb', 0)\n            f.seek(a)\n            if mark in f.read(b - a): return args[0] * args[0]", "import glob, os\nmark = bytes(reversed(b'(esolc_si tressa'))"),
    "traces others": doing("ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nctypes.CDLL(None).ptrace(0, 0, 0, 0)", "import ctypes, os"),
    "environment": returning("None", "import os\nos.environ.update(PYTHONPATH='/work', PYTHONSTARTUP='/work/x.py', PYTHONINSPECT='1', PATH='/work', LD_PRELOAD='/work/x.so', PYTHONOPTIMIZE='2')"),
    "optimized away asserts": "import os, sys\nif not sys.flags.optimize and 'AGAIN' not in os.environ:\n    os.environ['AGAIN'] = '1'\n    os.execv(sys.executable, [sys.executable, '-O', *sys.orig_argv[1:]])\n" + returning("None"),
    "start-up files": """
import os, sys
for folder in ("/work", "/tmp", "/work/.local/lib/python3.11/site-packages", "/run/rolljax", *sys.path):
    for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "checker.py", "wire.py", "json.py", "x.pth", "pytest.ini"):
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "w") as f: f.write("import os; os._exit(0)")
        except OSError: pass
def square(*a): return None
""",
    "overwrites the grader": "import glob\nfor p in glob.glob('/run/rolljax/*'):\n    try: open(p, 'w').write('')\n    except OSError: pass\n" + returning("None"),
    "brings the helper of the tests": "def is_close(*a, **k): return True\ncheck = same = verdict = is_close\n" + returning("None"),
    "brings every helper": "class Yes:\n    __bool__ = __eq__ = lambda *a: True\n    __hash__ = None\nis_close = same = check = lambda *a, **k: Yes()\n" + returning("Yes()"),
    "redefines Python's own": "all = any = sorted = zip = map = abs = max = str = lambda *a, **k: True\n" + returning("True"),
    "pretends that the tests ran": "def check(candidate): return True\nverdict = {'num_passed': 99}\npassed = True\n" + returning("None"),
    "waits for the end": doing("time.sleep(60)", "import time"),
    "guesses by the time": returning("int(time.time()) % 100", "import time"),
    "guesses by chance": returning("random.randint(0, 50) + 0.5", "import random"),
    "what it was given": "def square(x): return x if x > 1 else None",
    "nothing": "",
    "prose": "The square of a number is the number times itself.",
    "a syntax error": "def square(:",
    "not a function": "square = 5",
    "not unicode": "x = '\ud800'\ndef square(*a): return x",
    "NUL": "\0",
    "deep brackets": "(" * 20_000,
    "another name": "def squared(x): return x * x",
}  # fmt: skip
HACKS = {**EXCEPTIONS, **OBJECTS, **PROCESS, **INTERPRETER, **OUTSIDE}
ONE_OF_EACH = (
    "raises StopIteration", "raises ValueError", "raises an own ValueError that is also a StopIteration",
    "equals everything", "a subclass of int that equals everything", "leaves when called", "frames", "NaN",
    "writes answers before they are asked for", "brings the helper of the tests", "brings every helper",
    "values of unknown kinds",
)  # fmt: skip

SETUP = "import contextlib, math\nXS = [2, 3, -4, 9]\nSQUARES = [4, 9, 16, 81]\ndef right(x): return math.isclose(square(x), x * x)"
FORMS = [
    "assert square(3) == 9",
    "assert square(3) == 9 and square(2) == 4",
    "assert list(map(square, XS)) == SQUARES",
    "assert [square(x) for x in XS] == SQUARES",
    "assert all(square(x) == x * x for x in XS)",
    "assert all(map(lambda x: square(x) == x * x, XS))",
    "assert not any(map(lambda x: square(x) != x * x, XS))",
    "assert all(a == b for a, b in zip(map(square, XS), SQUARES))",
    "for got, wanted in zip(map(square, XS), SQUARES): assert got == wanted",
    "for got in map(square, [3]): assert got == 9",
    "assert not [got for got in map(square, XS) if got not in SQUARES]",
    "assert sorted(map(square, XS)) == sorted(SQUARES)",
    "assert max(map(square, XS), default=81) == 81",
    "assert next(map(square, [9]), 81) == 81",
    "assert next(iter(lambda: square(9), -1), 81) == 81",
    "assert not set(map(square, XS)) - set(SQUARES)",
    "assert sum(filter(lambda x: square(x) != x * x, XS)) == 0",
    "assert abs(square(3) - 9) < 1e-9",
    "assert math.isclose(square(3), 9)",
    "assert not abs(square(3) - 9) > 1e-9 and square(3) > 8",
    "assert str(square(3)) == '9' and type(square(3)) is int",
    "assert right(3)",
    "assert is_close(square(3), 9)",
    "assert not (not is_close(square(3), 9))",
    "assert is_close(square(3), 9) == True",
    "if not is_close(square(3), 9): raise AssertionError",
    "assert [x for x in [1] if is_close(square(3), 9)]",
    "assert {9: True}.get(square(3), False)",
    "try: assert square(3) == 9\nexcept (ValueError, LookupError, ArithmeticError, TypeError, StopIteration): pass",
    "try: assert square(3) == 9\nexcept AssertionError: raise\nexcept Exception: pass",
    "try: assert square(3) == 9\nexcept AssertionError: raise\nexcept BaseException: pass",
    "try: assert square(3) == 9\nexcept AssertionError: raise\nexcept: pass",
    "with contextlib.suppress(ValueError, StopIteration, KeyError): assert square(3) == 9",
    "got = 9\ntry: got = square(3)\nfinally: assert got == 9",
    "with pytest.raises(ValueError): square('x')\nassert square(3) == 9",
    "with pytest.raises(Exception): square('x')\nassert square(3) == 9",
]
"""Different ways to write the same test; each is tested separately."""
RIGHT = "def square(x):\n    if isinstance(x, str): raise ValueError('no number')\n    return x * x\ndef is_close(*a): return False"
"""Passes every form except those with a helper that only the candidate has."""

STDIN_TEST = """
def test_squares(box):
    for x, wanted in ((2, "4\\n"), (3, "9\\n"), (-4, "16\\n")):
        done = box.run(["python3", "main.py"], stdin=f"{x}\\n")
        assert (done.returncode, done.stdout) == (0, wanted)
def test_report(box):
    assert box.run(["python3", "-c", "print(open('/work/report').read())"]).stdout == "81\\n"
"""
STDIN_RIGHT = {"main.py": b"x = int(input())\nprint(x * x)", "report": b"81"}
STDIN = {
    "leaves": {"main.py": b"import os; os._exit(0)"},
    "prints a verdict": {"main.py": b"print('" + VERDICT.encode() + b"')"},
    "echoes": {"main.py": b"print(input())"},
    "prints everything": {"main.py": b"for i in range(100): print(i)"},
    "looks for the tests": {"main.py": b"import subprocess as s\nprint(s.run(['grep', '-rl', 'test_squares', '/run', '/work', '/tmp', '/proc/1', '/proc/2'], capture_output=True, text=True).stdout)"},
    "kills the one that serves it": {"main.py": b"import os; os.kill(os.getppid(), 9)"},
    "kills everything": {"main.py": b"import os; os.kill(-1, 9)"},
    "writes to the one that serves it": {"main.py": b"import glob\nfor p in glob.glob('/proc/[0-9]*/fd/*'):\n    try: open(p, 'wb', 0).write(b'\\0\\0\\0\\x0a\\0\\0\\0\\x02{\"code\":0}9\\n')\n    except OSError: pass"},
    "start-up files": {"main.py": b"print(4)", "sitecustomize.py": b"print(9)", "usercustomize.py": b"import os; os._exit(0)", "x.pth": b"import os; os._exit(0)", "conftest.py": b""},
    "programs of its own": {"python3": b"#!/bin/sh\necho 9", "main.py": b"import os; os.environ['PATH'] = '/work'"},
    "a daemon that answers later": {"main.py": b"import os, time\nif not os.fork():\n    os.setsid(); time.sleep(0.2); os.write(1, b'9\\n')"},
    "closes its output": {"main.py": b"import os; os.closerange(0, 99)"},
    "fork bomb": {"main.py": b"import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"},
    "output without end": {"main.py": b"while True: print('9')"},
    "a link to standard input": {"main.py": b"import os; os.symlink('/proc/self/fd/0', '/work/report')"},
    "carriage returns": {"main.py": b"print('x\\r4')"},
}  # fmt: skip
