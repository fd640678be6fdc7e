"""Environments that fail in worker processes: who is blamed, who is spared, and that nothing is left over."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from rolljax.concurrency.child import Child
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError, DataError, EnvError, InfraError, NeighbourError
from tests.faulty import (
    ENV,
    HARMLESS,
    INFRA,
    WORKER,
    WORKER_HARMLESS,
    WORKER_INFRA,
    Faulty,
    FaultyProcess,
    FaultyThread,
    Unpicklable,
    names,
    play,
    play_again,
)

ROOT = Path(__file__).parents[2]
SHORT = {"reset_s": 0.5, "step_s": 0.5, "close_s": 0.5, "memory_gib": 4.0, "max_fault_frac": 1.0}


def marked(mark):
    """Return the living processes started by this test: they carry its mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"FAULTY_MARK={mark}".encode() in (path / "environ").read_bytes() and path.name != str(os.getpid()):
                found.append(int(path.name))
        except OSError:
            pass
    return found


def soon(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def make_pool(monkeypatch, tmp_path):
    """Return a function that makes pools for `FaultyProcess` with short timeouts; check afterwards that nothing of them
    is left."""
    mark = f"{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv("FAULTY_MARK", mark)
    Child(["true"]).stop()  # the guard of this process's children stays
    fds, threads, pools = len(os.listdir("/proc/self/fd")), threading.active_count(), []

    def make(faults=("",), cls=FaultyProcess, **settings):
        pools.append(EnvPool(PoolConfig(**(SHORT | settings)), cls(tuple(faults), str(tmp_path))))
        return pools[-1]

    yield make
    for pool in pools:
        begin = time.monotonic()
        pool.close()
        assert time.monotonic() - begin < 20
        stats = pool.stats
        assert stats.open == 0 and stats.opened == stats.closed
    soon(lambda: not marked(mark))
    assert len(os.listdir("/proc/self/fd")) == fds
    soon(lambda: threading.active_count() <= threads)


def outcomes(pool, count, run=play, at_once=32):
    """Return the outcomes of the tasks 0 to `count - 1`: rewards and exceptions."""

    async def go():
        room = asyncio.Semaphore(at_once)

        async def one(index):
            async with room:
                return await run(pool, pool.spec.task(index))

        return await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.parametrize("frac", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("where", ["inline", "thread", "process"])
def test_the_healthy_finish_and_the_faulty_are_counted(make_pool, where, frac):
    blamed, spared, lost = names(ENV), list(HARMLESS), list(INFRA)
    if where == "process":
        blamed, spared, lost = blamed + names(WORKER), spared + WORKER_HARMLESS, lost + WORKER_INFRA
    kinds = [*blamed, *spared, *lost]
    random.Random(0).shuffle(kinds)
    every, count = round(1 / frac), {0.01: 300, 0.1: 150, 0.5: 2 * len(kinds)}[frac]
    faults = [""] * count
    for turn, index in enumerate(range(0, count, every)):
        faults[index] = kinds[turn % len(kinds)]
    cls = {"inline": Faulty, "thread": FaultyThread, "process": FaultyProcess}[where]
    pool = make_pool(faults, cls, workers=2, episodes_per_worker=8)
    got = outcomes(pool, count, play_again)
    for fault, outcome in zip(faults, got, strict=True):
        if fault in blamed:
            assert type(outcome) is EnvError and outcome.stage == fault.partition("_")[0], (fault, outcome)
        elif fault not in ("step_surrogate", "step_oversized"):  # whose text is no number
            assert outcome == 3.0, (fault, outcome)
        else:
            assert outcome == 1.0, (fault, outcome)
    stats, expected = pool.stats, Counter(faults)
    assert stats.faults.get("env", 0) == sum(expected[f] for f in blamed)
    assert stats.faults.get("infra", 0) >= sum(expected[f] for f in lost)
    if where != "process":
        assert stats.faults.get("infra", 0) == sum(expected[f] for f in lost)


def test_the_neighbours_of_a_culprit_are_not_blamed(make_pool):
    """One worker, four episodes at a time, one of them faulty."""
    faults = [f for f in names(WORKER) if f != "step_memory"]
    pool = make_pool([f for fault in faults for f in (fault, "", "", "")], workers=1)

    async def four(first):
        tasks = [pool.spec.task(first + i) for i in range(4)]
        return await asyncio.gather(*(play(pool, task) for task in tasks), return_exceptions=True)

    for turn, fault in enumerate(faults):
        culprit, *others = asyncio.run(asyncio.wait_for(four(4 * turn), 60))
        assert type(culprit) is EnvError and culprit.stage == fault.partition("_")[0], (fault, culprit)
        assert all(o == 3.0 or type(o) is NeighbourError for o in others), (fault, others)
        assert pool.stats.restarts == pool.stats.faults["env"] == turn + 1, fault


def siblings(pool, tasks, each):
    """Return the outcomes of `each` episodes of every task, all started at once, and repeated while they were lost
    with a neighbour or through the machine."""

    async def go():
        plays = [play_again(pool, pool.spec.task(i)) for i in range(tasks) for _ in range(each)]
        return await asyncio.gather(*plays, return_exceptions=True)

    got = asyncio.run(asyncio.wait_for(go(), 120))
    return [got[i * each : (i + 1) * each] for i in range(tasks)]


@pytest.mark.parametrize("fault", ["reset_segv", "step_segv", "step_exit", "step_kill"])
def test_a_task_in_eight_that_ends_its_worker(make_pool, fault):
    """With default settings all other tasks succeed, and the faulty one is set aside."""
    pool = make_pool([fault, *[""] * 7], workers=2, max_fault_frac=0.5)
    bad, *healthy = siblings(pool, 8, 8)
    assert healthy == [[3.0] * 8] * 7 and not pool.broken
    assert {type(e) for e in bad} == {EnvError} and {e.stage for e in bad} <= {fault.partition("_")[0], "set_aside"}
    stats = pool.stats
    assert stats.set_aside == 1 and 3 <= stats.crashes <= 4  # two may be under way at once
    # from now on it costs other episodes nothing
    bad, *healthy = siblings(pool, 8, 8)
    assert healthy == [[3.0] * 8] * 7 and {e.stage for e in bad} == {"set_aside"}
    assert "task 0 of faulty: it is set aside after PoolConfig.max_crashes = 3 ends of its worker" in str(bad[0])
    assert pool.stats.restarts == stats.restarts and pool.stats.faults.get("infra") == stats.faults.get("infra")


def test_a_task_that_crashed_has_its_next_workers_to_itself(make_pool):
    pool = make_pool(["step_segv", *[""] * 7], workers=2, max_crashes=0)
    siblings(pool, 8, 1)
    crashes, lost = pool.stats.crashes, pool.stats.faults.get("infra", 0)
    assert crashes == 1
    bad, *healthy = siblings(pool, 8, 4)
    assert healthy == [[3.0] * 4] * 7 and pool.stats.crashes == 5 and pool.stats.set_aside == 0
    assert pool.stats.faults.get("infra", 0) == lost, "a neighbour was lost"


def test_a_worker_that_ends_between_two_calls(make_pool):
    """All tasks of the ended worker are suspects; the culprit is found when it has a worker to itself."""
    pool = make_pool(["step_later", "", "", ""], workers=1, step_s=20.0)

    async def two_steps(index):
        episode = await pool.open(pool.spec.task(index))
        for n in range(2):
            await episode.step(str(index + n + 1))
        return episode

    async def until_restarted(times):
        while pool.stats.restarts < times:
            await asyncio.sleep(0.01)

    async def go():
        episodes = await asyncio.gather(*(two_steps(i) for i in range(4)))
        await until_restarted(1)
        for episode in episodes:
            with pytest.raises(NeighbourError, match="SIGABRT"):
                await episode.step("")
            await episode.close()
        assert pool.stats.crashes == 0
        assert await asyncio.gather(*(play(pool, pool.spec.task(i)) for i in (1, 2, 3))) == [3.0] * 3
        episode = await two_steps(0)
        await until_restarted(2)
        with pytest.raises(EnvError, match="SIGABRT") as e:
            await episode.step("")
        assert type(e.value) is EnvError and pool.stats.crashes == 1
        await episode.close()
        # innocent tasks share a worker again
        assert await asyncio.gather(*(play(pool, pool.spec.task(i)) for i in (1, 2, 3))) == [3.0] * 3

    asyncio.run(asyncio.wait_for(go(), 60))


def test_errors_describe_the_end_of_a_worker(make_pool):
    faults = ("step_exit", "step_segv", "step_hang", "step_once_kill", "step_oversizedline", "step_closed")
    pool = make_pool(faults, workers=1)
    exited, crashed, hung, killed, oversized, closed = outcomes(pool, len(faults), at_once=1)
    assert str(exited) == "step of faulty: it ended with exit code 7; its last output: last words"
    assert "it crashed (SIGSEGV)" in str(crashed) and "Segmentation fault" in crashed.__notes__[0]
    assert str(hung) == "step of faulty: no answer within 0.5 s"
    assert type(killed) is InfraError and "it was killed (SIGKILL)" in str(killed)
    assert pool.stats.timeouts == {"step": 1}
    assert "it sent a line of" in str(oversized) and "it closed its connection" in str(closed)


def test_the_end_of_a_flood_of_output_is_kept(make_pool):
    (error,) = outcomes(make_pool(("step_floodthenexit",)), 1)
    assert str(error).endswith("x\nlast words") and 60_000 < len(error.__notes__[0]) < 70_000


@pytest.mark.parametrize("cls", [Faulty, FaultyThread, FaultyProcess])
def test_errors_of_rolljax_keep_their_class(make_pool, cls):
    pool = make_pool(("step_data", "step_config", "step_enverror", "step_infra"), cls)
    data, config, own, infra = outcomes(pool, 4)
    assert type(data) is DataError and type(config) is ConfigError and "pip install chess" in str(config)
    assert type(own) is EnvError and own.stage == "board" and type(infra) is InfraError and infra.stage == "step"


def test_a_reference_action_that_hangs_ends_its_worker(make_pool):
    pool = make_pool(("gold_hangs",))

    async def go():
        episode = await pool.open(pool.spec.task(0))
        assert await episode.reference_answer() == "1"
        await episode.close()

    asyncio.run(go())


@pytest.mark.parametrize("cls", [FaultyThread, FaultyProcess])
@pytest.mark.parametrize("fault", ["reset_slow", "step_slow", "close_slow"])
def test_a_cancelled_caller_leaves_nothing_behind(make_pool, tmp_path, cls, fault):
    """After cancellation at any time, every environment is closed, and the pool still works."""
    pool = make_pool((fault,), cls, workers=1, reset_s=20.0, step_s=20.0, close_s=20.0)

    async def go():
        for pause in (0.0, 0.001, 0.02, 0.1, 0.21, 0.3):
            tasks = [asyncio.ensure_future(play(pool, pool.spec.task(i))) for i in range(2)]
            await asyncio.sleep(pause)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await play(pool, pool.spec.task(0)) == 3.0

    asyncio.run(go())
    pool.close()
    stats = pool.stats
    assert stats.faults == {} and stats.restarts == 0
    assert stats.opened <= len(list(tmp_path.glob("closed-*"))) <= stats.opened + stats.failed


def test_an_episode_that_stays_open_too_long(make_pool, tmp_path):
    pool = make_pool(episode_s=0.3)

    async def go():
        slow, quick = await pool.open(pool.spec.task(0)), await pool.open(pool.spec.task(1))
        assert (await quick.step("2")).reward == 1.0
        await quick.close()
        await asyncio.sleep(0.5)
        with pytest.raises(EnvError, match="episode_s = 0.3 s") as e:
            await slow.step("1")
        assert e.value.stage == "episode" and type(e.value) is EnvError
        await slow.close()

    asyncio.run(go())
    assert pool.stats.faults == {"limit": 1} and pool.stats.timeouts == {"episode": 1}
    soon(lambda: len(list(tmp_path.glob("closed-*"))) == 2)


def test_workers_that_cannot_start(make_pool):
    pool = make_pool(cls=Unpicklable)
    begin = time.monotonic()
    (error,) = outcomes(pool, 1)
    assert type(error) is InfraError and error.stage == "start" and time.monotonic() - begin < 60
    assert "5 starts in a row failed" in str(error) and "no module named nowhere" in str(error)


def test_workers_that_hang_at_their_start(make_pool):
    pool = EnvPool(PoolConfig(start_s=0.5, close_s=0.5, workers=1), Unpicklable(how="hang"))
    (error,) = outcomes(pool, 1)
    pool.close()
    assert type(error) is InfraError and "no answer within 0.5 s" in str(error) and pool.stats.timeouts["start"] >= 5


def test_a_python_that_is_not_there(make_pool, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    (error,) = outcomes(make_pool(), 1)
    assert type(error) is InfraError and "could not be started" in str(error) and "/no/python" in str(error)


def test_too_many_faults_of_the_infrastructure_break_the_pool(make_pool):
    pool = make_pool(("step_infra", "step_infra", "step_infra", ""), max_fault_frac=0.5, fault_window=16)
    got = outcomes(pool, 32, at_once=1)
    assert [type(o) for o in got[:4]] == [InfraError] * 3 + [float]
    assert type(got[-1]) is InfraError and got[-1].stage == "pool" and got[-1].args[0] == pool.broken
    assert "12 of the last 16" in pool.broken and "raise max_fault_frac" in pool.broken


def test_a_worker_is_replaced_at_the_end_of_its_life(make_pool):
    pool = make_pool(("step_fds",), workers=1, worker_lifetime=5)
    assert outcomes(pool, 50, at_once=4) == [3.0] * 50 and 9 <= pool.stats.restarts <= 10
    assert pool.stats.faults == {}


def test_the_process_that_starts_workers_may_die(make_pool, monkeypatch):
    pool = make_pool()

    async def go():
        episode = await pool.open(pool.spec.task(0))
        os.kill(pool._backend._link._fork_server.pid, signal.SIGKILL)
        with pytest.raises(InfraError, match="the process that starts workers was killed .SIGKILL."):
            for _ in range(1000):
                await episode.reference_answer()
                await asyncio.sleep(0.01)
        await episode.close()
        assert await play_again(pool, pool.spec.task(1)) == 3.0

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_fail_when_the_dispatcher_has_failed(make_pool, monkeypatch):
    pool = make_pool()

    async def go():
        episode = await pool.open(pool.spec.task(0))
        monkeypatch.setattr(pool._backend, "_place", lambda: 1 / 0)
        with pytest.raises(InfraError, match="dispatcher failed: ZeroDivisionError"):
            await episode.reference_answer()
        with pytest.raises(InfraError, match="dispatcher failed: ZeroDivisionError"):
            await pool.open(pool.spec.task(1))
        await episode.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_when_the_pool_is_killed_its_workers_end(monkeypatch, tmp_path):
    """Also an environment that hangs while it holds the interpreter's lock is ended, and so are its children."""
    code = f"""
import asyncio
from rolljax.envs.pool import EnvPool, PoolConfig
from tests.faulty import FaultyProcess, play
spec = FaultyProcess(("step_zombies", "step_hold"), {str(tmp_path)!r})
pool = EnvPool(PoolConfig(workers=2), spec)
async def go():
    await play(pool, spec.task(0))
    print("ready", flush=True)
    await play(pool, spec.task(1))
asyncio.run(go())
"""
    mark = f"{os.getpid()}-{tmp_path.name}"
    env = os.environ | {"FAULTY_MARK": mark, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as host:
        assert host.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        assert len(marked(mark)) >= 4  # it, the fork server, two workers
        host.kill()
    soon(lambda: not marked(mark))


def test_what_a_worker_gets_from_the_environment(make_pool, monkeypatch):
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD", "TOKENIZERS_PARALLELISM", "SHOP_KEY"):
        monkeypatch.setenv(name, "1")
    pool = make_pool(pass_env=("SHOP_KEY",), workers=1)

    async def go():
        episode = await pool.open(pool.spec.task(0))
        await episode.close()

    asyncio.run(go())
    (worker,) = [
        pid
        for pid in marked(os.environ["FAULTY_MARK"])
        if Path(f"/proc/{pid}/stat").read_text().split()[3] != str(os.getpid())
    ]
    environ = dict(v.split("=", 1) for v in Path(f"/proc/{worker}/environ").read_text().split("\0") if v)
    assert not {"HF_TOKEN", "OPENAI_API_KEY", "MY_PASSWORD"} & set(environ)
    assert environ["TOKENIZERS_PARALLELISM"] == environ["SHOP_KEY"] == "1"
    assert environ["JAX_PLATFORMS"] == "cpu" and environ["PYTHONHASHSEED"] == "0"
    assert "libjax" not in Path(f"/proc/{worker}/maps").read_text()
