"""Samplers that Ray places on a cluster of two nodes."""

import asyncio
import contextlib
import os
import signal
import time

import pytest

from rolljax.cluster.launchers import LaunchOrder
from rolljax.cluster.placement import Ray, Remote
from rolljax.cluster.ray_launcher import RaySamplers, describe, needs
from rolljax.commands.train import main as train
from rolljax.concurrency.waits import Watchdog
from rolljax.errors import InfraError
from rolljax.run.remote_samplers import RemoteRun, open_samplers

from .test_placement import GIN
from .test_remote_samplers import (  # noqa: F401  # a fixture
    REMOTE,
    Opened,
    assert_equal,
    checked,
    expected,
    sampled,
    weights_of,
)

ON_RAY = ["Remote.launcher = @Ray()", "Ray.cpus = 0.5"]


class OpenedOnRay(Opened):
    """Two samplers in a cluster."""

    def __init__(self, folder, *settings):
        super().__init__(folder, *ON_RAY, *settings)

    @property
    def launched(self):
        return self.group._launched

    def pid(self, name):
        return self.launched._placed[name][0].seen.pid


@pytest.fixture(scope="module")
def two(ray_cluster, tmp_path_factory):
    opened = OpenedOnRay(tmp_path_factory.mktemp("ray"))
    yield opened
    opened.group.close()


def wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def lives(pid):
    with contextlib.suppress(OSError):
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def actors(state="ALIVE"):
    import ray

    found = ray._private.state.actors().values()
    return {actor["Name"]: actor for actor in found if actor["State"] == state and "sampler" in actor["Name"]}


def groups():
    from ray.util.placement_group import placement_group_table

    return {g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"}


@pytest.mark.slow
def test_samplers_on_ray_give_the_tokens_of_one_in_this_process(two, expected):  # noqa: F811
    assert_equal(asyncio.run(sampled(two.group)), expected)
    assert set(actors()) == {f"rolljax-{two.folder.name}-sampler-{i}" for i in range(2)}
    log = (two.folder / "samplers" / "sampler-0.log").read_text()
    assert f"process {two.pid('sampler-0')} on " in log
    two.wait(lambda: "ready, with weights" in (two.folder / "samplers" / "sampler-0.log").read_text())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["sampler", "actor"])
def test_a_lost_sampler_or_actor_is_started_again(two, expected, what):  # noqa: F811
    two.publish()
    pid, actor = two.pid("sampler-1"), actors()[f"rolljax-{two.folder.name}-sampler-1"]["Pid"]
    two.said.clear()
    os.kill(pid if what == "sampler" else actor, signal.SIGKILL)
    two.wait(lambda: all(what in "".join(two.said) for what in ("is started again", "sampler-1 is lost")))
    two.wait(lambda: not lives(pid))
    two.publish()
    assert two.pid("sampler-1") != pid
    assert_equal(asyncio.run(sampled(two.group)), expected)


@pytest.mark.slow
def test_nothing_is_left_when_the_run_is_over(two):
    pids = [two.pid(name) for name in two.launched._placed] + [actor["Pid"] for actor in actors().values()]
    assert len(pids) == 4
    two.group.close()
    wait(lambda: not any(map(lives, pids)) and not actors() and not groups())


def test_resources_that_nobody_has_are_named(ray_cluster, tmp_path):
    said, settings = [], ["Recipe.wait_s = 1.0", "Ray.resources = {'Unobtainium': 2}", "Ray.placing_s = 0.000001"]
    found = checked(tmp_path, "Remote.samplers = 2", "MeshSpec.data = 1", *REMOTE, *ON_RAY, *settings)
    params, run, watchdog = weights_of(found), RemoteRun(tmp_path, 1, said.append), Watchdog(lambda text: None)
    with pytest.raises(InfraError, match="0 of 2 samplers are ready: sampler-0: waits for a place") as e:
        open_samplers(found, lambda: params, run, watchdog, lambda: False, 0)
    want = "(Unobtainium: wanted 4, present 0, at most 0 on one node, free 0, taken by nobody)"
    assert want in str(e.value) and "CPU" not in str(e.value)
    table = said[0].splitlines()
    assert table[0].startswith("no place") and table[-1].split() == "Unobtainium 4 0 0 0 nobody".split()
    wait(lambda: not groups())


def test_a_slice_is_reserved_and_a_sampler_that_ends_tells_why(ray_cluster, tmp_path):
    """No controller listens, so the sampler ends; it holds the only slice until the run is over."""
    settings, said = Ray(cpus=0.5, topology="2x2", generation="v6e", max_failures=1), []
    folder = tmp_path / "my_run" / "samplers"
    folder.mkdir(parents=True)
    launched = RaySamplers(settings, LaunchOrder(("", 1), b"key", ["sampler-0"], folder, rejoin_s=0.0), said.append)

    def failure():
        launched.check()
        return launched.failure()

    try:
        assert str(folder / "sampler-0.log") in wait(failure)
        assert "ended with exit code 3" in said[0]
        assert "no controller at" in (folder / "sampler-0.log").read_text()
        (tpu,) = [need for need in needs(settings, 2) if need.resource == "TPU"]
        assert tpu.is_short and (tpu.wanted, tpu.present, tpu.free) == (8, 4, 0)
        assert tpu.takers() == "rolljax-my_run-sampler-0 4"
        row = [line.split() for line in describe(Remote(samplers=2, launcher=settings))][-1]
        assert row == ["TPU", "8", "4", "4", "0", "rolljax-my_run-sampler-0", "4"]
    finally:
        launched.close()
    wait(lambda: not groups())


@pytest.mark.slow
def test_a_sampler_of_a_lost_node_is_started_on_another(ray_cluster, tmp_path):
    """No controller listens: the sampler looks for one while its node is lost."""
    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "resources": {"Seat": 1}}
    folder, said = tmp_path / "my_run" / "samplers", []
    folder.mkdir(parents=True)
    first = ray_cluster.cluster.add_node(**node)
    order = LaunchOrder(("", 1), b"key", ["sampler-0"], folder, rejoin_s=600.0)
    launched = RaySamplers(Ray(cpus=0.5, resources={"Seat": 1}), order, said.append)

    def pid():
        launched.check()
        placed = launched._placed.get("sampler-0")
        return placed and placed[0].seen and placed[0].seen.pid

    second = None
    try:
        before = wait(pid)
        ray_cluster.cluster.remove_node(first, allow_graceful=False)
        second = ray_cluster.cluster.add_node(**node)
        assert wait(lambda: pid() not in (None, before) and pid()) and not lives(before)
        assert "sampler-0 has lost its actor" in said[0] and said[0].endswith("it is started again")
    finally:
        after = pid()
        os.kill(after, signal.SIGKILL)
        launched.close()
        ray_cluster.cluster.remove_node(second or first)
    wait(lambda: not groups())


def test_a_dry_run_lists_the_resources(ray_address, tmp_path, capsys):
    import ray

    (tmp_path / "small.gin").write_text(GIN)
    settings = [*REMOTE, *ON_RAY, "Remote.samplers = 2", "MeshSpec.data = 1", f"Ray.address = '{ray_address}'"]
    argv = ["--gin", str(tmp_path / "small.gin"), "--run_dir", str(tmp_path / "run"), "--dry_run"]
    assert train([*argv, *(word for each in settings for word in ("--set", each))]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ray       CPU")]
    assert row == "ray CPU 1 4 2 4 nobody".split()
    assert not ray.is_initialized()
