"""Shared setup of all tests. The environment is set before anything imports jax: eight CPU devices, so that meshes can
be built in process (`MeshSpec().build(jax.devices()[:1])` is the mesh of one device)."""

import collections
import datetime
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile many programs and run each of them a few times. Without most optimizations, with XLA's older emitters and
# with one module of LLVM per program, they take half of the time. (Another version of XLA would refuse a flag that it does
# not know.)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
EMITTERS = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if metadata.version("jaxlib").startswith("0.10.")
    else ""
)
FLAGS = f"--xla_force_host_platform_device_count=8 {EMITTERS}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# programs that several tests compile, in this process or in their own, are compiled once
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="rolljax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import pytest

from .durations import Durations, longest_first

hypothesis.settings.register_profile("repo", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("repo")


def pytest_addoption(parser):
    parser.addoption("--write_durations", action="store_true", help="write what the tests cost to tests/durations.json")
    parser.addoption("--start_before", type=float, help="skip what has not started at this time (seconds since 1970)")
    parser.addoption("--sample_seed", help="which cases of slow tests run: any text; the date unless given")


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would hand out files with many tests first
    config.option.sample_seed = config.option.sample_seed or datetime.date.today().isoformat()  # also its workers'
    config.pluginmanager.register(Durations(config.getoption("--write_durations")))


OUT_OF_TIME = "out of time: --start_before"


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item):
    before = item.config.option.start_before
    if before is not None and time.time() > before:
        pytest.skip(OUT_OF_TIME)


def pytest_terminal_summary(terminalreporter, config):
    late = [report for report in terminalreporter.stats.get("skipped", ()) if OUT_OF_TIME in str(report.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were skipped, because the time of --start_before was over")
    terminalreporter.write_line(f"cases of slow tests marked `sampled`: --sample_seed {config.option.sample_seed}")


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config, items):
    leave_cases_to_slow(items, config.option.sample_seed)
    items[:] = longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Keep the byte code of all modules that are imported while tests are collected, even if the environment says not to:
    the workers and many child processes import the same modules. Afterwards the garbage collector leaves these modules
    alone, because each of its full passes over them takes more than a second."""
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = kept
        gc.freeze()


def leave_cases_to_slow(items, seed):
    """Keep n cases of a test marked `sampled(n)` in its set and mark the others.

    The other cases become slow, or sweeps if the test is slow; every seed keeps another n of them. With `sampled(n,
    slow=m)` the next m are slow (another m with every seed) and the rest sweeps. The default set has the same cases
    every day. Tests of a file with the same cases keep the same ones, so that shared fixtures are made for those alone.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            cases[item.path, item.originalname].append(item)
    for group in cases.values():
        sampled, is_slow = group[0].get_closest_marker("sampled"), bool(group[0].get_closest_marker("slow"))
        kept, slow = sampled.args[0], sampled.kwargs.get("slow", len(group))
        ordered = shuffled(group, seed if is_slow else "default")
        for i, item in enumerate(shuffled(ordered[kept:], seed)):
            item.add_marker(pytest.mark.sweep if is_slow or i >= slow else pytest.mark.slow)


def shuffled(items, seed):
    """Return the items in an order that depends only on the seed and their ids."""
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed} {item.callspec.id}".encode()).digest())


# What these compute meets no other dtype or rank than it says. (`trainer.vocab` takes any rank, and Optax multiplies counts
# of int32 by floats: tests of those cannot be held to it.)
STRICT = {"test_decoder", "test_masked", "test_mismatch", "test_objectives"}


@pytest.fixture(autouse=True, scope="module")
def strict_promotion(request):
    """Turn implicit promotion of dtypes or ranks into an error, in the modules in `STRICT`."""
    if request.module.__name__.rpartition(".")[2] not in STRICT:
        yield
        return
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(scope="session")
def chat():
    """Return the byte tokenizer's chat."""
    from rolljax.model.tokenizer import Chat, byte_tokenizer

    return Chat(byte_tokenizer())


@pytest.fixture(scope="session")
def model():
    """Return a float32 model whose random weights are large enough for attention and logits to matter."""
    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config

    return Model(Qwen3Config(init_std=0.1))


@pytest.fixture(scope="session")
def params(model):
    """Seed 0 parameters of `model`; do not donate them."""
    import jax

    return jax.jit(lambda: model.init(0))()


@pytest.fixture(scope="module")
def one_torch_thread():
    """Limit torch to one thread: with more, models as small as those of tests are slower."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that makes and mounts a file system of `kib` KiB."""
    mounted = []

    def mount(kib):
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)
