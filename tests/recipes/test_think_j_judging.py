"""Verdicts, pairs of answers as an environment, pairs of thoughts, and judges' tables: Think-J (arXiv 2505.14268)."""

import dataclasses
import json
import random
import re

import numpy as np
import pytest

from rolljax.envs import checks
from rolljax.envs.tasks import first_tasks, held_out, is_held_out
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.evaluation.settings import Attempts, Benchmark
from rolljax.recipes.think_j import pair_table, thought_pairs, verdicts
from rolljax.recipes.think_j.digit_sums import DigitSums, digit_sum
from rolljax.recipes.think_j.judging import JudgeQuestion, PreferencePair
from rolljax.recipes.think_j.preferences import Preferences
from rolljax.recipes.think_j.thought_pairs import Traces
from rolljax.recipes.think_j.verdicts import Verdict
from rolljax.types import Key, Task, Trajectory, Turn

A, B = "Therefore, Response (a) is better.", "Therefore, Response (b) is better."
ROWS = [
    {"prompt": "Name a prime.", "chosen": "7", "rejected": "9", "subset": "hep-python"},
    {"prompt": "Name a colour.", "chosen": "red", "rejected": "loud", "subset": "math-prm"},
]

# ---- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, truth, want",
    [("a2", -2, 1.0), ("a1", -2, 0.875), ("a5", -2, 0.5), ("b2", -2, 0.0), ("", -2, 0.0), ("a1", -3, 0.75)]
    + [("b3", 1, 0.75), ("a0", -1, 0.5), ("b1", 1, 1.0)],
)
def test_strength_reward(said, truth, want):
    assert verdicts.strength_reward(verdicts.read(said, "strength", "brief"), truth) == want


def scores(first, second):
    return f"Thoughts.\nTherefore, the scores are <Score 1>{first}</Score 1> and <Score 2>{second}</Score 2>."


@pytest.mark.parametrize(
    "text, better, want",
    [(scores(80, 60), "a", 1.2), (scores(80, 60), "b", -0.2), ("no scores", "a", 0.5), (scores(0, 100), "b", 2.0)]
    + [(scores(0, 100), "a", -1.0), (scores(50, 50), "a", 0.0), (scores(12.5, 37.5), "b", 1.25)],
)
def test_score_reward(text, better, want):
    assert verdicts.score_reward(verdicts.read(text, "scores"), better) == pytest.approx(want, abs=1e-12)


def test_cot_reward():
    assert [verdicts.cot_reward(verdicts.read(t, "plain"), "a") for t in (A, B, "hm")] == [1.0, 0.0, 0.5]


def authors(form, text, truth):
    """Compute the authors' rewards with their patterns: a second implementation, from the formulas."""
    if form == "strength":
        m = re.search(r"Therefore, Response \((a|b)\) is better, and the strength is \[\[(\d+)\]\]\.", text)
        if not m or (m[1] == "a") != (truth < 0):
            return 0.0
        return 1 + (-abs(abs(truth) - int(m[2])) / 8 if int(m[2]) in (1, 2, 3) else -0.5)
    label = 1 if truth < 0 else 2
    if form == "plain":
        said = [i for i, side in ((1, "a"), (2, "b")) if f"Response ({side}) is better." in text]
        return 0.5 if not said else float(said[-1] == label)
    m = re.search(r"<Score 1>(\d*\.?\d+)</Score 1>.*<Score 2>(\d*\.?\d+)</Score 2>", text)
    if not m:
        return 0.5
    gap = abs(float(m[1]) - float(m[2])) / 100
    right = (float(m[1]) > float(m[2])) if label == 1 else (float(m[1]) < float(m[2]))
    return min(gap, 1.0) + 1 if right else max(-gap, -1.0)


