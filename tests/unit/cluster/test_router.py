"""Placement of requests on samplers that join, take new weights, drain, and get lost."""

import random
import sys

import pytest

from rolljax.cluster.affinity import Affinity, AffinityConfig
from rolljax.cluster.router import MAX_OVERTAKEN, RoutedRequest, Router


def ask(number, group=None, sibling=0, version=0, **more):
    group = (0, number if group is None else group)
    return RoutedRequest(number, group, (*group, sibling), version, **more)


def routed(*slots, version=0, kinds=None, **settings):
    """Return a router with ready samplers a, b, ..."""
    router = Router(**settings)
    for i, each in enumerate(slots):
        router.join("abcdefgh"[i], each, kinds[i] if kinds else "")
    router.push(version)
    for name in [*router.members]:
        router.compiling(name)
        router.ready(name, version)
    return router


# ---- which sampler


def test_the_least_loaded_for_its_slots():
    router = routed(2, 4)
    assert [router.place(ask(i)) for i in range(6)] == ["a", "b", "b", "a", "b", "b"]
    assert router.place(ask(6)) is None and router.waiting == 1
    router.done(1)
    assert router.take() == [("b", ask(6))]


def test_the_holder_of_a_prefix_below_its_cap():
    router = routed(2, 2)
    assert router.place(ask(0, group=0, sibling=0)) == "a"
    assert router.place(ask(1, group=0, sibling=1)) == "a"  # a sibling, although b is idle
    assert router.place(ask(2, group=0, sibling=2)) == "b"  # a is full
    router.done(0)
    assert router.place(ask(3, group=0, sibling=0)) == "a"  # the next turn
    router.done(1)
    assert router.place(ask(4, group=0, sibling=2)) == "b"  # its own last turn rather than a sibling's
    counts = {name: (m.counts.placed, m.counts.kept) for name, m in router.members.items()}
    assert counts == {"a": (3, 2), "b": (2, 1)}


def test_a_factor_of_the_slots_is_the_cap():
    router = routed(4, cap=1.5)
    assert [router.place(ask(i)) for i in range(7)] == ["a"] * 6 + [None]


# ---- versions


def test_a_request_waits_for_a_sampler_of_its_version():
    router = routed(2, 2)
    router.push(1)
    assert router.place(ask(0, version=1)) is None
    assert router.place(ask(1, version=0)) == "a"  # what waits cannot use a yet
    router.swapped("b", 1)
    assert router.take() == [("b", ask(0, version=1))]
    assert router.place(ask(2, version=1)) == "b" and router.place(ask(3, version=1)) is None
    router.swapped("a", 1)
    assert router.take() == [("a", ask(3, version=1))]


def test_the_oldest_that_waits_comes_first():
    router = routed(1)
    assert [router.place(ask(i, priority=p)) for i, p in enumerate((0, 5, 3, 3))] == ["a", None, None, None]
    order = []
    for number in (0, 2, 3):
        router.done(number)
        if number == 0:
            assert router.place(ask(9, priority=9)) is None  # it does not overtake what `take` has yet to return
        order += [request.number for _, request in router.take()]
    assert order == [2, 3, 1]


def late(router):
    return sorted(m.name for m in router.members.values() if m.late)


def test_late_samplers_are_known():
    router = routed(1, 1)
    router.push(1)
    assert late(router) == []
    router.swapped("a", 1)
    router.push(2)
    assert late(router) == ["b"]
    router.swapped("b", 1)
    assert late(router) == ["b"]
    router.swapped("b", 2)
    assert late(router) == []


# ---- membership


def test_a_joiner_gets_requests_from_the_next_version_on():
    router = routed(1)
    router.join("z", 8)
    router.ready("z", 0)
    assert [router.place(ask(i)) for i in range(2)] == ["a", None]
    router.push(1)
    assert router.take() == [("z", ask(1))]


def test_a_joiner_is_needed_at_once_when_no_other_has_the_newest_version():
    router = routed(1)
    router.join("z", 8)
    router.ready("z", 0)
    assert router.lost("a") == [] and router.place(ask(0)) == "z"


