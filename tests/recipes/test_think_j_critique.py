"""Critiques of a thinking judge behind a real server, as rewards."""

import asyncio
import re

import pytest

from rolljax.chat_models.client import EndpointConfig
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, InfraError
from rolljax.judging.calls import CallLimits
from rolljax.recipes.think_j.critique import Critique
from rolljax.recipes.think_j.digit_sums import DigitSums
from rolljax.rewards.base import RewardContext
from tests.judge_server import judge_server

SPEC = Questions(records=[{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(9)])
AROUND = RewardContext(SPEC, seed=7)
FAST = CallLimits(deadline_s=20.0, retries=3, backoff_s=0.001, probe_s=0.005)


def critique(server, **settings):
    endpoint = EndpointConfig(server.url, "judge", timeout_s=30.0, retries=0, backoff_s=0.001)
    return Critique(endpoint, **{"limits": FAST} | settings)


def compare(cfg, answer, other="10"):
    spec = Questions(records=[{"question": "0 + 1?", "answer": other}])

    async def run():
        scorer = cfg.open(RewardContext(spec, seed=7))
        try:
            return await scorer.judge(spec.task(0), answer), dict(scorer.counts())
        finally:
            await scorer.close()

    return asyncio.run(run())


def shown(text):
    """Return the two responses, numbers, as a judge finds them between the marks."""
    return [float(x) for x in re.findall(r"\[material \w+\]\n(-?[0-9.]+)\n\[/material", text)]


def larger_is_better(text):
    a, b = shown(text)
    side = "a" if a > b else "b"
    strength = 1 if abs(a - b) < 5 else 3
    if "<Score 1>" in text:
        return f"Well. Therefore, the scores are <Score 1>{a:g}</Score 1> and <Score 2>{b:g}</Score 2>."
    return f"(a) is {a}.</think>Therefore, Response ({side}) is better" + (
        f", and the strength is [[{strength}]]." if "[[" in text else "."
    )


@pytest.mark.parametrize(
    "form, answer, want",
    [("strength", "20", 1.0), ("strength", "12", 0.75), ("strength", "3", 0.0), ("plain", "20", 1.0)]
    + [("plain", "3", 0.0), ("scores", "80", 1.7), ("scores", "3", -0.07), ("scores", "10.0", 0.0)],
)
@pytest.mark.parametrize("orders", ["both", "random"])
def test_a_critique_is_worth_what_the_judge_s_own_reward_says(form, answer, want, orders):
    with judge_server(larger_is_better) as server:
        found, counts = compare(critique(server, verdict=form, orders=orders), answer)
        assert found.value == pytest.approx(want, abs=1e-12) and len(server.asked) == (2 if orders == "both" else 1)
        assert found.success is None and found.parts.get("orders_agree", 1.0) == 1.0 and counts["answers"]


def test_a_judge_that_always_says_the_same_gives_every_answer_the_same():
    with judge_server(lambda text: "Therefore, Response (a) is better, and the strength is [[3]].") as server:
        for answer in ("1", "2", "3"):
            found, _ = compare(critique(server, solved_at=0.9), answer)
            assert (found.value, found.success) == (0.5, False)
            assert found.parts == {"wins": 0.5, "orders_agree": 0.0}


def test_garbage_is_asked_for_again_and_is_no_reward():
    with judge_server(larger_is_better, lambda number, text: "nonsense" if number % 2 else "") as server:
        found, counts = compare(critique(server), "20")
        assert found.value == 1.0 and counts["garbage"] >= 1
    for said in ("Therefore, Response (a) is better, and the strength is [[7]].", "Both are fine."):
        with judge_server(lambda text, said=said: said) as server, pytest.raises(InfraError):
            compare(critique(server), "20")


def test_what_cannot_be_is_refused():
    with judge_server(larger_is_better) as server:
        critique(server).check(AROUND)
        with pytest.raises(ConfigError, match="recorded answers"):
            critique(server).check(RewardContext(DigitSums()))
        with pytest.raises(ConfigError, match="no form of a verdict"):
            critique(server, verdict="stars")
        with pytest.raises(ConfigError, match="strength"):
            critique(server, strength=4)
