"""Task folders of both layouts, and the sixteen that come with rolljax."""

import collections
import textwrap

import pytest

from rolljax.envs.catalog import make_spec, ref_of, task_of
from rolljax.errors import ConfigError, DataError
from rolljax.recipes.terminal_bench.harbor import find_tasks, load_task
from rolljax.recipes.terminal_bench.images import image_of
from rolljax.recipes.terminal_bench.terminal import OWN_TASKS, HarborTasks, TerminalTasks

TESTS = "from pathlib import Path\n\ndef test_it():\n    assert Path('/app/out').read_text() == 'x'\n"

UNSUPPORTED = ("pytest.importorskip", "hold no tests", "not Python", "a GPU", "services of")
"""What an image cannot help with."""


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def v2(folder, **changes):
    files = {
        "task.toml": '[metadata]\ncategory = "games"\n[agent]\ntimeout_sec = 90.0\n[verifier]\ntimeout_sec = 9\n',
        "instruction.md": "Write x.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY data/ data/\n",
        "environment/data/a.txt": "a",
        "tests/test_outputs.py": TESTS,
        "solution/solve.sh": "#!/bin/bash\nprintf x > out\n",
        **{name.replace("__", "/"): text for name, text in changes.items()},
    }
    return write(folder, files)


def test_the_second_layout(tmp_path):
    task = load_task(v2(tmp_path / "job"))
    assert (task.name, task.instruction, task.category) == ("job", "Write x.", "games")
    assert (task.agent_timeout_s, task.verifier_timeout_s) == (90.0, 9.0)
    assert task.workdir == "/app" and task.artifacts == ("/app",) and task.solution == "printf x > out"
    assert task.cases == {"test_outputs.py": ("test_it",)} and task.unsupported == ()
    assert [s.path for s in task.steps if hasattr(s, "path")] == ["/app/data/a.txt"]


def test_the_first_layout(tmp_path):
    yaml = "instruction: |-\n  Write x.\ncategory: games\nmax_agent_timeout_sec: 90.0\nmax_test_timeout_sec: 9.0\n"
    files = {"task.yaml": yaml, "Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY . .\n", "a.txt": "a", "run-tests.sh": ""}
    task = load_task(write(tmp_path / "job", files | {"tests/test_outputs.py": TESTS, "solution.sh": "printf x > out"}))
    assert (task.instruction, task.agent_timeout_s, task.verifier_timeout_s) == ("Write x.", 90.0, 9.0)
    assert task.solution == "printf x > out" and task.cases == {"test_outputs.py": ("test_it",)}
    assert {s.path for s in task.steps if hasattr(s, "path")} == {"/app/Dockerfile", "/app/a.txt"}  # never the tests


def test_a_script_decides_where_there_are_no_test_functions(tmp_path):
    folder = v2(tmp_path / "job", **{"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"})
    (folder / "tests/test_outputs.py").unlink()
    task = load_task(folder)
    assert task.cases == {} and task.unsupported == ()


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"environment__Dockerfile": "FROM x\nWORKDIR /app\nRUN curl example.org\n"}, "curl, which needs a network"),
        ({"environment__Dockerfile": "FROM x\n"}, "nothing to carry"),
        ({"tests__test_outputs.py": "import numpy\ndef test_a(): pass\n"}, "uses numpy"),
        ({"tests__test_outputs.py": "import pytest\ndef test_a(): pytest.importorskip('x')\n"}, "pytest.importorskip"),
        ({"tests__test_outputs.py": "x = 1\n"}, "hold no tests"),
        ({"tests__test_outputs.py": "def\n"}, "not Python"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "a GPU"),
        ({"environment__docker-compose.yaml": "services:\n a:\n  image: x\n b:\n  image: y\n"}, "services of"),
    ],
)
def test_what_is_out_of_reach_is_said(tmp_path, changes, part):
    folder = v2(tmp_path / "tasks" / "job", **changes)
    task = load_task(folder)
    assert part in "; ".join((*task.unsupported, *task.needs_image))
    assert task.lacking((), images=False) and task.lacking((), images=True) == task.unsupported
    assert bool(task.unsupported) == (part in UNSUPPORTED)
    with pytest.raises(DataError, match="1 of 1 tasks.*\n.*job: ") as caught:
        HarborTasks(path=str(folder.parent)).task(0)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"instruction.md": " \n"}, "no instruction"),
        ({"task.toml": "x = [\n"}, "TOMLDecodeError"),
    ],
)
def test_broken_folders(tmp_path, changes, part):
    with pytest.raises(DataError, match=part):
        load_task(v2(tmp_path / "job", **changes))