def test_rewards_are_the_authors_for_answers_of_the_form_that_was_asked_for():
    rng = random.Random(0)
    for _ in range(300):
        form, better = rng.choice(verdicts.FORMS), rng.choice("ab")
        values = tuple(float(rng.randint(0, 1000)) / 10 for _ in range(2))
        side = rng.choice("ab")
        verdict = Verdict(side, rng.randint(0, 5), values)
        text = "A thought.\n" + verdicts.write(verdict, form) if rng.random() < 0.9 else "A thought."
        truth = rng.choice((1, 2, 3)) * (-1 if better == "a" else 1)
        mine = verdicts.reward(verdicts.read(text, form), form, better, abs(truth))
        assert mine == pytest.approx(authors(form, text, truth), abs=1e-12), (form, text, truth)


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", verdicts.FORMS)
@pytest.mark.parametrize("wording", ["sentences", "brief"])
def test_what_is_written_is_read(form, wording):
    for verdict in (Verdict("a", 3, (80.0, 60.5)), Verdict("b", 1, (0.0, 100.0))):
        text = verdicts.write(verdict, form, wording)
        read = verdicts.read(f"a thought about b\n{text}  \n", form, wording)
        want = {"plain": Verdict(verdict.better), "strength": dataclasses.replace(verdict, scores=None)}
        assert read == want.get(form, dataclasses.replace(verdict, strength=None))
        assert verdicts.read(text + " Or not.", form, wording) is None  # it is the end, and nothing else


@pytest.mark.parametrize(
    "form, text",
    [
        ("plain", f"{A} {B[:-1]}"),
        ("plain", "Response (a) is better."),
        ("plain", "Therefore, Response (c) is better."),
        ("strength", A),
        ("strength", "Therefore, Response (a) is better, and the strength is [[٢]]."),
        ("strength", "Therefore, Response (a) is better, and the strength is [[2000]]."),
        ("scores", "<Score 1>101</Score 1> and <Score 2>60</Score 2>."),
        ("scores", "<Score 1>-1</Score 1> and <Score 2>60</Score 2>."),
        ("scores", "<Score 1>1e1</Score 1> and <Score 2>nan</Score 2>."),
        ("scores", "<Score 2>80</Score 2> and <Score 1>60</Score 1>."),
        ("scores", "<Score 1>80</Score 1>" + " " * 1000 + "<Score 2>60</Score 2>."),
    ],
)
def test_what_is_no_verdict_is_none(form, text):
    assert verdicts.read(text, form) is None


def test_the_last_verdict_counts_and_thoughts_do_not():
    assert verdicts.read(f"{A} No: {B}", "plain") == Verdict("b")
    assert verdicts.read("12 5\nb1\na2", "strength", "brief") == Verdict("a", 2)
    assert verdicts.read("a2 b", "strength", "brief") is None


@pytest.mark.parametrize("form", verdicts.FORMS)
def test_a_megabyte_is_read_at_once(form):
    for text in ("Therefore, Response (" * 50_000, "<Score 1>" * 100_000, "[" * 2**20, " " * 2**20, "1" * 2**20):
        assert verdicts.read(text, form) is None and verdicts.read(text, form, "brief") is None
        assert not thought_pairs.leaks(text)


# ---- the environments -----------------------------------------------------------------------------------------------


def test_both_orders_of_a_pair_are_two_tasks_of_one_content():
    env = DigitSums()
    sides = []
    for k in range(200):
        first, second = env.task(2 * k), env.task(2 * k + 1)
        questions = [env.question(t.index) for t in (first, second)]
        assert first.content == second.content and env.variants(second) == (first, second)
        assert {q.better for q in questions} == {"a", "b"} and questions[0].a == questions[1].b
        sides.append(questions[0].better)
    assert 70 < sides.count("a") < 130  # which comes first is drawn, so that the first order alone favours nobody


def test_digit_sums_have_a_better_one_and_do_not_favour_the_larger_number():
    env = DigitSums(digits=3)
    drawn = [env.pair(k) for k in range(400)]
    assert all(digit_sum(p.better) > digit_sum(p.worse) for p in drawn)
    assert 160 < sum(p.better > p.worse for p in drawn) < 240
    assert {p.strength for p in drawn} == {1, 2, 3}
    assert len({DigitSums(num_pairs=5).task(i).content for i in range(100)}) == 5


@pytest.mark.parametrize("form", verdicts.FORMS)
@pytest.mark.parametrize("brief", [True, False])
def test_what_always_says_the_same_is_right_half_of_the_time(form, brief):
    env = DigitSums(verdict=form, brief=brief)
    text = "5 3\n" + verdicts.write(Verdict("a", 2, (80.0, 60.0)), form, env.wording)
    tasks = [env.task(i) for i in range(400)]
    plays = [checks.play(env, task, checks.always(text)) for task in tasks]
    assert sum(p.success for p in plays) == 200
    reference = [checks.play(env, task, checks.reference).reward for task in tasks]
    assert np.mean([p.reward for p in plays]) <= 0.5 * np.mean(reference) + 0.01


