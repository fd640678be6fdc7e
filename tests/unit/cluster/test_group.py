"""A group of samplers over real connections: who joins, leaves, is late or is drained; the tokens are always the same."""

import asyncio
import itertools
import random

import numpy as np
import pytest

from rolljax.sampler.weights import Snapshot
from rolljax.types import SamplerGap, SamplingParams
from tests.answering import Fleet, tokens_of
from tests.e2e.sandbox_support import eventually

PROMPT = np.arange(5, dtype=np.int32)
TOKENS = 16


def addresses(number, start=0):
    return [(1, 0, *divmod(i, 4), 0) for i in range(start, start + number)]


def asked(group, address, **more):
    return group.submit(PROMPT, SamplingParams(1.0, TOKENS), address, **more).completion


def assert_right(completions, wanted):
    for completion, address in zip(completions, wanted, strict=True):
        np.testing.assert_array_equal(completion.tokens, tokens_of(address, TOKENS))


@pytest.fixture
def fleet():
    with Fleet(samplers=2) as found:
        yield found


def ready(fleet, *names, version=0, **more):
    found = [fleet.join(name, version=version, **more) for name in names]
    assert eventually(lambda: all(fleet.state(name) == "ready" for name in names))
    return found


def publish(fleet, version):
    fleet.group.swap(version)
    fleet.group.prepare(Snapshot(version, location="memory://", epoch=1))


# ---- samplers that are far from the trainer -------------------------------------------------------------------------


NEAR, FAR = SamplerGap(0.001, 500), SamplerGap(0.3, 500)


def test_a_sampler_that_is_far_from_the_trainer_is_drained_and_told_to_end(fleet):
    """When it has no more requests; what joins in its place has another name on its completions."""
    good, bad = ready(fleet, "a", "b")
    fleet.group.swap(0)
    good.free.clear()
    bad.free.clear()

    async def run():
        waiting = [asked(fleet.group, address) for address in addresses(8)]
        await asyncio.sleep(0)
        assert eventually(lambda: len(bad._open) == 4)
        (found,) = fleet.group.drain_far({"a": NEAR, "b": FAR})
        assert (found.sampler, found.gap_nat, found.others_gap_nat, found.tokens) == ("b", 0.3, 0.001, 500)
        assert fleet.state("b") == "draining" and not bad.refused
        bad.free.set()
        good.free.set()
        return await asyncio.gather(*waiting)

    done = asyncio.run(run())
    assert_right(done, addresses(8))
    assert sorted(c.sampler for c in done) == ["a"] * 4 + ["b"] * 4
    assert bad.over.wait(30) and bad.refused.startswith("it is drained: its log-probs are 0.3 nats a token from")
    (line,) = fleet.said
    assert line == (
        "warning: b is drained: its log-probs are 0.3 nats a token from the trainer's, those of the others 0.001 "
        "(Remote.max_gap_nat = 0.05); it is to start again"
    )
    assert eventually(lambda: fleet.state("b") == "lost")
    ready(fleet, "b")
    publish(fleet, 1)
    assert fleet.group.drain_far({"a": NEAR, "b": FAR}) == []  # groups that the one before sampled
    done = asyncio.run(all_of(fleet, addresses(8)))
    assert {c.sampler for c in done} == {"a", "b.2"}


async def all_of(fleet, wanted, **more):
    return await asyncio.gather(*(asked(fleet.group, address, **more) for address in wanted))


def test_a_sampler_that_is_drained_again_stays_without_requests(fleet):
    ready(fleet, "a", "b")
    fleet.group.swap(0)
    fleet.group.drain_far({"a": NEAR, "b": FAR})
    assert eventually(lambda: fleet.state("b") == "lost")
    (again,) = ready(fleet, "b")
    publish(fleet, 1)
    assert eventually(lambda: again.version == 1)
    fleet.group.drain_far({"a": NEAR, "b.2": FAR})
    assert fleet.said[-1].endswith("it was drained before: it gets no more requests")
    assert "b: drained: its log-probs are 0.3 nats" in fleet.group.faults()[-1]
    publish(fleet, 2)
    done = asyncio.run(all_of(fleet, addresses(12), min_version=2))
    assert {c.sampler for c in done} == {"a"} and again.served == 0 and not again.over.is_set()


