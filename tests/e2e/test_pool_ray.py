"""Episodes in Ray actors on a cluster of two nodes."""

import asyncio
import signal

import pytest

from rolljax.commands.train import main as train
from rolljax.envs.catalog import make_spec
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.pool import EnvPool, PoolConfig, open_pool
from rolljax.errors import ConfigError, EnvError
from rolljax.rewards.base import RewardContext
from rolljax.rewards.function import Function
from tests.faulty import FaultyProcess, play_again
from tests.synthetic_rewards import ends, half, hangs, said, scored

from .conftest import arguments, rows

TASKS = 12


def pool_on_ray(spec, **settings):
    return EnvPool(PoolConfig(where="ray", max_fault_frac=1.0, ray_cpus_per_worker=1.0, **settings), spec)


def gather(coroutines, seconds=240):
    async def go():
        return await asyncio.gather(*coroutines, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(go(), seconds))


async def record(pool):
    """Return all messages of concurrent episodes with a policy that is right in its first turn and wrong after."""
    episodes = await asyncio.gather(*(pool.open(pool.spec.task(i)) for i in range(TASKS)))

    async def play(episode):
        said, result = [episode.initial_messages], None
        while result is None or not (result.terminated or result.truncated):
            reference = await episode.reference_answer()
            result = await episode.step(reference if result is None else f"not {reference}")
            said += [reference, result]
        await episode.close()
        return said

    return await asyncio.gather(*(play(e) for e in episodes))


def test_the_same_episodes_in_threads_processes_and_on_two_nodes(ray_cluster):
    told = {}
    for where in ("thread", "process", "ray"):
        # four actors of three episodes: all of both nodes is needed
        pool = EnvPool(PoolConfig(where=where, workers=4, episodes_per_worker=3), make_spec("frozen_lake(seed=4)"))
        told[where] = asyncio.run(asyncio.wait_for(record(pool), 240))
        assert pool.stats.opened == pool.stats.closed == TASKS and pool.stats.faults == {}
        if where == "ray":
            assert len(ray_cluster()) == 2
        pool.close()
    assert told["thread"] == told["process"] == told["ray"]
    assert len({str(said) for said in told["ray"]}) == TASKS


def test_faults_in_actors_have_owners(ray_cluster, tmp_path):
    faults = ("step_raise", "step_nan", "step_data", "step_once_infra", "step_surrogate")
    pool = pool_on_ray(FaultyProcess(faults + ("",) * 15, str(tmp_path)), workers=2)
    raised, nan, data, again, _, *fine = gather(play_again(pool, pool.spec.task(i)) for i in range(20))
    assert type(raised) is EnvError and "KeyError" in str(raised) and type(nan) is EnvError and "nan" in str(nan)
    assert type(data).__name__ == "DataError" and again == 3.0 and fine == [3.0] * 15
    assert pool.stats.faults == {"env": 2, "infra": 1} and pool.stats.restarts == 0
    pool.close()


def test_hanging_and_dying_actors_are_replaced(ray_cluster, tmp_path):
    faults = ("step_hold", "", "step_hang", "", "step_once_kill", "", "step_once_exit", "")
    pool = pool_on_ray(FaultyProcess(faults, str(tmp_path)), workers=2, step_s=2.0, episodes_per_worker=2)
    held, *fine = gather(play_again(pool, pool.spec.task(i)) for i in range(8))
    hung = fine.pop(1)
    for culprit in (held, hung):
        assert type(culprit) is EnvError and str(culprit) == "step of faulty: no answer within 2 s"
    assert fine == [3.0] * 6 and pool.stats.timeouts == {"step": 2} and pool.stats.restarts == 4
    assert pool.stats.faults["env"] == 2
    pool.close()
    assert pool.stats.opened == pool.stats.closed


def test_a_task_that_ends_its_actors_is_set_aside(ray_cluster, tmp_path):
    """How an actor died is not known: the task is to blame when it was alone there."""
    pool = EnvPool(PoolConfig(where="ray", workers=2), FaultyProcess(("step_segv", *[""] * 7), str(tmp_path)))
    bad, *fine = gather(play_again(pool, pool.spec.task(i)) for i in range(8))
    assert fine == [3.0] * 7 and type(bad) is EnvError and bad.stage == "set_aside"
    assert pool.stats.crashes == 3 and pool.stats.set_aside == 1 and not pool.broken
    pool.close()


