"""Which groups start, are trained, and are cancelled: the rules of ROLL Flash and RollPacker by their own examples, and
random traces."""

import dataclasses
import heapq
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolljax.errors import ConfigError
from rolljax.rollout.group_buffer import Admission, GroupBuffer, TailBatching
from rolljax.rollout.shares import StepPlan, normalised


def fill(buffer, version):
    """Begin all that may begin; their draws."""
    return [e.prompt_index for e in iter(lambda: buffer.start(version), None)]


def draws(entries):
    return None if entries is None else [e.prompt_index for e in entries]


# ---- by hand


def test_synchronous_steps_have_nothing_in_flight_between_them():
    buffer = GroupBuffer(Admission(3, num_steps=2))
    assert fill(buffer, 0) == [0, 1, 2]
    for draw in (2, 0):
        buffer.finished(draw)
        assert buffer.take(0) is None
    buffer.finished(1)
    assert draws(buffer.take(0)) == [0, 1, 2]
    assert buffer.expire(1) == [] and len(buffer) == 0
    assert fill(buffer, 0) == []  # what begins now would be too old for the next step
    assert fill(buffer, 1) == [3, 4, 5]
    for draw in (3, 4, 5):
        buffer.finished(draw)
    assert draws(buffer.take(1)) == [3, 4, 5]
    assert fill(buffer, 2) == []  # the phase is over


def flash_trace(late):
    """Replay ROLL Flash's example: a, b, c, d begin at version 0, e and f at 1; c is the slow one."""
    buffer = GroupBuffer(Admission(2, num_steps=9, async_ratio=1, late=late))
    assert fill(buffer, 0) == [0, 1, 2, 3]
    buffer.finished(0), buffer.finished(1)
    assert draws(buffer.take(0)) == [0, 1]
    assert buffer.expire(1) == []
    assert fill(buffer, 1) == [4, 5]
    buffer.finished(3), buffer.finished(5)
    return buffer


def test_a_group_that_would_be_too_old_is_let_go():
    buffer = flash_trace("drop")
    assert draws(buffer.take(1)) == [3, 5]
    assert draws(buffer.expire(2)) == [2]
    assert buffer.dropped == {"late": 1}
    assert [(e.prompt_index, e.age(2)) for e in buffer] == [(4, 1)]  # which began at version 1 and may still be trained
    assert fill(buffer, 2) == [6, 7, 8]


def test_with_redraw_a_late_group_starts_again_and_is_kept():
    buffer = flash_trace("resample")
    assert draws(buffer.take(1)) == [3, 5]
    assert draws(buffer.expire(2)) == [2]
    assert fill(buffer, 2) == [2, 6, 7]  # before any new one
    buffer.finished(4), buffer.finished(6)
    assert draws(buffer.take(2)) == [4, 6]  # it is young: no need to wait yet
    assert buffer.expire(3) == []
    fill(buffer, 3)
    buffer.finished(7), buffer.finished(8)
    assert buffer.take(3) is None  # now there is
    buffer.finished(2)
    assert draws(buffer.take(3)) == [2, 7]


def test_with_wait_a_step_waits_for_a_late_group():
    buffer = flash_trace("wait")
    assert buffer.take(1) is None
    buffer.finished(2)
    assert draws(buffer.take(1)) == [2, 3]  # oldest start first: 5 waits
    assert buffer.ages == {0: 2, 1: 2} and not buffer.dropped


def test_staleness_counts_from_the_start():
    """RollArt's example (arXiv 2512.22560): with a ratio of 1 a group of version 0 is dropped before the step at version 2, and one of version 2 may be trained
    at version 3, however long it took."""
    buffer = GroupBuffer(Admission(1, num_steps=9, async_ratio=1, late="drop"))
    first, second = buffer.start(0), buffer.start(0)
    buffer.finished(second.prompt_index)
    assert buffer.take(0) == [second]
    assert buffer.expire(1) == []
    third = buffer.start(1)
    buffer.finished(third.prompt_index)
    assert buffer.take(1) == [third]
    assert buffer.expire(2) == [first]  # it began at version 0
    fourth, fifth = buffer.start(2), buffer.start(2)
    buffer.finished(fifth.prompt_index)
    assert buffer.take(2) == [fifth]
    assert [e.age(3) for e in buffer] == [1] and buffer.expire(3) == []
    buffer.finished(fourth.prompt_index)
    assert buffer.take(3) == [fourth]  # as old as it may be, and before any younger one


