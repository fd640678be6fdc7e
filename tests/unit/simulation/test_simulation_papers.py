"""What ROLL Flash, RollPacker and RollArt say of time, by formula and from the loop on a virtual clock."""

import dataclasses
import heapq

import numpy as np
import pytest

from rolljax.rollout.group_buffer import TailBatching
from rolljax.simulate import simulate
from rolljax.simulation.bounds import Workload
from rolljax.simulation.timings import Distribution, EngineTimings, EnvTimings, TrainerTimings
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.credit.shaping import GroupFilter
from tests.simulations import TOKEN_A_SECOND, recipe, step_s, timings, with_scheduling

# ---- propositions


PAPER = Workload(samples=256, workers=64, generate_s=20, longest_s=120, train_s=4)


def test_proposition_1():
    assert PAPER.sample_s(0) == 0.78125 and PAPER.sample_s(2) == 0.46875
    assert PAPER.generation_speedup == 7


def test_proposition_2():
    assert [PAPER.step_s(a) for a in (0, 1, 2, 4)] == [216, 156, 136, 120]
    assert PAPER.step_s(8) == pytest.approx(109.33, abs=0.005)
    assert [round(PAPER.trainer_frac(a), 4) for a in (0, 1, 2, 8)] == [0.0741, 0.1026, 0.1176, 0.1463]
    assert PAPER.speedup == 2.25


@pytest.mark.slow
def test_the_split_of_proposition_2_is_close_to_the_best_of_a_sweep():
    """16 answers of a step on each device, up to 6 times as long as their mean, two versions ahead."""
    paper = Workload(samples=512, workers=32, generate_s=20, longest_s=120, train_s=4)

    def split_s(trainers):
        run = recipe(slots=32 - trainers, prompts=32, group=16, steps=7, answer_tok=121, async_ratio=2.0)
        lengths = Distribution("lognormal", 20 * np.exp(-0.5), 1.0, cap=120.0)
        return step_s(run, timings(lengths, trainer=TrainerTimings(step_s=512 * 4 / trainers)), skip=3)

    chosen = round(32 * paper.trainer_frac(2))
    found = {trainers: split_s(trainers) for trainers in range(4, 9)}
    assert found[chosen] <= 1.1 * min(found.values())
    assert found[4] > 1.2 * min(found.values())


def test_the_simulator_stays_within_the_bound_of_proposition_1():
    """And is above what any schedule needs: all slots busy all the time."""
    for ratio in (0.0, 1.0):
        run = recipe(slots=32, prompts=16, group=4, steps=24, async_ratio=ratio)
        _, recorder = simulate(run, timings())
        lengths = [row["rollout/len_tok"] for row in recorder.rows]
        seconds = np.mean([row["time/step_s"] for row in recorder.rows])
        bound = Workload(64, 32, float(np.mean(lengths)), 4000.0)
        assert bound.busy_s * 0.97 <= seconds <= 64 * bound.sample_s(ratio) * 1.03


# ---- rollout scheduling (ROLL Flash, section 5)


@pytest.mark.slow
def test_prompt_replication():
    check_replication(64, 16, 16, 2.26, 5)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("prompts", "group", "slots", "ratio", "steps"),
    [(32, 16, 16, 1.61, 40), (64, 16, 16, 2.26, 40), (16, 64, 64, 1.51, 30)],
)
def test_prompt_replication_in_numbers(prompts, group, slots, ratio, steps):
    check_replication(prompts, group, slots, ratio, steps)


def check_replication(prompts, group, slots, ratio, steps):
    """Compare a group of independent requests with one that occupies a worker's slots until its longest answer is
    done."""
    run = recipe(slots=8 * slots, prompts=prompts, group=group, steps=steps)
    queue = timings(engine=dataclasses.replace(TOKEN_A_SECOND, replicas=8))
    assert step_s(run, with_scheduling(queue, "group")) / step_s(run, queue) == pytest.approx(ratio, rel=0.1)


def batches_until(valid, run, world):
    """Return the seconds until rounds of whole batches, without a queue, have `valid` groups with a signal."""
    _, recorder = simulate(run, world)
    seconds, found, spent = [], 0, 0.0
    for row in recorder.rows:
        spent += row["time/step_s"]
        found += round((1 - row["reward/zero_std_frac"]) * valid)
        if found >= valid:
            seconds, found, spent = [*seconds, spent], 0, 0.0
    return np.mean(seconds)


