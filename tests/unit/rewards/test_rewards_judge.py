"""Judges on a real server that times out, answers garbage or is down: no wrong reward, no blocking, all counted."""

import asyncio
import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.chat_models.client import EndpointConfig
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, DataError, InfraError
from rolljax.judging.calls import CallLimits
from rolljax.judging.prompts import filled
from rolljax.judging.verdict import Unreadable, last_object
from rolljax.metrics import check_row
from rolljax.rewards.base import RewardContext
from rolljax.rewards.calibration import agreed, agreement, isotonic, read_labelled
from rolljax.rewards.function import Function
from rolljax.rewards.judge import Comparison, Judge
from rolljax.rewards.scoring import Scoring
from rolljax.storage import journal
from rolljax.types import Group
from tests.judge_server import judge_server, share
from tests.synthetic_rewards import episode

SPEC = Questions(records=[{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(50)])
AROUND = RewardContext(SPEC, seed=7)
FAST = CallLimits(deadline_s=20.0, retries=3, backoff_s=0.001, probe_s=0.005, down_after=20, outage_s=120.0)
RUBRIC = "Task: {question}\nRight: {reference}\nMark this:\n{answer}"


def endpoint(server, **settings):
    return EndpointConfig(server.url, "judge", **{"timeout_s": 30.0, "retries": 0, "backoff_s": 0.001} | settings)


def judge(server, **settings):
    return Judge(endpoint(server), RUBRIC, **{"limits": FAST} | settings)


def tried(text):
    """Return the policy's answer, as a judge finds it between the marks."""
    return re.search(r"\[material \w+\]\n(.*)\n\[/material", text, re.S)[1]


def mark(text):
    """Return the server's score of a text that contains its own quality."""
    return json.dumps({"score": int(tried(text).split()[-1])})


def said(text, index=0):
    found = episode(0.0, texts=[text], env=SPEC.name)
    return dataclasses.replace(found, task=SPEC.task(index))


def score(cfg, *trajectories, around=AROUND, before=None):
    """Score the trajectories; return them with the counts."""

    async def run():
        scoring = Scoring(cfg.open(around))
        try:
            done = asyncio.gather(*map(scoring.score, trajectories))
            if before:
                await before(scoring, done)
            done = await done
            return done, scoring.row([Group(done[0].task, 0, tuple(done))])
        finally:
            await scoring.close()

    return asyncio.run(run())


# ---- faults


def test_a_server_that_misbehaves_gives_no_wrong_reward():
    """One call in ten is never answered, one in twenty is answered with garbage, and one in twenty holds no verdict."""

    def fault(number, text):
        kind = share(f"{text} {len([b for b in server.asked if b['messages'][-1]['content'] == text])}")
        return "hang" if kind < 0.1 else "garbage" if kind < 0.15 else "nonsense" if kind < 0.2 else ""

    with judge_server(mark, fault) as server:
        every = [said(f"it is {i % 11}", i % 50) for i in range(200)]
        cfg = dataclasses.replace(
            judge(server), limits=dataclasses.replace(FAST, deadline_s=1.5, retries=8, down_after=1000)
        )
        done, row = score(cfg, *every)
    assert [t.reward for t in done] == [i % 11 / 10 for i in range(200)] and {t.status for t in done} == {"ok"}
    assert row["rewards/lost_n"] == 0 and not check_row(row)
    faults = {name: row[f"rewards/faults/{name}_n"] for name in ("timeout", "garbage")}
    assert all(n > 0 for n in faults.values()) and row["rewards/retries_n"] == sum(faults.values())


def test_a_judge_that_is_down_is_waited_for():
    """Answers wait, one call at a time checks whether it is back, and no answer gets a reward before."""

    async def comes_back(scoring, done):
        while scoring._counts()["status_503"] < FAST.down_after:
            await asyncio.sleep(0.005)
        assert not done.done()
        server.up.set()

    with judge_server(mark) as server:
        server.up.clear()
        done, row = score(judge(server), *(said(f"it is {i % 11}", i % 50) for i in range(40)), before=comes_back)
    assert [t.reward for t in done] == [i % 11 / 10 for i in range(40)]
    assert row["rewards/faults/status_503_n"] >= FAST.down_after and row["rewards/lost_n"] == 0


def test_a_judge_that_stays_down_fails_as_the_infrastructure():
    limits = dataclasses.replace(FAST, outage_s=0.05, down_after=3, retries=1)
    with judge_server(mark) as server:
        server.up.clear()
        done, row = score(judge(server, limits=limits), *(said(f"it is {i}") for i in range(10)))
    assert {(t.status, t.fault.kind, t.fault.stage) for t in done} == {("failed", "infra", "reward")}
    assert row["rewards/lost_n"] == 10 and row["rewards/faults/down_n"] >= 1


def test_an_answer_that_waits_keeps_no_other():
    """One judge call hangs; all others are answered, and their episodes are done."""

    async def others_first(scoring, done):
        while scoring._scored < 30:
            await asyncio.sleep(0.005)
        assert not done.done()
        server.release.set()

    with judge_server(mark, lambda number, text: "hang" if "it is 3\n" in text else "") as server:
        every = [said(f"it is {3 if i == 0 else 4}", i) for i in range(31)]
        cfg = judge(server, limits=dataclasses.replace(FAST, retries=0, deadline_s=300.0))
        done, row = score(cfg, *every, before=others_first)
    assert [t.status for t in done] == ["failed"] + ["ok"] * 30 and row["rewards/faults/connection_n"] == 1


def test_a_refusal_and_a_closed_connection_are_counted_by_kind():
    kinds = ["refuse", "status_500", "status_429", ""]
    with judge_server(mark, lambda number, text: kinds[number]) as server:
        done, row = score(judge(server), said("it is 5"))
    assert done[0].reward == 0.5
    assert {k: row[f"rewards/faults/{k}_n"] for k in ("connection", "status_500", "status_429")} == {
        "connection": 1, "status_500": 1, "status_429": 1
    }  # fmt: skip


def test_the_same_question_is_asked_once():
    with judge_server(mark) as server:
        done, row = score(judge(server), *[said("it is 5")] * 10)
        assert len(server.asked) == 1 and row["rewards/calls_n"] == 1
    assert {t.reward for t in done} == {0.5}


def test_a_run_that_goes_on_pays_nothing_twice_and_is_told_the_same(tmp_path):
    around = dataclasses.replace(AROUND, cache_dir=str(tmp_path))
    every = [said(f"it is {i}") for i in range(5)]
    with judge_server(mark) as server:
        first, _ = score(judge(server), *every, around=around)
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-4])  # it was ended in the middle of a line
        server.verdict = lambda text: '{"score": 0}'
        second, row = score(judge(server), *every, around=around)
        assert len(server.asked) == 6 and row["rewards/cached_n"] == 4
        third, row = score(judge(server), *every, around=around)
        assert row["rewards/cached_n"] == 5 and row["rewards/calls_n"] == 0
    same = [t.reward for t in first]
    assert sorted(a.reward == b for a, b in zip(second, same, strict=True)) in ([True] * 5, [False] + [True] * 4)
    assert [t.reward for t in third] == [t.reward for t in second]


