"""The event loop of a run: coroutines, blocking calls in another thread, and waits with a name and a deadline."""

import asyncio
import gc
import signal
import threading

import pytest

from rolljax.concurrency.event_loop import EventLoop, SteppedLoop, Stopped
from rolljax.errors import EnvError, HangError


@pytest.fixture
def make_event_loop():
    made = []

    def make(should_stop=lambda: False):
        made.append(EventLoop(should_stop))
        return made[-1]

    yield make
    for event_loop in made:
        event_loop.close()


async def answer(passes=3):
    """Return 42 after `passes` passes of the loop."""
    for _ in range(passes):
        await asyncio.sleep(0)
    return 42


async def forever(started, cancelled):
    """Wait forever; set `cancelled` when cancelled."""
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.set()


# ---- what runs in the loop ------------------------------------------------------------------------------------------


def test_run_gives_the_result(make_event_loop):
    event_loop = make_event_loop()
    assert event_loop.run(answer()) == 42
    assert event_loop.run(event_loop.within(answer(), "the answer", 60)) == 42


@pytest.mark.parametrize("error", [EnvError("lost"), ValueError("odd"), TimeoutError("its own")], ids=repr)
def test_run_raises_what_the_work_raised(make_event_loop, error):
    async def work():
        raise error

    event_loop = make_event_loop()
    for wrapped in (work(), event_loop.within(work(), "the answer", 60)):
        with pytest.raises(type(error), match=str(error)):
            event_loop.run(wrapped)


def test_the_event_loop_runs_in_a_thread_of_its_own(make_event_loop):
    async def where():
        return threading.get_ident()

    event_loop = make_event_loop()
    assert event_loop.run(where()) == event_loop.run(where()) != threading.get_ident()


# ---- waits ----------------------------------------------------------------------------------------------------------


def test_a_wait_past_its_deadline_names_itself_and_ends_the_work(make_event_loop):
    started, cancelled, event_loop = threading.Event(), threading.Event(), make_event_loop()
    with pytest.raises(HangError, match="the groups of step 7.*Recipe.wait_s"):
        event_loop.run(event_loop.within(forever(started, cancelled), "the groups of step 7", 0.1))
    assert started.is_set() and cancelled.wait(10)


def test_a_wait_for_several_that_is_given_up_leaves_no_error_to_log(make_event_loop, caplog):
    """The garbage collector logs errors that were never awaited, whenever it runs."""
    event_loop = make_event_loop()

    async def both():
        works = [forever(threading.Event(), threading.Event()) for _ in range(2)]
        await event_loop.within(asyncio.gather(*works), "x", 0.1)

    with pytest.raises(HangError):
        event_loop.run(both())
    event_loop.run(answer(passes=9))  # until the works are cancelled
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_stop_ends_only_waits_that_may_be_interrupted(make_event_loop):
    released = asyncio.Event()

    async def released_work():
        await released.wait()
        return "done"

    started, cancelled, asked = threading.Event(), threading.Event(), []

    def should_stop():
        asked.append(True)
        return True

    event_loop = make_event_loop(should_stop)
    with pytest.raises(Stopped):
        event_loop.run(event_loop.within(forever(started, cancelled), "x", 60))
    assert asked and cancelled.wait(10)

    async def both():
        waiting = asyncio.ensure_future(event_loop.within(released_work(), "x", 60, interruptible=False))
        await asyncio.sleep(0.5)  # longer than it takes to ask
        assert not waiting.done()
        released.set()
        return await waiting

    asked.clear()
    assert event_loop.run(both()) == "done" and not asked


def test_what_is_done_when_the_run_is_told_to_stop_is_not_lost(make_event_loop):
    assert (event_loop := make_event_loop(lambda: True)).run(event_loop.within(answer(), "x", 60)) == 42


# ---- what blocks ----------------------------------------------------------------------------------------------------


def test_a_blocking_call_does_not_block_the_loop(make_event_loop):
    """The loop keeps running: otherwise the call could never return."""
    event_loop, released = make_event_loop(), threading.Event()

    def blocks(number, *, more):
        assert released.wait(30)
        return threading.get_ident(), number + more

    async def both():
        call = asyncio.ensure_future(event_loop.call(blocks, 40, more=2))
        await answer()
        assert not call.done()
        released.set()
        return threading.get_ident(), await call

    here, (there, number) = event_loop.run(both())
    assert number == 42 and len({here, there, threading.get_ident()}) == 3


