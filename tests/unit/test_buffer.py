"""Waits with a name and a deadline; groups in flight by the step that will train them."""

import asyncio
import concurrent.futures
import random
import threading

import pytest

from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.tasks import TaskStream
from rolljax.errors import EnvError, HangError
from rolljax.run.buffer import Buffer
from rolljax.threads.event_loop import EventLoop, Stopped
from rolljax.types import Group

SPEC = ReasoningGym("chain_sum")
PROMPTS, STEPS = 3, 6


@pytest.fixture
def make_background():
    made = []

    def make(should_stop=lambda: False):
        made.append(EventLoop(should_stop))
        return made[-1]

    yield make
    for background in made:
        background.close()


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_wait_gives_the_result(make_background):
    async def work():
        await asyncio.sleep(0.01)
        return 42

    background = make_background()
    assert background.wait(background.start(work()), "the answer", 10) == 42


@pytest.mark.parametrize("error", [EnvError("lost"), ValueError("odd"), TimeoutError("its own")], ids=repr)
def test_wait_raises_what_the_work_raised(make_background, error):
    async def work():
        raise error

    background = make_background()
    with pytest.raises(type(error), match=str(error)):
        background.wait(background.start(work()), "the answer", 10)


def test_a_wait_past_its_deadline_names_itself_and_ends_the_work(make_background):
    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    background = make_background()
    with pytest.raises(HangError, match="the groups of step 7"):
        background.wait(background.start(forever()), "the groups of step 7", 0.1)
    assert cancelled.wait(10)


def test_a_stop_ends_only_waits_that_may_be_interrupted(make_background):
    async def soon():
        await asyncio.sleep(0.5)
        return "done"

    background = make_background(should_stop=lambda: True)
    with pytest.raises(Stopped):
        background.wait(background.start(soon()), "x", 60)
    assert background.wait(background.start(soon()), "x", 60, interruptible=False) == "done"


def test_a_result_that_arrives_just_after_a_poll_is_not_lost(make_background):
    class Late(concurrent.futures.Future):
        """Done between the moment its first poll times out and the moment anyone looks."""

        def result(self, timeout=None):
            if not self.done():
                self.set_result("here")
                raise concurrent.futures.TimeoutError
            return super().result(timeout)

    assert make_background().wait(Late(), "x", 10) == "here"


def test_close_cancels_what_is_left_and_ends_the_thread():
    before = set(threading.enumerate())
    background, started, cancelled = EventLoop(lambda: False), threading.Event(), threading.Event()

    async def forever():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    (thread,) = set(threading.enumerate()) - before
    background.start(forever())
    assert started.wait(10)
    background.close()
    assert cancelled.is_set() and not thread.is_alive()


# ---- the buffer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Drives a buffer the way the loop does and records what was started when."""

    def __init__(self, background, stream, staleness, latency=lambda: 0.0, first=0):
        self.now, self.ages, self.dealt, self.cancelled, self.latency = first, {}, {}, [], latency

        def start(due, wanted):
            step = due[0].step if due else first
            self.ages[step] = step - self.now
            self.dealt[step] = self.dealt.get(step, []) + [d.task for d in due]
            return self.groups(due)

        self.buffer = Buffer(background, stream, start, prompts_per_step=PROMPTS, staleness=staleness, num_steps=STEPS)

    async def groups(self, due):
        async def one(d):
            await asyncio.sleep(self.latency())
            return Group(d.task, d.step, d.index, ())

        try:
            return list(await asyncio.gather(*map(one, due)))
        except asyncio.CancelledError:
            self.cancelled.append(due[0].step)
            raise

    def run(self, until=STEPS):
        trained = []
        while self.now < until:
            self.buffer.fill(self.now)
            trained.append([g.task for g in self.buffer.collect(self.now, 30)])
            self.now += 1
        return trained


def waiting(buffer):
    return buffer.row()["groups/waiting_n"]


def in_order(num_steps=STEPS):
    stream = TaskStream(SPEC, 0, 0.1)
    return [[next(stream) for _ in range(PROMPTS)] for _ in range(num_steps)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_tasks_belong_to_steps_whatever_the_latencies(make_background, staleness):
    rng = random.Random(staleness)
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), staleness, lambda: rng.random() * 0.03)
    assert trainer.run() == in_order()
    assert trainer.dealt == dict(enumerate(in_order()))
    assert waiting(trainer.buffer) == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_age_bound_is_held_and_reached(make_background, staleness):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), staleness)
    trainer.run()
    assert set(trainer.ages) == set(range(STEPS))
    assert min(trainer.ages.values()) >= 0 and max(trainer.ages.values()) == staleness
    assert all(trainer.ages[s] == staleness for s in range(staleness, STEPS))


