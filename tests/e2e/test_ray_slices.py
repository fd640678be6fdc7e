"""A sampler on a TPU slice of several hosts, which Ray places: here nodes of a cluster on this machine, without TPUs."""

import asyncio
import os
import signal

import pytest

from rolljax.cluster.placement import Ray, Remote
from rolljax.cluster.ray_launcher import describe, needs
from rolljax.concurrency.waits import Watchdog
from rolljax.errors import ConfigError
from rolljax.run.remote_samplers import RemoteRun, open_samplers

from ..conftest import EMITTERS
from .test_ray_samplers import ON_RAY, actors, groups, lives, wait
from .test_remote_samplers import (  # noqa: F401  # a fixture
    REMOTE,
    assert_equal,
    checked,
    expected,
    sampled,
    weights_of,
)

SLICE = ["Ray.topology = '2x2x2'", "Ray.generation = 'v4'"]


@pytest.fixture
def hosts(ray_cluster, monkeypatch):
    """Add the two hosts of a slice to the cluster, the second one first."""
    monkeypatch.setenv("TPU_NAME", "slice-a")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=2 {EMITTERS}")
    added = []
    for worker in (1, 0):
        labels = {"tpu-worker-id": str(worker), "tpu-pod-type": "v4-16", "tpu-slice-name": "slice-a"}
        added.append(
            ray_cluster.cluster.add_node(
                num_cpus=1,
                object_store_memory=80_000_000,
                resources={"TPU": 4} | ({} if worker else {"TPU-v4-16-head": 1}),
                labels={f"ray.io/{name}": value for name, value in labels.items()},
            )
        )
    yield added
    for node in added:
        ray_cluster.cluster.remove_node(node)


@pytest.mark.sweep
def test_a_sampler_on_two_hosts_gives_the_tokens_of_one_in_this_process(hosts, tmp_path, expected):  # noqa: F811
    """If a process is killed, all are started again, on a new slice."""
    said, folder = [], tmp_path / "run"
    folder.mkdir()
    found = checked(folder, "MeshSpec.data = 1", *REMOTE, *ON_RAY, *SLICE)
    params, run = weights_of(found), RemoteRun(folder, 1, said.append)
    group, channel = open_samplers(found, lambda: params, run, Watchdog(lambda text: None), lambda: False, 0)
    try:
        assert_equal(asyncio.run(sampled(group)), expected)
        assert set(actors()) == {"rolljax-run-sampler-0", "rolljax-run-sampler-0-1"}
        pids = [each.seen.pid for each in group._launched._placed["sampler-0"]]
        wait(lambda: (folder / "samplers" / "sampler-0.log").read_text().count("process ") == 2)
        os.kill(pids[0], signal.SIGKILL)
        wait(lambda: any("is started again" in line for line in said))
        wait(lambda: not any(map(lives, pids)))
        wait(lambda: any(member.sampler for member in list(group._members.values())))
        channel.publish(1)
        assert_equal(asyncio.run(sampled(group, min_version=1)), expected)
    finally:
        group.close()
    wait(lambda: not actors() and not groups())


def test_what_a_slice_of_several_hosts_wants_is_listed(ray_cluster):
    (tpu,) = [need for need in needs(Ray(topology="4x4", generation="v6e"), 2) if need.resource == "TPU"]
    assert (tpu.each, tpu.hosts, tpu.wanted, tpu.present) == (4, 4, 32, 4) and tpu.is_short
    row = describe(Remote(samplers=2, launcher=Ray(topology="4x4", generation="v6e")))[-1].split()
    assert row == ["TPU", "32", "4", "4", "4", "nobody"]
    with pytest.raises(ConfigError, match="7x5"):
        needs(Ray(topology="7x5", generation="v6e"), 1)