@pytest.mark.parametrize(
    "gaps",
    [
        {"a": FAR},
        {"a": FAR, "b": SamplerGap(0.2, 500)},
        {"a": FAR, "b": SamplerGap(0.001, 20)},
        {"a": SamplerGap(0.04, 500), "b": NEAR},
        {"a": FAR, "gone": NEAR},
    ],
    ids=["alone", "all are far", "too few tokens", "below the alarm", "of one that has left"],
)
def test_no_sampler_is_drained(fleet, gaps):
    ready(fleet, "a", "b")
    fleet.group.swap(0)
    assert fleet.group.drain_far(gaps) == [] and not fleet.said


# ---- membership -----------------------------------------------------------------------------------------------------


def test_tokens_stay_the_same_while_samplers_join_and_leave(fleet):
    """One joins and one leaves between any two versions; publishing waits for no sampler."""
    rng, names = random.Random(0), (f"s{i}" for i in itertools.count())
    there = ready(fleet, next(names), next(names))
    fleet.group.swap(0)

    async def run():
        done = []
        for version in range(12):
            waiting = [asked(fleet.group, a, min_version=version) for a in addresses(16, 16 * version)]
            await asyncio.sleep(0)
            there.extend([fleet.join(next(names), version=version)])
            there.pop(rng.randrange(len(there) - 1)).leave()
            publish(fleet, version + 1)
            done += await asyncio.gather(*waiting)
            assert all(c.versions.min() >= version for c in done[-16:])
        return done

    assert_right(asyncio.run(run()), addresses(16 * 12))


def test_a_sampler_that_joins_while_weights_are_published_takes_the_newest(fleet):
    """It joins with a version that is not the newest any more, and gets no group of a later one before it has it."""
    (there,) = ready(fleet, "a")
    fleet.group.swap(0)
    publish(fleet, 1)
    joiner = fleet.join("b", version=0, takes=False)
    fleet.group.swap(2)  # its snapshot is still being written
    assert eventually(lambda: fleet.state("b") == "ready")
    fleet.group.prepare(Snapshot(2, location="memory://", epoch=1))
    done = asyncio.run(all_of(fleet, addresses(12), min_version=2))
    assert_right(done, addresses(12))
    assert {c.sampler for c in done} == {"a"} and there.version == 2
    assert eventually(lambda: joiner.announced == 2)
    joiner.take()
    assert eventually(lambda: fleet.group._router.members["b"].version == 2)
    assert {c.sampler for c in asyncio.run(all_of(fleet, addresses(12), min_version=2))} == {"a", "b"}


def test_a_sampler_that_leaves_while_it_prepares_weights_leaves_its_requests_to_the_others(fleet):
    """Also the requests of a held frame that wait for it to take these weights."""
    there, leaving = ready(fleet, "a", "b", takes=False)
    fleet.group.swap(0)
    publish(fleet, 1)
    assert eventually(lambda: there.announced == leaving.announced == 1)

    async def run():
        release = fleet.group.hold()
        waiting = [asked(fleet.group, address, min_version=1) for address in addresses(8)]
        release()
        there.take()
        leaving.leave()
        return await asyncio.gather(*waiting)

    done = asyncio.run(run())
    assert_right(done, addresses(8))
    assert {c.sampler for c in done} == {"a"}


def test_a_sampler_that_connects_again_replaces_its_old_connection(fleet):
    """It may notice before the group that the connection has failed. Another process of its name is refused."""
    (before,) = ready(fleet, "a", process="1")
    fleet.group.swap(0)
    before.free.clear()

    async def run():
        waiting = [asked(fleet.group, address) for address in addresses(4)]
        await asyncio.sleep(0)
        assert eventually(lambda: len(before._open) == 4)
        other = fleet.join("a", process="2")
        assert (
            eventually(other.over.is_set) and other.refused == "there is a sampler of the name a: give another --name"
        )
        fleet.join("a", process="1")
        return await asyncio.gather(*waiting)

    assert_right(asyncio.run(run()), addresses(4))
    assert before.over.is_set() and fleet.said == ["a is lost: it has connected again; its requests continue elsewhere"]
