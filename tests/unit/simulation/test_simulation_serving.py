"""Rollouts on the GPUs of users (ROSE) and serverless reward workers (RollArt): the rules by hand, and on the virtual clock."""

import dataclasses

import numpy as np
import pytest

from rolljax.simulate import simulate
from rolljax.simulation import report
from rolljax.simulation.coserving import LinearPredictor, ServingTimings, admits, emergency, slack_s
from rolljax.simulation.reward_workers import RewardTimings, RewardWorkers
from rolljax.simulation.timings import Distribution, EngineTimings, EnvTimings
from tests.simulations import recipe, timings

# ---- ROSE's rules


@pytest.mark.parametrize(
    ("now_s", "since_s", "budget_s", "predicted_s", "slack", "admitted"),
    [
        (10.05, 10.0, 0.15, 0.06, 0.04, True),
        (10.02, 10.0, 0.05, 0.02, 0.01, True),
        (10.02, 10.0, 0.05, 0.04, -0.01, False),
    ],
)
def test_slack(now_s, since_s, budget_s, predicted_s, slack, admitted):
    found = slack_s(now_s, since_s, budget_s, predicted_s)
    assert found == pytest.approx(slack)
    assert admits([found]) is admitted
    assert admits([1.0, found]) is admitted
    assert admits([])  # nobody is served


def test_a_burst_halves_what_rollouts_have():
    assert emergency(64, [("a", 20), ("b", 20), ("c", 10), ("d", 14)]) == (32, ["d", "c", "b"])
    assert emergency(64, [("a", 20), ("b", 12)]) == (32, [])


def test_a_predictor_follows_and_is_seldom_too_low():
    rng, predictor = np.random.default_rng(0), LinearPredictor(window=128)
    assert predictor(1000, 3) == 0.0
    for slope in (1e-4, 3e-4):
        late = 0
        for n in range(600):
            tokens, sequences = rng.integers(1, 2000), rng.integers(0, 64)
            seconds = 0.02 + slope * tokens + 1e-3 * sequences + 0.005 * rng.standard_normal()
            late += n >= 200 and seconds > predictor(tokens, sequences)
            predictor.observe(seconds, tokens, sequences)
        assert late / 400 < 0.08
        assert predictor(1000, 10) == pytest.approx(0.03 + 1000 * slope + predictor.margin_s, rel=0.05)
        assert predictor.margin_s == pytest.approx(1.645 * 0.005, rel=0.3)


# ---- with users

ENGINE = EngineTimings(step_s=0.02, sequence_s=1e-4, prefill_s=5e-5)
USERS = ServingTimings(requests_s=1.6, seconds=480.0, answer_tok=50)


def beside(serving, steps):
    world = timings(Distribution("lognormal", 1000.0, 0.5), ENGINE, serving=serving)
    runtime, recorder = simulate(recipe(slots=64, prompts=32, group=8, steps=steps), world)
    first_s = {r.arrival_s: r.first_s - r.arrival_s for s in runtime.serving for r in s.done}
    numbers = report.summarize(runtime, recorder).numbers
    return numbers, first_s, recorder.rows[-1]["end_s"]


def test_users_do_not_notice_rollouts():
    """Five times as many requests come in bursts. Of a hundred users 99 get their first token as soon as without
    rollouts, to 5 %; rollouts that only run while no user is served are much slower."""
    numbers, first_s, end_s = beside(USERS, 5)
    _, alone_first_s, alone_end_s = beside(dataclasses.replace(USERS, rollouts=False), 5)
    both = first_s.keys() & alone_first_s.keys()
    assert len(both) > 1000
    with_rollouts, without = (np.percentile([s[at] for at in both], 99) for s in (first_s, alone_first_s))
    assert without <= with_rollouts < 1.05 * without < USERS.ttft_s
    assert numbers["served_late_frac"] < 0.002
    assert alone_end_s - end_s > 120


def test_rollouts_are_faster_where_there_are_fewer_users():
    found = [1 / beside(s, 1)[2] for s in (USERS, dataclasses.replace(USERS, requests_s=0.1), None)]
    assert found == sorted(found) and found[2] > 1.5 * found[0]


