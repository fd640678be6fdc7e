"""Samplers in other processes: the tokens of a sampler in this process, whatever happens to them."""

import asyncio
import dataclasses
import math
import os
import re
import signal
import threading
import time

import jax
import numpy as np
import pytest

from rolljax import cli
from rolljax.cluster import launchers
from rolljax.cluster.group import SamplerGroup
from rolljax.cluster.wire import Port
from rolljax.concurrency.waits import Watchdog
from rolljax.errors import SamplerError, StorageError
from rolljax.run import preflight
from rolljax.run.remote_samplers import RemoteRun, open_samplers
from rolljax.run.runtime import open_sampler
from rolljax.types import SamplingParams

from ..proxies import DOWN, UP, through_proxies
from .test_placement import GIN

REMOTE = ["Recipe.placement = @Remote()", "Remote.heartbeat_s = 0.2", "Remote.lost_s = 5.0", "Phase.async_ratio = 1"]


def checked(folder, *settings):
    file = folder / "small.gin"
    file.write_text(GIN)
    return preflight.check(cli.load_recipe([str(file)], list(settings)).value)


def weights_of(found, seed=0):
    return jax.jit(lambda: found.model.full_params(found.model.init(seed), None))()


def requests(n=24, max_tokens=48):
    rng = np.random.default_rng(0)
    for group in range(n // 4):
        prompt = rng.integers(0, 256, int(rng.integers(6, 20))).astype(np.int32)
        for sibling in range(4):
            params = SamplingParams(1.0, max_tokens, (int(rng.integers(0, 40)),), top_logprobs=2)
            yield prompt, params, (1, 0, group, sibling, 0)


async def sampled(sampler, n=24, **more):
    return await asyncio.gather(*(sampler.generate(*request, **more) for request in requests(n)))


async def held(sampler, **more):
    """Submit all requests in one frame, which is dealt over all samplers."""
    release = sampler.hold()
    waiting = [asyncio.ensure_future(sampler.generate(*request, **more)) for request in requests()]
    await asyncio.sleep(0)
    release()
    return await asyncio.gather(*waiting)


def assert_equal(found, expected, to=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert a.finish_reason == b.finish_reason
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.sampled.top_ids.shape, b.sampled.top_ids.shape)
        np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=to)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the completions of a sampler in this process."""
    found = checked(tmp_path_factory.mktemp("here"), "MeshSpec.data = 1")
    params = weights_of(found)
    sampler, _ = open_sampler(found, lambda: params, 0, found.chat.vocabulary, longest_prompt=0)
    yield asyncio.run(sampled(sampler))
    sampler.close()


class Opened:
    """Two samplers in processes of their own, and the lines that the run says."""

    def __init__(self, folder, *settings):
        self.folder, self.said = folder, []
        served = "Remote.weights = @ServedWeights()", f"ServedWeights.folder = '{folder}/weights'"
        self.found = checked(folder, "Remote.samplers = 2", "MeshSpec.data = 1", *REMOTE, *served, *settings)
        self.params = weights_of(self.found)
        self.open(1)

    def open(self, epoch, version=0):
        run = RemoteRun(self.folder, epoch, self.said.append)
        self.group, self.channel = open_samplers(
            self.found, lambda: self.params, run, Watchdog(lambda text: None), lambda: False, version
        )

    def pid(self, name):
        return int((self.folder / "samplers" / f"{name}.pid").read_text().split()[0])

    def wait(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.said, self.group.describe())
            time.sleep(0.02)

    def publish(self):
        """When both samplers are ready, publish a version, and wait until both get requests with it."""
        self.wait(lambda: sum(m.sampler is not None for m in list(self.group._members.values())) == 2)
        version = self.group.version + 1
        self.channel.publish(version)
        both = lambda: [m for m in self.group._router.members.values() if m.routable and m.version == version]  # noqa: E731
        self.wait(lambda: len(both()) == 2)
        return version


@pytest.fixture(scope="module", autouse=True)
def patient():
    """Do not kill a sampler that lives, however long a busy machine takes to connect it again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "HUNG_S", math.inf)
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        proxies = through_proxies(patch)
        opened = Opened(tmp_path_factory.mktemp("two"))
        opened.proxies = proxies
        yield opened
        opened.group.close()
        for proxy in proxies.values():
            proxy.close()


def test_tokens_are_those_of_a_sampler_in_this_process(two, expected):
    found = asyncio.run(sampled(two.group))
    assert_equal(found, expected)
    counts = two.group._router.members
    assert all(counts[name].counts.placed > 0 for name in ("sampler-0", "sampler-1"))
    two.wait(lambda: two.group.stats.sampled_tok >= sum(len(c.tokens) for c in found))
    assert two.group.stats.finished == len(found)


def test_a_held_frame_repeats_to_the_bit(two):
    first, second = asyncio.run(held(two.group)), asyncio.run(held(two.group))
    assert_equal(first, second, to=0)


SILENT = "has been silent for [0-9.]+ s"
NOTICED = f"({SILENT}|it has connected again)"  # whichever side notices first
LOSSES = {
    "killed": (signal.SIGKILL, 1, "the connection "),
    "stopped": (signal.SIGSTOP, 1, SILENT),
    "cut off": ((UP, DOWN), 1, NOTICED),
    "not heard": ((UP,), 1, SILENT),
    "does not hear": ((DOWN,), 1, "the connection was closed"),  # by the sampler, to which the controller is silent
    "both cut off": ((UP, DOWN), 2, NOTICED),
}
"""What happens to how many samplers, and why they are lost."""


