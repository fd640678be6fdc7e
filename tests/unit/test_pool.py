"""The pool of environment threads: results, failures, deadlines."""

import asyncio
import threading

import pytest

from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError, DataError, EnvError


@pytest.fixture
def make_pool():
    pools = []

    def make(**settings):
        pools.append(EnvPool(PoolConfig(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_results_come_back_to_their_callers(make_pool):
    pool = make_pool(workers=3)

    async def run():
        return await asyncio.gather(*(pool.call(lambda i=i: i * i, "square") for i in range(2000)))

    assert asyncio.run(run()) == [i * i for i in range(2000)]


def test_jobs_run_outside_the_event_loop(make_pool):
    pool = make_pool(workers=1)

    async def run():
        return await pool.call(threading.get_ident, "who"), threading.get_ident()

    worker, loop = asyncio.run(run())
    assert worker != loop


def test_foreign_exceptions_get_an_owner_and_ours_pass(make_pool):
    pool = make_pool()

    async def run():
        ours = DataError("no tasks")

        def fail(error):
            raise error

        return ours, await asyncio.gather(
            pool.call(lambda: fail(KeyError("hole")), "step of lake"),
            pool.call(lambda: fail(ours), "reset of lake"),
            pool.call(lambda: "fine", "x"),
            return_exceptions=True,
        )

    ours, (foreign, passed, fine) = asyncio.run(run())
    assert type(foreign) is EnvError and str(foreign) == "step of lake: KeyError: 'hole'"
    assert passed is ours and fine == "fine"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hanging_job_fails_alone(make_pool, workers):
    pool, release = make_pool(workers=workers, step_timeout_s=0.3), threading.Event()

    async def run():
        hanging = asyncio.ensure_future(pool.call(release.wait, "step of a stuck lake"))
        later = [pool.call(lambda i=i: i, "later") for i in range(50)]
        return await asyncio.gather(hanging, *later, return_exceptions=True)

    error, *later = asyncio.run(asyncio.wait_for(run(), 20))
    release.set()
    assert type(error) is EnvError and str(error) == "step of a stuck lake: no answer within 0.3 s"
    assert later == list(range(50)) and pool.num_timeouts == 1


def test_time_in_the_queue_does_not_count(make_pool):
    pool, gate = make_pool(workers=1, step_timeout_s=1.0), threading.Event()

    async def run():
        jobs = [asyncio.ensure_future(pool.call(lambda: gate.wait(0.2), "short")) for _ in range(7)]
        return await asyncio.gather(*jobs)

    assert asyncio.run(run()) == [False] * 7 and pool.num_timeouts == 0


def test_a_late_answer_reaches_nobody_and_its_thread_ends(make_pool):
    pool, release, late = make_pool(workers=1, step_timeout_s=0.2), threading.Event(), []

    def slow():
        late.append(threading.current_thread())
        release.wait()

    async def run():
        with pytest.raises(EnvError, match="no answer within"):
            await pool.call(slow, "slow")
        release.set()
        return [await pool.call(lambda i=i: i, "later") for i in range(20)]

    assert asyncio.run(asyncio.wait_for(run(), 20)) == list(range(20))
    late[0].join(timeout=5)
    assert not late[0].is_alive()


def test_one_event_loop_after_another(make_pool):
    """A loop that ended while its job ran must not take the pool with it."""
    pool, started, release = make_pool(workers=1), threading.Event(), threading.Event()

    async def abandon():
        job = asyncio.ensure_future(pool.call(lambda: (started.set(), release.wait(10)), "abandoned"))
        while not started.is_set():
            await asyncio.sleep(0.01)
        job.cancel()

    asyncio.run(abandon())
    release.set()
    assert asyncio.run(asyncio.wait_for(pool.call(lambda: 7, "next"), 5)) == 7


def test_close_ends_all_threads():
    before = set(threading.enumerate())
    pool = EnvPool(PoolConfig(workers=3))
    assert asyncio.run(pool.call(lambda: 1, "one")) == 1
    ours = set(threading.enumerate()) - before
    assert len(ours) == 4
    pool.close()
    for thread in ours:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in ours)


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"step_timeout_s": 0.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PoolConfig(**wrong)