def test_a_drained_sampler_may_leave_when_it_is_idle_or_with_the_next_version():
    router = routed(1, 1, 1)
    assert [router.place(ask(i)) for i in range(2)] == ["a", "b"]
    router.drain("a")
    router.drain("b")
    assert router.leavers() == [] and router.place(ask(2, group=0)) == "c"
    router.done(0)
    assert router.leavers() == ["a"] and router.place(ask(3)) is None  # it gets nothing more
    router.push(1)
    assert router.leavers() == ["a", "b"] and router.lost("b") == [ask(1)]


def test_the_requests_of_a_lost_sampler_are_placed_again():
    router = routed(2, 2)
    for i in range(4):
        router.place(ask(i))
    returned = router.lost("a")
    assert returned == [ask(0), ask(2)] and router.members["a"].where == "lost"
    assert [router.place(request) for request in returned] == [None, None]
    router.done(1)
    assert router.take() == [("b", ask(0))]
    with pytest.raises(ValueError, match="lost"):
        router.ready("a", 0)
    router.join("a", 2)
    router.push(1)
    router.ready("a", 1)
    assert router.take() == [("a", ask(2))]
    with pytest.raises(ValueError, match="placed or waits"):
        router.place(ask(2))


# ---- held frames


def frame(version=0, groups=6, group_size=4, first=100):
    return [ask(first + g * group_size + s, g, s, version) for g in range(groups) for s in range(group_size)]


def test_a_held_frame_is_dealt_by_its_keys_and_the_membership_alone():
    placed = []
    for seed in range(8):
        router, rng = routed(4, 8, 4), random.Random(seed)
        for i in range(rng.randrange(12)):
            router.place(ask(i, group=50 + i))
        requests = frame(first=100 + seed)
        rng.shuffle(requests)
        found = router.place_held(requests)
        placed.append({name: [r.episode for r in part] for name, part in found.items()})
    assert all(other == placed[0] for other in placed)
    groups = {name: sorted({group for _, group, _ in part}) for name, part in placed[0].items()}
    assert groups == {"a": [0, 1], "b": [2, 3, 4], "c": [5]}


def test_no_sampler_has_its_part_of_a_held_frame_at_the_same_place_in_each_version():
    router, first = routed(8, 8, 8), set()
    for version in range(1, 4):
        router.push(version)
        for name in "abc":
            router.swapped(name, version)
        requests = frame(version, first=100 * version)
        first |= {name for name, part in router.place_held(requests).items() if requests[0] in part}
        for request in requests:
            router.done(request.number)
    assert first == {"a", "b", "c"}


def test_a_held_frame_waits_for_the_newest_weights_of_its_samplers():
    router = routed(4, 4)
    router.push(1)
    router.swapped("a", 1)
    requests = frame(version=1, groups=2)
    assert router.place_held(requests) == {"a": requests[4:]}
    router.swapped("b", 1)
    assert router.take() == [("b", r) for r in requests[:4]] and router.take() == []
    for request in requests:
        router.done(request.number)
    router.push(2)
    router.swapped("a", 2)
    router.push(3)  # b is late
    requests = frame(version=3, groups=2)
    assert router.place_held(requests) == {}
    router.swapped("a", 3)
    assert router.take() == [("a", r) for r in requests]


def test_what_a_held_frame_has_at_a_lost_or_late_sampler_goes_elsewhere():
    router = routed(4, 4, cap=2.0)
    router.push(1)
    requests = frame(version=1, groups=2)
    assert router.place_held(requests) == {}
    router.done(requests[0].number)
    assert router.lost("a") == requests[4:]
    for request in requests[4:]:
        assert router.place(request) is None
    router.push(2)
    assert late(router) == ["b"] and router.waiting == 7
    router.swapped("b", 2)
    assert router.take() == [("b", r) for r in requests[1:]]


# ---- kinds


def observe(affinity, tag, ratio, first=0):
    for i in range(64):
        affinity.observe(tag, (first, i), round(10 * ratio), 10)
    return affinity.kind(tag)


def test_the_kind_of_a_domain_follows_its_measured_ratio_with_hysteresis():
    """The traces of RollArt's rule: tau 8, left only below 6.4."""
    affinity = Affinity(AffinityConfig())
    affinity.observe("early", (0,), 100, 1)
    assert affinity.kind("early") == affinity.kind("unknown") == ""
    found = [observe(affinity, tag, ratio) for tag, ratio in (("x", 20), ("y", 3), ("z", 9))]
    assert found == ["compute", "bandwidth", "compute"]
    assert observe(affinity, "z", 7.5, 1) == "compute" and observe(affinity, "z", 6.0, 2) == "bandwidth"
    assert observe(affinity, "z", 7.5, 3) == "bandwidth"


