"""Samplers of two processes each: the tokens of a sampler in this process, whatever happens to one of them."""

import asyncio
import os
import signal
import threading

import jax
import pytest

from rolljax.run.runtime import open_sampler

from ..conftest import EMITTERS
from .test_placement import run
from .test_remote_run import REMOTE
from .test_remote_samplers import (  # noqa: F401  # a fixture
    Opened,
    assert_equal,
    check_refused,
    checked,
    expected,
    flip,
    held,
    sampled,
)

OF_TWO = ["Remote.launcher = @Processes()", "Processes.processes = 2"]


@pytest.fixture(scope="module")
def devices():
    """Return a function that sets the number of devices of each process that is started from now on."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda n: patch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={n} {EMITTERS}")


@pytest.fixture(scope="module")
def two(tmp_path_factory, devices):
    """Two samplers, each of two processes with two devices; the slots are split over all four."""
    devices(2)
    opened = Opened(tmp_path_factory.mktemp("two"), *OF_TWO)
    yield opened
    opened.group.close()


def pids(two, name):
    return [int(line.split()[0]) for line in (two.folder / "samplers" / f"{name}.pid").read_text().splitlines()]


@pytest.mark.slow
def test_tokens_are_those_of_a_sampler_in_this_process(two, expected):  # noqa: F811
    assert [len(pids(two, name)) for name in ("sampler-0", "sampler-1")] == [2, 2]
    assert_equal(asyncio.run(sampled(two.group)), expected)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("process", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_process_is_a_lost_sampler(two, expected, process, number):  # noqa: F811
    """Its requests continue at the other one. All of its processes end, and are started again."""
    two.publish()
    before, hit = pids(two, "sampler-1"), threading.Event()

    def first_tokens(_):
        if not hit.is_set() and two.group._router.members["sampler-1"].requests:
            hit.set()
            os.kill(before[process], number)

    two.said.clear()
    found = asyncio.run(held(two.group, on_tokens=first_tokens))
    assert hit.is_set()
    assert_equal(found, expected)
    two.wait(lambda: any("sampler-1 is lost" in line for line in two.said))
    how = "crashed (SIGABRT)" if number == signal.SIGSTOP else "was killed (SIGKILL)"  # JAX ends the other process
    two.wait(lambda: any(f"sampler-1 {how}" in line for line in two.said))
    two.publish()
    assert not set(before) & set(pids(two, "sampler-1"))
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in before)


@pytest.mark.slow
def test_new_weights_are_taken_while_it_samples(two):
    two.params = jax.tree.map(lambda x: x * 1.05, two.params)
    version = two.group.version + 1

    async def meanwhile():
        earlier = asyncio.ensure_future(sampled(two.group))
        await asyncio.sleep(0)
        two.channel.publish(version)
        later = await sampled(two.group, min_version=version)
        return await earlier, later

    earlier, later = asyncio.run(meanwhile())
    assert {v for c in earlier for v in c.versions.tolist()} <= {version - 1, version}
    assert {v for c in later for v in c.versions.tolist()} == {version}
    here, _ = open_sampler(
        checked(two.folder, "MeshSpec.data = 1"), lambda: two.params, 0, two.found.chat.vocabulary, 0
    )
    assert_equal(later, asyncio.run(sampled(here)))
    here.close()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", [flip, os.remove])
def test_damaged_weights_are_refused_and_written_again(two, damage):
    check_refused(two, damage)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_is_that_of_samplers_of_one_process(devices, tmp_path, adapters):
    """To the bit, with as many devices; also if the trainer serves the weights."""
    settings = [*REMOTE, "Remote.samplers = 1", *(["Recipe.lora = @Lora()", "Lora.rank = 2"] if adapters else [])]
    served = ["Remote.weights = @ServedWeights()", f"ServedWeights.folder = '{tmp_path / 'served'}'"]
    devices(2)
    of_two = run(tmp_path / "of_two" / "run", *settings, *OF_TWO, *served)
    devices(4)
    assert run(tmp_path / "of_one" / "run", *settings) == of_two