def test_what_may_be_trained_at_a_version():
    """RollArt's trace: A began at version 0, B at 1, C at 2. At version 2 B and C may be trained, at version 3 only C."""
    buffer = GroupBuffer(Admission(2, num_steps=9, async_ratio=1, late="drop"))
    a, x, y, z = (buffer.start(0) for _ in range(4))

    def step(version, *trained):
        """Train two groups; return those that are too old from then on."""
        for entry in trained:
            buffer.finished(entry.prompt_index)
        assert buffer.take(version) == list(trained)
        return buffer.expire(version + 1)

    assert step(0, x, y) == []
    b, w = buffer.start(1), buffer.start(1)
    assert step(1, z, w) == [a]
    c, u, v = (buffer.start(2) for _ in range(3))
    assert list(buffer) == [b, c, u, v]
    assert step(2, u, v) == [b]
    assert list(buffer) == [c]


@pytest.mark.parametrize(
    ("ratio", "prompts", "ahead"), [(0.5, 4, 2), (1.5, 4, 6), (0.25, 4, 1), (2, 3, 6), (0.3, 10, 3)]
)
def test_fractions(ratio, prompts, ahead):
    """A fraction of a step's groups may be one version older, and starts ahead (the paper's example: .5 of 4 is 2)."""
    buffer = GroupBuffer(Admission(prompts, 100, async_ratio=ratio, late="drop"))
    assert len(fill(buffer, 0)) == prompts + ahead
    for draw in range(prompts):
        buffer.finished(draw)
    buffer.take(0), buffer.expire(1)
    fill(buffer, 1)
    for version in range(1, 12):
        for entry in [e for e in buffer if not e.ready]:
            buffer.finished(entry.prompt_index)
        taken = buffer.take(version)
        ages = [e.age(version) for e in taken]
        assert max(ages) == min(version, math.ceil(ratio))  # the bound is reached
        assert ratio == int(ratio) or ages.count(math.ceil(ratio)) <= math.floor(ratio % 1 * prompts + 1e-9)
        buffer.expire(version + 1)
        fill(buffer, version + 1)


def test_dynamic_sampling_replaces_while_the_others_run():
    """Means (0, .25, 1, .5, 0, .75) and three prompts: those with a signal are trained, three were replaced (ROLL)."""
    means = [0, 0.25, 1, 0.5, 0, 0.75]
    buffer = GroupBuffer(Admission(3, num_steps=1, max_replaced=30))
    waiting = fill(buffer, 0)
    assert waiting == [0, 1, 2]
    while (taken := buffer.take(0)) is None:
        draw = waiting.pop(0)
        buffer.finished(draw, has_signal=0 < means[draw] < 1)
        waiting += fill(buffer, 0)
    assert draws(taken) == [1, 3, 5]
    assert buffer.dropped == {"no_signal": 3} and buffer.num_started == 6


def test_dynamic_sampling_has_an_end():
    buffer = GroupBuffer(Admission(2, num_steps=1, max_replaced=3))
    done = 0
    while (taken := buffer.take(0)) is None:
        fill(buffer, 0)
        buffer.finished(done, has_signal=False)
        done += 1
    assert draws(taken) == [3, 4] and not any(e.has_signal for e in taken)


def test_in_rounds_nothing_begins_beside_what_runs():
    buffer = GroupBuffer(Admission(3, num_steps=2, max_replaced=30, in_rounds=True))
    assert fill(buffer, 0) == [0, 1, 2]
    buffer.finished(0, has_signal=False)
    assert fill(buffer, 0) == []
    buffer.finished(1, has_signal=False), buffer.finished(2)
    assert fill(buffer, 0) == [3, 4]
    buffer.finished(4)
    assert fill(buffer, 0) == []
    buffer.finished(3)
    assert draws(buffer.take(0)) == [2, 3, 4]
    buffer.expire(1)
    assert fill(buffer, 1) == [5, 6, 7]


