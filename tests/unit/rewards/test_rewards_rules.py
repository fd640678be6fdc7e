"""Rewards by rule and by function: what they are worth, whatever a policy writes, and wherever they run."""

import asyncio
import dataclasses
import math
import threading

import pytest

from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, InfraError
from rolljax.rewards.base import Reward, RewardContext
from rolljax.rewards.code import Code
from rolljax.rewards.compose import Gate, Sum
from rolljax.rewards.function import Function
from rolljax.rewards.rules import (
    Answer,
    Format,
    Language,
    LengthBand,
    Repetition,
    json_object,
    repeated_share,
    script_share,
)
from rolljax.rewards.workers import Said
from tests.synthetic_rewards import AROUND, SPEC, ends, half, hangs, said, scored


def rule(cfg, text, index=0, **how):
    """Compute the value that a rule gives."""
    return cfg.reward(SPEC, SPEC.task(index), Said.of(said(text, index, **how))).value


# ---- answers

HOSTILE = [
    "\\boxed{__import__('os').kill(__import__('os').getppid(), 9)}",
    "\\boxed{" + "(" * 3000 + "x" + ")" * 3000 + "}",
    "\\boxed{\\sqrt{" * 50 + "2" + "}}" * 50,
    "\\boxed{9**9**9}",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{\\sum_{i=1}^{10^{9}} \\prod_{j=1}^{i} j!}",
    "\\boxed{" + "[" * 1_000_000,
    "{" * 1_000_000,
    "\x00\ud800\\boxed{\ud800}",
    "\\boxed{exec(compile('1', 'x', 'exec'))}",
]


def test_recorded_answers_in_all_their_forms_and_payloads_that_harm_nothing():
    """One pool for all: this process is the one that trains."""
    right = [("so \\boxed{42.0}", 0), ("\\boxed{\\sqrt{8}}", 1), ("Answer: paris", 2), ("<think>41</think> #### 42", 0)]
    wrong = [("\\boxed{41}", 0), ("\\boxed{\\sqrt{7}}", 1), ("", 0), ("Rome", 2)]
    before = threading.active_count()
    done = scored(Answer(), *(said(*x) for x in right + wrong), *(said(x, 1) for x in HOSTILE))
    assert [t.reward for t in done] == [1.0] * 4 + [0.0] * (4 + len(HOSTILE)), [t.fault for t in done]
    assert [t.success for t in done] == [True] * 4 + [False] * (4 + len(HOSTILE))
    assert threading.active_count() <= before + 2


def test_other_places_for_the_answer():
    assert rule(Answer(pattern=r"final=(\d+)"), "final=41 final=42") == 1.0
    assert rule(Answer(pattern=r"final=(\d+)"), "42") == 0.0
    assert rule(Answer(field="x"), '<think>{"x": 1}</think>{"x": 42}') == 1.0
    assert rule(Answer(field="x"), '```json\n{"x": "42"}\n```') == 1.0
    assert rule(Answer(field="x"), '{"x": true}') == rule(Answer(field="x"), '{"y": 42}') == 0.0
    assert rule(Answer(where="<a>{answer}</a>"), "<a>42</a>") == 1.0
    assert rule(Answer(answer_key="also"), "\\boxed{43}") == 1.0


def test_answers_that_nobody_recorded():
    for cfg, around in [(Answer(), RewardContext(FrozenLake())), (Answer(answer_key="none"), AROUND)]:
        with pytest.raises(ConfigError, match="no recorded answer|the tasks of frozen_lake have none"):
            cfg.check(around)
    for wrong in ({"where": "somewhere"}, {"pattern": "(?=x)"}, {"pattern": "(a)", "field": "b"}):
        with pytest.raises(ConfigError):
            Answer(**wrong)


# ---- lengths


@pytest.mark.parametrize(
    ("tokens", "value"), [(40, 0.4), (60, 0.6), (100, 1), (150, 1), (200, 1), (250, 0.5), (300, 0)]
)
def test_the_band_of_live_thinking(tokens, value):
    """L_ref 200, band [.5, 1], eps 100 tokens."""
    band = LengthBand(ref_tok=200, low=0.5, high=1.0, eps_frac=0.5)
    assert rule(band, "x", tokens=tokens) == value
    by_row = dataclasses.replace(band, ref_tok=0.0, ref_key="ref")
    assert rule(by_row, "x", tokens=tokens) == value and rule(by_row, "x", 1, tokens=100) == 1.0