def test_a_critic_is_told_rightly_or_wrongly_and_earns_by_what_it_was_told():
    env = DigitSums(critic_frac=0.5)
    questions = [env.question(i) for i in range(400)]
    told = [q for q in questions if q.told]
    wrong = [q for q in told if q.told != q.better]
    assert 150 < len(told) < 250 and 60 < len(wrong) < 140
    play = checks.play(env, env.task(questions.index(wrong[0])), checks.reference)
    assert play.success and play.reward == 1.0 and play.seen[0][0].content.endswith(f" {wrong[0].told}")
    assert is_held_out(env.task(0), 1.0) and all(is_held_out(t, 0.2) for t in held_out(env, 20, 0.2))


def test_an_evaluation_asks_in_both_orders():
    tasks = Benchmark(DigitSums(), num_tasks=30, held_out_frac=0.1).tasks()
    assert len(tasks) == 60 and len({t.id for t in tasks}) == 30 and all(is_held_out(t, 0.1) for t in tasks)
    assert [t.index % 2 for t in tasks] == [0, 1] * 30
    assert Benchmark(DigitSums(num_pairs=3)).tasks()[:2] == [DigitSums(num_pairs=3).task(i) for i in range(2)]


@pytest.mark.parametrize(
    "row, better, strength",
    [
        ({"prompt": "q", "chosen": "x", "rejected": "y"}, "x", None),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "strength": -3}, "x", 3.0),
        ({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": -2}, "x", 2.0),
        ({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": 5}, "y", 3.0),
        ({"instruction": "q", "response1": "x", "response2": "y", "better": 1}, "x", None),
        ({"question": "q", "response_a": "x", "response_b": "y", "winner": "model_b"}, "y", None),
        (
            {
                "prompt": [{"role": "user", "content": "q"}],
                "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}],
                "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "y"}],
            },
            "x",
            None,
        ),
    ],
)
def test_rows_of_preferences(row, better, strength):
    pair = Preferences(records=[row]).pair(0)
    assert (pair.instruction, pair.better, pair.strength) == ("q", better, strength)


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": 0}, "neither response is better"),
        ({"prompt": "q", "response_1": "x", "response_2": "y", "winner": "tie"}, "names neither response"),
        ({"prompt": "q", "chosen": "x", "rejected": "x"}, "the same text"),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "strength": "much"}, "not a finite number"),
    ],
)
def test_rows_that_are_no_pair(row, complaint):
    with pytest.raises(DataError, match=complaint):
        Preferences(records=[row]).pair(0)
    mended = {"chosen": "u", "response_1": "u", "strength": 1, "preference_strength": 1, "winner": "a"}
    good = {name: mended.get(name, value) for name, value in row.items()}
    both = Preferences(records=[good, row], bad_rows="skip")
    assert both.num_pairs == 1 and "left out" in both.warnings()[0]


def test_preferences_without_a_label_are_refused():
    with pytest.raises(ConfigError, match="which response is better"):
        Preferences(records=[{"prompt": "q", "response_1": "x", "response_2": "y"}]).pair(0)
    with pytest.raises(ConfigError, match="no form of a verdict"):
        Preferences(records=ROWS, verdict="stars")


def test_without_a_strength_every_strength_is_right(tmp_path):
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    env = Preferences(path=str(path))
    task = env.task(0)
    better = env.question(0).better
    for strength, want in ((1, 1.0), (3, 1.0), (7, 0.5)):
        said = checks.always("So. " + verdicts.write(Verdict(better, strength), "strength"))
        assert checks.play(env, task, said).reward == want
    assert "[Response (a)]" in checks.play(env, task, checks.reference).seen[0][-1].content
    with pytest.raises(EnvError, match="was its file changed"):
        env.make().reset(Task("preferences", 0, "another"))


# ---- pairs of thoughts ----------------------------------------------------------------------------------------------

ENV = DigitSums(num_pairs=50)