def test_in_rounds_nobody_waits_for_what_was_let_go():
    buffer = GroupBuffer(Admission(2, num_steps=3, spare_prompts=2, late="resample", in_rounds=True))
    assert fill(buffer, 0) == [0, 1, 2, 3]
    buffer.finished(0), buffer.finished(2)
    assert draws(buffer.take(0)) == [0, 2]
    buffer.finished(3)  # too late, and before it is let go
    assert draws(buffer.expire(1)) == [1, 3]
    assert fill(buffer, 1) == [1, 3, 4, 5]


def test_redundancy():
    buffer = GroupBuffer(Admission(2, num_steps=3, spare_prompts=2, late="drop"))
    assert fill(buffer, 0) == [0, 1, 2, 3]
    buffer.finished(2, failed=True)  # a spare takes its place
    assert buffer.dropped == {"failed": 1}
    buffer.finished(3), buffer.finished(0)
    assert draws(buffer.take(0)) == [0, 3]
    assert draws(buffer.expire(1)) == [1]
    assert buffer.dropped == {"failed": 1, "late": 1}
    assert fill(buffer, 1) == [4, 5, 6, 7]


def test_a_round_of_tail_batching():
    """RollPacker's example: four of five prompts, two of three responses; the round ends at 8 and prompt 4 is queued."""
    times = [(1, 2, 9), (3, 4, 5), (2, 8, 9), (1, 1, 1), (7, 20, 30)]
    tail = TailBatching(1.25)
    buffer = GroupBuffer(Admission(4, num_steps=5, tail=tail))
    assert fill(buffer, 0) == [0, 1, 2, 3, 4]
    assert math.ceil(tail.eta * 2) == 3
    done = sorted((sorted(responses)[2 - 1], draw) for draw, responses in enumerate(times))
    while (taken := buffer.take(0)) is None:
        end, prompt_index = done.pop(0)
        buffer.finished(prompt_index)
    assert end == 8 and draws(taken) == [0, 1, 2, 3]
    assert draws(buffer.expire(1)) == [4]


def test_spares_of_a_domain_that_steps_no_longer_train_count_as_spares():
    """The shares change from all `a` to all `b`: the two spares of `a` stay, and no further ones begin."""
    plan = StepPlan(2, lambda step: {"a": 1.0 - bool(step), "b": float(bool(step))})
    buffer = GroupBuffer(Admission(2, num_steps=4, async_ratio=2, spare_prompts=2, late="drop"), plan)
    assert [e.domain for e in iter(lambda: buffer.start(0), None)] == ["a", "a", "b", "b", "b", "b", "a", "a"]
    buffer.finished(0), buffer.finished(1)
    assert draws(buffer.take(0)) == [0, 1] and buffer.expire(1) == []
    assert [e.domain for e in iter(lambda: buffer.start(1), None)] == ["b", "b"] and len(buffer) == 8


def test_spares_that_begin_again_are_prompts_of_later_steps():
    plan = StepPlan(2, lambda step: {"a": 0.5, "b": 0.5})
    buffer = GroupBuffer(Admission(2, num_steps=2, spare_prompts=1, late="resample"), plan)
    assert [e.domain for e in iter(lambda: buffer.start(0), None)] == ["a", "b", "a"]
    buffer.finished(0), buffer.finished(1)
    assert draws(buffer.take(0)) == [0, 1] and draws(buffer.expire(1)) == [2]
    assert [(e.prompt_index, e.domain) for e in iter(lambda: buffer.start(1), None)] == [(2, "a"), (3, "b")]
    buffer.finished(2), buffer.finished(3)
    assert draws(buffer.take(1)) == [2, 3] and buffer.num_drawn == 4 and len(buffer) == 0


# ---- continuing


def restored(buffer, plan=None, domains=None, **changes):
    """Return a buffer that continues from the state of `buffer`, with changed settings if given."""
    state = json.loads(json.dumps(buffer.state()))
    buffer = GroupBuffer(dataclasses.replace(buffer.admission, **changes), plan)
    buffer.restore(state, domains)
    return buffer


