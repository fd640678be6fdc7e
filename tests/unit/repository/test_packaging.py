"""Packages installed with rolljax, and modules that its commands load at the start."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rolljax

ROOT = Path(rolljax.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
VERBS = (
    "train",
    "chat",
    "data",
    "eval",
    "export",
    "plan",
    "play",
    "serve",
    "service",
    "show",
    "simulate",
    "validate",
    "view",
)
HEAVY = {
    "jax",
    "flax",
    "numpy",
    "scipy",
    "optax",
    "transformers",
    "ray",
    "gin",
    "grain",
    "rich",
    "pydantic",
    "starlette",
}
MOST_MODULES = 250
"""That a verb's `--help` loads; Python itself has about 60, argparse and asyncio bring the rest."""
MODULE_OF = {
    "gin-config": "gin", "google-re2": "re2", "math-verify": "math_verify", "orbax-checkpoint": "orbax", "pyyaml": "yaml",
    "prometheus-client": "prometheus_client", "reasoning-gym": "reasoning_gym",
}  # fmt: skip
OPTIONAL = {
    "ray": "ray", "mcp": "tools", "mcp_types": "tools", "anyio": "tools", "pyarrow": "data", "datasketch": "data", "rapidfuzz": "data", "textarena": "envs",
    "tinker": "service", "zstandard": "service", "google": "service",
    "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "aim": "aim", "trackio": "trackio",
}  # fmt: skip
"""Modules that come with an extra (or with a package of one), and which."""
ELSEWHERE = {"tau_bench", "wire", "plain", "IPython", "pandas", "tokamax", "verifiers"}
"""A checkout that a user names; a package of another Python; modules next to the file that imports them, inside a sandbox; optional packages."""


def loaded(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_import_rolljax_loads_nothing_else():
    before = loaded("import sys; print(*sys.modules)")
    assert loaded("import sys, rolljax; print(*sys.modules)") - before == {"rolljax"}


@pytest.mark.parametrize("verb", VERBS)
def test_help_loads_no_library(verb):
    """So that it is there at once: in a tenth of a second where this was written."""
    found = loaded(
        "import contextlib, io, runpy, sys\n"
        "sys.argv = ['x', '--help']\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        f"    runpy.run_module('rolljax.{verb}', run_name='__main__')\n"
        "print(*sys.modules)"
    )
    assert "rolljax.cli" in found and not found & HEAVY
    assert len(found) <= MOST_MODULES


def names_of(requirements):
    return {re.split(r"[<>=;\[ ]", r, maxsplit=1)[0].lower() for r in requirements}


def imported():
    """Return the third-party packages, by the files that import them."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if "terminal_tasks" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"rolljax"}:
                found.setdefault(top, set()).add(path.name)
    return found


def test_every_library_is_declared_and_every_declared_library_used():
    base = {MODULE_OF.get(name, name) for name in names_of(PROJECT["dependencies"])}
    used = imported()
    assert used.keys() - base - OPTIONAL.keys() - ELSEWHERE == set(), used
    assert base - used.keys() == {"httptools", "uvloop", "websockets"}  # uvicorn and adapters load them by name


def test_extras_are_for_what_not_everybody_needs():
    extras = PROJECT["optional-dependencies"]
    trackers = {"tensorboard", "wandb", "mlflow", "aim", "trackio"}
    assert (
        extras.keys()
        == {"tpu", "cuda", "data", "docs", "envs", "jetstream", "ray", "service", "tools", "test"} | trackers
    )
    assert {OPTIONAL[m] for m in OPTIONAL} == extras.keys() - {"tpu", "cuda", "docs", "jetstream", "test"}
    base = names_of(PROJECT["dependencies"])
    assert all(not names_of(r) & base - {"jax"} for r in extras.values())


def test_what_is_declared_is_pinned():
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in (ROOT.parent / "constraints.txt").open()}
    declared = names_of([*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]) - {"rolljax"}
    assert {name.replace("_", "-") for name in declared} <= pinned


def test_no_file_is_there_that_nothing_speaks_of():
    """What is not text (pictures, archives, recordings) is named by a page or by code; a wheel or a profile that was
    added by mistake is not."""
    if not (ROOT.parent / ".git").exists():
        pytest.skip("needs the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT.parent, capture_output=True, check=True).stdout
    files = [ROOT.parent / name.decode() for name in listed.split(b"\0") if name]
    said, others = [], []
    for path in filter(Path.is_file, files):
        try:
            said.append(path.read_text("utf-8"))
        except UnicodeDecodeError:
            others.append(path)
    text = "\n".join(said)
    assert others and not [str(path) for path in others if path.name not in text]
