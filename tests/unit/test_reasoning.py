"""The bridge to reasoning-gym: what is offered, how it is scored, what is refused."""

import pytest

from rolljax.envs.reasoning import REFUSED, ReasoningGym
from rolljax.errors import ConfigError, EnvError
from rolljax.types import Task

SUM = ReasoningGym("chain_sum")


def answer(spec, text, index=0):
    env = spec.make()
    env.reset(spec.task(index))
    return env.step(text)


def test_question_gold_and_reward():
    spec = ReasoningGym("chain_sum", prompt="Think first.\n{question}\nNumber only.")
    env = spec.make()
    (message,) = env.reset(spec.task(3))
    assert message.role == "user" and message.content == f"Think first.\n{spec.task(3).content}\nNumber only."
    result = env.step(env.gold())
    assert (result.reward, result.success, result.terminated, result.messages) == (1, True, True, ())


def test_exact_and_partial_credit():
    exact, partial = (ReasoningGym("spell_backward", {"min_word_len": 6}, partial_credit=p) for p in (False, True))
    env = exact.make()
    env.reset(exact.task(0))
    almost = env.gold()[:-1] + "_"
    score = answer(partial, almost).reward
    assert 0 < score < 1
    result = answer(exact, almost)
    assert (result.reward, result.success, result.reward_parts) == (0, False, {"score": score})
    assert not answer(partial, almost).success


def test_an_episode_is_one_step():
    env = SUM.make()
    with pytest.raises(EnvError, match="before reset"):
        env.step("1")
    env.reset(SUM.task(0))
    env.step("1")
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("1")
    with pytest.raises(EnvError):
        env.gold()


def test_a_foreign_task_is_refused():
    for task in (ReasoningGym("chain_sum", seed=1).task(0), Task("chain_sum", 0, "What is 1 + 1?")):
        with pytest.raises(EnvError, match="item 0 of chain_sum is not the task"):
            SUM.make().reset(task)


def test_an_answer_that_breaks_the_scorer_is_a_wrong_answer():
    """This family's scorer calls int() on every word of the answer."""
    result = answer(ReasoningGym("prime_factorization"), "no idea")
    assert (result.reward, result.success) == (0, False)


def test_a_family_without_reference_answers_says_so():
    spec = ReasoningGym("rush_hour")
    env = spec.make()
    env.reset(spec.task(0))
    with pytest.raises(EnvError, match="no reference answer for rush_hour"):
        env.gold()


def test_settings_may_hold_lists():
    """gin files write sequences as lists."""
    as_list, as_tuple = (ReasoningGym("basic_arithmetic", {"operators": ops}) for ops in (["+"], ("+",)))
    assert as_list.task(0) == as_tuple.task(0)


def test_settings_and_seeds_change_the_tasks():
    longer = ReasoningGym("chain_sum", {"min_terms": 9, "max_terms": 9})
    assert longer.task(0).content.count("+") + longer.task(0).content.count("-") >= 8
    assert ReasoningGym("chain_sum", seed=1).task(0) != SUM.task(0)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_run_their_answers_are_refused(family):
    with pytest.raises(ConfigError, match=family):
        ReasoningGym(family)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ReasoningGym("chain_summ"), ("ReasoningGym.family", "did you mean chain_sum")),
        (lambda: ReasoningGym("zzzz"), ("ReasoningGym.family", "one of ", "spell_backward")),
        (lambda: ReasoningGym("chain_sum", {"min_digit": 1}), ("min_digit", "did you mean min_digits?")),
        (lambda: ReasoningGym("chain_sum", {"size": 5}), ("'size' is not a setting", "max_terms")),
        (lambda: ReasoningGym("chain_sum", {"min_digits": 3, "max_digits": 1}), ("refuses", "max_digits")),
        (lambda: ReasoningGym(prompt="Answer."), ("ReasoningGym.prompt", "{question}")),
    ],
)
def test_broken_settings_name_the_fix(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value
