"""Tasks at a terminal, as folders: the layout of Harbor (version 2) and that of Terminal-Bench before it (version 1).

    NAME/task.toml                  settings                             v1: task.yaml
    NAME/instruction.md             the prompt for the policy            v1: in task.yaml
    NAME/environment/Dockerfile     how the machine looks, with files    v1: Dockerfile, with files
    NAME/tests/test_outputs.py      functions `test_*` that assert       (else tests/test.sh, which writes a verdict)
    NAME/solution/solve.sh          a solution                           v1: solution.sh

`HarborTask.unsupported` lists the needs that no sandbox can meet, `needs_image` the needs that the task's image meets.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import shutil
import stat
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rolljax.errors import DataError
from rolljax.recipes.terminal_bench.dockerfile import File, Put, RunCommand, read_dockerfile

MAX_FILE_BYTES = 32 << 20
MAX_SCRIPT = 128 << 10
"""Longest text of a program that Linux takes as an argument."""
_NOT_CONTEXT = {"tests", "task.yaml", "solution.sh", "solution.yaml", "run-tests.sh"}
"""Files next to the Dockerfile of version 1 that must not get onto the machine."""
_PYTEST = {"approx", "fail", "fixture", "mark", "raises", "skip"}
"""Names of pytest that the verifier provides."""


@dataclasses.dataclass(frozen=True, slots=True)
class HarborTask:
    """One task."""

    name: str
    instruction: str
    category: str
    difficulty: str
    steps: tuple[Put | RunCommand, ...]
    """Make the machine, in order; then commands run in `workdir` with `env`."""
    workdir: str
    env: Mapping[str, str]
    artifacts: tuple[str, ...]
    """Files and folders that are carried to the grading sandbox."""
    tests: Mapping[str, bytes]
    """Files by path under tests/."""
    cases: Mapping[str, tuple[str, ...]]
    """Names of the tests by file, in the order of the source; empty: tests/test.sh decides."""
    solution: str
    agent_timeout_s: float
    verifier_timeout_s: float
    packages: tuple[str, ...]
    """Packages that the task's Dockerfile installs."""
    needs_image: tuple[str, ...]
    """Reasons why the task cannot run on this machine's own system, but can in its image."""
    unsupported: tuple[str, ...]
    """Reasons why the task cannot run at all."""
    build_folder: Path
    """Folder of the Dockerfile."""
    docker_image: str
    """Image that the task names; empty: it is built from the Dockerfile."""
    build_timeout_s: float
    memory_bytes: int
    """Memory that the task asks for; 0: it does not say."""
    image: str = ""
    """Image in which the task runs (`images.in_image`); empty: this machine's own system."""

    @property
    def content(self) -> str:
        """The content of the task in an environment and in rollouts."""
        return f"{self.name}\n\n{self.instruction}"

    def lacking(self, have: Collection[str], *, images: bool) -> tuple[str, ...]:
        """Return the reasons why the task cannot run here: unsupported features, and without `images` the needs for
        one, and packages that are neither among `have` nor programs of this machine."""
        if images:
            return self.unsupported
        missing = [p for p in self.packages if p not in have and not shutil.which(p, path="/usr/bin:/bin")]
        packages = (f"packages {', '.join(missing)}",) if missing else ()
        return (*self.unsupported, *self.needs_image, *packages)


def find_tasks(folder: Path) -> list[Path]:
    """Return the task folders under `folder`, by name; `folder` itself if it is one.

    Raises:
      DataError: there is none.
    """
    if _is_task(folder):
        return [folder]
    found = sorted(p for p in folder.iterdir() if _is_task(p)) if folder.is_dir() else []
    if not found:
        raise DataError(f"{folder} holds no tasks: no folder with a task.toml or task.yaml")
    return found


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


@functools.lru_cache(maxsize=8192)
def load_task(folder: Path) -> HarborTask:
    """Read one task folder.

    Raises:
      DataError: a file that must be there is missing or cannot be read.
    """
    try:
        return _load(folder)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise DataError(f"task {folder}: {type(e).__name__}: {e}") from e