def begun(**settings):
    """Return a buffer after a step: 2 and 4 are ready, 3 and 5 in flight."""
    buffer = GroupBuffer(Admission(2, num_steps=4, async_ratio=2, **settings))
    assert fill(buffer, 0) == [0, 1, 2, 3, 4, 5]
    for draw in (0, 1, 2, 4):
        buffer.finished(draw)
    assert draws(buffer.take(0)) == [0, 1] and buffer.expire(1) == []
    return buffer


def test_what_is_ready_is_ready_and_what_was_in_flight_begins_again_first():
    buffer = restored(begun())
    assert [(e.prompt_index, e.version, e.ready) for e in buffer] == [(2, 0, True), (4, 0, True)]
    assert [(e.prompt_index, e.version) for e in iter(lambda: buffer.start(1), None)] == [
        (3, 1),
        (5, 1),
        (6, 1),
        (7, 1),
    ]
    assert buffer.num_started == 8
    assert draws(buffer.take(1)) == [2, 4]


def test_a_state_does_not_change_with_its_buffer():
    buffer = flash_trace("resample")
    buffer.take(1), buffer.expire(2)
    state = buffer.state()
    before = json.dumps(state)
    fill(buffer, 2)
    assert state["again"] == [2] and json.dumps(state) == before


def test_nothing_is_lost_if_a_run_stops_before_anything_began_again():
    buffer = begun()
    again = restored(restored(buffer))
    assert again.state() == restored(buffer).state() and again.state().keys() == buffer.state().keys()
    assert fill(again, 1) == fill(restored(buffer), 1) == [3, 5, 6, 7]


@pytest.mark.parametrize("ratio", [0, 1, 2.5])
def test_a_phase_ends_with_nothing_started_and_continues_with_more_steps(ratio):
    """The result is as with all steps from the start, except for groups that would have started ahead."""
    buffer, trained = GroupBuffer(Admission(2, num_steps=3, async_ratio=ratio)), []

    def train(first, last):
        for version in range(first, last):
            for draw in fill(buffer, version):
                buffer.finished(draw)
            trained.extend(draws(buffer.take(version)))
            buffer.expire(version + 1)
            for draw in fill(buffer, version):
                buffer.finished(draw)

    train(0, 3)
    assert trained == [0, 1, 2, 3, 4, 5] and len(buffer) == 0 and buffer.start(3) is None
    buffer = restored(buffer, num_steps=5)
    train(3, 5)
    assert trained == list(range(10)) and len(buffer) == 0 and buffer.start(5) is None


def test_a_round_goes_on_that_lost_a_group_before_the_run_ended():
    buffer = GroupBuffer(Admission(4, num_steps=2, max_replaced=4, tail=TailBatching(1.25)))
    assert fill(buffer, 0) == [0, 1, 2, 3, 4]
    assert buffer.finished(1) and not buffer.finished(0, has_signal=False)
    buffer = restored(buffer)
    assert fill(buffer, 0) == [2, 3, 4, 5]
    for draw in (2, 3, 5):
        buffer.finished(draw)
    assert draws(buffer.take(0)) == [1, 2, 3, 5] and draws(buffer.expire(1)) == [4]


def test_a_step_that_goes_on_replaces_no_more_than_it_may():
    buffer = GroupBuffer(Admission(2, num_steps=2, async_ratio=1, max_replaced=1))
    assert fill(buffer, 0) == [0, 1, 2, 3] and not buffer.finished(0, has_signal=False)
    buffer = restored(buffer)
    assert fill(buffer, 0) == [1, 2, 3, 4] and buffer.finished(1, has_signal=False)


def test_in_rounds_a_replacement_waits_for_what_begins_again():
    buffer = GroupBuffer(Admission(3, num_steps=2, max_replaced=30, in_rounds=True))
    assert fill(buffer, 0) == [0, 1, 2] and not buffer.finished(0, has_signal=False)
    buffer = restored(buffer)
    assert fill(buffer, 0) == [1, 2]
    buffer.finished(1)
    assert fill(buffer, 0) == []
    buffer.finished(2)
    assert fill(buffer, 0) == [3]


# ---- random traces


