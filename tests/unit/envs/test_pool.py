"""The pool in this process: results, limits, cancelled callers, counts; and the language that workers speak."""

import asyncio
import dataclasses
import json
import pickle
import subprocess
import sys
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rolljax import sandbox
from rolljax.envs.base import Action, Env, EnvSpec, StepResult
from rolljax.envs.catalog import make_spec
from rolljax.envs.pool import EnvPool, PoolConfig, wire
from rolljax.envs.pool.episode_runner import check_answer, check_messages, check_opening, check_result
from rolljax.envs.pool.processes import spec_bytes, worker_environ
from rolljax.envs.pool.wire import WorkerEpisodes
from rolljax.errors import ConfigError, DataError, EnvError, InfraError
from rolljax.sandbox import SandboxConfig
from rolljax.types import Message, Task

LIMIT = 1000


@dataclasses.dataclass(frozen=True)
class Scripted(EnvSpec):
    """An environment whose methods are given; they get the episode's index and the action."""

    runs = "inline"

    reset: object = None
    step: object = None
    close: object = None
    reference: object = None

    @property
    def name(self):
        return "scripted"

    def task(self, index):
        return Task(self.name, index, str(index))

    def make(self):
        return ScriptedEnv(self)


@dataclasses.dataclass(frozen=True)
class Waiting(Scripted):
    runs = "thread"


class ScriptedEnv(Env):
    def __init__(self, spec):
        self.spec = spec

    def reset(self, task):
        self.index = task.index
        if self.spec.reset:
            self.spec.reset(task.index)
        return (Message("user", str(task.index)),)

    def step(self, action):
        if self.spec.step:
            result = self.spec.step(self.index, action)
            if isinstance(result, StepResult):
                return result
        return StepResult((Message("user", action),), float(self.index), False)

    def reference_answer(self):
        return self.spec.reference(self.index) if self.spec.reference else str(self.index)

    def close(self):
        if self.spec.close:
            self.spec.close(self.index)


def slots_here(index, action):
    return StepResult((Message("user", "."),), float(sandbox.settings().slots), False)


@pytest.fixture
def make_pool():
    pools = []

    def make(cls=Scripted, methods=None, **settings):
        pools.append(EnvPool(PoolConfig(**settings), cls(**(methods or {}))))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def run(coroutine, seconds=30):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def one_step(pool, index, action="go"):
    episode = await pool.open(pool.spec.task(index))
    try:
        return await episode.step(action)
    finally:
        await episode.close()


@pytest.mark.parametrize("cls", [Scripted, Waiting])
def test_results_come_back_to_their_callers(make_pool, cls):
    pool = make_pool(cls, workers=3, io_threads=40)

    async def go():
        return await asyncio.gather(*(one_step(pool, i, f"act {i}") for i in range(500)))

    results = run(go())
    assert [r.reward for r in results] == list(range(500))
    assert [r.messages[0].content for r in results] == [f"act {i}" for i in range(500)]
    stats = pool.stats
    assert (stats.opened, stats.closed, stats.open, stats.steps, stats.failed) == (500, 500, 0, 500, 0)
    assert stats.faults == {} and stats.timeouts == {} and stats.restarts == 0


def test_calls_run_outside_the_event_loop(make_pool):
    seen = []
    pool = make_pool(methods={"step": lambda i, a: seen.append(threading.get_ident())})
    run(one_step(pool, 0))
    assert seen != [threading.get_ident()]


def test_foreign_exceptions_get_an_owner_and_ours_pass(make_pool):
    errors = [KeyError("hole"), DataError("no tasks"), EnvError("lost", stage="board"), InfraError("refused"), None]

    def step(index, action):
        if errors[index]:
            raise errors[index]

    pool = make_pool(methods={"step": step})

    async def go():
        return await asyncio.gather(*(one_step(pool, i) for i in range(5)), return_exceptions=True)

    foreign, data, env, infra, fine = run(go())
    assert type(foreign) is EnvError and str(foreign) == "step of scripted: KeyError: 'hole'"
    assert foreign.stage == "step" and isinstance(foreign.__cause__, KeyError)
    assert data is errors[1] and env is errors[2] and env.stage == "board"
    assert infra is errors[3] and infra.stage == "step" and fine.reward == 4.0
    assert pool.stats.faults == {"env": 2, "infra": 1} and pool.stats.opened == pool.stats.closed == 5