def test_only_thinking_may_be_counted():
    band = LengthBand(ref_tok=100, low=0.0, high=0.5, eps_frac=0.5, count="thinking")
    text = "<think>" + "x" * 34 + "</think>" + "y" * 49  # half of 98 characters
    assert band.reward(SPEC, SPEC.task(0), Said.of(said(text, tokens=98))).parts["counted_tok"] == 49
    assert band.reward(SPEC, SPEC.task(0), Said.of(said("still thinking", tokens=98))).parts["counted_tok"] == 98


def test_short_and_wrong_is_worth_nothing():
    band = LengthBand(ref_tok=100, low=0.0, high=0.5)
    right = Format(pattern=".*42")
    cfg = Sum({"right": right, "length": Gate(band, by=right)}, {"length": 0.5})
    done = scored(cfg, said("it is 42"), said("it is 41"), said("it is 42", tokens=100))
    assert [t.reward for t in done] == [1.5, 0.0, 1.0]
    assert done[0].reward_parts["length/gated/counted_tok"] == 3


def test_bands_that_cannot_be():
    for wrong in ({}, {"ref_tok": 1, "ref_key": "x"}, {"ref_tok": 1, "low": 2.0, "high": 1.0}):
        with pytest.raises(ConfigError):
            LengthBand(**wrong)
    with pytest.raises(ConfigError, match="the tasks of frozen_lake have none"):
        LengthBand(ref_key="ref").check(RewardContext(FrozenLake()))
    (done,) = scored(LengthBand(ref_key="ref"), said("x", 2))
    assert done.fault.kind == "env" and "no length in 'ref'" in done.fault.detail


# ---- forms


def test_formats():
    shape = Format(pattern="<think>.*</think>.+")
    assert rule(shape, "<think>a\nb</think>c") == 1.0 and rule(shape, "c") == 0.0
    fields = Format(json_fields=("a", "b"))
    assert rule(fields, '{"a": 1, "b": {}}') == 1.0 and rule(fields, '{"a": 1}') == rule(fields, "{" * 10**6) == 0.0
    for wrong in ({}, {"pattern": "x", "json_fields": ("a",)}, {"pattern": "(?<=x)y"}):
        with pytest.raises(ConfigError):
            Format(**wrong)
    assert json_object("[1]") is None and json_object("{" + '"a":' * 100 + "1") is None


def test_repetition():
    assert repeated_share("a b c d e", 3) == 0.0 == repeated_share("", 3)
    assert repeated_share("a b c a b c", 3) == 1 / 4
    assert rule(Repetition(), "x " * 1000) == pytest.approx(-1 + 1 / 998)
    assert rule(Repetition(free=0.25), "a b c a b c") == 0.0
    assert rule(Repetition(), "all is said once") == 0.0 and math.copysign(1, rule(Repetition(), "once")) == 1


def test_languages():
    assert script_share("hello, 123", ("latin",)) == 1.0 == script_share("123", ("han",))
    assert script_share("ab漢字", ("latin",)) == 0.5 and script_share("ab漢字", ("latin", "han")) == 1.0
    assert rule(Language(scripts=("cyrillic",)), "привет") == 1.0
    assert rule(Language(at_least=0.9), "ab漢字") == 0.0 and rule(Language(at_least=0.5), "ab漢字") == 1.0
    with pytest.raises(ConfigError, match="names no scripts"):
        Language(scripts=("klingon",))


@pytest.mark.parametrize("cfg", [Format(pattern=".*x"), Format(json_fields=("a",)), Repetition(), Language(), Answer(
    pattern="(x+)+y")], ids=lambda c: type(c).__name__)  # fmt: skip
def test_rules_are_linear_in_a_megabyte(cfg):
    """What is not would not end."""
    for text in ("x" * 2**20, "a " * 2**19, "{" * 2**20, "\ud800" * 2**18, "x\n" * 2**19):
        assert math.isfinite(rule(cfg, text))


