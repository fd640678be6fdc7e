"""Replicas that are lost, join, are slow, fetch weights, and are of two kinds; the run's own router places answers."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from rolljax import simulate as verb
from rolljax.envs.catalog import make_spec
from rolljax.envs.mixture import Domain, Mixture
from rolljax.errors import ConfigError
from rolljax.simulate import simulate
from rolljax.simulation import clock, report
from rolljax.simulation.replica import SimulatedAnswer
from rolljax.simulation.sampler import SimulatedSampler
from rolljax.simulation.timings import (
    ClusterTimings,
    Distribution,
    DomainLengths,
    EngineTimings,
    EnvTimings,
    Timings,
    TrainerTimings,
    from_json,
    to_json,
)
from tests.simulations import TOKEN_A_SECOND, recipe, step_s, timings

FAULTY = ClusterTimings(mtbf_s=2000.0, rejoin_s=180.0, slow_frac=0.05)


def play(events, answers, replicas=2, slots=2, prefill_s=0.1, **cluster):
    """Play a sampler of dispatches of two tokens: answers are (second, tokens), of one prompt of 20 tokens each; events
    are (second, function of the sampler). Returns the answers."""

    async def run():
        loop = asyncio.get_running_loop()
        engine = EngineTimings(replicas=replicas, step_s=1.0, prefill_s=prefill_s)
        sampler = SimulatedSampler(Timings(engine=engine, cluster=ClusterTimings(**cluster)), replicas * slots, 1, 2, 0)
        made = []

        async def ask(number, at, tok):
            await asyncio.sleep(at)
            answer = SimulatedAnswer(number, (0, number), 20, 20, tok, tok, loop.create_future(), at)
            made.append(answer)
            await sampler.generate(answer, min_version=sampler.version)

        for at, event in events:
            loop.call_at(at, event, sampler)
        await asyncio.gather(*(ask(i, *answer) for i, answer in enumerate(answers)))
        return made

    return clock.run(run())


def lose(index):
    return lambda sampler: sampler.fleet._lose(sampler.replicas[index])


def publish(version):
    return lambda sampler: sampler.publish(version, pause_s=0.0, recompute=False)


def test_an_answer_of_a_lost_replica_goes_on_from_the_tokens_that_had_arrived():
    """20 tokens of prompt in 2 s; lost at 7 s, with 5 of 10 tokens, of which 4 came with whole dispatches; 24 tokens in
    2.4 s, and 6 more."""
    [answer] = play([(7.0, lose(0))], [(0.0, 10)])
    assert answer.ended_s == pytest.approx(7 + 2.4 + 6) and answer.replica == 1
    assert [len(part) for part in (*answer.kept, answer.versions)] == [4, 6]


def test_a_lost_replica_gets_answers_from_the_next_version_on():
    found = play([(0.5, lose(0)), (30.0, publish(1))], [(0.0, 4), (20.0, 4), (31.0, 4)], slots=1, rejoin_s=5.0)
    assert [a.replica for a in found] == [1, 1, 0]
    assert [a.versions.tolist() for a in found] == [[0] * 4, [0] * 4, [1] * 4]


def test_a_replica_that_joins_gets_answers_from_the_next_version_on():
    answers = [(1.0, 4), (12.0, 20), (12.0, 4), (41.0, 4), (41.0, 4)]
    found = play([(40.0, publish(1))], answers, slots=1, join_s=(10.0,), prefill_s=0.0)
    assert [a.replica for a in found] == [0, 0, 0, 0, 1]
    assert found[2].started_s == pytest.approx(32)


def test_a_group_waits_for_a_replica_with_the_version_of_its_start():
    found = play([(1.0, publish(1))], [(2.0, 2)], replicas=1, fetch_s=Distribution(center=6.0), prefill_s=0.0)
    assert found[0].started_s == pytest.approx(7) and found[0].versions.tolist() == [1, 1]


def test_a_slow_replica_takes_its_time():
    found = play([], [(0.0, 10), (0.0, 10)], slots=1, slow_frac=0.5, slow_factor=3.0, prefill_s=0.0)
    assert sorted(a.ended_s for a in found) == pytest.approx([10, 30])


def test_losses_change_no_answer_and_break_no_bound():
    """Of several turns, one version ahead: the same lengths, all groups, no older token; a repeated run is the same."""
    world = timings(
        turns=Distribution(center=3.0),
        engine=dataclasses.replace(TOKEN_A_SECOND, replicas=8, prefill_s=0.01),
        env=EnvTimings(step_s=Distribution(center=5.0)),
        observation_tok=Distribution(center=50.0),
    )
    run = recipe(slots=32, prompts=8, group=4, steps=6, async_ratio=1.0)
    faulty = dataclasses.replace(world, cluster=FAULTY)
    (_, plain), (runtime, recorder), (_, again) = (simulate(run, w) for w in (world, faulty, faulty))
    assert runtime.sampler.fleet.losses > 10 and runtime.sampler.rerouted > 10
    assert recorder.rows == again.rows and set(recorder.ages) <= {0, 1}
    numbers = report.summarize(runtime, recorder).numbers
    assert numbers["lost_replicas"] == runtime.sampler.fleet.losses
    assert numbers["rerouted_answers"] == runtime.sampler.rerouted
    synchronous = verb.with_setting(run, "async_ratio", 0)
    lengths = [[r["rollout/len_tok"] for r in simulate(synchronous, w)[1].rows] for w in (world, faulty)]
    assert lengths[0] == lengths[1]
    assert sorted(plain.trained) == sorted(recorder.trained)


def cluster_step_s(samplers, cluster, steps):
    """Return the seconds of a step, about 420, and the runtime: five answers for each of four slots."""
    world = timings(
        Distribution("lognormal", 70.0, 0.6, group_spread=0.3, cap=210.0),
        EngineTimings(replicas=samplers, step_s=1.0, prefill_s=0.01),
        cluster=cluster,
        prompt_tok=Distribution(center=100.0),
        trainer=TrainerTimings(step_s=50.0),
    )
    run = recipe(slots=4 * samplers, prompts=5 * samplers, group=4, steps=steps, async_ratio=1.0)
    runtime, recorder = simulate(run, world)
    rows = recorder.rows
    return (rows[-2]["end_s"] - rows[1]["end_s"]) / (len(rows) - 3), runtime


@pytest.mark.parametrize(
    ("samplers", "steps", "limit"), [(40, 8, 1.1), pytest.param(160, 8, 1.05, marks=pytest.mark.sweep)]
)
def test_losses_cost_little(samplers, steps, limit):
    """Each replica lost every eight hours, back in three minutes, one of twenty at half the speed: 5 %, and more by chance
    where there are few. benchmarks/simulated_cluster.py has 2,000."""
    plain_s, _ = cluster_step_s(samplers, ClusterTimings(), steps)
    faulty_s, runtime = cluster_step_s(samplers, ClusterTimings(mtbf_s=8 * 3600.0, slow_frac=0.05), steps)
    assert runtime.sampler.fleet.losses > 2 and faulty_s < limit * plain_s


# ---- two kinds


def two_kinds(bandwidth_replicas, affinity=True):
    """Return the seconds of a step: agents with much prefill, and answers that reason; one kind of replica computes
    prompts at four times the speed of the other, which decodes at twice the speed."""
    spec = Mixture({"agent": Domain(make_spec("sokoban"), 0.5), "reason": Domain(make_spec("frozen_lake"), 0.5)})
    run = recipe(slots=64, prompts=40, group=4, steps=10, async_ratio=1.0)
    world = timings(
        engine=EngineTimings(replicas=8, step_s=0.02, prefill_s=1e-3),
        domains={
            "agent": DomainLengths(
                answer_tok=Distribution("lognormal", 30.0, 0.3),
                prompt_tok=Distribution(center=1000.0),
                observation_tok=Distribution(center=500.0),
                turns=Distribution(center=4.0),
            ),
            "reason": DomainLengths(Distribution("lognormal", 1500.0, 0.3), Distribution(center=100.0)),
        },
        cluster=ClusterTimings(
            bandwidth_replicas=bandwidth_replicas,
            bandwidth_prefill_speed=0.25,
            bandwidth_decode_speed=2.0,
            affinity=affinity,
        ),
    )
    return step_s(dataclasses.replace(run, env=spec), world, skip=3)


def test_affinity_beats_either_kind_alone():
    """At equal cost: RollArt has 1.12 to 1.37 of its better kind."""
    alone_s, both_s = min(two_kinds(0), two_kinds(8)), two_kinds(4)
    assert alone_s >= 1.12 * both_s
    assert two_kinds(4, affinity=False) >= 1.12 * both_s


# ---- settings


def test_settings_of_domains_and_cluster_there_and_back():
    world = Timings(domains={"a": DomainLengths(turns=Distribution(center=3.0))}, cluster=FAULTY)
    assert from_json(json.loads(json.dumps(to_json(world))), Timings) == world
    assert world.of_domain("a").turns.center == 3.0 and world.of_domain("b") == world
    with pytest.raises(ConfigError, match=r"DomainLengths\.colour is not known"):
        from_json({"domains": {"a": {"colour": 1}}}, Timings)


@pytest.mark.parametrize(
    ("engine", "cluster"),
    [
        ({"replicas": 2}, {"bandwidth_replicas": 3}),
        ({"replicas": 2}, {"join_s": (1.0, 2.0)}),
        ({"scheduling": "group"}, {"mtbf_s": 10.0}),
    ],
)
def test_settings_that_do_not_fit_are_refused(engine, cluster):
    world = Timings(engine=EngineTimings(**engine), cluster=ClusterTimings(**cluster))
    with pytest.raises(ConfigError, match="EngineTimings"):
        simulate(recipe(slots=4, prompts=2, group=2, steps=1), world)


def test_a_user_asks_what_losses_cost(tmp_path, capsys):
    settings = ["--set", "rl/Phase.prompts_per_step=4", "--set", "EngineTimings.replicas=4"]
    sweep = ["--set", "EngineTimings.step_s=0.5", "--steps", "3", "--sweep", "ClusterTimings.mtbf_s=0,20"]
    assert verb.main(["--gin", "quickstart", *settings, *sweep, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["0"]["lost_replicas"] == 0 < found["20"]["lost_replicas"]
    assert np.isfinite(found["20"]["step_s"])