def test_reference_and_rejected(make_pool):
    pool = make_pool()

    async def go():
        episode = await pool.open(pool.spec.task(7))
        assert episode.initial_messages == (Message("user", "7"),)
        with pytest.raises(EnvError, match="no rejected answers") as e:
            await episode.rejected()
        assert e.value.stage == "rejected"
        assert await episode.reference_answer() == "7"
        await episode.close()

    run(go())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hanging_call_fails_alone_and_is_cleared_when_it_returns(make_pool, workers):
    release, closed = threading.Event(), []
    methods = {"step": lambda i, a: release.wait() if i == 0 else None, "close": closed.append}
    pool = make_pool(methods=methods, workers=workers, step_s=0.3)

    async def go():
        hanging = asyncio.ensure_future(one_step(pool, 0))
        return await asyncio.gather(hanging, *(one_step(pool, i) for i in range(1, 50)), return_exceptions=True)

    error, *others = run(go())
    assert type(error) is EnvError and str(error) == "step of scripted: no answer within 0.3 s"
    assert error.stage == "step" and [o.reward for o in others] == list(range(1, 50))
    assert pool.stats.timeouts == {"step": 1} and pool.stats.restarts == 1 and pool.stats.open == 0
    assert sorted(closed) == list(range(1, 50)), "an environment was closed while a call was in it"
    release.set()
    end = time.monotonic() + 10
    while 0 not in closed:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_time_in_the_queue_does_not_count(make_pool):
    gate = threading.Event()
    pool = make_pool(methods={"step": lambda i, a: gate.wait(0.2)}, workers=1, step_s=1.0)

    async def go():
        return await asyncio.gather(*(one_step(pool, i) for i in range(7)))

    assert len(run(go())) == 7 and pool.stats.timeouts == {}


def test_waiting_environments_get_a_thread_each(make_pool):
    together = threading.Barrier(64)
    pool = make_pool(Waiting, {"step": lambda i, a: together.wait(20) and None}, workers=1, io_threads=64)

    async def go():
        return await asyncio.gather(*(one_step(pool, i) for i in range(64)))

    assert len(run(go())) == 64


@pytest.mark.parametrize("runs", ["inline", "process"])
def test_scorers_that_compute_get_few_threads(make_pool, runs):
    """However many calls there are at once: they would only wait for each other."""
    cls = dataclasses.dataclass(frozen=True)(type("Computing", (Scripted,), {"runs": runs}))
    pool = make_pool(cls, where="thread")

    async def go():
        return await asyncio.gather(*(one_step(pool, i) for i in range(512)))

    assert len(run(go())) == 512
    assert len(pool._backend._threads) == 2


def test_waiting_environments_get_as_many_threads_as_they_hold_up(make_pool):
    """300 calls that wait for each other get 300 threads; calls one after the other have one."""
    pool = make_pool(Waiting, {"step": lambda i, a: together.wait(20) and None})

    async def go():
        return await asyncio.gather(*(one_step(pool, i) for i in range(together.parties)))

    together = threading.Barrier(1)
    for _ in range(20):
        run(go())
    assert len(pool._backend._threads) == 1
    together = threading.Barrier(300)
    assert len(run(go())) == 300
    assert len(pool._backend._threads) == 300


@pytest.mark.parametrize("stage", ["reset", "step", "close"])
def test_a_cancelled_caller_leaves_nothing_open(make_pool, stage):
    started, release, closed = threading.Event(), threading.Event(), []

    def block(index, action=None):
        if index == 0:
            started.set()
            release.wait()

    def close(index):
        if stage == "close":
            block(index)
        closed.append(index)

    methods = {"close": close} | ({stage: block} if stage != "close" else {})
    pool = make_pool(methods=methods, workers=1)

    async def go():
        task = asyncio.ensure_future(one_step(pool, 0))
        queued = asyncio.ensure_future(one_step(pool, 1))
        while not started.is_set():
            await asyncio.sleep(0.001)
        for t in (task, queued):
            t.cancel()
        await asyncio.gather(task, queued, return_exceptions=True)
        assert pool.stats.open == 0
        release.set()
        await one_step(pool, 2)

    run(go())
    pool.close()
    assert closed.count(0) == 1 and closed.count(2) == 1 and len(closed) <= 3
    assert pool.stats.opened == pool.stats.closed and pool.stats.faults == {}


