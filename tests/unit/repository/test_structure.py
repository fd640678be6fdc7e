"""The house rules that no other test would notice: who imports whom, what stays light, how long functions get."""

import ast
import functools
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rolljax

ROOT = Path(rolljax.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
VERBS = {
    "cli.py",
    "service/__main__.py",
    "commands",
    "train.py",
    "chat.py",
    "eval.py",
    "export.py",
    "plan.py",
    "sampler_host.py",
    "play.py",
    "serve.py",
    "show.py",
    "simulate.py",
    "validate.py",
    "view.py",
    "data/__main__.py",
}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def is_for_types_only(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@functools.cache
def nodes(path):
    """Return all nodes of a file's syntax tree; the first is its root."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def forget():
    """Free the syntax trees of all files when the tests of this module have ended."""
    yield
    nodes.cache_clear()


@functools.cache
def imports(path):
    """Return (dotted name, whether it is deferred: inside a function, or for type checkers) of every import of a
    file."""
    inside = {
        id(node)
        for fn in nodes(path)
        if isinstance(fn, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_for_types_only(fn)
        for node in ast.walk(fn)
    }
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        found += [(name, id(node) in inside) for name in names]
    return found


def under(name, package):
    return name == package or name.startswith(package + ".")


LEFT = {
    "types": set(),
    "errors": {"types"},
    "metrics": {"types", "errors"},
    "reading": {"errors"},
    "fields": {"reading"},
    "concurrency": {"errors"},
    "console": {"errors", "reading"},
    "storage": {"errors", "reading", "fields", "types"},
    "sandbox": {"errors", "types"},
    "model": {"errors", "reading", "types", "console", "concurrency"},
    "envs": {"errors", "reading", "types", "concurrency", "sandbox"},
    "sampler": {"errors", "types", "concurrency", "model"},
    "trainer": {"errors", "types", "metrics", "model"},
    "cluster": {"errors", "reading", "fields", "types", "concurrency", "model", "sampler", "trainer"},
    "service": {"errors", "reading", "types", "concurrency", "model", "sampler", "trainer", "serving", "storage", "run"},
    "serving": {"errors", "reading", "types", "concurrency", "model", "envs", "sampler"},
    "chat_models": {"errors", "types", "concurrency", "model", "envs", "sampler"},
    "judging": {"errors", "types", "envs", "chat_models", "storage"},
    "rewards": {"errors", "reading", "types", "metrics", "concurrency", "sandbox", "model", "envs", "sampler", "trainer", "chat_models",
                "judging", "storage"},
    "rollout": {"errors", "types", "concurrency", "sandbox", "model", "envs", "sampler", "serving", "trainer", "rewards"},
    "aot": {"errors", "types", "model", "sampler", "trainer"},
    "config": {"errors"},
    "trackers": {"errors", "concurrency"},
    "recipe": {"errors", "model", "envs", "sampler", "trainer", "cluster", "chat_models", "rewards", "rollout", "trackers"},
    "run": {"errors", "reading", "types", "metrics", "concurrency", "sandbox", "model", "envs", "sampler", "trainer", "cluster", "chat_models",
            "rewards", "rollout", "recipe", "config", "trackers", "aot", "console", "storage"},
    "viewer": {"errors", "reading", "fields", "types", "metrics", "model", "serving", "storage", "run"},
    "evaluation": {"errors", "reading", "types", "concurrency", "model", "envs", "sampler", "trainer", "chat_models", "judging", "rewards", "rollout",
                   "recipe", "console", "storage", "run"},
    "data": {"errors", "types", "concurrency", "model", "envs", "sampler", "chat_models", "judging", "console", "storage"},
    "simulation": {"errors", "reading", "fields", "types", "concurrency", "model", "envs", "sampler", "trainer", "cluster", "rollout", "recipe", "storage",
                   "run", "aot"},
    "recipes": {"errors", "reading", "fields", "types", "metrics", "concurrency", "sandbox", "model", "envs", "sampler", "trainer", "chat_models",
                "judging", "rewards", "rollout", "recipe", "storage", "run", "evaluation", "data", "library"},
}  # fmt: skip
"""What each room, or module at the root, may import besides itself; the loop, the verbs and `library`, which is the verbs as
functions, may import everything."""
OUTSIDE = {
    "types": {"jax", "gin"}, "errors": {"jax", "numpy"}, "reading": {"jax", "numpy"}, "fields": {"jax", "numpy"}, "metrics": {"jax"},
    "sandbox": {"jax", "flax"}, "envs": {"jax", "flax", "optax"}, "viewer": {"jax", "flax", "optax", "transformers"},
    "trackers": {"jax", "numpy"},
}  # fmt: skip
"""Libraries that these never import."""


def room_of(name):
    """Return the room of a dotted name of ours."""
    parts = name.split(".")
    return parts[1] if parts[0] == "rolljax" and len(parts) > 1 else ""


def test_imports_are_found():
    found = dict(imports(ROOT / "commands" / "train.py"))
    assert found["rolljax.cli"] is False and any(inside for inside in found.values())
    assert any(under(name, "jax") for name, _ in imports(ROOT / "trainer" / "update.py"))


@pytest.mark.parametrize("room", LEFT)
def test_rooms_import_only_what_stands_left_of_them(room):
    files = [f for f in FILES if name_of(f).startswith(f"{room}/") or name_of(f) == f"{room}.py"]
    files = [f for f in files if name_of(f) not in VERBS]
    assert files
    allowed = LEFT[room] | {room, "", "__version__"}
    wrong = [
        f"{name_of(f)} imports {name}"
        for f in files
        for name, _ in imports(f)
        if under(name, "rolljax")
        and room_of(name) not in allowed
        or any(under(name, banned) for banned in OUTSIDE.get(room, ()))
    ]
    assert not wrong


def test_no_recipe_imports_another():
    """Of `recipes`, whose own folder each of them may import."""
    files = [f for f in FILES if name_of(f).startswith("recipes/") and f.parent != ROOT / "recipes"]
    assert files
    wrong = [
        f"{name_of(f)} imports {name}"
        for f in files
        for name, _ in imports(f)
        if under(name, "rolljax.recipes") and name.split(".")[2] != f.relative_to(ROOT).parts[1]
    ]
    assert not wrong


def test_every_room_has_a_rule():
    rooms = {name_of(f).split("/")[0].removesuffix(".py") for f in FILES}
    verbs = {v.split("/")[0].removesuffix(".py") for v in VERBS}
    assert rooms == LEFT.keys() | verbs | {"loop", "library", "__init__"}


def test_no_modules_import_each_other_in_a_circle():
    """Of imports that run when a module is loaded."""
    modules = {
        ".".join(("rolljax", *f.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): f for f in FILES
    }

    def needs(module):
        for name, inside in imports(modules[module]):
            found = name if name in modules else name.rpartition(".")[0]
            if not inside and found in modules and found != module:
                yield found

    edges = {module: set(needs(module)) for module in modules}
    assert sum(map(len, edges.values())) > 500
    while edges:  # take away what needs nothing that is left
        free = {module for module, found in edges.items() if not found & edges.keys()}
        assert free, f"a circle among {sorted(edges)}, or what needs it"
        edges = {module: found for module, found in edges.items() if module not in free}


def test_every_class_that_declares_a_range_checks_it():
    def texts(cls):
        yield from map(ast.unparse, cls.bases)
        yield from (ast.unparse(node) for node in cls.body if isinstance(node, ast.FunctionDef))

    declared = [
        (name_of(f), cls.name, any(text == "Checked" or "check_fields(self)" in text for text in texts(cls)))
        for f in FILES
        for cls in nodes(f)
        if isinstance(cls, ast.ClassDef)
        if any(isinstance(m, ast.AnnAssign) and "Range(" in ast.unparse(m.annotation) for m in cls.body)
    ]
    assert len(declared) > 50 and [found for found in declared if not found[2]] == []


def test_one_module_installs_signal_handlers():
    """Besides programs that start as children and reset what they inherit."""
    children = ("sandbox/", "envs/pool/fork_server.py", "envs/bounded.py", "recipes/terminal_bench/inside.py")
    wrong = [
        f"{name_of(f)}:{node.lineno}"
        for f in FILES
        if name_of(f) != "concurrency/signals.py" and not name_of(f).startswith(children)
        for node in nodes(f)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("signal.signal", ".add_signal_handler"))
    ]
    assert not wrong


def test_the_root_holds_verbs_and_what_flows():
    assert len(list(ROOT.glob("*.py"))) <= 21


@pytest.mark.parametrize("file", ["types.py", "errors.py", "metrics.py"])
def test_what_everyone_imports_imports_nobody(file):
    allowed = {"rolljax.errors", "rolljax.types"}
    for name, _ in imports(ROOT / file):
        assert not under(name, "jax") and (not under(name, "rolljax") or name.rsplit(".", 1)[0] in allowed), name


def test_only_config_and_verbs_touch_gin():
    wrong = []
    for f in FILES:
        if name_of(f) in VERBS or name_of(f).startswith(("commands/", "config/", "library/")):
            continue
        for name, inside in imports(f):
            if (
                under(name, "gin")
                or under(name, "rolljax.config")
                and not (name_of(f) in ("run/folder.py", "run/policy.py") and inside)
            ):
                wrong.append(f"{name_of(f)} imports {name}")
    assert not wrong


def run(code, **environ):
    env = os.environ | environ
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_class_names_are_unique():
    places: dict[str, list[str]] = {}
    for path in FILES:
        if "terminal_tasks" in path.parts:  # foreign files that a task puts into a sandbox
            continue
        for node in nodes(path)[0].body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_import_rolljax_is_light():
    heavy = ["jax", "flax", "numpy", "transformers", "ray", "gin"]
    out = run(f"import sys, rolljax; print([m for m in {heavy} if m in sys.modules])")
    assert out.strip() == "[]"


def test_envs_load_no_jax():
    modules = [info.name for info in pkgutil.walk_packages([str(ROOT / "envs")], "rolljax.envs.")]
    out = run(f"import sys, {', '.join(modules)}; print([m for m in ('jax', 'flax') if m in sys.modules])")
    assert out.strip() == "[]"


def test_the_core_works_without_the_rest():
    """Model, sampler, trainer and the loop, a recipe of Python objects, and its tasks."""
    folders = [str(ROOT.parent / "tests" / "hidden"), str(ROOT.parent), str(ROOT.parent / "benchmarks" / "accelerator")]
    out = run(
        "import sys, sitecustomize\nsys.modules['torch'] = None\n"
        "import rolljax.model.decoder, rolljax.sampler.client, rolljax.trainer.update, rolljax.loop, rolljax.commands.train\n"
        "import rolljax.eval, rolljax.commands.export, rolljax, learning\n"
        "from rolljax.errors import ConfigError\n"
        "from rolljax.envs.tasks import open_stream\n"
        "from rolljax.library.verbs import config_of\n"
        "from rolljax.run import preflight\n"
        "config = config_of(learning.recipe(1.0, 0, tiny=True), {'Recipe.seed': 7})\n"
        "assert config.value.seed == 7 and 'Grpo' in config.operative\n"
        "assert preflight.check(config.value).heldout\n"
        "print(next(open_stream(config.value.env, 7, 0.1)).content)\n"
        "try:\n    rolljax.train('quickstart')\n"
        "except ConfigError as e:\n    print(e)\n"
        "used = sitecustomize.HIDDEN - sitecustomize.FOR_OTHERS\n"
        "assert not any(sys.modules.get(name) for name in used)\n",
        PYTHONPATH=os.pathsep.join(folders),
        XLA_FLAGS="",
    )
    assert out.startswith("Spell this word backward")
    assert "reading a gin file needs the package gin\n" in out and "pip install 'gin-config', or build" in out


def test_no_function_is_longer_than_120_lines():
    lengths = {
        f"{name_of(f)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for f in FILES
        for node in nodes(f)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(lengths) > 100
    assert {k: n for k, n in lengths.items() if n > 120} == {}


TIMED_WAITS = {
    "from queue import SimpleQueue as Q": True,
    "import queue as q\nself.inbox = q.SimpleQueue()\nself.inbox.get(True, 0.1)": True,
    "from _queue import SimpleQueue": True,
    "make = getattr(queue, 'SimpleQueue')": True,
    "from queue import *": True,
    "import queue\nqueue.Queue().get(timeout=0.1)": False,
    "from multiprocessing import SimpleQueue\nimport multiprocessing as m\nm.SimpleQueue()": False,
}


def simple_queues(tree):
    """Return the lines that could make a `queue.SimpleQueue` under any name: sooner or later code waits on it."""
    elsewhere = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            elsewhere |= {a.asname or a.name for a in node.names if under(a.name, "multiprocessing")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("queue", "_queue"):
            found = {a.name for a in node.names} & {"SimpleQueue", "*"}
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            found = node.attr == "SimpleQueue" and owner not in elsewhere
        else:
            found = isinstance(node, ast.Constant) and node.value == "SimpleQueue"
        if found:
            yield node.lineno


@pytest.mark.parametrize("code", TIMED_WAITS)
def test_simple_queues_are_found(code):
    assert bool(list(simple_queues(ast.parse(code)))) == TIMED_WAITS[code]


def test_no_thread_waits_on_a_simple_queue():
    """Before Python 3.13 its waits may outlast their time-out for good: see `rolljax.concurrency.waits`."""
    files = [f for name in ("rolljax", "benchmarks", "examples") for f in sorted((ROOT.parent / name).rglob("*.py"))]
    assert len(files) > len(FILES)
    texts = {f: text for f in files if "queue" in (text := f.read_text())}
    assert [f"{f}:{line}" for f, text in texts.items() for line in simple_queues(ast.parse(text))] == []


def test_every_package_travels_in_the_wheel():
    import tomllib

    listed = set(tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {".".join(f.parent.relative_to(ROOT.parent).parts) for f in FILES if f.name == "__init__.py"}
    assert listed == found | {"rolljax.configs"}


def test_no_folder_brings_code_that_is_run():
    """`transformers` asks on standard input whether to run it, unless an argument says so."""
    examples = sorted((ROOT.parent / "examples").rglob("*.py"))
    calls = {
        f"{f.name}:{node.lineno}": {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        for f in [*FILES, *examples]
        for node in nodes(f)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    }
    assert calls
    assert [where for where, given in calls.items() if given.get("trust_remote_code") is not False] == []


def is_broad(kind):
    """Return whether an `except` with this expression catches everything."""
    if isinstance(kind, ast.Tuple):
        return any(map(is_broad, kind.elts))
    return kind is None or isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")


def test_everything_is_caught_at_named_borders_only():
    """At most once in 2,000 lines, with a comment `# border: ...`."""
    wrong, found, num_lines = [], 0, 0
    for f in FILES:
        text = f.read_text()
        lines = text.splitlines()
        num_lines += len(lines)
        for node in nodes(f):
            if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
                found += 1
                if "# border: " not in lines[node.lineno - 1]:
                    wrong.append(f"{name_of(f)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not wrong and found <= num_lines / 2000


def test_the_table_of_the_loop_lists_the_calls_of_its_body():
    """In the order of the body; a call in the trainer thread (`clock.call`) is that of the called method."""
    tree = ast.parse((ROOT / "loop.py").read_text())
    (body,) = (n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef) and n.name == "train_step")
    parts = {argument.arg for argument in body.args.args} | {"progress"}
    calls = []
    for node in ast.walk(body):
        method = node.func if isinstance(node, ast.Call) else None
        if isinstance(method, ast.Attribute) and ast.unparse(method) == "clock.call":
            method = node.args[0]
        if isinstance(method, ast.Attribute) and ast.unparse(method.value) in parts:
            calls.append((node.lineno, node.col_offset, ast.unparse(method)))
    rows = [line.split("`")[1] for line in ast.get_docstring(tree).splitlines() if line.startswith("| `")]
    assert rows == [name for *_, name in sorted(calls)]