def in_order(state):
    """Return a state with its groups in the order of their prompt indices."""
    return state | {"entries": sorted(state["entries"], key=lambda e: e["prompt_index"])}


class Play:
    """A phase in virtual time. After every call of the buffer, capacity and account are checked, and the run may end
    and resume.

    seconds: from a draw and the number of the start to the duration of a group, whether it has a signal, and whether it
      failed. restores: numbers of the calls after which the run ends. plan: makes the plan of domains.
    Afterwards `steps` has for every step the draws it trained, with their ages; `replaced` the draws without a signal
    and the failed ones; `domains` the domain of every draw.
    """

    def __init__(self, admission, seconds, restores=(), plan=None):
        self.admission, self.seconds, self.restores, self.plan = admission, seconds, restores, plan or (lambda: None)
        self.buffer = GroupBuffer(admission, self.plan())
        self.now, self.running, self.steps, self.replaced, self.domains = 0.0, [], [], set(), {}
        self.in_flight = set()
        self.starts = self.calls = self.no_signal = 0
        self.version, self.taken_at, self.round_goes_on = 0, -1, False

    def called(self):
        buffer, self.calls = self.buffer, self.calls + 1
        assert buffer.num_started == buffer.num_trained + sum(buffer.dropped.values()) + len(buffer)
        if self.calls in self.restores:
            for _ in range(2):  # the second time before anything has begun again
                self.buffer, self.running = restored(self.buffer, self.plan(), self.domains), []
                assert in_order(self.buffer.state()) == in_order(buffer.state())

    def room(self):
        """Return the number of groups that may be in flight and ready together."""
        rules = self.admission
        if self.version <= self.taken_at:
            return rules.allowed(0)
        return rules.allowed(0) + math.ceil(
            (rules.tail.eta if rules.tail else 1) * rules.prompts_per_step + rules.spare_prompts
        )

    def begin(self):
        """Start all groups that may start."""
        while (entry := self.buffer.start(self.version)) is not None:
            assert self.domains.setdefault(entry.prompt_index, entry.domain) == entry.domain, (
                "a draw has changed its domain"
            )
            assert len(self.buffer) <= self.room(), "more groups than the capacity"
            assert entry.prompt_index not in self.replaced
            if self.round_goes_on:
                assert entry.prompt_index in self.in_flight, "a group begins next to an unfinished round"
            self.in_flight.add(entry.prompt_index)
            seconds, signal, failed = self.seconds(entry.prompt_index, self.starts)
            heapq.heappush(self.running, (self.now + seconds, self.starts, entry.prompt_index, signal, failed))
            self.starts += 1
            self.called()

    def finish(self):
        """End the group that takes the shortest time."""
        self.now, _, draw, signal, failed = heapq.heappop(self.running)
        assert any(e.prompt_index == draw and not e.ready for e in self.buffer), "a dropped group is done"
        self.in_flight.remove(draw)
        if not self.buffer.finished(draw, has_signal=signal, failed=failed):
            self.replaced.add(draw)
            self.no_signal += not failed
            assert self.no_signal <= self.admission.max_replaced
        self.round_goes_on = self.admission.in_rounds and bool(self.in_flight)
        self.called()
        self.begin()

    def step(self):
        self.begin()
        while (taken := self.buffer.take(self.version)) is None:
            assert self.running, "a step waits, and nothing is in flight"
            self.finish()
        gone = {e.prompt_index for e in self.buffer.expire(self.version + 1)}
        self.in_flight -= gone
        self.running = [r for r in self.running if r[2] not in gone]
        heapq.heapify(self.running)
        self.steps.append([(e.prompt_index, e.age(self.version)) for e in taken])
        self.taken_at, self.no_signal, self.round_goes_on = self.version, 0, False
        self.called()
        self.begin()
        self.version += 1


def play(admission, seconds, restores=(), plan=None):
    """Play a phase to its end; see `Play`."""
    played = Play(admission, seconds, restores, plan)
    for _ in range(admission.num_steps):
        played.step()
    assert played.buffer.num_trained == admission.num_steps * admission.prompts_per_step
    return played