def test_one_call_at_a_time_and_none_after_the_end(make_pool):
    over = StepResult((), 1.0, True)
    pool = make_pool(methods={"step": lambda i, a: over if a == "end" else time.sleep(0.05)})

    async def go():
        episode = await pool.open(pool.spec.task(0))
        first = asyncio.ensure_future(episode.step("go"))
        await asyncio.sleep(0)
        with pytest.raises(EnvError, match="another call under way"):
            await episode.reference_answer()
        await first
        assert (await episode.step("end")).terminated
        with pytest.raises(EnvError, match="the episode is over") as e:
            await episode.step("go")
        assert e.value.stage == "step"
        await episode.close()
        await episode.close()
        with pytest.raises(EnvError, match="is closed"):
            await episode.reference_answer()

    run(go())


def test_a_failed_step_ends_the_episode(make_pool):
    pool = make_pool(methods={"step": lambda i, a: 1 / 0})

    async def go():
        episode = await pool.open(pool.spec.task(0))
        for match in ("ZeroDivisionError", "an earlier step failed"):
            with pytest.raises(EnvError, match=match):
                await episode.step("go")
        await episode.close()

    run(go())
    assert pool.stats.faults == {"env": 1}


def test_the_wall_clock_of_an_episode(make_pool):
    closed, release = [], threading.Event()
    methods = {"close": closed.append, "step": lambda i, a: release.wait() if i == 1 else None}
    pool = make_pool(methods=methods, episode_s=0.2, workers=3)

    async def go():
        forgotten, stuck = await pool.open(pool.spec.task(0)), await pool.open(pool.spec.task(1))
        for episode in (stuck, forgotten):
            with pytest.raises(EnvError, match="open for more than PoolConfig.episode_s = 0.2 s") as e:
                await episode.step("go")
                await asyncio.sleep(0.5)
                await episode.step("go")
            assert e.value.stage == "episode"
        assert pool.stats.open == 0

    run(go())
    release.set()
    pool.close()
    assert sorted(closed) == [0, 1] and pool.stats.timeouts == {"episode": 2} and pool.stats.faults == {"limit": 2}


def test_one_event_loop_after_another(make_pool):
    """A loop that ended while its call ran must not take the pool with it."""
    started, release = threading.Event(), threading.Event()

    def step(index, action):
        if index == 0:
            started.set()
            release.wait(10)

    pool = make_pool(methods={"step": step}, workers=1)

    async def abandon():
        task = asyncio.ensure_future(one_step(pool, 0))
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(abandon())
    release.set()
    assert run(one_step(pool, 7)).reward == 7.0


@pytest.mark.parametrize("cls", [Scripted, Waiting])
def test_close_ends_all_threads_and_episodes(cls):
    before, closed = set(threading.enumerate()), []
    pool = EnvPool(PoolConfig(workers=3), cls(close=closed.append))
    run(one_step(pool, 0))

    async def leave_open():
        for i in (1, 2):
            await pool.open(pool.spec.task(i))

    run(leave_open())
    ours = set(threading.enumerate()) - before
    assert ours
    pool.close()
    assert not any(thread.is_alive() for thread in ours) and sorted(closed) == [0, 1, 2]
    with pytest.raises(InfraError, match="the pool is closed") as e:
        run(one_step(pool, 3))
    assert e.value.stage == "pool"


def test_closing_under_a_call_is_bounded():
    release = threading.Event()
    pool = EnvPool(PoolConfig(close_s=0.2), Scripted(step=lambda i, a: release.wait()))

    async def go():
        task = asyncio.ensure_future(one_step(pool, 0))
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await asyncio.to_thread(pool.close)
        assert time.monotonic() - begin < 10
        with pytest.raises(InfraError, match="the pool was closed"):
            await task

    run(go())
    release.set()


def test_where_decides_over_what_the_environment_says(make_pool):
    @dataclasses.dataclass(frozen=True)
    class Heavy(Scripted):
        runs = "process"

    pool = make_pool(Heavy, where="thread")
    assert run(one_step(pool, 3)).reward == 3.0


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_pool_sets_the_sandboxes_of_every_process_that_runs_episodes(make_pool, where):
    before = sandbox.settings()
    try:
        pool = make_pool(methods={"step": slots_here}, where=where, workers=1, sandboxes=SandboxConfig(slots=7))
        assert run(one_step(pool, 0)).reward == 7.0
    finally:
        sandbox.configure(before)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": -1},
        {"max_crashes": -1},
        {"io_threads": 0},
        {"episodes_per_worker": 0},
        {"worker_lifetime": 0},
        {"step_s": 0.0},
        {"reset_s": float("nan")},
        {"episode_s": float("inf")},
        {"where": "cloud"},
        {"max_observation_bytes": 10},
        {"memory_gib": 0.01},
        {"max_fault_frac": 1.5},
        {"fault_window": 0},
        {"ray_cpus_per_worker": -1.0},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PoolConfig(**wrong)