def test_the_turns_of_a_trajectory_count_together():
    affinity = Affinity(AffinityConfig(window=2))
    for trajectory, prefill_tok in ((0, 10), (0, 10), (1, 100), (2, 100)):
        assert affinity.kind("x") == ("bandwidth" if trajectory == 2 else "")
        affinity.observe("x", trajectory, prefill_tok, 10 if trajectory != 1 else 100)
    assert affinity.kind("x") == "bandwidth"


def test_a_domain_goes_to_its_kind_and_falls_back_to_any():
    affinity = Affinity(AffinityConfig())
    observe(affinity, "long", 1.0)
    observe(affinity, "chat", 20.0)
    router = routed(2, 2, kinds=["compute", "bandwidth"], affinity=affinity)
    assert [router.place(ask(i, tag="long")) for i in range(5)] == ["b", "b", "a", "a", None]
    assert router.place(ask(5, tag="chat")) is None
    router.done(2)
    assert router.take() == [("a", ask(5, tag="chat"))]  # it suits
    router.done(3)
    assert router.take() == [("a", ask(4, tag="long"))]  # nothing else waits


def test_what_suits_no_sampler_is_not_overtaken_forever():
    affinity = Affinity(AffinityConfig())
    observe(affinity, "long", 1.0)
    observe(affinity, "chat", 20.0)
    router = routed(1, kinds=["compute"], affinity=affinity)
    router.place(ask(0, tag="chat"))
    router.place(ask(1, tag="long"))
    running, served = 0, []
    for number in range(2, 2 * MAX_OVERTAKEN):
        router.place(ask(number, tag="chat"))
        router.done(running)
        [(_, request)] = router.take()
        running = request.number
        served.append(running)
    assert served.index(1) == MAX_OVERTAKEN


# ---- any course of events


