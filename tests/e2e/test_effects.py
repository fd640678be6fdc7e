"""What papers say their credit does, on problems of seconds (`benchmarks/effects.py`): the trainer's own code throughout,
a margin in every comparison, and every seed for itself where the effect allows it."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import effects
import plan_task
import segments

CONTROLS = ("top 40 %", "any 40 %", "bottom 40 %")


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with jax.default_device(jax.devices()[0]):
        yield


# ---- attention rhythm, arXiv 2510.13554: amplifying any 40 % of the tokens helps less, the bottom 40 % least --------


def in_order(found):
    top, anywhere, bottom = found.speed
    assert (top > anywhere).all() and (anywhere > bottom).all(), found.speed.round(3)
    assert top.mean() > anywhere.mean() + 0.03 and anywhere.mean() > bottom.mean() + 0.02
    # because the model's attention finds the token that decides
    plan = found.factors[:, plan_task.PLAN]
    assert plan[0] > 1.4 and 1.1 < plan[1] < 1.3 and plan[2] < 1.1


@pytest.mark.slow
def test_what_attention_marks_is_worth_amplifying():
    in_order(effects.rhythm(CONTROLS, steps=20))


@pytest.mark.sweep
def test_what_attention_marks_is_worth_amplifying_on_more_seeds():
    in_order(effects.rhythm(CONTROLS, seeds=12, steps=30))


# ---- segment rewards, arXiv 2411.00809: faster than rewards for whole answers, if segments say something -------------


@pytest.mark.parametrize(
    "pair", ["GRPO", *(pytest.param(p, marks=pytest.mark.slow) for p in segments.PAIRS if p != "GRPO")]
)
def test_segments_that_know_the_span_learn_it_faster(pair):
    whole, told, random = (segments.learned(pair, arm, seeds=5).measured for arm in segments.ARMS)
    faster = told["right"].mean(1) - whole["right"].mean(1)
    assert (faster > 0).all() and faster.mean() > 0.02, faster
    assert random["right"].mean() < whole["right"].mean()
    assert told["drift"][:, -1].mean() < random["drift"][:, -1].mean()


# ---- Lite PPO, arXiv 2508.08221: steadier than GRPO as its paper has it ---------------------------------------------


@pytest.fixture(scope="module")
def mixture():
    return effects.mixture(("GRPO", "Lite PPO"))


@pytest.mark.parametrize("relative", [False, True])
def test_lite_ppo_has_steadier_gradients_than_grpo(mixture, relative):
    ratio = effects.variance_ratio(mixture["GRPO"], mixture["Lite PPO"], relative=relative)
    assert (ratio >= 1.3).all() and ratio.mean() >= 2, ratio


def test_lite_ppo_is_not_worse_at_hard_prompts(mixture):
    hard = {name: h.measured["hard"][:, -1] for name, h in mixture.items()}
    assert (hard["Lite PPO"] >= hard["GRPO"] + 0.1).all()
    easy = {name: h.measured["easy"][:, -1].mean() for name, h in mixture.items()}
    assert easy["Lite PPO"] >= easy["GRPO"] - 0.01


def test_equally_long_answers_leave_only_the_deviation_of_the_batch():
    """The mean over tokens is then GRPO's. The batch's deviation shrinks as prompts are solved, and gradients grow, so
    that their variance is not lower; hard prompts are learned no worse."""
    found = effects.mixture(("GRPO", "Lite PPO"), seeds=3, long=False)
    assert effects.variance_ratio(found["GRPO"], found["Lite PPO"]).mean() < 1.3
    assert np.all(found["Lite PPO"].measured["hard"][:, -1] >= found["GRPO"].measured["hard"][:, -1] - 0.02)