DAMAGE = {
    "another mark": lambda line: line.replace(b": 3}", b": 7000}"),
    "a mark within the scale": lambda line: line.replace(b": 3}", b": 4}"),
    "another key": lambda line: line.replace(b'"key":"', b'"key":"0'),
    "no text": lambda line: json.dumps({"key": json.loads(line)["key"], "verdict": {"score": 7000}}).encode(),
    "sealed, and beyond the scale": lambda line: sealed(line, '{"score": 7000}'),
    "sealed, and no number": lambda line: sealed(line, '{"score": true}'),
    "sealed, and no text": lambda line: sealed(line, {"score": 3}),
    "no object": lambda line: b"[" * 100_000,
    "no UTF-8": lambda line: line.replace(b"key", b"\xff\xfe"),
}


def sealed(line, said):
    """Return a line of the cache with another content and the right checksum."""
    return journal.sealed(json.loads(line)["key"], said)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_kept_verdict_that_is_not_as_it_was_written_is_asked_for_again(tmp_path, damage):
    around = dataclasses.replace(AROUND, cache_dir=str(tmp_path))
    with judge_server(lambda text: '{"score": 3}') as server:
        score(judge(server), said("x"), around=around)
        (file,) = tmp_path.iterdir()
        file.write_bytes(DAMAGE[damage](file.read_bytes()).rstrip(b"\n") + b"\n")
        for damaged, cached in ((1, 0), (not damage.startswith("sealed"), 1)):  # what was sealed has another line now
            (done,), row = score(judge(server), said("x"), around=around)
            assert (done.reward, len(server.asked), row["rewards/cached_n"]) == (0.3, 2, cached)
            assert row.get("rewards/faults/damaged_n", 0) == damaged


