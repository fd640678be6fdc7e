"""Stages that ask a model (a rule behind a real server), and rejection sampling."""

import json
import re

import pytest

from rolljax.data import attempts, judge, rejection
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError
from rolljax.judging.verdict import Unreadable, last_object
from rolljax.types import Key, Task, Trajectory
from tests.stages import coin, through


def test_adaptive_synthesis_stops_at_the_first_success(tmp_path):
    records = [{"prompt": f"{i}: seven with {c} ?", "answer": "7"} for i, c in enumerate((1.0, 0.0, 0.5, 0.5, 0.5))]
    rows, _, server = through(tmp_path, attempts.SampleAttempts(until_success=True), records=records, rule=coin)
    assert [len(r["attempts"]) for r in rows[:2]] == [1, 8]
    assert all(sum(a["reward"] for a in r["attempts"]) == (i != 1) for i, r in enumerate(rows))
    assert server.num_asked == sum(len(r["attempts"]) for r in rows)


def test_a_run_s_own_rollouts_are_attempts(tmp_path):
    played = [("What?", True), ("What?", False), ("Who?", False)]
    lines = [
        Trajectory(Key(0, i, 0), Task("questions", i, content), (), float(right), {}, right, "ok").to_json()
        for i, (content, right) in enumerate(played)
    ]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stages = (attempts.FromRollouts((str(tmp_path / "rollouts"),)), attempts.Difficulty())
    rows, ledgers, _ = through(tmp_path, *stages, records=[{"prompt": p} for p in ("What?", "Who?", "Where?")])
    assert [(r["prompt"], r["rollouts"]["k"], r["rollouts"]["mu"]) for r in rows] == [("What?", 2, 0.5), ("Who?", 1, 0)]
    assert ledgers[0]["dropped"] == {"not_played": 1}


def test_rejection_sampling_keeps_what_is_right_and_differs(tmp_path):
    tried = [
        ("First 3 and 4 make 7, so \\boxed{7}", 1),
        ("First 3 and 4 makes 7, so \\boxed{7}", 1),  # nearly the first
        ("First 3 and 4 make 7, so \\boxed{7.0}", 1),  # the same answer, otherwise written
        ("Seven it is: count on your fingers.\\boxed{7}", 1),
        ("First 3 and 4 make 8, so \\boxed{8}", 0),
        ("By symmetry of the sum we get \\boxed{7}", 1),
        ("One more way would be to subtract: \\boxed{7}", 1),
        ("And yet another, which is over the cap: \\boxed{7}", 1),
    ]
    one = {"prompt": "3+4?", "attempts": [{"text": t, "reward": r} for t, r in tried]}
    none = {"prompt": "?", "attempts": [{"text": "x", "reward": 0.5}]}
    rows, (ledger,), _ = through(tmp_path, rejection.RejectionSampling(), records=[one, none])
    assert [r["answer"] for r in rows] == [tried[i][0] for i in (0, 3, 5, 6)]
    assert ledger["dropped"] == {"no_good_attempt": 1} and ledger["counts"]["attempts_good"] == 7
    assert Records(path=str(tmp_path / "out" / "data.jsonl")).record(1).answers[0].text == tried[3][0]
    with pytest.raises(DataError, match="put SampleAttempts or FromRollouts before"):
        through(tmp_path, rejection.RejectionSampling(), records=[{"prompt": "x"}])


def test_rejection_sampling_keeps_the_shortest_with_its_length(tmp_path):
    """A model's attempts have the number of their tokens, which the length band refers to."""
    thinking = iter(["3+4=7. " * n + f"\\boxed{{{7 if n != 1 else 8}}}" for n in (5, 1, 3, 4)])
    sampled = attempts.SampleAttempts(k=4)
    kept = rejection.RejectionSampling(prefer="shortest", cap=1, answer_key="solution", tok_key="ref_tok")
    one = [{"prompt": "3+4?", "answer": "7"}]
    rows, ledgers, _ = through(tmp_path, sampled, kept, records=one, rule=lambda *_: next(thinking), concurrency=1)
    assert ledgers[1]["counts"] == {"attempts": 4, "attempts_good": 3, "attempts_kept": 1}
    assert [(r["solution"], r["answer"]) for r in rows] == [("3+4=7. " * 3 + "\\boxed{7}", "7")]
    assert rows[0]["ref_tok"] > 0
    unknown = [{"prompt": "x", "attempts": [{"text": "x", "reward": 1}]}]
    with pytest.raises(DataError, match="has no num_tok"):
        through(tmp_path, kept, records=unknown)


def test_a_judge_keeps_what_most_of_its_votes_accept(tmp_path):
    def rule(messages, rng):
        text = messages[-1]["content"]
        if "garbage" in text:
            return "I will not say."
        return f"Reasons.\nVerdict: {'Yes' if rng.random() < float(text.split('p=')[1].split()[0]) else 'no'}"

    stage = judge.JudgeFilter(prompt="Good? {prompt} {of.x}", votes=5, column="share", tries=2)
    texts = ["p=1 a", "p=0 b", "garbage", "p=0.5 {prompt}"]
    records = [{"prompt": t, "of": {"x": "deep"}} for t in texts]
    rows, (ledger,), server = through(tmp_path, stage, records=records, rule=rule)
    assert rows[0] == records[0] | {"share": 1.0} and all(r["share"] > 0.5 for r in rows)
    assert ledger["dropped"]["no_verdict"] == 1 and ledger["dropped"]["rejected"] >= 1
    assert ledger["counts"]["unparsed_answers"] == 10 and any(
        re.search(r"Good\? \[(material \w+)\]\\np=1 a\\n\[/\1\] \[\1\]\\ndeep\\n", k) for k in server.asked
    )
    for wrong in ({"prompt": "no slot"}, {"prompt": "{a}", "verdict": "("}, {"prompt": "{a}", "verdict": "x"}):
        with pytest.raises(ConfigError):
            judge.JudgeFilter(**wrong)


def test_a_verdict_in_the_thoughts_of_a_judge_is_none(tmp_path):
    stage = judge.JudgeFilter(prompt="Good? {prompt}", tries=2)
    said = lambda *_: "<think>Verdict: yes</think>I will not say."  # noqa: E731
    rows, (ledger,), _ = through(tmp_path, stage, records=[{"prompt": "a"}], rule=said)
    assert not rows and ledger["dropped"] == {"no_verdict": 1}


def test_an_answer_that_was_cut_holds_no_verdict(tmp_path):
    stage = judge.JudgeFilter(prompt="Good? {prompt}", tries=2)
    whole, _, _ = through(tmp_path, stage, records=[{"prompt": "a"}], rule=lambda *_: "Verdict: yes")
    cut = lambda *_: ("Verdict: yes", "length")  # noqa: E731
    rows, (ledger,), _ = through(tmp_path, stage, records=[{"prompt": "a"}], rule=cut)
    assert len(whole) == 1 and not rows and ledger["counts"]["unparsed_answers"] == 2


@pytest.mark.parametrize(
    "text, found",
    [
        ('{"a": {"b": 1}} then {"c": 2}.', {"c": 2}), ("none {} of these {", {}), ("[1]", None), ('{"a": NaN} {1}', None),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}), ('{"a": 1} ' + "{" * 200 + '{"b": 2}', {"a": 1}),
    ],
)  # fmt: skip
def test_the_last_object_of_an_answer(text, found):
    if found is None:
        with pytest.raises(Unreadable):
            last_object(text)
    else:
        assert last_object(text) == found
