"""Shared parts of the verbs: the cache of compiled programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolljax import cli

PROGRAM = """
import os, sys
from rolljax import cli
cli.quiet()
import jax
counts = {}
jax.monitoring.register_event_listener(lambda name, **_: counts.update({name: counts.get(name, 0) + 1}))
jax.jit(lambda x: jax.numpy.sin(x) @ x.T)(jax.numpy.ones((4, 4))).block_until_ready()
print(counts.get("/jax/compilation_cache/cache_hits", 0), counts.get("/jax/compilation_cache/cache_misses", 0))
"""


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Set up the environment of a user without settings, with their own cache folder."""
    for name in list(os.environ):
        if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT", "JAX_ENABLE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def run():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split())), done.stderr


def test_a_second_process_compiles_nothing(environment):
    (hits, misses), _ = run()
    assert hits == 0 and misses > 0
    again, stderr = run()
    assert again == (misses, 0) and not stderr
    [folder] = (environment / "rolljax" / "compiled").iterdir()
    assert any(folder.iterdir())


def test_jax_s_own_switch_is_heard(environment, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    (hits, _), _ = run()
    (again, _), _ = run()
    assert hits == again == 0
    assert not [f for f in environment.rglob("*") if f.is_file()]


def test_a_folder_of_the_user_s_is_left_alone(environment, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    cli.keep_compiled()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/somewhere"
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ
    assert not (environment / "rolljax").exists()


def test_without_a_folder_nothing_is_kept(environment, monkeypatch):
    (environment / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(environment / "file"))
    cli.keep_compiled()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_another_processor_has_another_folder(environment, monkeypatch):
    own = cli._machine()
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a: "flags : avx9" if str(self) == "/proc/cpuinfo" else read(self, *a)
    )
    assert cli._machine() != own