def said(side, index=0, thought="9 1"):
    """Return a trace about question `index` that prefers the better (or the worse) response."""
    better = ENV.question(index).better
    return f"{thought}\n{better if side == 'right' else verdicts.other(better)}2"


@pytest.mark.parametrize(
    "judge, critic, outcome",
    [
        ("right", "wrong", "judge_right"),
        ("right", "right", "critic_failed"),
        ("wrong", "right", "judge_wrong"),
        ("wrong", "wrong", "critic_failed"),
    ],
)
def test_truth_table_of_four_cases_gives_two_pairs(judge, critic, outcome):
    j, c = said(judge, thought="9 1"), said(critic, thought="1 9")
    record, found = thought_pairs.pair_of(ENV, Traces(0, j, c))
    assert found == outcome and (record is not None) == (outcome != "critic_failed")
    if record:
        assert (record["chosen"], record["rejected"]) == ((j, c) if judge == "right" else (c, j))
        assert record["prompt"][-1]["content"] == ENV.prompt(ENV.question(0))[-1].content
    assert (
        thought_pairs.label_for_critic(ENV, ENV.question(0), j)
        == ENV.read(said({"right": "wrong"}.get(judge, "right"))).better
    )


def test_traces_without_a_verdict():
    assert thought_pairs.pair_of(ENV, Traces(0, "hm", said("right")))[1] == "judge_wrong"  # the judge's: rejected
    assert thought_pairs.pair_of(ENV, Traces(0, said("right"), "hm"))[1] == "critic_failed"
    assert thought_pairs.pair_of(ENV, Traces(0, said("right")))[1] == "critic_failed"
    assert thought_pairs.pair_of(ENV, Traces(0, " ", said("right")))[1] == "same"


@pytest.mark.parametrize(
    "thought, leak",
    [
        ("It is known that (b) is better, so", True),
        ("As told that b wins,", True),
        ("The label says b,", True),
        ("I was told\nthat this one is better", True),
        ("Given that Response (a) is better, its style", True),
        ("We are informed that", True),
        ("The given preference favours a", True),
        ("Response (a) is more complete. The labels of the axes are known.", False),
        ("The user asked that it be told as a story. As is known, Paris is the capital.", False),
    ],
)
def test_traces_that_give_away_the_label_are_let_go(thought, leak):
    assert thought_pairs.leaks(thought) == leak
    assert thought_pairs.pair_of(ENV, Traces(0, said("right"), said("wrong", thought=thought)))[1] == (
        "leaked" if leak else "judge_right"
    )


def test_pairs_are_counted_and_are_records(tmp_path):
    from rolljax.envs.records import Records

    traces = [Traces(2 * k, said(("right", "wrong")[k % 2], 2 * k), said(("wrong", "right")[k % 2], 2 * k, "3 4")) for k in range(20)]  # fmt: skip
    records, counts = thought_pairs.build(ENV, [*traces, Traces(40, "", None)])
    assert counts == {"judge_right": 10, "judge_wrong": 10, "critic_failed": 1} and len(records) == 20
    assert thought_pairs.build(ENV, traces)[0] == records  # no chance in it
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    env = Records(path=str(path)).make()
    env.reset(Records(path=str(path)).task(0))
    assert (env.reference_answer(), env.rejected()) == (records[0]["chosen"], records[0]["rejected"])


def test_reference_traces_of_judge_and_critic():
    records = thought_pairs.reference_traces(ENV, range(10))
    assert len(records) == 30
    assert [ENV.read(r["answer"]).better for r in records[1:3]] == ["a", "b"]  # the given labels
    assert len(thought_pairs.reference_traces(ENV, range(10), critic=False)) == 10


# ---- tables ---------------------------------------------------------------------------------------------------------


def trajectory(env, task, text, sibling=0, failed=False):
    key, ids = Key(1_000_000, task.index, sibling), np.array([1], np.int32)
    turn = Turn(ids, ids, np.zeros(1, np.float32), np.zeros(1, np.int32), "stop", 0.0, text)
    return Trajectory(key, task, (turn,), 0.0, {}, False, "failed" if failed else "ok"), key


def asked(env, num, say, attempts=1, failed=lambda k, i: False):
    found = [
        trajectory(env, task, say(env.question(task.index), k, i), i, failed(k, i))
        for k in range(num)
        for task in env.variants(env.task(2 * k))
        for i in range(attempts)
    ]
    return pair_table.score(env, [t for t, _ in found], [key for _, key in found])