def test_calls_raise_what_they_raised(make_event_loop):
    event_loop = make_event_loop()
    with pytest.raises(ZeroDivisionError):
        event_loop.run(event_loop.call(lambda: 1 // 0))


def test_calls_are_made_one_after_the_other(make_event_loop):
    event_loop, under_way, order = make_event_loop(), threading.Lock(), []

    def one(number):
        assert under_way.acquire(blocking=False)
        order.append(number)
        under_way.release()

    async def many():
        await asyncio.gather(*(event_loop.call(one, i) for i in range(50)))

    event_loop.run(many())
    assert order == list(range(50))


def test_a_call_is_not_interrupted(make_event_loop):
    """The waiting coroutine may be cancelled; the call runs to its end, and the next call waits for that."""
    event_loop, released, done = make_event_loop(), threading.Event(), []

    def blocks():
        assert released.wait(30)
        done.append("first")

    async def work():
        with pytest.raises(HangError):
            await event_loop.within(event_loop.call(blocks), "x", 0.1)
        released.set()
        await event_loop.call(done.append, "second")

    event_loop.run(work())
    assert done == ["first", "second"]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_close_cancels_what_is_left_and_ends_the_threads():
    before = set(threading.enumerate())
    event_loop, started, cancelled = EventLoop(lambda: False), threading.Event(), threading.Event()

    async def begin():
        task = asyncio.ensure_future(forever(started, cancelled))
        await asyncio.sleep(0)
        return task, await event_loop.call(threading.current_thread)

    task, beside = event_loop.run(begin())
    threads = set(threading.enumerate()) - before
    assert started.is_set() and len(threads) == 2 and beside in threads
    event_loop.close()
    beside.join(30)
    assert task.cancelled() and cancelled.is_set() and not any(t.is_alive() for t in threads)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["the work", "another task"])
def test_what_ends_the_loop_ends_the_run(make_event_loop, error, where):
    loop = make_event_loop()

    async def ends():
        raise error(3)

    async def work():
        if where == "the work":
            await ends()
        task = asyncio.ensure_future(ends())
        await asyncio.Event().wait()
        return task

    with pytest.raises(error):
        loop.run(work())


# ---- a loop that stands still ---------------------------------------------------------------------------------------


def test_a_stepped_loop_stands_still_while_nobody_waits():
    """Also for callers that are in an event loop."""
    passes = []

    async def count():
        while True:
            passes.append(threading.get_ident())
            await asyncio.sleep(0)

    async def begin():
        return asyncio.create_task(count())

    async def caller():
        with SteppedLoop() as loop:
            task = loop.run(begin())
            before = len(passes)
            assert loop.run(answer(5)) == 42 and before < len(passes)
            still = len(passes)
            await asyncio.sleep(0.01)
            assert len(passes) == still
            with pytest.raises(ValueError, match="odd"):
                loop.run(raises(ValueError("odd")))
        assert task.cancelled() and set(passes).isdisjoint({threading.get_ident()})

    asyncio.run(caller())


def test_a_stepped_loop_works_on_many_items_and_gives_their_results_in_order():
    started, cancelled = [], []

    async def work(item):
        started.append(item)
        try:
            if item != 1:
                await answer()
            if item == 3:
                await asyncio.Event().wait()
            return 10 * item
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with SteppedLoop() as loop:
        results = loop.each(range(9), work, 3)
        assert [next(results), next(results)] == [(0, 0), (1, 10)] and started == [0, 1, 2, 3]
        results.close()
        assert cancelled == [3]
        with pytest.raises(ValueError, match="odd"):
            list(loop.each([ValueError("odd")], raises, 3))
        assert list(loop.each([], work, 3)) == []


async def raises(error):
    raise error


def test_an_interrupt_cancels_what_a_stepped_loop_runs():
    started, cancelled = threading.Event(), threading.Event()

    def interrupt():
        assert started.wait(30)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it
    try:
        with SteppedLoop() as loop:
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                loop.run(forever(started, cancelled))
            assert cancelled.is_set() and loop.run(answer()) == 42  # it can be used on
    finally:
        signal.signal(signal.SIGINT, before)