def test_settings_that_cannot_travel_are_refused():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to worker processes"):
        spec_bytes(Scripted(step=lambda i, a: lock.acquire()))


def test_what_workers_cannot_import_travels_by_value():
    """A class of `__main__` and a lambda, as a notebook has them, are made again in a process that has neither."""
    code = """if True:
        import dataclasses, sys
        from rolljax.envs.games.frozen_lake import FrozenLake
        from rolljax.envs.pool.processes import spec_bytes
        factor = 3

        @dataclasses.dataclass(frozen=True)
        class Mine(FrozenLake):
            say: object = lambda self: factor * self.size

        sys.stdout.buffer.write(spec_bytes(Mine(size=5)))
    """
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    spec = pickle.loads(sent)
    assert type(spec).__name__ == "Mine" and spec.size == 5 and spec.say(spec) == 15
    assert spec.make().reset(spec.task(0))


def test_secrets_stay_here():
    ours = {
        "PATH": "/bin",
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "aws_secret_access": "x",
        "TOKENIZERS_PARALLELISM": "0",
    }
    got = worker_environ(ours | {"KEYBOARD": "us", "SHOP_KEY": "y"}, ("SHOP_KEY",))
    assert {"PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "SHOP_KEY"} <= set(got)
    assert not {"HF_TOKEN", "WANDB_API_KEY", "aws_secret_access"} & set(got)


# what an environment may say


def result(**changes):
    return dataclasses.replace(StepResult((Message("user", "x"),), 1.0, False), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": float("nan")},
        {"reward": float("inf")},
        {"reward": 10**400},
        {"reward": "1"},
        {"reward": None},
        {"reward": 1j},
        {"weight": float("nan")},
        {"weight": -1.0},
        {"terminated": True, "truncated": True},
        {"terminated": 1},
        {"success": None},
        {"messages": ()},
        {"messages": "text"},
        {"messages": None},
        {"messages": ("text",)},
        {"messages": (Message("user", None),)},
        {"messages": (Message("", "x"),)},
        {"messages": (Message("r" * 65, "x"),)},
        {"messages": (Message("user", "x"),) * 1001},
        {"reward_parts": {"a": float("nan")}},
        {"reward_parts": {1: 1.0}},
        {"reward_parts": [("a", 1.0)]},
        {"metrics": {"a": "1"}},
        {"metrics": {"a" * 201: 1.0}},
        {"metrics": {str(i): 1.0 for i in range(257)}},
    ],
    ids=repr,
)
def test_results_that_break_the_rules(changes):
    with pytest.raises(EnvError):
        check_result(result(**changes), LIMIT)


def test_results_that_obey_pass_as_they_are():
    for fine in (result(), result(messages=(), terminated=True), result(messages=(), truncated=True)):
        assert check_result(fine, LIMIT) is fine
    with pytest.raises(EnvError, match="returns a StepResult, not a tuple"):
        check_result(((), 1.0, True, False, {}), LIMIT)
    with pytest.raises(EnvError, match="opening conversation is empty"):
        check_opening((), LIMIT)


def test_numbers_of_numpy_become_floats():
    parts = {"a": np.float32(0.5), "b": np.int64(2)}
    got = check_result(result(reward=np.float32(0.5), terminated=np.True_, reward_parts=parts, metrics=parts), LIMIT)
    assert got == result(reward=0.5, terminated=True, reward_parts={"a": 0.5, "b": 2.0}, metrics={"a": 0.5, "b": 2.0})
    assert {type(got.reward), *map(type, got.reward_parts.values())} == {float} and type(got.terminated) is bool


@hypothesis.given(
    st.lists(st.text(st.characters(codec=None, categories=None), max_size=600), min_size=1, max_size=4),
    st.integers(256, 600),
)
def test_observations_are_cut_and_can_be_written(texts, limit):
    messages = check_messages([Message("user", t) for t in texts], limit)
    assert sum(len(m.content.encode()) for m in messages) <= limit and len(messages) == len(texts)
    assert check_messages(messages, limit) == messages