class Trace:
    """A random course of events, with a second account of it. No rule is asked of the router."""

    def __init__(self, seed):
        self.rng, self.router = random.Random(seed), Router(cap=random.Random(seed).choice([1.0, 1.5]))
        self.version, self.versions, self.routable = 0, {}, {}
        self.running, self.asked, self.home, self.turns = {}, {}, {}, [0, 0]
        self.numbers = self.groups = self.names = 0
        self.router.push(0)
        for _ in range(self.rng.randint(1, 4)):
            self.join()
            self.ready()

    def some(self, where):
        names = [m.name for m in self.router.members.values() if m.where == where]
        return self.rng.choice(names) if names else None

    def free(self, name, request):
        m = self.router.members[name]
        count = len(m.held) + sum(at == name for at in self.running.values())
        return m.routable and self.versions[name] >= request.min_version and count < m.cap

    def sent(self, name, request, is_held=False):
        assert request.number in self.asked and request.number not in self.running
        assert self.router.members[name].where == "ready" and self.versions[name] >= request.min_version
        home = self.home.get(request.episode)
        if home and not is_held and self.router.members.get(home) is not None and self.free(home, request):
            self.turns[0] += 1
            self.turns[1] += home == name
        self.running[request.number], self.home[request.episode] = name, name

    def take(self):
        for name, request in self.router.take():
            self.sent(name, request)
        assert len(self.running) + self.unsent() == len(self.asked)
        for request in self.asked.values():  # nothing waits that could run
            if request.number in self.router._waiting.requests:
                assert not any(self.free(name, request) for name in self.router.members)

    def unsent(self):
        return self.router.waiting + sum(len(m.held) for m in self.router.members.values())

    # ---- events

    def request(self):
        if self.rng.random() < 0.5 or not self.home:
            self.groups += 1
            keys = [(self.groups, s) for s in range(self.rng.randint(1, 4))]
        else:  # a later turn
            keys = [self.rng.choice([*self.home])[1:]]
        made = []
        for group, sibling in keys:
            self.numbers += 1
            version = self.rng.randint(max(0, self.version - 1), self.version)
            made.append(ask(self.numbers, group, sibling, version, priority=group if self.rng.random() < 0.5 else 0))
        self.asked |= {r.number: r for r in made}
        if self.rng.random() < 0.3:
            for name, part in self.router.place_held(made).items():
                for request in part:
                    self.sent(name, request, is_held=True)
        else:
            self.place(made)

    def place(self, requests):
        for request in requests:
            if name := self.router.place(request):
                self.sent(name, request)

    def done(self):
        if self.asked:
            running = [*self.running] or [*self.asked]
            number = self.rng.choice(running if self.rng.random() < 0.9 else [*self.asked])
            self.router.done(number)
            self.running.pop(number, None)
            del self.asked[number]

    def push(self):
        self.version += 1
        self.router.push(self.version)

    def swap(self):
        if name := self.some("ready"):
            self.versions[name] = self.version
            self.router.swapped(name, self.version)

    def join(self):
        self.names += 1
        self.router.join(self.some("lost") or f"s{self.names}", self.rng.randint(1, 4))

    def ready(self):
        if name := self.some("joining"):
            self.versions[name] = self.rng.randint(max(0, self.version - 1), self.version)
            self.versions[name] = max(self.versions[name], self.router.members[name].version)
            self.router.ready(name, self.versions[name])

    def drain(self):
        if name := self.some("ready"):
            self.router.drain(name)

    def lose(self):
        if name := self.some(self.rng.choice(["ready", "joining", "draining"])):
            self.again(name, self.router.lost(name))

    def leave(self):
        for name in self.router.leavers():
            self.again(name, self.router.lost(name))

    def again(self, name, returned):
        had = {number for number, at in self.running.items() if at == name}
        assert had <= {r.number for r in returned}
        for number in had:
            del self.running[number]
        self.place(returned)

    def play(self, events):
        kinds = [
            self.request,
            self.done,
            self.push,
            self.swap,
            self.join,
            self.ready,
            self.drain,
            self.lose,
            self.leave,
        ]
        for event in self.rng.choices(kinds, [12, 10, 2, 6, 1, 3, 0.5, 1, 0.5], k=events):
            event()
            self.take()
        self.join()  # everything ends once nothing new comes
        for _ in range(4):
            self.ready()
        self.push()
        for name, member in self.router.members.items():
            if member.where == "ready":
                self.versions[name] = self.version
                self.router.swapped(name, self.version)
        for _ in range(len(self.asked) + 1):
            self.take()
            for number in [*self.running]:
                self.router.done(number)
                del self.running[number], self.asked[number]
        assert not self.asked and self.unsent() == 0


@pytest.mark.parametrize("seeds", [range(1000), pytest.param(range(1000, 11000), marks=pytest.mark.slow)], ids=len)
def test_random_traces(seeds):
    """No request goes to a sampler that is not ready or too old, is lost, runs twice, or waits for good; turns go to the
    sampler of their episode."""
    turns = kept = 0
    for seed in seeds:
        trace = Trace(seed)
        trace.play(40)
        turns, kept = turns + trace.turns[0], kept + trace.turns[1]
    assert turns > 2 * len(seeds) and kept >= 0.8 * turns


def cluster(samplers, events):
    """Play a cluster that takes new weights, sampler by sampler; returns the number of requests."""
    router, rng, number = Router(), random.Random(0), 0
    for i in range(samplers):
        router.join(f"sampler-{i}", 16)
    router.push(0)
    for name in router.members:
        router.ready(name, 0)
    running = []
    for event in range(events):
        if event % samplers == 0:
            router.push(router.version + 1)
        router.swapped(f"sampler-{event % samplers}", router.version)
        for _ in range(12):
            version = max(0, router.version - rng.randint(0, 1))
            if router.place(ask(number, number // 8, number % 8, version)):
                running.append(number)
            number += 1
        for _ in range(10):
            router.done(running.pop(rng.randrange(len(running))))
        running += [request.number for _, request in router.take()]
    return number


def test_the_work_of_a_decision_does_not_grow_with_the_cluster():
    """Counted in calls; benchmarks/router.py measures microseconds."""

    def calls_per_decision(samplers):
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            decisions = cluster(samplers, 500)
        finally:
            sys.setprofile(None)
        return calls / decisions

    assert calls_per_decision(2000) < 1.5 * calls_per_decision(50)
