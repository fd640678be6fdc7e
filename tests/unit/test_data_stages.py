"""Stages that ask a model (a rule behind a real server), rejection sampling, STAgent's routing, DLCoT's pruning."""

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import dlcot_toy
from rule_server import RuleServer

from rolljax.chat_models.client import EndpointConfig
from rolljax.config import loader
from rolljax.data import attempts, dlcot, judge, pipeline, rejection, stagent, turn_mask
from rolljax.data.dlcot import Trace
from rolljax.data.dlcot_stages import Deconstruct, Prune, Rewrite
from rolljax.data.pipeline import Pipeline
from rolljax.envs.questions import BOXED
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError
from rolljax.types import Key, Task, Trajectory


def through(tmp_path, *stages, records, rule=None, **settings):
    """What stages make of records, their ledgers, and the server that was asked."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    with RuleServer(rule) as server:
        model = EndpointConfig(server.url, "rule", retries=3, backoff_s=0.1) if rule else None
        found = pipeline.run(Pipeline(stages, model, **settings), str(source), tmp_path / "out", fresh=True)
    rows = [json.loads(line) for name in found.files for line in (found.folder / name).read_text().splitlines()]
    return rows, list(found.stages.values()), server


# ---- attempts, rejection sampling -----------------------------------------------------------------------------------


def coin(messages, rng):
    """Right with the probability that the question tells."""
    chance = float(messages[-1]["content"].split("with ")[1].split()[0])
    return f"Hm. \\boxed{{{7 if rng.random() < chance else 8}}}"


def test_tasks_that_can_be_learned_are_the_true_middle_band(tmp_path):
    rng = random.Random(0)
    chances = [1.0] * 80 + [0.0] * 80 + [rng.uniform(0.3, 0.7) for _ in range(80)]
    rng.shuffle(chances)
    records = [{"prompt": f"{i}: seven with {c} ?", "answer": "7", "chance": c} for i, c in enumerate(chances)]
    stages = (attempts.SampleAttempts(k=8), stagent.Learnability(keep_attempts=False))
    rows, ledgers, server = through(tmp_path, *stages, records=records, rule=coin, split_by="route")
    middle = {r["prompt"] for r in records if 0 < r["chance"] < 1}
    found = {r["prompt"] for r in rows}
    assert len(found & middle) >= 0.9 * len(found | middle)
    assert server.num_asked == 8 * 240 and BOXED.split("\n")[1] in next(iter(server.asked)).replace("\\\\", "\\")
    by_route = {name: [r for r in rows if r["route"] == name] for name in ("sft", "rl")}
    assert len(by_route["sft"]) > 3 and all(r["rollouts"]["mu"] >= 0.75 for r in by_route["sft"])
    assert sum(ledgers[1]["dropped"].values()) == 240 - len(rows)


@pytest.mark.parametrize(
    "mu, sigma, route", [(0.9, 0.3, "trivial"), (0.05, 0.2, "noise"), (0.875, 0.33, "sft"), (0.75, 0.46, "rl"), (0.5, 0.5, "rl")]
)  # fmt: skip
def test_routes(mu, sigma, route):
    assert stagent.Learnability().route(mu, sigma) == route


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
    with pytest.raises(DataError, match="put Attempts or FromRollouts before"):
        through(tmp_path, rejection.RejectionSampling(), records=[{"prompt": "x"}])


# ---- judges, STAgent ------------------------------------------------------------------------------------------------


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
    assert ledger["counts"]["unparsed_answers"] == 10 and any("Good? p=1 a deep" in k for k in server.asked)
    for wrong in ({"prompt": "no slot"}, {"prompt": "{a}", "verdict": "("}, {"prompt": "{a}", "verdict": "x"}):
        with pytest.raises(ConfigError):
            judge.JudgeFilter(**wrong)


def test_an_answer_that_was_cut_holds_no_verdict(tmp_path):
    stage = judge.JudgeFilter(prompt="Good? {prompt}", tries=2)
    whole, _, _ = through(tmp_path, stage, records=[{"prompt": "a"}], rule=lambda *_: "Verdict: yes")
    cut = lambda *_: ("Verdict: yes", "length")  # noqa: E731
    rows, (ledger,), _ = through(tmp_path, stage, records=[{"prompt": "a"}], rule=cut)
    assert len(whole) == 1 and not rows and ledger["counts"]["unparsed_answers"] == 2


def test_a_taxonomy_is_induced_and_extended_from_what_it_does_not_cover(tmp_path):
    kinds = ("flight", "hotel", "weather")

    def rule(messages, rng):
        text = messages[-1]["content"]
        if text.startswith("Here are"):
            return "\n".join(f"- {k}" for k in kinds[:2]) if "known already" not in text else "1. weather"
        kind = next(k for k in kinds if k in text.split("Request:")[1])
        listed = text.split("Request:")[0]
        primary = kind if f"- {kind}" in listed else "Other"
        said = {"primary": primary, "secondary": [], "constraints": ["cheap"]}
        return f"Let me see {{}}. {json.dumps(said)}" if rng.random() < 0.8 else "{"

    records = [{"prompt": f"{i} about {kinds[i % 3]}"} for i in range(30)]
    rows, (ledger,), _ = through(tmp_path, stagent.Taxonomy(tries=6), records=records, rule=rule)
    assert [r["intent"] for r in rows] == [kinds[i % 3] for i in range(30)]
    assert rows[0]["constraints"] == ["cheap"] and ledger["numbers"] == {
        "other_before_round_1": 10,
        "other_before_round_2": 0,
        "intents": 3,
    }


def test_difficulty_is_graded_and_what_cannot_be_read_is_asked_again(tmp_path):
    def rule(messages, rng):
        value = int(messages[-1]["content"].split("level ")[1].split()[0])
        return json.dumps({"reasons": "{}", "difficulty": value}) if rng.random() < 0.7 else '{"difficulty": 9}'

    records = [{"prompt": f"level {n} ."} for n in (-1, 0, 3, 5)]
    rows, _, _ = through(tmp_path, stagent.GradeDifficulty(tries=9), records=records, rule=rule)
    assert [r["difficulty"] for r in rows] == [-1, 0, 3, 5]


@pytest.mark.parametrize(
    "text, found",
    [
        ('{"a": {"b": 1}} then {"c": 2}.', {"c": 2}), ("none {} of these {", {}), ("[1]", None), ('{"a": NaN} {1}', None),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}), ('{"a": 1} ' + "{" * 200 + '{"b": 2}', {"a": 1}),
    ],
)  # fmt: skip
def test_the_last_object_of_an_answer(text, found):
    assert stagent.last_json_object(text) == found


def test_rare_combinations_of_tools_are_repeated(tmp_path):
    tools = [["map"]] * 9 + [["map", "weather"], ["weather", "map"]] + [["pay"]] + [["hotel"]] * 5
    records = [{"prompt": str(i), "tools": t} for i, t in enumerate(tools)]
    rows, (ledger,), _ = through(tmp_path, stagent.RareTools(), records=records)
    counts = {}
    for row in rows:
        name = "+".join(sorted(row["tools"]))
        counts[name] = counts.get(name, 0) + 1
    assert counts == {"map": 9, "map+weather": 5, "pay": 4, "hotel": 5} and ledger["numbers"]["target"] == 5
    assert {r["prompt"] for r in rows} == {r["prompt"] for r in records}


def test_a_model_says_which_turns_mattered(tmp_path):
    said = [
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"))
    ]
    rule = lambda messages, rng: "Turns: 9" if rng.random() < 0.3 else "Because.\nTurns: 2"  # noqa: E731
    rows, _, _ = through(tmp_path, turn_mask.TurnMask(judge=True, tries=9), records=[{"messages": said}], rule=rule)
    assert [m.get("weight") for m in rows[0]["messages"]] == [None, 0, None, 1]
    with pytest.raises(ConfigError, match="asks a model"):
        Pipeline((turn_mask.TurnMask(judge=True),))


@pytest.mark.parametrize("name", ["stagent", "dlcot", "learnability"])
def test_recipes_can_be_read(name):
    found = loader.load([f"data/{name}"], root=Pipeline).value
    assert found.labels and all(found.model_of(s) for s in found.stages if s.asks)


# ---- DLCoT ----------------------------------------------------------------------------------------------------------


def traced(labels, clusters, errors=None, steps=0):
    texts = tuple(f"S{i}. " for i in range(1, len(labels) + 1))
    wrong = tuple(errors or (False,) * len(labels))
    spans = tuple((t.strip(),) if e else () for t, e in zip(texts, wrong, strict=True))
    checks = tuple(f"V{i}. " for i in range(1, steps + 1))
    return Trace("Q. ", texts, checks, "C.", tuple(labels), wrong, spans, clusters)


def test_pruning_is_the_papers():
    """Specs: clusters {S1, S3, S5}, {S2, S4}; S1 and S5 incomplete, S2 and S3 correct, S4 incorrect."""
    labels = ("Incomplete", "Correct", "Correct", "Incorrect", "Incomplete")
    clusters = ((1, 3, 5), (2, 4))
    trace = traced(labels, clusters)
    assert dlcot.redundant(clusters) == [3, 5, 4]
    assert [dlcot.redundant(clusters, n) for n in (1, 2, 9)] == [[4], [5, 4], [3, 5, 4]]
    assert dlcot.incorrect(trace) == {3, 4, 5} and trace.first_correct == 2
    assert trace.without({3, 4, 5}) == "Q. S1. S2. C."
    assert dlcot.incorrect(traced(("Incomplete", "Correct"), ((1, 2),))) == set()
    assert dlcot.incorrect(traced(("Incomplete", "Incorrect"), ((1, 2),))) is None
    assert dlcot.incorrect(traced(("Correct", "Incorrect"), ((1,), (2,)), (False, True))) == {2}
    assert dlcot.incorrect(traced(("Incorrect", "Correct"), ((1,), (2,)), (True, False))) == set()
    ten = tuple(range(1, 12))
    assert dlcot.redundant([ten[::-1]])[:2] == [2, 3]  # numbers, not names: Solution10 is not before Solution2
    assert dlcot.incorrect(traced(("Correct",), ((1, 2), (3, 4)), steps=3)) == {2, 4}
    mixed = traced(("Incorrect", "Correct", "Correct"), ((1,), (2,), (3,)), (True, False, True))
    assert dlcot.erroneous_spans(mixed, trunk=False) == {3: ("S3.",)}
    assert dlcot.erroneous_spans(mixed, trunk=True) == {1: ("S1.",), 3: ("S3.",)}
    assert dlcot.complete(("a", "b"), ("x", "y"), 1) == (("a", "bx"), ("y",))


def test_a_proposed_partition_is_made_exact():
    text = "We add.  First, 2 and 3 are 5.\nThen 5 and 1 are 6!\n\nCheck: 6-1=5. \n\\boxed{6}\n"
    assert "".join(dlcot.sentences(text)) == text
    told = ["We add.", "first, 2 and 3 are 5. Then 5 and 1 are 6!", "", "Check: 6-1=5.", "\\boxed{6}"]
    parts = dlcot.aligned(text, told, least=0.8)
    assert parts == [
        "We add.  ",
        "First, 2 and 3 are 5.\nThen 5 and 1 are 6!\n\n",
        "",
        "Check: 6-1=5. \n",
        "\\boxed{6}\n",
    ]
    skipped = dlcot.aligned(text, ["We add.", "", "Check: 6-1=5.", "\\boxed{6}"], least=0.3)
    assert "".join(skipped) == text and skipped[0].endswith("are 6!\n\n")
    assert dlcot.aligned(text, ["Something else altogether", "was written here."]) is None
    rng = random.Random(0)
    for _ in range(30):
        whole = dlcot_toy.trace(rng.randrange(10, 60), rng.randrange(10, 60), rng)
        cuts = sorted(rng.randrange(len(whole)) for _ in range(3))
        pieces = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, len(whole)), strict=True)]
        found = dlcot.aligned(whole, pieces, least=0.5)
        assert found is None or "".join(found) == whole and len(found) == 4


def test_a_rewriting_may_change_little_and_not_the_answer():
    whole, kept = "long. " * 40 + "\\boxed{6}", "word " * 40 + "\\boxed{6}"
    assert dlcot.rewrite_fault(whole, kept, kept.replace("word", "Word", 5)) == ""
    assert dlcot.rewrite_fault(whole, kept, kept.replace("word", "what")) == "rewritten_too_much"
    assert dlcot.rewrite_fault(whole, kept, kept.replace("6", "7")) == "answer_changed"


def test_traces_get_a_third_shorter_and_keep_their_answers(tmp_path):
    records = dlcot_toy.records(40, 0)
    stages = (Deconstruct(), Prune(), Rewrite())
    rows, ledgers, _ = through(tmp_path, *stages, records=records, rule=dlcot_toy.rule)
    before = {r["prompt"]: r["trace"] for r in records}
    assert len(rows) == 40 and all(r["trace"].endswith(f"\\boxed{{{r['answer']}}}") for r in rows)
    assert sum(len(r["trace"]) for r in rows) <= 0.7 * sum(map(len, before.values()))
    said = {line for text in before.values() for line in text.splitlines()}
    fresh = {line for r in rows for line in r["trace"].splitlines()} - said
    assert all(line.startswith("And digits ") for line in fresh)  # what the model mended
    assert all(any(f"so {r['answer']}." in line for line in r["trace"].splitlines()) for r in rows)
    assert ledgers[1]["counts"]["parts_cut"] > 40


def test_prune_needs_a_trace_taken_apart(tmp_path):
    with pytest.raises(DataError, match="put Deconstruct before"):
        through(tmp_path, Prune(), records=[{"trace": "x"}])
    with pytest.raises(ConfigError, match="has no effect"):
        Prune(how="redundant", spans=True)
