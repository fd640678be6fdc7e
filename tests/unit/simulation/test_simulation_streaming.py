"""RollPacker's stream trainer: its rules by hand, and the step times that they give on the virtual clock."""

import dataclasses

import pytest

from rolljax.errors import ConfigError
from rolljax.simulate import simulate
from rolljax.simulation import report
from rolljax.simulation.streaming import ScaleDown, StreamTraining, projected_tok, trained_s
from rolljax.simulation.timings import ClusterTimings, Distribution, EngineTimings, TrainerTimings
from tests.simulations import recipe, timings


def test_memory_is_looked_at_between_a_fifth_and_half_of_the_episodes():
    rule = ScaleDown(StreamTraining())
    shares = [0.1, 0.19, 0.2, 0.22, 0.249, 0.25, 0.29, 0.3, 0.38, 0.4, 0.5, 0.56, 0.9]
    assert [s for s in shares if rule.is_due(s)] == [0.2, 0.25, 0.3, 0.38, 0.5]


def test_an_answer_becomes_as_long_as_those_that_got_as_far():
    lengths = [10, 20, 30, 40]
    assert projected_tok([(100, 0), (100, 25), (50, 99)], lengths) == (100 + 25) + (100 + 35) + (50 + 99)
    assert projected_tok([], lengths) == 0.0


def test_a_part_of_the_devices_trains_what_has_ended():
    work = [(0.0, 3.0), (1.0, 2.0), (30.0, 4.0)]
    assert trained_s(work, start_s=10.0, now_s=40.0, slowdown=2.0) == 9.0  # until 20, and from 30 to 38
    assert trained_s(work, start_s=10.0, now_s=34.0, slowdown=2.0) == 7.0  # half of the last
    assert trained_s(work, start_s=10.0, now_s=18.0, slowdown=2.0) == 4.0
    assert trained_s(work, start_s=10.0, now_s=10.0, slowdown=2.0) == 0.0


WORLD = timings(
    Distribution("lognormal", 500.0, 0.4, group_spread=0.4),
    EngineTimings(step_s=0.02, sequence_s=1e-4, replicas=4),
    shared_devices=True,
    trainer=TrainerTimings(step_s=2.0, token_s=6e-5),
)
RUN = recipe(slots=512, prompts=32, group=8, steps=4, answer_tok=8000)


def played(world=WORLD, run=RUN):
    runtime, recorder = simulate(run, world)
    return runtime, recorder, report.summarize(runtime, recorder).numbers


def test_streaming_shortens_a_step():
    """By 7 % in the paper, of which a fifth of the step is training. No group is lost, and all tokens are those of the
    newest version; decoding is slower on half of the replicas."""
    _, plain, before = played()
    runtime, recorder, after = played(dataclasses.replace(WORLD, stream=StreamTraining()))
    assert 0.1 < before["update_s"] / before["step_s"] < 0.25
    assert 1.05 < before["step_s"] / after["step_s"] < 1.15
    assert after["rollout_s"] > before["rollout_s"] and after["streamed_frac"] > 0.3
    assert runtime.sampler.rerouted > 0
    assert recorder.trained.keys() == plain.trained.keys() and set(recorder.ages) == {0}
    assert [r["rollout/len_tok"] for r in recorder.rows] == [r["rollout/len_tok"] for r in plain.rows]


@pytest.mark.parametrize("kv_tok", [1_000, 10**6])
def test_replicas_stay_where_the_others_have_no_room(kv_tok):
    engine = dataclasses.replace(WORLD.engine, kv_tok=kv_tok)
    runtime, *_ = played(dataclasses.replace(WORLD, engine=engine, stream=StreamTraining()))
    assert (runtime.sampler.rerouted > 0) == (kv_tok == 10**6)


@pytest.mark.parametrize(
    ("world", "run", "said"),
    [
        ({"shared_devices": False}, {}, "shared_devices"),
        ({"cluster": ClusterTimings(slow_frac=0.5)}, {}, "not lost"),
        ({}, {"async_ratio": 1.0}, "async_ratio must be 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(world, run, said):
    with pytest.raises(ConfigError, match=said):
        played(
            dataclasses.replace(WORLD, stream=StreamTraining(), **world),
            recipe(slots=512, prompts=4, group=8, steps=1, **run),
        )
