"""C4's rules on recorded times: who hangs, who is slow, and that noise alone raises no alarm."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.cluster import diagnosis
from rolljax.cluster.diagnosis import DiagnosisRules, OperationRecord, diagnose, located, slow_peers, waits
from rolljax.cluster.operation_log import OperationLog

RULES = DiagnosisRules()


def work(peer, sequence, enter_s, exit_s=None, **more):
    return OperationRecord(more.pop("operation", "step"), peer, sequence, enter_s, exit_s, **more)


def message(sender, peer, sequence, enter_s, exit_s=None, size=1000, operation="exchange"):
    return OperationRecord(operation, peer, sequence, enter_s, exit_s, size, sender)


# ---- what the rules say of single events


def test_one_that_never_arrives_hangs_in_its_own_work():
    """Ranks have started collectives (7, 7, 6, 7): rank 2 is still in the work before the seventh."""
    records = [work(str(r), n, n, n + 0.5) for r in range(4) for n in range(7)]
    records += [work(str(r), 7, 7.0, None if r == 2 else 7.5) for r in range(4)]
    assert diagnose(records, 60.0) == []
    (found,) = diagnose(records, 70.0)
    assert (found.kind, found.culprit) == ("non-communication hang", "2")


def test_one_that_is_not_reached_hangs_in_communication():
    """All have started (7, 7, 7, 7), and rank 2 has not ended: (7, 7, 6, 7)."""
    records = [work(str(r), n, n, n + 0.5) for r in range(4) for n in range(8)]
    records += [message("hub", str(r), n, n + 0.5, n + 0.6) for r in range(4) for n in range(7)]
    records += [message("hub", str(r), 7, 7.5, None if r == 2 else 7.6) for r in range(4)]
    (found,) = diagnose(records, 70.0)
    assert (found.kind, found.culprit) == ("communication hang", "2")


def test_the_culprit_is_named_as_a_person_would():
    records = [work(f"sampler-{r}", 11, 0.0, 0.4, operation="swap") for r in range(4)]
    records += [
        work(f"sampler-{r}", 12, 1.0, None if r == 3 else 1.4, operation="swap", subject="version 12") for r in range(4)
    ]
    (found,) = diagnose(records, 64.0)
    assert str(found) == "sampler-3: has not answered `swap` of version 12 for 63 s; the others took 0.4 s"


def test_heartbeats_tell_a_stuck_program_from_a_lost_peer():
    asked = [work("a", 1, 10.0, 10.4), work("b", 1, 10.0)]
    heard = [message("b", "lead", n, n, n + 0.01, operation="heartbeat") for n in range(15)]
    later = [message("b", "lead", n, n, n + 0.01, operation="heartbeat") for n in range(15, 80)]
    (silent,), (alive,) = diagnose(asked + heard, 80.0), diagnose(asked + heard + later, 80.0)
    assert (silent.kind, silent.culprit) == ("communication hang", "b")
    assert (alive.kind, alive.culprit) == ("non-communication hang", "b")


def test_a_long_operation_gets_ten_times_its_median():
    records = [work(str(r), n, 100 * n, 100 * n + 20) for r in range(4) for n in range(4)]
    records += [work(str(r), 4, 400.0, None if r == 1 else 420.0) for r in range(4)]
    assert diagnose(records, 599.0) == []
    assert [d.culprit for d in diagnose(records, 601.0)] == ["1"]


def test_compiling_is_no_hang():
    assert diagnose([work("a", 0, 0.0, execution=RULES.warm_up - 1)], 1e4) == []
    assert diagnose([work("a", 0, 0.0, execution=RULES.warm_up)], 1e4) != []


def test_the_others_wait_for_the_last_to_arrive():
    arrivals = dict(zip("0123", (0.0, 0.1, 5.0, 0.2), strict=True))
    assert waits(arrivals) == pytest.approx({"0": 5.0, "1": 4.9, "2": 0.0, "3": 4.8})
    assert slow_peers(arrivals, RULES.factor) == {"2"}


def test_a_delay_matrix():
    rng = np.random.default_rng(0)
    for _ in range(100):
        assert located(1 + 0.1 * rng.standard_normal((4, 4))) == []
    row, column, cell = np.ones((4, 4)), np.ones((4, 4)), np.ones((4, 4))
    row[1], column[:, 3], cell[0, 2] = 5, 5, 5
    assert (located(row), located(column), located(cell)) == ([(1, None)], [(None, 3)], [(0, 2)])
    for matrix, found in ((row, (1, None)), (column, (None, 3)), (cell, (0, 2))):
        np.fill_diagonal(matrix, np.nan)
        assert located(matrix) == [found]


def test_in_a_star_the_end_of_a_slow_link_is_named():
    assert located(np.array([[1.0, 1.1, 3.0, 0.9]])) == [(None, 2)]
    assert located(np.array([[1.0], [4.0]])) == [(1, None)]


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_the_median_of_the_others(values):
    expected = [np.median(values[:i] + values[i + 1 :]) for i in range(len(values))]
    np.testing.assert_allclose(diagnosis.others_median(np.array(values)), expected)


# ---- faults injected into random traces

FAULTS = ("sleep", "lost", "link", "sender", "receiver", "work")


class Trace:
    """Random work and messages of a barrier loop: all ranks to all, or a controller, its samplers and a store."""

    def __init__(self, rng, steps, fault=None, since=0):
        self.rng, self.steps, self.fault, self.since = rng, steps, fault, since
        number = int(rng.integers(3, 7))
        self.peers = [f"p{i}" for i in range(number)]
        pairs = list(itertools.permutations(self.peers, 2))
        star = [*(("store", p) for p in self.peers), *((p, "lead") for p in self.peers), ("lead", "store")]
        self.is_star = bool(rng.random() < 0.5)
        self.links = star if self.is_star else pairs
        self.victim = self.peers[rng.integers(number)]
        if fault in ("sleep", "work"):
            self.culprit, self.slow = self.victim, set()
        elif fault in ("lost", "link"):
            self.slow = {self.links[rng.integers(len(self.links) - 1)]}
            (sender, peer), *_ = self.slow
            self.culprit = f"{sender} -> {peer}" if not self.is_star else peer if sender == "store" else sender
        else:
            end = 0 if fault == "sender" else 1
            self.slow = {link for link in self.links if link[end] == self.victim}
            self.culprit = self.victim
        self.speed = dict(zip([*self.peers, *self.links], np.exp(0.05 * rng.standard_normal(99)), strict=False))

    def records(self):
        """Return the records, and the time after their end."""
        found, now_s = [], 0.0
        for n in range(self.steps):
            broken = self.fault if n >= self.since else None
            ends = []
            for p, tok, noise in zip(self.peers, *self.draws(len(self.peers), 1.0), strict=True):
                took = (0.2 + 0.001 * tok) * noise * self.speed[p] * (3 if broken == "work" and p == self.victim else 1)
                hangs = broken == "sleep" and p == self.victim and n == self.steps - 1
                ends.append(now_s + took)
                found.append(work(p, n, now_s, None if hangs else now_s + took, size=int(tok)))
            if broken == "sleep" and n == self.steps - 1:
                return found, now_s + 100.0
            for link, size, noise in zip(self.links, *self.draws(len(self.links), 0.5), strict=True):
                slow = 3 if link in self.slow and broken not in (None, "lost") else 1
                took = (0.01 + 1e-5 * size) * noise * self.speed[link] * slow
                lost = broken == "lost" and link in self.slow and n == self.steps - 1
                operation = "exchange" if not self.is_star else "tokens" if link[1] == "lead" else "read"
                begin = max(ends)
                ends.append(begin + took)
                found.append(message(*link, n, begin, None if lost else begin + took, int(size), operation))
            now_s = max(ends)
        return found, now_s + (100.0 if self.fault == "lost" else 0.0)

    def draws(self, number, spread):
        sizes = 1000 * np.exp(spread * self.rng.standard_normal(number))
        return sizes, np.exp(0.1 * self.rng.standard_normal(number))


@pytest.mark.parametrize("number", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_injected_faults_are_found_within_two_windows(number):
    """Each begins 80 to 100 steps before it must be found: the rules want it in 3 windows that overlap by half."""
    right = 0
    for seed in range(number):
        rng = np.random.default_rng(seed)
        trace = Trace(rng, RULES.kept, FAULTS[seed % len(FAULTS)], int(rng.integers(0, 21)))
        right += {d.culprit for d in diagnose(*trace.records())} == {trace.culprit}
    assert right >= 0.98 * number


@pytest.mark.parametrize("number", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_clean_windows_raise_no_alarm(number):
    """Ten windows of each trace. There is none even without the confirmation by further windows."""
    rules = DiagnosisRules(confirm=1)
    for seed in range(number):
        records, now_s = Trace(np.random.default_rng(1000 + seed), 275).records()
        for first in range(0, 250, 25):
            window = [r for r in records if first <= r.sequence < first + rules.window]
            assert diagnose(window, now_s, rules) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_that_passes_is_not_confirmed(seed):
    trace = Trace(np.random.default_rng(seed), RULES.kept, FAULTS[2 + seed], since=RULES.kept - RULES.window)
    assert diagnose(*trace.records()) == []


def test_microseconds_are_no_fault():
    """A link that takes .3 ms instead of .1 is not slow, one that takes .3 s instead of .1 is."""
    for unit_s, culprits in ((1e-3, []), (1.0, ["c"])):
        took = {"a": 0.1 * unit_s, "b": 0.1 * unit_s, "c": 0.3 * unit_s}
        calls = [message("lead", p, n, n, n + s) for p, s in took.items() for n in range(RULES.kept)]
        swaps = [work(p, n, n, n + s) for p, s in took.items() for n in range(RULES.kept)]
        assert [d.culprit for d in diagnose(calls, 200.0)] == [d.culprit for d in diagnose(swaps, 200.0)] == culprits


# ---- the log


def test_threads_that_meet_at_a_barrier():
    """Eight threads record a barrier loop at virtual times; one is three times slower than the others."""
    log, barrier, steps = OperationLog(), threading.Barrier(8), RULES.kept + RULES.warm_up

    def rank(name, seconds):
        for n in range(steps):
            ticket = log.enter("step", name, n * 10.0, sequence=n)
            call = log.enter("report", "lead", n * 10.0, sequence=n, sender=name)
            barrier.wait()
            log.exit(call, n * 10.0 + 0.1, size=n)
            log.exit(ticket, n * 10.0 + seconds)
            barrier.wait()

    threads = [threading.Thread(target=rank, args=(f"rank-{i}", 3.0 if i == 5 else 1.0)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = log.records()
    assert len(records) == 16 * RULES.kept and all(r.exit_s is not None for r in records)
    (found,) = diagnose(records, steps * 10.0)
    assert (found.kind, found.culprit) == ("non-communication slow", "rank-5")
    assert str(found) == "rank-5: takes 3 s for `step`; the others wait 2 s for it"


def test_a_log_has_bounded_memory_and_keeps_what_hangs():
    log = OperationLog(most_pending=4)
    tickets = [log.enter("submit", "a", float(n), sequence=n, sender="lead") for n in range(1000)]
    assert [r.sequence for r in log.records()] == [0, 1, 2, 3]
    for ticket in tickets:
        log.exit(ticket, 2000.0)
    for n in range(1000):
        log.exit(log.enter("submit", "a", float(n), sequence=n, sender="lead"), n + 1.0)
    assert [r.sequence for r in log.records()] == list(range(900, 1000))


def test_a_peer_that_left_is_forgotten_and_warms_up_again():
    log = OperationLog()
    for peer in "ab":
        for n in range(5):
            log.enter("swap", peer, 0.0, sequence=n)
    assert [d.culprit for d in diagnose(log.records(), 100.0)] == ["a", "b"]
    log.forget("a")
    log.enter("swap", "a", 0.0, sequence=5)
    assert [d.culprit for d in diagnose(log.records(), 100.0)] == ["b"]