def test_rewards_in_actors_are_those_of_threads_and_lose_only_what_hangs_or_dies(ray_cluster):
    answers = [said(text) for text in ("four", "two", "", "x" * 10_000)]
    there, here = (scored(Function(half, where=where, workers=2), *answers) for where in ("ray", "thread"))
    assert [(t.reward, t.reward_parts) for t in there] == [(t.reward, t.reward_parts) for t in here]
    assert [t.reward for t in there] == [1.5, 0.5, 0.5, 1.5]
    others = [said(str(i)) for i in range(4)]
    for fn, text in ((hangs, "hang"), (ends, "end")):
        lost, *done = scored(Function(fn, where="ray", workers=2, timeout_s=5.0), said(text), *others)
        assert lost.status == "failed" and lost.fault.stage != "reset"
        assert [(t.status, t.reward) for t in done] == [("ok", 1.0)] * 4


def held(pool):
    """Return the CPUs that every actor of a pool requested."""
    return sorted(peer.cpus for peer in pool._backend._link._peers.values())


async def played(pool, index):
    """Play an episode of FrozenLake."""
    episode = await pool.open(pool.spec.task(index))
    result = await episode.step(await episode.reference_answer())
    await episode.close()
    return result


def test_environments_and_rewards_share_a_cluster_until_the_last_is_closed(ray_address):
    """On a connection of their own: who closes first leaves it to the other, who closes last ends it."""
    import ray

    spec = make_spec("frozen_lake(seed=4)")
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    pool = EnvPool(PoolConfig(where="ray", ray_address=ray_address), spec)
    assert signal.getsignal(signal.SIGTERM) is sigterm_handler
    with pytest.raises(ConfigError, match="not the cluster that this process uses"):
        EnvPool(PoolConfig(where="ray", ray_address="127.0.0.1:1"), spec)
    with pytest.raises(ConfigError, match="leaves nothing of the cluster's 4 CPUs"):
        EnvPool(PoolConfig(where="ray", workers=4), spec)
    scorer = Function(half, where="ray").open(RewardContext(spec))
    texts = [said(text) for text in ("four", "two", "", "x" * 100)] * 4

    async def both():
        alone = await asyncio.gather(*(played(pool, i) for i in range(TASKS)))
        mixed = await asyncio.gather(
            *(played(pool, i) for i in range(TASKS)), *(scorer.score(t.task, t) for t in texts)
        )
        assert mixed[:TASKS] == alone and held(pool) == held(scorer._pool) == [1.0] * 2
        pool.close()
        assert ray.is_initialized()
        after = await asyncio.gather(*(scorer.score(t.task, t) for t in texts))
        assert held(scorer._pool) == [1.0] * 4
        assert [r.value for r in after] == [r.value for r in mixed[TASKS:]] == [1.5, 0.5, 0.5, 1.5] * 4
        await scorer.close()

    asyncio.run(asyncio.wait_for(both(), 240))
    assert not ray.is_initialized()


def test_domains_on_a_cluster_have_a_share_each(ray_cluster):
    """Five domains on four CPUs: an actor each, which reserves none."""
    domains = {name: Domain(make_spec(f"frozen_lake(seed={i})"), 0.2) for i, name in enumerate("abcde")}
    pool = open_pool(PoolConfig(where="ray"), Mixture(domains))
    first = {pool.spec.task(i).env: i for i in reversed(range(40))}

    async def every():
        await asyncio.gather(*(played(pool, i) for i in first.values()))

    asyncio.run(asyncio.wait_for(every(), 240))
    assert len(first) == 5 and [held(each) for each in pool._pools.values()] == [[0.0]] * 5
    pool.close()


@pytest.mark.slow
def test_a_run_with_environments_and_rewards_on_ray(ray_address, tmp_path):
    """A recipe, from the first check to its end: both pools of the check and of the run, on a connection of their own."""
    import ray

    settings = {
        "PoolConfig.where": "'ray'",
        "PoolConfig.ray_address": f"'{ray_address}'",
        "Recipe.reward": "@rolljax.rewards.function.Function()",
        "Function.fn": "@tests.synthetic_rewards.half",
        "Function.where": "'ray'",
    }
    argv = arguments(tmp_path / "run", warm_start__Phase_dot_steps=1, rl__Phase_dot_steps=2)
    assert train([*argv, *(a for name, value in settings.items() for a in ("--set", f"{name} = {value}"))]) == 0
    row = rows(tmp_path / "run")[-1]
    assert row["rewards/part/half"] == 0.5
    assert row["rewards/lost_n"] == row["faults/infra_n"] == 0 and not ray.is_initialized()