def test_groups_ahead_are_counted_as_waiting(make_background):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), staleness=2)
    found = []
    for step in range(STEPS):
        trainer.run(step + 1)
        found.append(waiting(trainer.buffer))
    assert found == [6, 6, 6, 6, 3, 0]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 4, STEPS])
def test_a_saved_position_skips_and_repeats_nothing(make_background, staleness, done):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), staleness)
    before = trainer.run(done)
    position = trainer.buffer.position()
    stream = TaskStream(SPEC, 0, 0.1)
    stream.restore(position)
    after = Trainer(make_background(), stream, staleness, first=done).run()
    assert before + after == in_order()


@pytest.mark.parametrize("staleness", [0, 2])
def test_cancel_puts_the_stream_back(make_background, staleness):
    stream, slow = TaskStream(SPEC, 0, 0.1), [0.0]
    trainer = Trainer(make_background(), stream, staleness, lambda: slow[0])
    before = trainer.run(2)
    slow[0] = 60.0
    trainer.buffer.fill(2)
    assert waiting(trainer.buffer) == PROMPTS * (staleness + 1)
    trainer.buffer.cancel()
    assert waiting(trainer.buffer) == 0
    again = Trainer(make_background(), stream, staleness, first=2)
    assert before + again.run() == in_order()


def test_cancel_ends_what_is_in_flight(make_background):
    background = make_background()
    trainer = Trainer(background, TaskStream(SPEC, 0, 0.1), 2, lambda: 60.0)
    trainer.buffer.fill(0)
    # the loop's thread must have begun the coroutines before they can notice a cancellation
    background.wait(background.start(asyncio.sleep(0.05)), "a beat", 10)
    trainer.buffer.cancel()
    background.wait(background.start(asyncio.sleep(0.05)), "a beat", 10)
    assert sorted(trainer.cancelled) == [0, 1, 2]


def test_a_hanging_group_names_its_step(make_background):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), 0, lambda: 60.0)
    trainer.buffer.fill(0)
    with pytest.raises(HangError, match="the groups of step 1"):
        trainer.buffer.collect(0, 0.1)


# ---- further groups of a step that was collected --------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2])
def test_further_groups_take_the_next_tasks_and_go_on_counting(make_background, staleness):
    """They come from behind the tasks that are dealt out already, and no task is skipped or dealt twice."""
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), staleness)
    stream = TaskStream(SPEC, 0, 0.1)
    trainer.buffer.fill(0)
    dealt = [next(stream) for _ in range(PROMPTS * (staleness + 1))]
    groups = trainer.buffer.collect(0, 30)
    for num in (2, 1):
        groups += trainer.buffer.more(0, num, 30)
        dealt += [next(stream) for _ in range(num)]
    assert [g.index for g in groups] == list(range(PROMPTS + 3)) and {g.step for g in groups} == {0}
    assert [g.task for g in groups] == dealt[:PROMPTS] + dealt[-3:]
    assert waiting(trainer.buffer) == PROMPTS * staleness

    # the steps that were in flight keep their tasks, later ones follow
    trainer.now = 1
    dealt = dealt[PROMPTS:-3] + [next(stream) for _ in range(PROMPTS * (STEPS - 1 - staleness))]
    assert sum(trainer.run(), []) == dealt


def test_more_of_no_groups_is_nothing(make_background):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), 0)
    assert trainer.buffer.more(0, 0, 30) == []
    assert trainer.run() == in_order()


def test_after_a_save_further_groups_are_not_drawn_again(make_background):
    """Where nothing is in flight the position stands behind them."""
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), 0)
    trainer.run(1)
    extra = [g.task for g in trainer.buffer.more(0, 2, 30)]
    stream = TaskStream(SPEC, 0, 0.1)
    stream.restore(trainer.buffer.position())
    after = Trainer(make_background(), stream, 0, first=1).run()
    every = TaskStream(SPEC, 0, 0.1)
    assert in_order(1)[0] + extra + sum(after, []) == [next(every) for _ in range(PROMPTS * STEPS + 2)]


def test_hanging_further_groups_name_their_step(make_background):
    trainer = Trainer(make_background(), TaskStream(SPEC, 0, 0.1), 0, lambda: 60.0)
    with pytest.raises(HangError, match="further groups of step 4"):
        trainer.buffer.more(3, 2, 0.1)
