"""Threads that oversleep are found, reported and woken, and waits in which nothing moves are named."""

import asyncio
import threading

import pytest

from rolljax.concurrency import waits
from rolljax.concurrency.event_loop import EventLoop
from rolljax.concurrency.waits import CHECK_EVERY_S, LOOKS, QUIET_S, Inbox, Watchdog
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import HangError
from tests.faulty import FaultyThread, play

WAIT_S = 60


@pytest.fixture
def told():
    return []


@pytest.fixture
def dog(told, tmp_path):
    made = Watchdog(told.append, told.append, tmp_path / "crash")
    yield made
    made.close()


def put_in_silence(inbox, item):
    """Append an item without a wake-up."""
    inbox._items.append(item)


def sleeping(inbox):
    """Return a thread that takes one item, once it is in its wait, and a list for the item."""
    taken = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take()), name="the-sleeper", daemon=True)
    thread.start()
    while not inbox._waits:
        pass
    return thread, taken


def test_a_lost_wake_up_is_found_in_time():
    assert (LOOKS + 1) * CHECK_EVERY_S <= 5


def test_a_thread_that_sleeps_while_work_waits_is_reported_and_woken(dog, told, tmp_path):
    inbox = Inbox("a thread of the test")
    dog.watch(inbox)
    thread, taken = sleeping(inbox)
    put_in_silence(inbox, "work")
    for look in range(LOOKS):
        assert not told and thread.is_alive()
        dog.check(float(look))
    thread.join(WAIT_S)
    assert taken == ["work"]
    (line,) = told
    (report,) = (tmp_path / "crash").iterdir()
    assert "a thread of the test slept" in line and "it was woken" in line and str(report) in line
    text = report.read_text()
    assert "thread the-sleeper" in text and "thread MainThread" in text and "inbox.take()" in text
    for look in range(3 * LOOKS):
        dog.check(LOOKS + look)
    assert len(told) == 1


def test_a_lost_wake_up_is_found_by_the_watching_thread(monkeypatch, dog, told):
    monkeypatch.setattr(waits, "CHECK_EVERY_S", 0.01)
    inbox = Inbox("a thread of the test")
    dog.watch(inbox)
    dog.start()
    thread, taken = sleeping(inbox)
    put_in_silence(inbox, "work")
    thread.join(WAIT_S)
    assert taken == ["work"] and told


def test_a_thread_of_environments_is_found(dog, told):
    pool = EnvPool(PoolConfig(io_threads=1), FaultyThread())
    assert asyncio.run(play(pool, pool.spec.task(0))) == 3.0
    dog.watch(*pool.inboxes)
    (inbox,) = pool.inboxes
    while not inbox._waits:
        pass
    put_in_silence(inbox, None)  # the thread's end
    for look in range(LOOKS):
        dog.check(float(look))
    assert len(told) == 1
    pool.close()


def test_honest_work_is_left_alone(dog, told):
    """Work that waits for a thread that works, a thread that sleeps without work, work that comes and goes."""
    busy, idle, flowing = Inbox("busy"), Inbox("idle"), Inbox("flowing")
    dog.watch(busy, idle, flowing)
    put_in_silence(busy, "work")
    thread, taken = sleeping(idle)
    other, others = sleeping(flowing)
    for look in range(10 * LOOKS):
        put_in_silence(flowing, look)  # in time between two looks, another item each time
        dog.check(float(look))
        flowing._items.clear()
    assert told == [] and taken == [] and others == []
    for inbox, one in ((idle, thread), (flowing, other)):
        inbox.put("end")
        one.join(WAIT_S)


def test_a_wait_in_which_nothing_moves_is_named_again_and_again(dog, told):
    dog.state = lambda: "step 3: 5 episodes done, 2 under way"
    with dog.waiting_for("the update"), dog.waiting_for("the groups of step 3"):
        for second in range(int(8 * QUIET_S) + 1):
            dog.check(float(second))
    assert [line.partition(" s;")[0].rpartition(" ")[2] for line in told] == ["10", "20", "40", "80"]
    assert all("waiting for the groups of step 3: step 3: 5 episodes done, 2 under way" in line for line in told)


def test_as_long_as_something_moves_nothing_is_said(dog, told):
    moved = iter(range(1000))
    dog.state = lambda: f"{next(moved)} steps"
    with dog.waiting_for("the groups of step 3"):
        for second in range(100):
            dog.check(float(second))
    dog.state = lambda: "idle"
    for second in range(100, 200):  # one wait after another
        with dog.waiting_for("the update"):
            dog.check(float(second))
    for second in range(200, 300):  # none
        dog.check(float(second))
    assert told == []


def test_a_state_that_cannot_be_read_stops_nothing(dog, told):
    dog.state = lambda: 1 / 0
    with dog.waiting_for("the update"):
        dog.check(0.0)
        dog.check(QUIET_S)
    assert "waiting for the update" in told[0] and "ZeroDivisionError" in told[0]


def test_waits_of_the_event_loop_have_their_names(dog, told):
    background = EventLoop(lambda: False, dog)
    dog.state = lambda: "sampler idle"
    try:
        with pytest.raises(HangError, match=r"for the groups of step 7 \(sampler idle\)") as e:
            background.run(background.within(asyncio.sleep(WAIT_S), "the groups of step 7", 0.1))
        dog.hung(e.value)
    finally:
        background.close()
    assert "hang-1.txt" in told[0]


def test_without_a_folder_reports_go_to_stderr(capsys):
    assert Watchdog().report("hang", "what hung") == "the lines above"
    err = capsys.readouterr().err
    assert err.startswith("what hung") and "thread MainThread" in err


def test_a_folder_that_cannot_be_written_to_is_said(capsys, tmp_path):
    (tmp_path / "file").touch()
    Watchdog(folder=tmp_path / "file").report("hang", "what hung")
    assert "cannot be written" in capsys.readouterr().err