def test_what_is_said_reaches_a_worker_whole_and_long_texts_by_their_end():
    for text in ("x" * 3_000_000 + "end", "\x00" * 500_000 + "end", "漢" * 2_000_000 + "end"):
        found = Said.from_json(Said.of(said(text)).to_json())
        assert found.text.endswith("end") and len(Said.of(said(text)).to_json()) <= 2**20
    one = Said.of(said("short", cut=True))
    assert Said.from_json(one.to_json()) == one and one.is_cut


# ---- functions


def raises(task, said):
    raise ValueError("mine")


def no_number(task, said):
    return {"nan": math.nan, "text": "1.0", "none": None}[said.text]


async def waits(task, said):
    await asyncio.sleep(0)
    return Reward(0.25, {"a": 1.0}, True)


@pytest.mark.parametrize("where", ["thread", "process"])
def test_a_function_of_ones_own(where):
    done = scored(Function(half, where=where, workers=1), said("four"), said("two"))
    assert [t.reward for t in done] == [1.5, 0.5] and done[0].reward_parts == {"half": 0.5, "long": 1.0}
    (done,) = scored(Function(raises, where=where, workers=1), said("x"))
    assert done.fault.kind == "env" and "test_rewards_rules.raises: ValueError: mine" in done.fault.detail


def test_what_is_no_number_is_the_functions_fault():
    done = scored(Function(no_number, where="thread"), said("nan"), said("text"), said("none"))
    assert {(t.status, t.fault.kind) for t in done} == {("failed", "env")}


def test_a_function_that_hangs_or_dies_is_killed_and_the_others_go_on():
    done = scored(Function(hangs, timeout_s=1.0, workers=2), said("hang"), *(said(f"{i}") for i in range(4)))
    assert [t.status for t in done] == ["failed"] + ["ok"] * 4 and "within 1 s" in done[0].fault.detail
    done = scored(Function(ends, workers=1), said("end"), *(said(f"{i}", 1) for i in range(4)))
    assert [t.status for t in done] == ["failed"] + ["ok"] * 4


def test_a_coroutine_is_asked_once_for_the_same_and_kept(tmp_path):
    around = dataclasses.replace(AROUND, cache_dir=str(tmp_path))
    asked = []

    async def counted(task, said):
        asked.append(task.index)
        return await waits(task, said)

    done = scored(Function(counted), said("x"), said("x"), said("x", 1), around=around)
    assert [t.reward for t in done] == [0.25] * 3 and done[0].success and sorted(asked) == [0, 1]
    scored(Function(counted), said("x"), around=around)
    assert len(asked) == 2
    scored(Function(counted, version="2"), said("x"), around=around)
    assert len(asked) == 3


def test_a_coroutine_that_fails_is_called_again():
    tries = []

    async def fails(task, said):
        tries.append(1)
        if len(tries) < 3:
            raise InfraError("not yet")
        return 1.0

    cfg = Function(fails)
    cfg = dataclasses.replace(cfg, limits=dataclasses.replace(cfg.limits, backoff_s=0.0))
    assert scored(cfg, said("x"))[0].reward == 1.0 and len(tries) == 3


# ---- programs


def test_programs_against_the_tests_of_their_row():
    rows = [
        {
            "question": "double", "answer": "-", "test_list": ["assert double(2) == 4", "assert double(3) == 6"],
            "entry_point": "double",
        }
    ]  # fmt: skip
    spec = Questions(records=rows)
    around = RewardContext(spec)
    programs = ["2*n", "4", "0", "__import__('os')._exit(0)"]
    texts = [f"```python\ndef double(n):\n    return {p}\n```" for p in programs] + ["\x00", "(" * 10_000]
    every = [dataclasses.replace(said(t), task=spec.task(0)) for t in texts]
    done = scored(Code(sandbox="none"), *every, around=around)
    assert [t.reward for t in done] == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0] and done[0].success and not done[1].success
    assert scored(Code(sandbox="none", pay="all"), every[1], around=around)[0].reward == 0.0
    Code().check(around)
    with pytest.raises(ConfigError, match="names no list of asserts"):
        Code().check(AROUND)
    with pytest.raises(ConfigError, match="have none"):
        Code().check(RewardContext(FrozenLake()))
