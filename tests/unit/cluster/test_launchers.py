"""When samplers are killed that run and have lost their connection."""

import time

import pytest

from rolljax.cluster import launchers
from rolljax.cluster.launchers import LaunchOrder, Restarts


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers, "HUNG_S", -1.0)
    return Restarts(LaunchOrder(("127.0.0.1", 1), b"", ["a"], tmp_path, 60.0), 5, lambda text: None)


def test_a_lost_sampler_that_does_not_return_hangs(restarts):
    restarts.lost("a", time.monotonic())
    assert restarts.is_hung("a")
    restarts.ready("a")
    assert not restarts.is_hung("a")


def test_the_late_end_of_a_connection_is_not_that_of_the_next_process(restarts):
    joined_s = time.monotonic()
    restarts.failed("a", "was killed")
    restarts.lost("a", joined_s)
    assert not restarts.is_hung("a")
    restarts.lost("a", time.monotonic())
    assert restarts.is_hung("a")