def test_a_burst_takes_memory_from_rollouts_until_the_next_version():
    """Rollouts continue at the other replicas, all with the tokens of a run without users."""
    engine = dataclasses.replace(ENGINE, kv_tok=60_000, replicas=2)
    run = recipe(slots=128, prompts=32, group=8, steps=3)
    plain, world = (
        timings(Distribution("lognormal", 1000.0, 0.5), engine, serving=s)
        for s in (None, dataclasses.replace(USERS, seconds=100.0))
    )
    runtime, recorder = simulate(run, world)
    assert [r["rollout/len_tok"] for r in recorder.rows] == [r["rollout/len_tok"] for r in simulate(run, plain)[1].rows]
    published_s = recorder.rows[0]["end_s"]
    for serving in runtime.serving:
        (cut_s,) = (s for s in serving.cuts if s < published_s)  # once, however long the burst
        own = [a for a in runtime.sampler.ended if a.replica == serving.replica.index and a.started_s < published_s]
        left = sum(a.started_s < cut_s < a.ended_s for a in own)
        later_s = [a.started_s for a in own if a.started_s > cut_s]
        assert 0 < left < 64
        assert max(sum(a.started_s <= t < a.ended_s for a in own) for t in later_s) <= left
    assert runtime.sampler.rerouted > 20


# ---- reward workers


def test_serverless_workers_start_when_needed_and_end_when_idle():
    workers = RewardWorkers(RewardTimings("serverless", workers=2, start_s=2.0, keep_s=10.0))
    assert workers.score(0.0, 1.0) == 3.0  # from zero
    assert workers.score(0.5, 1.0) == 3.5  # a second worker
    assert workers.score(0.5, 1.0) == 4.0  # there is no third: after the first
    assert workers.score(8.0, 1.0) == 9.0  # one that has waited since 3.5
    assert workers.score(30.0, 1.0) == 33.0  # both have ended at 14 and 19
    assert workers.busy_s == 5.0 and workers.alive_s(33.0) == pytest.approx((14.0 - 0.0) + (19.0 - 0.5) + 3.0)


def test_dedicated_workers_have_one_queue():
    workers = RewardWorkers(RewardTimings("dedicated", workers=2))
    assert [workers.score(s, 4.0) for s in (0.0, 1.0, 1.5, 9.0)] == [4.0, 5.0, 8.0, 13.0]
    assert workers.alive_s(20.0) == 40.0


def test_serverless_rewards_free_the_devices_of_dedicated_ones():
    """RollArt: half of the devices are kept for a judge that is busy for a few percent of the time; serverless, they
    sample, so that rollouts take half as long (158 s and 77 s in the paper) and the workers are used (6 % and 88 %)."""
    found = {}
    for slots, rewards in (
        (32, RewardTimings("dedicated", workers=16)),
        (64, RewardTimings("serverless", start_s=0.05, keep_s=0.2)),
    ):
        world = timings(
            Distribution("lognormal", 100.0, 0.2),
            EngineTimings(step_s=0.2, replicas=slots // 8),
            env=EnvTimings(score_s=Distribution(center=1.0)),
            rewards=rewards,
        )
        found[rewards.kind] = report.summarize(
            *simulate(recipe(slots=slots, prompts=64, group=8, steps=4), world)
        ).numbers
    dedicated, serverless = found["dedicated"], found["serverless"]
    assert dedicated["rollout_s"] / serverless["rollout_s"] == pytest.approx(158 / 77, rel=0.1)
    assert dedicated["reward_busy_frac"] < 0.1 and serverless["reward_busy_frac"] > 0.8


def test_a_score_that_waits_too_long_is_the_pools_fault():
    from rolljax.envs.pool import PoolConfig

    pool = PoolConfig(where="process", step_s=30.0, max_fault_frac=1.0)
    world = timings(
        Distribution(center=5.0),
        env=EnvTimings(score_s=Distribution(center=10.0)),
        rewards=RewardTimings("dedicated", workers=8),
    )
    _, recorder = simulate(recipe(slots=64, prompts=4, group=8, steps=2, pool=pool), world)
    assert recorder.rows[0]["rollout/fail_frac"] == pytest.approx(
        8 / 32
    )  # the fourth of each worker would end after 40 s
    assert recorder.rows[0]["time/step_s"] == pytest.approx(35.0)