def test_a_kept_reward_of_a_function_is_checked_too(tmp_path):
    around = dataclasses.replace(AROUND, cache_dir=str(tmp_path))
    for change in (b'"value":0.5', b'"value":NaN'), (b'"value":0.5', b'"value":700'), (b"null", b"3"):
        (first,), _ = score(Function(half_of), said("x"), around=around)
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes().replace(*change))
        (second,), row = score(Function(half_of), said("x"), around=around)
        assert first.reward == second.reward == 0.5 and row["rewards/faults/damaged_n"] >= 1


async def half_of(task, said):
    return np.float32(0.5)


def test_a_budget_is_of_the_whole_run(tmp_path):
    around = dataclasses.replace(AROUND, cache_dir=str(tmp_path))
    limits = dataclasses.replace(FAST, max_calls=3)
    with judge_server(mark) as server:
        _, row = score(judge(server, limits=limits), said("it is 1"), said("it is 2"), around=around)
        done, row = score(judge(server, limits=limits), *(said(f"it is {i}") for i in range(5)), around=around)
    assert sum(t.status == "failed" for t in done) == 2 and row["rewards/faults/budget_n"] == 2


def test_a_key_that_is_not_accepted_is_no_reward():
    with judge_server(mark, lambda number, text: "status_401") as server:
        done, _ = score(judge(server, limits=dataclasses.replace(FAST, retries=0)), said("it is 1"))
    assert done[0].fault.kind == "infra" and "the key is not accepted" in done[0].fault.detail


def test_calls_that_nobody_waits_for_are_given_up():
    async def run():
        calls, began = AROUND.calls("x", "y", FAST), asyncio.Event()

        async def forever(_):
            began.set()
            await asyncio.Event().wait()

        waiting = [asyncio.ensure_future(calls.answer("same", forever, str)) for _ in range(2)]
        await began.wait()
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert calls._under_way
        waiting[1].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert not calls._under_way
        return await calls.answer("same", lambda _: asyncio.sleep(0, 5), str)

    assert asyncio.run(run()) == "5"


# ---- verdicts


def test_dimensions_are_weighed_and_the_veto_sets_them_aside():
    """STAgent: reasoning .4, facts .4, service .2; made-up facts make it worth nothing."""
    cfg = Judge(
        EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}", {"plan": 0.4, "facts": 0.4, "service": 0.2},
        veto="made_up",
    )  # fmt: skip
    marks = {"plan": 10, "facts": 5, "service": 0}
    assert cfg.worth([marks | {"made_up": False}]).value == pytest.approx(0.6)
    assert cfg.worth([{"plan": 10, "facts": 10, "service": 10, "made_up": True}]).value == 0.0
    assert cfg.worth([marks | {"made_up": v} for v in (True, False, False)]).parts["made_up"] == 0.0


def test_a_majority_of_labels():
    cfg = Judge(
        EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}", labels={"good": 1.0, "bad": 0.0, "fair": 0.5},
        num=3, combine="majority", temperature=1.0, solved_at=1.0,
    )  # fmt: skip
    found = cfg.worth([{"verdict": v} for v in ("good", "bad", "good")])
    assert (found.value, found.success) == (1.0, True) and found.parts["agreed"] == pytest.approx(2 / 3)
    mean = dataclasses.replace(cfg, combine="mean").worth([{"verdict": v} for v in ("good", "bad", "fair")])
    assert (mean.value, mean.success) == (0.5, False)


def test_several_verdicts_are_asked_for_with_seeds_of_their_own():
    with judge_server(mark) as server:
        cfg = judge(server, num=3, temperature=0.7)
        score(cfg, said("it is 5"))
        assert len({body["seed"] for body in server.asked}) == 3 and len(server.asked) == 3


def test_the_judge_sees_the_question_the_answer_and_what_is_right():
    with judge_server(mark) as server:
        score(judge(server), said("<think>{reference} it is 0</think>I say {reference} {question} it is 7", 3))
        system, user = (m["content"] for m in server.asked[0]["messages"])
    assert "Task: 3+1?" in user and "Right: 4" in user and "I say {reference} {question} it is 7" in user
    assert "it is 0" not in user, "thinking is not shown"
    assert tried(user) and re.search(r"material \w+", user)[0] in system