@pytest.mark.sweep
@pytest.mark.parametrize(("spares", "seconds", "ratio"), [(11, 1238, 4.1), (16, 954, 5.4)])
def test_queue_scheduling_with_redundant_prompts(spares, seconds, ratio):
    """8 groups with a signal of 8 answers; half of the groups have none. The paper keeps 8 + 8 and 8 + 16 in flight; here
    a group that is ready keeps its place, so that 16 are in flight on average with 11 spares."""
    world = timings(no_signal_frac=0.5, env=EnvTimings(score_s=Distribution(center=20.0)))
    plain = recipe(slots=1024, prompts=8, group=8, steps=120)
    sampling = Grpo(clip_low=None, clip_high=None, dual_clip=None, filter=GroupFilter(dynamic_sampling_rounds=50))
    queue = recipe(slots=1024, prompts=8, group=8, steps=30, algorithm=sampling, spare_prompts=spares, late="drop")
    batch_s, queue_s = batches_until(8, plain, world), step_s(queue, world)
    assert batch_s == pytest.approx(5132, rel=0.1)
    assert queue_s == pytest.approx(seconds, rel=0.1)
    assert batch_s / queue_s == pytest.approx(ratio, rel=0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("spread", "ratio"), [(1.0, 1.10), (5.0, 1.40), (10.0, 1.65)])
def test_environments_that_do_not_wait_for_each_other(spread, ratio):
    """64 environments of 8 turns, 5 s of decoding and N(10, spread) s of latency each."""
    run = recipe(slots=64, prompts=8, group=8, steps=12)
    world = timings(
        Distribution(center=5.0),
        turns=Distribution(center=8.0),
        env=EnvTimings(step_s=Distribution(center=10.0, spread=spread)),
    )
    assert step_s(run, with_scheduling(world, "batch")) / step_s(run, world) == pytest.approx(ratio, rel=0.1)


REDUNDANT = {(32, 8): 344, (36, 8): 112, (32, 9): 104, (36, 9): 67, (36, 12): 58}


def redundant_s(groups, size, steps):
    """Return the seconds of 32 of `groups` groups and 8 of `size` siblings; 5 turns of N(10, 5) s, and one of a hundred
    episodes hangs for 300 s."""
    spare = groups - 32
    run = recipe(
        slots=512,
        prompts=32,
        group=8,
        steps=steps,
        spare_prompts=spare,
        spare_siblings=size - 8,
        late="drop" if spare else "wait",
    )
    latency = Distribution(center=10.0, spread=5.0, hang_frac=0.01 / 5, hang=300.0)
    world = timings(
        Distribution(center=1.0),
        EngineTimings(step_s=0.0),
        turns=Distribution(center=5.0),
        env=EnvTimings(step_s=latency),
    )
    return step_s(run, world)


@pytest.mark.slow
def test_redundant_environments():
    many, few = redundant_s(32, 8, 8), redundant_s(36, 9, 4)
    assert few == pytest.approx(67, rel=0.1)
    assert many / few == pytest.approx(5.1, rel=0.1)


@pytest.mark.sweep
@pytest.mark.parametrize(("groups", "size"), [(32, 8), (36, 9), (36, 12)])
def test_redundant_environments_in_numbers(groups, size):
    assert redundant_s(groups, size, 40) == pytest.approx(REDUNDANT[groups, size], rel=0.1)


@pytest.mark.slow
def test_resets_that_hang():
    """RollArt: one of a hundred resets takes 300 s longer. Turns that wait for all episodes take more than three times
    as long; with spare groups and siblings, and no such waits, a step takes hardly longer."""

    def seconds(hang_frac, scheduling, spares):
        run = recipe(
            slots=512, prompts=32, group=8, steps=3, spare_prompts=4 * spares, spare_siblings=spares,
            late="drop" if spares else "wait",
        )  # fmt: skip
        env = EnvTimings(
            reset_s=Distribution(center=1.0, hang_frac=hang_frac, hang=300.0),
            step_s=Distribution(center=10.0, spread=5.0),
        )
        world = timings(Distribution(center=1.0), EngineTimings(step_s=0.0), turns=Distribution(center=5.0), env=env)
        return step_s(run, with_scheduling(world, scheduling))

    assert seconds(0.01, "batch", 0) > 3 * seconds(0.0, "batch", 0)
    assert seconds(0.01, "queue", 1) < 1.2 * seconds(0.0, "queue", 1)


# ---- asynchronous training