def _load(folder: Path) -> HarborTask:
    v1 = not (folder / "task.toml").is_file()
    settings = _yaml(folder / "task.yaml") if v1 else tomllib.loads((folder / "task.toml").read_text())
    instruction = settings.get("instruction") if v1 else (folder / "instruction.md").read_text()
    if not isinstance(instruction, str) or not instruction.strip():
        raise DataError(f"task {folder}: has no instruction")
    environment = folder if v1 else folder / "environment"
    context = _files(environment, skip=_NOT_CONTEXT if v1 else set())
    machine = settings.get("environment", {})
    docker_image = str(machine.get("docker_image", ""))
    if "Dockerfile" not in context and not docker_image:
        raise DataError(f"task {folder}: has no {environment.name}/Dockerfile")
    recipe = read_dockerfile(context["Dockerfile"].data.decode() if "Dockerfile" in context else "", context)
    tests = {path: file.data for path, file in _files(folder / "tests", set()).items()}
    cases, test_problems, foreign = _cases(tests)
    artifacts = tuple(settings.get("artifacts", ())) or ((recipe.workdir,) if recipe.workdir != "/" else ())
    solution = folder / ("solution.sh" if v1 else "solution/solve.sh")
    metadata = settings if v1 else settings.get("metadata", {})
    return HarborTask(
        name=folder.name,
        instruction=instruction.strip(),
        category=str(metadata.get("category", "")),
        difficulty=str(metadata.get("difficulty", "")),
        steps=recipe.steps,
        workdir=recipe.workdir,
        env=recipe.env,
        artifacts=artifacts,
        tests=tests,
        cases=cases,
        solution=_without_shebang(solution.read_text()) if solution.is_file() else "",
        agent_timeout_s=_seconds(settings, v1, "agent", 600.0),
        verifier_timeout_s=_seconds(settings, v1, "verifier" if not v1 else "test", 60.0),
        packages=recipe.packages,
        needs_image=(
            *recipe.unsupported,
            *foreign,
            *(() if "Dockerfile" in context else ("no Dockerfile",)),
            *(() if artifacts else ("no WORKDIR and no artifacts: nothing to carry to the tests",)),
        ),
        unsupported=(*test_problems, *_machine(machine, context)),
        build_folder=environment.absolute(),
        docker_image=docker_image,
        build_timeout_s=float(machine.get("build_timeout_sec", 600.0)),
        memory_bytes=int(machine.get("memory_mb", 0)) << 20,
    )


def _seconds(settings: Mapping[str, Any], v1: bool, who: str, default: float) -> float:
    value = settings.get(f"max_{who}_timeout_sec") if v1 else settings.get(who, {}).get("timeout_sec")
    return float(value) if isinstance(value, (int, float)) and value > 0 else default


def _machine(asked: Mapping[str, Any], context: Mapping[str, File]) -> tuple[str, ...]:
    """Return the demands of [environment] and of the Dockerfile's folder that a sandbox cannot meet."""
    found = ["a GPU"] if asked.get("gpus") else []
    found += ["MCP servers"] if asked.get("mcp_servers") else []
    compose = [c for c in context if c in ("docker-compose.yaml", "docker-compose.yml")]
    found += [f"services of {c}" for c in compose if context[c].data.count(b"image:") > 1]
    return tuple(found)


def _cases(tests: Mapping[str, bytes]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], tuple[str, ...]]:
    """Return the names of the test functions of each test file, the needs of the files that the verifier lacks, and the
    modules that only an image can have."""
    names = [p for p in tests if p.startswith("test_") and p.endswith(".py") and "/" not in p]
    if not names:
        if len(tests.get("test.sh", b"")) >= MAX_SCRIPT:
            return {}, (f"tests/test.sh has {MAX_SCRIPT} bytes or more",), ()
        return {}, () if "test.sh" in tests else ("no tests/test_outputs.py and no tests/test.sh",), ()
    try:
        files = {p: ast.parse(tests[p]) for p in names}
    except (SyntaxError, ValueError) as e:
        return {}, (f"the tests are not Python: {e}",), ()
    problems: dict[str, list[str]] = {"pytest": [], "foreign": []}
    beside = {p.removesuffix(".py") for p in tests}
    for path, tree in files.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "."] if node.module != "pytest" else [f"pytest.{a.name}" for a in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pytest":
                names = [f"pytest.{node.attr}"]
            else:
                continue
            for name in names:
                top, _, rest = name.partition(".")
                known = top in sys.stdlib_module_names or top in beside or (top == "pytest" and rest in {"", *_PYTEST})
                kind = problems["pytest" if top == "pytest" else "foreign"]
                if not known and f"tests/{path} uses {name}" not in kind:
                    kind.append(f"tests/{path} uses {name}")
    cases = {path: tuple(_names(tree)) for path, tree in files.items()}
    if not any(cases.values()):
        problems["pytest"].append("the test files hold no tests")
    return cases, tuple(problems["pytest"]), tuple(problems["foreign"])


def _names(tree: ast.Module) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = []
    for node in tree.body:
        if isinstance(node, functions) and node.name.startswith("test"):
            names.append(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            inner = (n.name for n in node.body if isinstance(n, functions) and n.name.startswith("test"))
            names += [f"{node.name}.{name}" for name in inner]
    return names


def _files(folder: Path, skip: set[str]) -> dict[str, File]:
    """Return the regular files under a folder by relative path; hidden files too, no links."""
    found = {}
    for top, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(top, name)
            relative = path.relative_to(folder).as_posix()
            info = path.lstat()
            if relative.split("/")[0] in skip or not stat.S_ISREG(info.st_mode) or name.endswith(".pyc"):
                continue
            if info.st_size > MAX_FILE_BYTES:
                raise DataError(f"{path} has {info.st_size} bytes, more than {MAX_FILE_BYTES}")
            found[relative] = File(path.read_bytes(), 0o755 if info.st_mode & 0o100 else 0o644)
    return found


def _yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        settings = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise DataError(f"{path}: {e}") from e
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no settings")
    return settings


def _without_shebang(text: str) -> str:
    return (text.partition("\n")[2] if text.startswith("#!") else text).strip("\n")