@pytest.mark.parametrize(
    "text",
    ["", "10", '{"score": 11}', '{"score": -1}', '{"score": "10"}', '{"score": true}', '{"score": NaN}',
     '{"score": 1e999}', '{"other": 3}', '[{"score": 3}]', '{"score": 3} and more', "{" * 100_000,
     '{"score": ' + "9" * 5000 + "}", '{"score": 3', "__import__('os').system('x')", '{"score": [3]}', "[" * 1_000_000]
)  # fmt: skip
def test_what_is_no_verdict(text):
    cfg = Judge(EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}")
    with pytest.raises(Unreadable):
        cfg.read(text)


@pytest.mark.parametrize(
    "text",
    ['{"score": 7}', 'It says {"score": 10}.\n```json\n{"score": 7}\n```', '<think>{"score": 1}</think>\n{"score": 7.0}\n',
     '{"why": "fine", "score": 7}']
)  # fmt: skip
def test_what_is_a_verdict(text):
    assert Judge(EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}").read(text) == {"score": 7}


@given(st.text())
def test_no_text_is_anything_but_a_verdict_or_unreadable(text):
    cfg = Judge(EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}", labels={"a": 1.0})
    for read in (cfg.read, Comparison.FORM.read, last_object):
        try:
            assert isinstance(read(text), dict)
        except Unreadable:
            pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.sampled_from(["a", "good", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["score", "a"]), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from(["score", "veto", "verdict", "better"]), VALUES),
    st.sampled_from(["", "\ud800", "{"]),
)
def test_no_object_is_anything_but_a_verdict_or_unreadable(found, before):
    """And what is kept of a verdict is read as the same."""
    model = EndpointConfig("http://127.0.0.1:1/v1", "m")
    marks, labels = Judge(model, "{answer}", veto="veto"), Judge(model, "{answer}", labels={"good": 1.0, "a": 0.0})
    for read, worth in ((marks.read, marks.worth), (labels.read, labels.worth), (Comparison.FORM.read, None)):
        try:
            verdict = read(before + json.dumps(found))
        except Unreadable:
            continue
        assert read(json.dumps(verdict)) == verdict
        assert worth is None or 0 <= worth([verdict]).value <= 1


@pytest.mark.parametrize(
    "text", ['{"score": 1, "score": 9}', '{"verdict": ["a"]}', '{"verdict": {}}', '{"score": ' + "9" * 400 + "}"]
)
def test_a_verdict_that_is_ambiguous_or_of_another_kind_is_none(text):
    model = EndpointConfig("http://127.0.0.1:1/v1", "m")
    for judge in (Judge(model, "{answer}"), Judge(model, "{answer}", labels={"a": 1.0})):
        with pytest.raises(Unreadable):
            judge.read(text)


def test_what_is_put_in_is_not_looked_at_again():
    assert filled("{a} {b} {a}", {"a": "{b}", "b": "{a}"}) == "{b} {a} {b}"


def test_both_orders_are_asked_and_one_that_always_says_a_is_worth_a_half():
    solved = Questions(records=[{"question": "1+1?", "solution": "it is 4", "answer": "2"}])
    around = RewardContext(solved)
    better = lambda text: json.dumps({"better": "a"})  # noqa: E731

    def honest(text):
        a, b = (int(x.split()[-1]) for x in re.findall(r"\[material \w+\]\n(.*?)\n\[/material", text, re.S))
        return "I think\n" + json.dumps({"better": "tie" if a == b else "a" if a > b else "b"})

    for verdict, value, agree in ((better, 0.5, 0.0), (honest, 1.0, 1.0)):
        with judge_server(verdict) as server:
            cfg = Comparison(endpoint(server), "{question}\nA: {a}\nB: {b}", limits=FAST)
            task = dataclasses.replace(said("it is 9"), task=solved.task(0))
            (done,), _ = score(cfg, task, around=around)
            assert (done.reward, done.reward_parts["orders_agree"]) == (value, agree) and len(server.asked) == 2
    with judge_server(better) as server:
        cfg = Comparison(endpoint(server), "{a} {b}", orders="random", limits=FAST)
        many = [dataclasses.replace(said(f"it is {i}"), task=solved.task(0)) for i in range(20)]
        done, _ = score(cfg, *many, around=around)
        assert {t.reward for t in done} == {0.0, 1.0} and len(server.asked) == 20


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rubric": "mark it"}, r"does not contain \{answer\}"),
        ({"scale": (1.0, 1.0)}, "is empty"),
        ({"dimensions": {}}, "weighs nothing"),
        ({"num": 3}, "temperature is 0"),
        ({"combine": "majority"}, "there are none"),
        ({"veto": "score"}, "is a dimension"),
        ({"max_chars": 0}, "at least 1"),
    ],
)
def test_judges_that_cannot_be(settings, says):
    with pytest.raises(ConfigError, match=says):
        Judge(**{"model": EndpointConfig("http://127.0.0.1:1/v1", "m"), "rubric": "{answer}"} | settings)