@st.composite
def admissions(draw):
    prompts, steps = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    replaced = draw(st.sampled_from([0, 0, prompts, 5 * prompts]))
    if draw(st.integers(0, 3)) == 0:
        tail = TailBatching(draw(st.sampled_from([1.25, 1.5, 2.0])), epoch=draw(st.sampled_from([0, 3, 7])))
        return Admission(prompts, steps, max_replaced=replaced, tail=tail)
    ratio = draw(st.one_of(st.just(0.0), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0]), st.floats(0, 3)))
    late = draw(st.sampled_from(["wait", "resample", "drop"]))
    spare = 0 if late == "wait" else draw(st.integers(0, 4))
    late = late if ratio or spare else "wait"
    return Admission(prompts, steps, ratio, spare, late, replaced, in_rounds=ratio == 0 and draw(st.booleans()))


CALLS = 60
"""Most traces of one phase have more calls of the buffer."""
RESTORES = st.one_of(st.just(set()), st.sets(st.integers(1, CALLS), max_size=4), st.just(set(range(1, CALLS))))
WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(lambda w: sum(w) > 0.1)
FAULTS = st.sampled_from([(0.0, 0.0), (0.3, 0.05), (0.6, 0.3)])
"""Shares of groups without a signal, and of failed groups."""
TRACES = {"deadline": None, "suppress_health_check": list(HealthCheck)}
a_trace = given(admissions(), st.integers(0, 2**32 - 1), RESTORES, FAULTS)
a_trace_of_domains = given(
    admissions().filter(lambda a: not a.tail), WEIGHTS, WEIGHTS, st.integers(0, 2**32 - 1), RESTORES, FAULTS
)


@settings(max_examples=600, **TRACES)
@a_trace
def test_random_traces(admission, seed, restores, faults):
    check_trace(admission, seed, restores, faults)


@pytest.mark.sweep
@settings(max_examples=10_000, **TRACES)
@a_trace
def test_ten_thousand_random_traces(admission, seed, restores, faults):
    check_trace(admission, seed, restores, faults)


def check_trace(admission, seed, restores, faults, plan=None):
    """Check the staleness bound, that nothing is lost or trained twice, and that every prompt is trained unless it may
    be dropped, for any latencies, failures and restarts."""
    rng = np.random.default_rng(seed)

    def seconds(draw, start):
        return float(rng.lognormal(0, 1)), bool(rng.random() >= faults[0]), bool(rng.random() < faults[1])

    played = play(admission, seconds, restores, plan)
    trained = [d for step in played.steps for d, _ in step]
    assert len(set(trained)) == len(trained) and not played.replaced & set(trained)
    assert max(age for step in played.steps for _, age in step) <= math.ceil(admission.async_ratio)
    fraction = admission.async_ratio % 1
    if fraction:
        most = math.floor(fraction * admission.prompts_per_step + 1e-9)
        assert all(sum(a == math.ceil(admission.async_ratio) for _, a in step) <= most for step in played.steps)
    if admission.late == "wait" and not admission.tail:
        assert not played.buffer.dropped["late"]
    if admission.late != "drop":  # every prompt that was drawn is trained, unless it was replaced
        assert len(played.buffer) == 0
        assert sorted({*trained, *played.replaced}) == list(range(played.buffer.num_drawn))
    return played


@settings(max_examples=300, **TRACES)
@a_trace_of_domains
def test_random_traces_of_domains(admission, weights, others, seed, restores, faults):
    check_domains(admission, weights, others, seed, restores, faults)


@pytest.mark.sweep
@settings(max_examples=2_500, **TRACES)
@a_trace_of_domains
def test_many_random_traces_of_domains(admission, weights, others, seed, restores, faults):
    check_domains(admission, weights, others, seed, restores, faults)