@pytest.mark.parametrize("how", LOSSES)
def test_a_lost_samplers_requests_go_on_elsewhere_with_the_same_tokens(two, expected, how, monkeypatch):
    """It is started again; if it hangs, it is killed first; one that lives comes back with its engine."""
    what, number, why = LOSSES[how]
    names = ["sampler-1", "sampler-0"][:number]
    if what == signal.SIGSTOP:
        monkeypatch.setattr(launchers, "HUNG_S", 0.5)
    two.publish()
    pids, hit = [two.pid(name) for name in names], threading.Event()

    def first_tokens(_):
        members = two.group._router.members
        if not hit.is_set() and all(members[name].where == "ready" and members[name].requests for name in names):
            hit.set()
            for name, pid in zip(names, pids, strict=True):
                os.kill(pid, what) if isinstance(what, int) else two.proxies[name].swallow(*what)

    two.said.clear()
    found = asyncio.run(held(two.group, on_tokens=first_tokens))
    assert hit.is_set()
    assert_equal(found, expected)
    for name in names:
        two.wait(lambda name=name: any(re.match(f"{name} is lost: {why}", line) for line in two.said))
    two.publish()
    assert ([two.pid(name) for name in names] != pids) == isinstance(what, int)


def test_an_aborted_request_has_the_tokens_so_far(two):
    async def aborted():
        some = asyncio.Event()
        prompt, _, address = next(requests())
        pending = two.group.submit(prompt, SamplingParams(1.0, 60), address, on_tokens=lambda part: some.set())
        await some.wait()
        pending.abort()
        return await pending.completion

    done = asyncio.run(aborted())
    assert done.finish_reason in ("abort", "length") and len(done.tokens)


def test_new_weights_are_fetched_by_all_and_used_by_groups_that_start_then(two):
    two.params = jax.tree.map(lambda x: x * 1.01, two.params)
    version = two.group.version + 1
    two.channel.publish(version)
    for completion in asyncio.run(sampled(two.group, min_version=version)):
        assert set(completion.versions.tolist()) == {version}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def check_refused(two, damage):
    """Check that no token is sampled with damaged weights, and that they are written again."""
    version, source, tell = two.group.version + 1, two.channel._source, two.group.prepare
    two.said.clear()

    def damaged(snapshot):
        if snapshot.version == version:  # not an earlier one, which may be written again even now
            source.on_written = tell
            folder = two.folder / "weights" / "process_0" / f"{snapshot.epoch:06d}" / f"{snapshot.version:08d}"
            damage(max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size))
        tell(snapshot)

    source.on_written = damaged
    two.params = jax.tree.map(lambda x: x * 1.001, two.params)
    two.channel.publish(version)
    found = asyncio.run(sampled(two.group, min_version=version))
    assert {v for c in found for v in c.versions.tolist()} == {version}
    assert any(f"does not take the weights of version {version}" in line for line in two.said)


@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
def test_damaged_weights_are_refused_and_written_again(two, damage):
    check_refused(two, damage)


def test_a_sampler_that_hangs_is_named(two):
    """Here one whose answer to new weights is never handled."""
    while len(two.group._operations.records()) < 12:  # the first operations of a sampler do not count
        two.publish()
    two.group._operations.enter("swap", "sampler-1", time.monotonic() - 100, sequence=99, subject="version 99")
    (fault,) = two.group.faults()
    assert fault.startswith("sampler-1: has not answered `swap` of version 99")


def test_weights_that_cannot_be_written_end_the_run(two):
    """At once, not where the next ones are published: requests would wait for these."""
    store, aside = two.folder / "weights" / "process_0", two.folder / "aside"

    def asked():
        try:
            two.channel.should_stop(lambda: False)()
        except StorageError as e:
            return str(e)

    assert asked() is None
    store.rename(aside)
    store.write_text("")
    two.channel.publish(two.group.version + 1)
    two.wait(asked)
    assert f"cannot be written to {store}" in asked()
    store.unlink()
    aside.rename(store)


def test_samplers_stay_when_the_controller_returns(two):
    """The engine is kept: no second process is started."""
    pids = [two.pid(name) for name in ("sampler-0", "sampler-1")]
    group = two.group
    group._over.set()
    group._port.close()
    for member in list(group._members.values()):
        member.channel.end("the controller is gone")
    version = group.version + 1
    two.open(2, version)
    assert [two.pid(name) for name in ("sampler-0", "sampler-1")] == pids
    found = asyncio.run(sampled(two.group, min_version=version))
    assert {v for c in found for v in c.versions.tolist()} == {version}


def test_a_controller_whose_successor_has_begun_gets_no_samplers(two):
    """A sampler that reaches it tells it so, and continues with the successor."""
    job, said = dataclasses.replace(two.group._job, epoch=1), []
    before = SamplerGroup(two.found.recipe.placement, job, two.group.limits, said.append)
    key = bytes.fromhex((two.folder / "samplers" / "key").read_text())
    port, proxy = Port(("127.0.0.1", 0), key, before.welcome), two.proxies["sampler-1"]
    successors, proxy.target = proxy.target, port.number
    two.group._members["sampler-1"].channel.end("the connection has failed")
    two.wait(lambda: "sampler-1 is lost: stopped: it serves a later controller, of epoch 2" in "; ".join(said))
    proxy.target = successors
    two.publish()
    before.close()
    port.close()


def test_the_end_of_the_run_ends_the_samplers(two):
    pids = [two.pid(name) for name in ("sampler-0", "sampler-1")]
    two.group.close()
    two.wait(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))
    with pytest.raises(SamplerError, match="closed"):
        asyncio.run(sampled(two.group))