def test_missing_folders(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        HarborTasks(path=str(tmp_path / "none"))
    with pytest.raises(DataError, match="holds no tasks"):
        HarborTasks(path=str(tmp_path)).task(0)
    with pytest.raises(DataError, match="no environment/Dockerfile"):
        folder = v2(tmp_path / "job")
        (folder / "environment/Dockerfile").unlink()
        load_task(folder)


def test_packages_are_there_or_said_to_be(tmp_path):
    install = "FROM x\nWORKDIR /app\nRUN apt-get update && apt-get install -y bash no-such-package=1.2 other[extra]\n"
    v2(tmp_path / "a", **{"environment__Dockerfile": install})
    v2(tmp_path / "b", **{"instruction.md": "b"})
    with pytest.raises(DataError, match="1 of 2 tasks.*\n.*a: packages no-such-package, other"):
        HarborTasks(path=str(tmp_path)).task(0)
    assert len(HarborTasks(path=str(tmp_path), have=("no-such-package", "other")).tasks()) == 2
    assert [t.name for t in HarborTasks(path=str(tmp_path), skip_unusable=True).tasks()] == ["b"]
    with pytest.raises(DataError, match="1 of 1"):
        HarborTasks(path=str(tmp_path), skip_unusable=True, only=("a",)).task(0)


def test_choosing_tasks(tmp_path):
    for name in ("one", "two", "three"):
        v2(tmp_path / name, **{"instruction.md": name})
    spec = HarborTasks(path=str(tmp_path), only=("two", "one"))
    assert [spec.task(i).content for i in range(3)] == ["one\n\none", "two\n\ntwo", "one\n\none"]
    with pytest.raises(ConfigError, match="is not a task") as caught:
        HarborTasks(path=str(tmp_path), only=("tow",)).task(0)
    assert "did you mean two" in str(caught.value)
    assert HarborTasks(path=str(tmp_path / "one")).task(5).content == "one\n\none"


@pytest.mark.parametrize(
    "settings, part",
    [({"max_turns": 0}, "max_turns"), ({"max_repeats": 1}, "max_repeats"), ({"prompt": "Go."}, "prompt")],
)
def test_settings_that_cannot_work(settings, part):
    with pytest.raises(ConfigError, match=part):
        TerminalTasks(**settings)


def test_names_in_the_catalog(tmp_path):
    v2(tmp_path / "one")
    assert make_spec("terminal(max_turns=5)") == TerminalTasks(max_turns=5)
    assert make_spec(f"harbor:{tmp_path}") == HarborTasks(path=str(tmp_path))
    for spec in (TerminalTasks(only=("sudoku",)), HarborTasks(path=str(tmp_path), max_repeats=0)):
        assert make_spec(ref_of(spec)) == spec and task_of(ref_of(spec, 3))[1] == spec.task(3)


def test_the_own_tasks_are_two_of_each_of_eight_domains():
    tasks = TerminalTasks().tasks()
    assert len(tasks) == len(find_tasks(OWN_TASKS)) == 16
    domains = collections.Counter(t.category for t in tasks)
    assert set(domains) == {
        "data-processing", "games", "debugging", "system-administration", "scientific-computing",
        "software-engineering", "machine-learning", "security",
    }  # fmt: skip
    assert set(domains.values()) == {2}
    assert len({TerminalTasks().task(i).id for i in range(24)}) == 16


@pytest.mark.parametrize("task", TerminalTasks().tasks(), ids=lambda t: t.name)
def test_own_tasks_name_what_they_want_and_hide_their_tests(task):
    assert task.solution and task.artifacts and all(a.startswith("/work/") for a in task.artifacts)
    assert all(a in task.instruction for a in task.artifacts)
    assert task.cases and all(task.cases.values())
    shown = [s.data for s in task.steps if hasattr(s, "data")]
    assert not any(source in shown for source in task.tests.values())


def test_the_image_of_a_task(tmp_path):
    built = load_task(
        v2(tmp_path / "My task!", **{"task.toml": "[environment]\nmemory_mb = 512\nbuild_timeout_sec = 5\n"})
    )
    name, _, tag = image_of(built).rpartition(":")
    assert name == "localhost/rolljax/my-task" and len(tag) == 16
    assert (built.memory_bytes, built.build_timeout_s) == (512 << 20, 5.0)
    named = v2(tmp_path / "named", **{"task.toml": '[environment]\ndocker_image = "docker.io/x/y:1"\n'})
    (named / "environment/Dockerfile").unlink()
    assert image_of(load_task(named)) == "docker.io/x/y:1"
    assert load_task(named).needs_image == (
        "no Dockerfile",
        "no WORKDIR and no artifacts: nothing to carry to the tests",
    )
    with pytest.raises(DataError, match="HarborTasks.images if they need their image(.|\n)*no Dockerfile"):
        HarborTasks(path=str(named)).tasks()
    assert [t.name for t in HarborTasks(path=str(named), images="docker").tasks()] == ["named"]