def test_always_a_gets_pair_accuracy_0():
    env = DigitSums()
    scores, left_out = asked(env, 50, lambda q, k, i: "9 1\na2")
    row = pair_table.pair_table(env, scores, left_out, Attempts())["all pairs"].estimates
    assert [row[m].mean for m in pair_table.METRICS] == [0.5, 0.0, 0.0, 1.0, 0.0]
    assert row["pair accuracy"].high < 0.08 and row["pair accuracy"].method == "wilson"


def test_accuracy_pair_accuracy_and_agreement():
    """Ten pairs: right in both orders 6, right in one 2, wrong in both 1, one order without a verdict 1."""
    env = DigitSums()

    def say(q, k, i):
        if k < 6:
            return f"1 2\n{q.better}1"
        if k < 8:
            return "1 2\nb1"
        if k == 8:
            return f"1 2\n{verdicts.other(q.better)}1"
        return "1 2" if q.better == "a" else "1 2\nb1"

    scores, left_out = asked(env, 10, say)
    row = pair_table.pair_table(env, scores, left_out, Attempts())["all pairs"]
    found = {m: e.mean for m, e in row.estimates.items()}
    assert row.pairs == 10 and left_out == 0
    right, says_a = 6 * 2 + 2 + 0 + 1, 6 * 0.5 + 0 + 0.5 + 0
    assert found == pytest.approx(
        {"accuracy": right / 20, "pair accuracy": 0.6, "agreement": 0.7, "says (a)": says_a / 10, "no verdict": 0.05}
    )
    low, high = row.estimates["accuracy"].low, row.estimates["accuracy"].high
    assert (
        low < 0.75 < high and row.estimates["accuracy"].method == "bootstrap"
    )  # both orders of a pair are no two trials


def test_failed_attempts_are_in_no_number():
    env = DigitSums()
    right = lambda q, k, i: f"1 2\n{q.better}1"  # noqa: E731
    scores, left_out = asked(env, 4, right, attempts=2, failed=lambda k, i: k == 0 or (k == 1 and i == 0))
    assert left_out == 1 and [s.attempts for s in scores] == [1, 2, 2]
    assert "1 pair(s) have no attempt" in pair_table.pair_table(env, scores, left_out, Attempts(num=2)).markdown()


def test_rows_by_subset_and_sections_of_reward_bench():
    def row(i, subset):
        return {"prompt": f"q{i}", "chosen": f"x{i}", "rejected": f"y{i}", "subset": subset}

    names = ["alpacaeval-easy", "llmbar-natural", "donotanswer", "math-prm", "hep-go"]
    env = Preferences(records=[row(i, names[i % 5]) for i in range(50)], verdict="plain")

    def say(q, k, i):  # right but for code, and half of math
        wrong = q.pair.subset == "hep-go" or (q.pair.subset == "math-prm" and k % 2)
        return B if (q.better == "b") != bool(wrong) else A

    table = pair_table.pair_table(env, *asked(env, 50, say), Attempts())
    found = {r.name: r.estimates["pair accuracy"].mean for r in table.rows}
    assert found["Reasoning"] == pytest.approx((found["Math"] + found["Code"]) / 2) and found["Code"] == 0
    assert found["RewardBench"] == pytest.approx((3 + found["Reasoning"]) / 4)
    assert found["all pairs"] == pytest.approx((30 + 10 * found["Math"]) / 50)
    other = Preferences(records=[row(i, f"part {i % 2}") for i in range(10)], verdict="plain")
    table = pair_table.pair_table(other, *asked(other, 10, say), Attempts())
    assert [r.name for r in table.rows] == ["part 0", "part 1", "all pairs"]
    subset_table = table.markdown().splitlines()
    assert subset_table[0].startswith("| preferences, both orders") and len(subset_table) == 5


def test_first_tasks_of_a_small_file_are_its_pairs():
    env = Preferences(records=ROWS)
    assert len(first_tasks(env, 10)) == 2 and env.num_pairs == 2
    pair = PreferencePair("q", "x", "y")
    assert pair.content == PreferencePair("q", "y", "x").content and JudgeQuestion(pair, "b").a == "y"