def check_domains(admission, weights, others, seed, restores, faults):
    """Check that every step trains its plan's groups of each domain, whichever were late, failed, replaced or
    restarted, and all rules without domains."""
    size = min(len(weights), len(others))
    one, two = (normalised({str(i): w + 1e-6 for i, w in enumerate(each[:size])}) for each in (weights, others))
    shares = lambda step: one if step % 5 < 3 else two  # noqa: E731
    played = check_trace(admission, seed, restores, faults, lambda: StepPlan(admission.prompts_per_step, shares))
    plan = StepPlan(admission.prompts_per_step, shares)
    for i, step in enumerate(played.steps):
        assert sorted(played.domains[d] for d, _ in step) == sorted(plan.places(i))
        exact = {name: admission.prompts_per_step * share for name, share in shares(i).items()}
        assert all(abs(plan.places(i).count(name) - x) < 1 for name, x in exact.items())


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.5])
def test_shares_are_exact_over_a_thousand_steps(ratio):
    """The shares of the trained groups, with groups that are replaced, late and restarted."""
    shares = {"math": 0.45, "code": 0.35, "judge": 0.2}
    rng = np.random.default_rng(0)
    rules = Admission(7, 1000, ratio, late="resample" if ratio else "wait", max_replaced=70)
    plan = lambda: StepPlan(7, lambda step: shares)  # noqa: E731
    played = play(rules, lambda d, s: (float(rng.lognormal(0, 1)), bool(rng.random() > 0.4), False), (500,), plan)
    total, dropped = Counter(played.domains[d] for step in played.steps for d, _ in step), played.buffer.dropped
    assert total == {"math": 3150, "code": 2450, "judge": 1400}
    assert dropped["no_signal"] > 1000 and (dropped["late"] > 0) == (ratio > 0)


def test_what_is_replaced_is_replaced_by_its_domain():
    buffer = GroupBuffer(Admission(5, 1, max_replaced=9), StepPlan(5, lambda step: {"a": 0.4, "b": 0.6}))
    begun = {e.prompt_index: e.domain for e in iter(lambda: buffer.start(0), None)}
    assert sorted(begun.values()) == ["a", "a", "b", "b", "b"]
    bad = next(draw for draw, domain in begun.items() if domain == "a")
    assert not buffer.finished(bad, has_signal=False)
    assert buffer.start(0).domain == "a" and buffer.start(0) is None


def test_the_bound_is_reached():
    rng = np.random.default_rng(0)
    for ratio in (0.5, 1.0, 2.0, 3.5):
        steps = play(Admission(4, 50, ratio), lambda d, s: (float(rng.lognormal(0, 1)), True, False)).steps
        assert max(age for step in steps for _, age in step) == math.ceil(ratio)


def test_long_answers_are_trained_as_often_as_short_ones():
    """At ratio 1 the answers that are trained are as long as those of synchronous training."""
    rng = np.random.default_rng(0)
    length = rng.lognormal(0, 1, size=100_000)
    slow, fast = (play(Admission(8, 400, ratio), lambda d, s: (length[d], True, False)) for ratio in (0.0, 1.0))
    means = [np.mean([length[d] for step in run.steps for d, _ in step]) for run in (slow, fast)]
    assert means[1] == pytest.approx(means[0], rel=0.02)
    assert fast.now < 0.75 * slow.now


@pytest.mark.parametrize("epoch", [0, 64])
def test_tail_batching_trains_every_prompt_once(epoch):
    rng = np.random.default_rng(0)
    tail = TailBatching(1.25, epoch)
    scale = rng.lognormal(0, 0.7, size=10_000)
    plain = play(Admission(32, 40), lambda d, s: (scale[d], True, False))
    played = play(Admission(32, 40, tail=tail), lambda d, s: (scale[d], True, False))
    steps = played.steps
    assert sorted(d for step in steps for d, _ in step) == list(range(40 * 32))
    assert all(age == 0 for step in steps for _, age in step)
    assert played.now < plain.now
    if epoch:  # no prompt waits beyond the end of its epoch
        for i in range(0, 40, 2):
            assert {d for step in steps[i : i + 2] for d, _ in step} == set(range(i * 32, (i + 2) * 32))


def test_settings_that_have_no_effect_are_refused():
    with pytest.raises(ConfigError, match="steps wait for every group"):
        Admission(2, 1, spare_prompts=1)
    with pytest.raises(ConfigError, match="is synchronous"):
        Admission(2, 1, async_ratio=1, tail=TailBatching())
    with pytest.raises(ConfigError, match="eta"):
        TailBatching(1.0)
    assert dataclasses.asdict(Admission(2, 1))["late"] == "wait"
