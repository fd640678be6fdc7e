"""Notices: each situation is reported once, with the setting that fixes it; a healthy run has no notice."""

import dataclasses

import numpy as np
import pytest

from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.recipe import Phase, Recipe
from rolljax.run.alerts import SHOWN_CHARS, STILL_STEPS, Alerts, PreemptionRule, samples, unfilled_step
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.types import Fault, Group, Key, Task, Trajectory, Turn

TASK = Task("lake", 0, "where now?")
PHASE = Phase("rl", Reinforce(), steps=50, group_size=4)


def trajectory(reward=0.0, status="ok", fault=None, turns=1, text="up"):
    said = Turn(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1), np.zeros(1, np.int32), "stop", reward, text)
    return Trajectory(Key(0, 0, 0), TASK, (said,) * turns, reward, {}, False, status, fault)


def cut(stage, turns=1):
    return trajectory(status="truncated", fault=Fault("limit", stage, "why"), turns=turns)


def of(phase):
    return Alerts(Recipe(env=FrozenLake(max_turns=8), phases=(phase,), max_answer_tok=12), phase)


@pytest.fixture
def notices():
    return of(PHASE)


def step(notices, *trajectories):
    return notices.step([Group(TASK, 0, trajectories)])


def test_nothing_is_said_of_a_run_that_goes_well(notices):
    for _ in range(2 * STILL_STEPS):
        assert not step(notices, trajectory(0.0), trajectory(1.0), cut("turns", 8))


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("answer", "Recipe.max_answer_tok = 12"),
        ("context", "SamplerConfig.max_context"),
        ("turns", "FrozenLake.max_turns"),
        ("env", "a limit (env)"),
    ],
)
def test_the_limit_that_cuts_most_answers_is_named_once(notices, stage, says):
    [text] = step(notices, cut(stage, 2), cut(stage, 2), trajectory(1.0))
    assert text.startswith("2 of 3") and says in text
    assert not step(notices, cut(stage, 2), cut(stage, 2), trajectory(1.0))


def test_a_cut_first_answer_that_ends_an_episode_of_many_turns_is_told(notices):
    limit, first = step(notices, cut("answer"), cut("answer"), trajectory(1.0))
    assert "max_answer_tok" in limit and "ended with their first answer" in first and "8 turns" in first


def test_the_first_error_of_an_environment_is_told_even_when_reference_answers_play():
    notices = of(Phase("sft", Sft(), steps=1))
    failed = trajectory(status="failed", fault=Fault("env", "step", "KeyError: 'map'"))
    [text] = step(notices, failed, trajectory(1.0))
    assert "1 of 2" in text and "KeyError: 'map'" in text
    assert not step(notices, failed, trajectory(1.0))


def test_a_reward_that_never_moves_is_told_after_some_steps(notices):
    said = [step(notices, trajectory(0.5), trajectory(0.5)) for _ in range(STILL_STEPS + 5)]
    assert [len(texts) for texts in said] == [0] * (STILL_STEPS - 1) + [1] + [0] * 5
    assert "have reward 0.5" in said[STILL_STEPS - 1][0]


def test_a_good_and_a_bad_answer_are_shown_on_one_line_each():
    good, bad = trajectory(1.0, text="down\x1b[31m\n" + "x" * 100), trajectory(-1.0, text="", turns=3)
    lines = samples([trajectory(0.5), good, bad, trajectory(status="failed")])
    assert [line.split()[:2] for line in lines] == [["good", "1.000"], ["bad", "-1.000"]]
    assert all("\n" not in line and "\x1b" not in line for line in lines)
    assert "\\x1b[31m\\n" in lines[0] and len(lines[0]) < 3 * SHOWN_CHARS and "(turn 3)" in lines[1]
    assert samples([]) == [] and len(samples([good])) == 1


