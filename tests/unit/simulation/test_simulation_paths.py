"""C4P's allocation of flows to paths, by hand and on random networks."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.simulate import simulate
from rolljax.simulation import paths
from rolljax.simulation.paths import Flow, NetworkTimings, Route
from rolljax.simulation.timings import ClusterTimings, Distribution, TrainerTimings
from tests.simulations import recipe, timings


def two_paths(sizes):
    return [Flow(f"f{i}", size, (Route(0, ("a",)), Route(1, ("b",)))) for i, size in enumerate(sizes)]


def test_four_flows_on_two_paths():
    flows = two_paths([10, 10, 10, 10])
    planned = paths.allocate(flows)
    collided = {f.name: f.paths[i == 3] for i, f in enumerate(flows)}  # what a hash may do
    assert paths.loads(flows, planned) == {"a": 20, "b": 20}
    assert paths.loads(flows, collided) == {"a": 30, "b": 10}
    assert max(paths.loads(flows, collided).values()) / max(paths.loads(flows, planned).values()) == 1.5


def test_large_flows_are_placed_first_and_ties_go_to_the_first_path():
    chosen = paths.allocate(two_paths([1, 2, 9, 4]))
    assert {name: path.id for name, path in chosen.items()} == {"f2": 0, "f3": 1, "f1": 1, "f0": 1}


def test_a_failed_link_moves_only_the_flows_on_it():
    flows = [Flow(f"f{i}", 10, tuple(Route(p, (f"spine {p}",)) for p in range(3))) for i in range(6)]
    before = paths.allocate(flows)
    after = paths.allocate(flows, {"spine 1"}, before)
    assert {n for n in before if before[n] != after[n]} == {n for n in before if before[n].id == 1}
    assert paths.loads(flows, after) == {"spine 0": 30, "spine 2": 30}
    with pytest.raises(ValueError, match="no path is left for f0"):
        paths.allocate(flows, {"spine 0", "spine 1", "spine 2"}, before)


@given(st.lists(st.floats(1, 100), min_size=1, max_size=20), st.integers(1, 5))
def test_no_link_has_more_than_its_share_and_one_flow(sizes, number):
    flows = [Flow(f"f{i}", s, tuple(Route(p, (str(p),)) for p in range(number))) for i, s in enumerate(sizes)]
    most = sum(sizes) / number + (1 - 1 / number) * max(sizes)
    assert max(paths.loads(flows, paths.allocate(flows)).values()) <= most * (1 + 1e-9)


@pytest.mark.parametrize("failed", [0, 1])
def test_ports_and_spines_are_balanced(failed):
    network = NetworkTimings(push_bytes=8e9, hosts=4, spines=4, failed_spines=failed)
    flows = paths.push_flows(network, 8)
    broken = {f"spine {s} port {p}" for s in range(failed) for p in range(network.ports)}
    chosen = paths.allocate(flows, broken)
    for path in chosen.values():
        assert len({link[-1] for link in path.links}) == 1  # a port to the same port
    by_kind = collections.defaultdict(list)
    for link, size in paths.loads(flows, chosen).items():
        by_kind[link.split()[0]].append(size)
    assert len(by_kind["spine"]) == 2 * (4 - failed) and len(by_kind["host"]) == 8
    for sizes in by_kind.values():
        assert max(sizes) <= 1.51 * np.mean(sizes)
    assert not broken & set(paths.loads(flows, chosen))


def test_planned_paths_publish_faster_than_hashed_ones():
    """Switched on in a simulation: the seconds of a publish are those of the busiest link."""
    seconds = {}
    for how in ("planned", "hashed"):
        network = NetworkTimings(push_bytes=100e9, hosts=4, spine_bytes_s=25e9, paths=how)
        world = timings(Distribution(center=10.0), trainer=TrainerTimings(publish_s=99.0), network=network)
        _, recorder = simulate(recipe(slots=2, prompts=1, group=2, steps=3), world)
        seconds[how] = recorder.rows[-1]["time/publish_s"]
    assert seconds["planned"] == pytest.approx(2.0)
    assert seconds["hashed"] >= 1.5 * seconds["planned"]


@pytest.mark.parametrize("fetch_s", [5.0, 20.0, 25.0, 40.0])
def test_only_what_outlasts_the_overlap_of_a_fetch_is_waited_for(fetch_s):
    """RollArt: one version ahead, 20 s are left between the end of 10 s of sampling and that of 30 s of training. A
    synchronous step waits for all of the fetch."""
    world = timings(
        Distribution(center=10.0),
        trainer=TrainerTimings(step_s=30.0),
        cluster=ClusterTimings(fetch_s=Distribution(center=fetch_s)),
    )
    for async_ratio, overlap_s, step_s in ((0.0, 0.0, 40.0), (1.0, 20.0, 30.0)):
        run = recipe(slots=2, prompts=1, group=2, steps=6, async_ratio=async_ratio)
        _, recorder = simulate(run, world)
        longest_s = max(row["time/step_s"] for row in recorder.rows[1:])
        assert longest_s == pytest.approx(step_s + max(0.0, fetch_s - overlap_s))