def test_the_middle_of_an_observation_is_cut_out():
    (message,) = check_messages([Message("tool", "a" * 1000 + "b" * 1000)], 300)
    assert message.content == "a" * 130 + "\n[1740 bytes left out]\n" + "b" * 130
    (message,) = check_messages([Message("tool", "x\udc80y\ud83d\ude00")], 300)
    assert message.content == "x\ufffdy\U0001f600"
    with pytest.raises(EnvError, match="an action of 400 characters"):
        check_answer("a" * 400, 300)


# what goes over the wire


def value(verb, payload, limit=LIMIT):
    number, outcome, plain = wire.parse(payload)
    return wire.value_of(verb, outcome, plain, limit)


def test_what_is_said_arrives():
    said = result(
        reward_parts={"a": 0.1}, metrics={"n": 3.0}, weight=0.5, messages=(Message("tool", "é\0\ufffd\n\"'"),)
    )
    assert value("step", wire.reply(1, "step", said)) == said
    assert value("reset", wire.reply(1, "reset", said.messages)) == said.messages
    assert (
        value("reference_answer", wire.reply(1, "reference_answer", "a")) == "a"
        and value("close", wire.reply(1, "close", None)) is None
    )
    for error in (EnvError("lost", stage="board"), InfraError("refused", stage="step"), DataError("none")):
        got = value("step", wire.failure(1, error))
        assert type(got) is type(error) and str(got) == str(error)
        assert getattr(got, "stage", "") == getattr(error, "stage", "")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"{}",
        b"[1]",
        b'[1,"ok"]',
        b'["1","ok",null]',
        b'[true,"ok",null]',
        b'[1,"ok",null]x',
        b'[1,"ok","\xff"]',
        b"[" * 100_000,
        b"1" * 5000,
        b'[1,"maybe",[]]',
        b'[1,"error","text"]',
        b'[1,"error",["EnvError",1,""]]',
        b'[1,"ok",[]]',
        b'[1,"ok",[[],1.0,true,true,false,{},1.0,{}]]',
        b'[1,"ok",[[["user","x"]],NaN,false,false,false,{},1.0,{}]]',
        b'[1,"ok",[[["user","x"]],1e999,false,false,false,{},1.0,{}]]',
        b'[1,"ok",[[["user","x"]],true,false,false,false,{},1.0,{}]]',
        b'[1,"ok",[[["user","x"]],1.0,0,false,false,{},1.0,{}]]',
        b'[1,"ok",[[["user","x"]],1.0,false,false,false,{"a":"b"},1.0,{}]]',
        b'[1,"ok",[[["user"]],1.0,false,false,false,{},1.0,{}]]',
        b'[1,"ok",[[["user",1]],1.0,false,false,false,{},1.0,{}]]',
        b'[1,"ok",[[],1.0,false,false,false,{},1.0,{}]]',
    ],
    ids=lambda p: repr(p[:40]),
)
def test_what_no_honest_worker_says(payload):
    with pytest.raises(wire.ProtocolError):
        value("step", payload)


def test_an_error_is_none_of_the_machine_unless_it_says_so():
    """A worker cannot choose what is raised beyond the four kinds."""
    for name in ("SystemExit", "RolljaxError", "HangError", "__builtins__", ""):
        assert type(value("step", json.dumps([1, "error", [name, "x", ""]]).encode())) is EnvError


@hypothesis.given(st.binary(max_size=200))
def test_bytes_that_mean_nothing_are_refused(payload):
    with pytest.raises(wire.ProtocolError):
        value("step", payload)


def test_a_host_plays_like_the_environment_itself():
    spec = make_spec("frozen_lake")
    host, env, task = WorkerEpisodes(spec, LIMIT), spec.make(), spec.task(3)
    assert value("reset", host.answer((1, 9, "reset", task))) == env.reset(task)
    for number in range(2, 20):
        action = value("reference_answer", host.answer((number, 9, "reference_answer", None)))
        assert action == env.reference_answer()
        got, expected = value("step", host.answer((number, 9, "step", Action(action)))), env.step(action)
        assert got == expected
        if got.terminated:
            break
    assert isinstance(value("step", host.answer((30, 9, "step", Action(action)))), EnvError)
    assert value("close", host.answer((31, 9, "close", None))) is None
    assert value("close", host.answer((32, 9, "close", None))) is None
    assert isinstance(value("step", host.answer((33, 9, "step", Action("up")))), EnvError)