def test_a_step_that_dynamic_sampling_did_not_fill_is_told():
    phase = Phase(
        "rl",
        Dapo(filter=GroupFilter(dynamic_sampling_rounds=3), shaping=None),
        steps=5,
        prompts_per_step=8,
        group_size=4,
        updates_per_step=2,
    )
    text = unfilled_step(phase, 5, 32)
    assert text.startswith("only 5 of 8 groups") and "after 3 rounds (32 groups drawn)" in text
    assert "GroupFilter.dynamic_sampling_rounds" in text


# ---- the sampler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preemptions", "factors"),
    [
        ([100, 106], [1, 2]),
        ([100, 104], [1, 1]),
        ([0, 0, 0, 0], [1, 1, 1, 0.5]),
        ([0, 0, 0, 5, 0], [1, 1, 1, 2, 1]),
        ([0, 3], [1, 2]),
        ([9, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0.5, 1]),
    ],
)
def test_the_split_of_the_weights_follows_preemptions(preemptions, factors):
    rule = PreemptionRule()
    assert [rule.after_round(n) for n in preemptions] == factors


def told(preemptions, long_rounds=(), **settings):
    """Return the notices after steps with these numbers of preemptions; the steps of `long_rounds` are long rounds."""
    sampler = SamplerConfig(max_context=64, **settings)
    notices = Alerts(Recipe(FrozenLake(max_turns=8), (PHASE,), max_answer_tok=12, sampler=sampler), PHASE)
    rows = [{"sampler/preempt_n": n, "groups/long_rounds_n": i in long_rounds} for i, n in enumerate(preemptions)]
    return [notices.row(row) for row in rows]


def test_growing_preemptions_are_told_once():
    assert told([100, 104], pages=50) == [[], []]
    first, second, third, last = told([100, 106, 120, 140], pages=50)
    assert first == third == last == []
    assert "106 sequences" in second[0] and "SamplerConfig.pages = 50" in second[0] and "tensor" in second[0]


def test_long_and_short_rounds_are_compared_with_their_like():
    assert told([10, 300, 10, 300], long_rounds={1, 3}, pages=50) == [[]] * 4
    assert told([10, 300, 10, 400], long_rounds={1, 3}, pages=50)[3]


def test_devices_that_may_be_spared_are_named_where_weights_are_split():
    *before, last = told([0, 0, 0, 0], pages=50, tensor=4)
    assert before == [[]] * 3 and "SamplerConfig.tensor = 2" in last[0]
    assert told([0] * 9, pages=50) == [[]] * 9, "they are not split"
    assert told([0] * 9, tensor=4) == [[]] * 9, "pages cannot run out"


def test_a_step_without_rollouts_says_nothing_of_the_sampler():
    assert of(PHASE).row({"train/tokens_n": 3.0}) == []


def test_a_policy_far_from_its_old_samples_is_told_of_once():
    near, far = {"policy/ratio_max": 30.0}, {"policy/ratio_max": 812.3}
    ahead = of(dataclasses.replace(PHASE, async_ratio=4))
    assert ahead.row(near) == [] and ahead.row({"policy/ratio_max": float("nan")}) == []
    (text,) = ahead.row(far)
    assert "812 times" in text and "learning rate" in text and "Phase.async_ratio = 4" in text
    assert ahead.row(far) == [] and of(PHASE).row(far) == []


def test_a_count_of_the_environment_that_drifts_is_told_of_once(notices):
    counts = [0.1] * 20 + [2.0] * 12
    told = [notices.row({"env/timeouts_n": n, "env/commands_n": 4.0 + n % 1, "env/score": 9 * n}) for n in counts]
    assert [i for i, texts in enumerate(told) if texts] == [22]  # three steps of 2: a mean of 0.67
    assert "env/timeouts_n is 0.67" in told[22][0] and "was 0.10" in told[22][0] and "rollouts/" in told[22][0]


def test_rare_counts_and_slow_changes_are_not_told_of(notices):
    for i in range(40):
        assert notices.row({"env/tamper_n": 0.01 * (i > 20), "env/commands_n": 4 + i / 10}) == []