# ---- calibration


def test_isotonic_is_the_best_rising_curve():
    """Against all rising curves on a grid."""
    rng = np.random.default_rng(0)
    scores = [0.1, 0.4, 0.4, 0.6, 0.9]
    labels = rng.integers(0, 2, 5).tolist()
    points = dict(isotonic(scores, labels))
    assert list(points.values()) == sorted(points.values())
    loss = sum((points[s] - g) ** 2 for s, g in zip(scores, labels, strict=True))
    grid = np.linspace(0, 1, 13)
    best = min(
        (a - labels[0]) ** 2 + (b - labels[1]) ** 2 + (b - labels[2]) ** 2 + (c - labels[3]) ** 2 + (d - labels[4]) ** 2
        for a in grid for b in grid[grid >= a] for c in grid[grid >= b] for d in grid[grid >= c]
    )  # fmt: skip
    assert loss <= best + 1e-9
    assert isotonic([3.0, 1.0, 2.0], [0.0, 1.0, 0.5]) == ((1.0, 0.5), (2.0, 0.5), (3.0, 0.5))
    with pytest.raises(DataError, match="cannot be calibrated"):
        isotonic([], [])


def test_agreement_against_hand_counts():
    found = agreed([0.9, 0.8, 0.2, 0.6], [1.0, 1.0, 0.0, 0.0], lost=1)
    assert (found.num, found.lost, found.accuracy) == (4, 1, 0.75)
    assert found.kappa == pytest.approx((0.75 - (0.75 * 0.5 + 0.25 * 0.5)) / (1 - 0.5))
    assert found.mean_error == pytest.approx((0.1 + 0.2 + 0.2 + 0.6) / 4)
    assert math.isnan(agreed([], []).accuracy) and math.isnan(agreed([1.0], [1.0]).kappa)


def test_a_judge_against_a_labelled_set(tmp_path):
    file = tmp_path / "labelled.jsonl"
    rows = [{"index": i, "answer": f"it is {m}", "label": g} for i, (m, g) in enumerate([(9, 1), (2, 0), (4, 1)])]
    file.write_text("\n".join(map(json.dumps, rows)))
    with judge_server(mark) as server:
        found = asyncio.run(agreement(judge(server), AROUND, read_labelled(file)))
    assert (found.num, found.accuracy, found.scores) == (3, pytest.approx(2 / 3), (0.9, 0.2, 0.4))
    file.write_text('{"index": 0, "answer": "x", "label": 2}')
    with pytest.raises(DataError, match="line 1: label is 2"):
        read_labelled(file)


def test_calibration_is_part_of_the_verdict():
    cfg = Judge(
        EndpointConfig("http://127.0.0.1:1/v1", "m"), "{answer}", calibration=((0.0, 0.0), (0.5, 0.8), (1.0, 1.0))
    )
    assert cfg.worth([{"score": 5}]).value == 0.8 and cfg.worth([{"score": 5}]).parts["uncalibrated"] == 0.5


def test_unreadable_is_no_outage():
    async def run():
        calls = AROUND.calls("x", "y", dataclasses.replace(FAST, retries=1, down_after=1))

        async def nonsense(_):
            raise Unreadable("no")

        for i in range(5):
            with pytest.raises(InfraError, match="no verdict: no"):
                await calls.answer(str(i), nonsense, str)
        return dict(calls.counts())

    assert asyncio.run(run()) == {"calls": 5, "garbage": 10, "retries": 5}