def unbounded_step_s(async_ratio, steps=300):
    """Simulate the same work with a bound on the answers in flight, but none on their age."""
    rng, now, waiting, running, ready, trained_s, ends = np.random.default_rng(0), 0.0, 0, [], 0, 0.0, []

    def begin():
        nonlocal waiting
        while waiting and len(running) < 64:
            heapq.heappush(running, now + min(rng.lognormal(np.log(200), 1), 4000))
            waiting -= 1

    waiting = int((1 + async_ratio) * 64)
    for _ in range(steps):
        while ready < 64 or now < trained_s:
            begin()
            if ready >= 64 and (not running or running[0] > trained_s):
                now = trained_s
            else:
                now, ready = heapq.heappop(running), ready + 1
        ready, waiting, trained_s = ready - 64, waiting + 64, now + 300
        ends.append(now)
    return np.diff(ends)[5:].mean()


def async_step_s(ratio, steps, **phase):
    run = recipe(slots=64, prompts=64, group=1, steps=steps, async_ratio=ratio, **phase)
    return step_s(run, timings(trainer=TrainerTimings(step_s=300.0)), skip=round(ratio) + 1)


@pytest.mark.slow
def test_the_gain_of_asynchrony_saturates():
    """64 answers of a step on 64 slots, 300 s of training. Synchronous: the longest answer, then the trainer. In the
    limit: no slot is ever free (mean length 328)."""
    sync = async_step_s(0.0, 60)
    assert sync == pytest.approx(2484, rel=0.1)
    found = [sync, *(async_step_s(ratio, 30) for ratio in (1.0, 4.0, 12.0))]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(332, rel=0.1)
    for ratio, seconds in zip((0, 1, 4, 12), found, strict=True):
        assert seconds <= 64 * Workload(64, 64, 328.0, 4000.0).sample_s(ratio) + 300


@pytest.mark.parametrize(("ratio", "seconds"), [(0.25, 539), (0.5, 391), (1.0, 332), (2.0, 332)])
def test_without_a_bound_on_staleness_a_ratio_of_one_is_enough(ratio, seconds):
    """The figures that go around for this workload are those of a buffer that trains whatever is ready, however old. An
    answer of 2,200 tokens that is trained at most one version after its start takes two steps of 1,100 s."""
    assert unbounded_step_s(ratio) == pytest.approx(seconds, rel=0.1)
    assert ratio > 0.5 or unbounded_step_s(ratio) < async_step_s(ratio, 10)


# ---- tail batching (RollPacker)


def tail_batching(steps):
    """Return the seconds of a round with and without tail batching, and the recorder of the former."""
    lengths = Distribution("lognormal", 500.0, 0.5, group_spread=0.7)
    runs = [
        recipe(slots=512, prompts=32, group=8, steps=steps, answer_tok=8000, tail_batching=tail)
        for tail in (None, TailBatching(1.25))
    ]
    _, recorder = simulate(runs[1], timings(lengths))
    return step_s(runs[0], timings(lengths)), recorder


def check_tail_batching(steps, rel):
    plain_s, recorder = tail_batching(steps)
    rounds = np.array([row["time/step_s"] for row in recorder.rows])
    is_long = np.array([row["groups/started_n"] == 32 for row in recorder.rows])
    assert plain_s == pytest.approx(5110, rel=rel)
    assert plain_s / rounds.mean() == pytest.approx(2.10, rel=rel)
    assert is_long.mean() == pytest.approx(0.2, abs=0.03)
    assert rounds[~is_long].mean() == pytest.approx(1260, rel=rel)
    assert rounds[is_long].mean() == pytest.approx(7119, rel=rel)
    assert max(row["stale/max_ver"] for row in recorder.rows) == 0
    draws = sorted(draw for _, draw in recorder.trained)
    assert draws == list(range(32 * steps))


@pytest.mark.slow
def test_tail_batching():
    check_tail_batching(40, rel=0.1)


@pytest.mark.sweep
def test_tail_batching_at_full_length():
    check_tail_batching(400, rel=0.1)


# ---- bounded staleness (RollArt)


def test_nothing_is_trained_beyond_the_bound():
    """Whatever hangs or fails: every token is at most one version older than its trainer, and some are."""
    run = recipe(slots=16, prompts=4, group=4, steps=30, async_ratio=1.0, late="resample")
    latency = Distribution("lognormal", 20.0, 1.5)
    world = timings(turns=Distribution(center=5.0, spread=3.0), env=EnvTimings(step_s=latency, fail_frac=0.02))
    _, recorder = simulate(run, world)
    assert set(recorder.ages) == {0, 1}
    assert sum(row["groups/late_n"] for row in recorder.rows) > 0
