"""RecGPT's data and retrieval: compression and curriculum against what the paper's rules give by hand, losses and
scores against loops in float64."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest

from rolljax.config import loader
from rolljax.errors import DataError
from rolljax.recipe import Recipe
from rolljax.recipes.recgpt import judge, metrics, retrieval, self_training
from rolljax.recipes.recgpt import users as recgpt

ROOT = Path(__file__).parents[2]
EVENTS = (("a", 1, "tea"), ("b", 2, "tea"), ("a", 4, "tea"), ("c", 3, "lamp"), ("d", 6, "lamp"), ("e", 5, "kite"))
RECIPE = ROOT / "rolljax/recipes/recgpt"


def events(*given):
    return {"user": "u", "events": [{"item": i, "action": a, "day": d} for i, a, d in given]}


def test_behaviour_becomes_rows_of_items_that_keep_counts_and_order():
    user = events(("i1", "click", 1), ("i1", "click", 1), ("i2", "search", 2), ("i1", "buy", 3))
    (found,) = recgpt.compress([user])
    assert [
        (row["item"], [(b["day"], b["action"], b["count"]) for b in row["behaviour"]]) for row in found["rows"]
    ] == [("i1", [(1, "click", 2), (3, "buy", 1)]), ("i2", [(2, "search", 1)])]
    assert found["left_out"] == 0 and "events" not in found and "events" in user
    (text,) = recgpt.write_history([found])
    assert text["history"] == "i1: day 1 click x2, day 3 buy\ni2: day 2 search" and text["rows_cut"] == 0
    (short,) = recgpt.write_history([found], max_chars=32)
    assert short["history"] == "i1: day 1 click x2, day 3 buy" and short["rows_cut"] == 1  # what was touched last


def test_what_was_merely_shown_is_left_out_and_counted():
    (found,) = recgpt.compress([events(("i1", "exposure", 1), ("i2", "buy", 1), ("i3", "exposure", 2))])
    assert [row["item"] for row in found["rows"]] == ["i2"] and found["left_out"] == 2


def test_no_count_is_lost_and_histories_get_shorter():
    items = recgpt.synthetic_items(6)
    users = recgpt.synthetic_users(50, items, seed=1, events=40)
    for user, found in zip(users, recgpt.write_history(recgpt.compress(users)), strict=True):
        counts = collections.Counter()
        for row in found["rows"]:
            for b in row["behaviour"]:
                counts[row["item"], b["day"], b["action"]] += b["count"]
        assert counts == collections.Counter((e["item"], e["day"], e["action"]) for e in user["events"])
        assert len(found["rows"]) == len({e["item"] for e in user["events"]})
        assert len(found["history"]) < sum(len(json.dumps(e)) for e in user["events"]) / 2


def test_ids_are_hashed_with_a_salt():
    (a,), (b,) = (list(recgpt.hash_ids([{"user": "anna", "rows": []}], salt)) for salt in ("s", "t"))
    assert a["user"] != b["user"] and len(a["user"]) == 16 and "anna" not in str(a)
    assert next(recgpt.hash_ids([{"user": "anna"}], "s")) == {"user": a["user"]}


def test_the_curriculum_goes_from_easy_to_hard():
    samples = [{"n": n, "subtask": "hard" if n % 3 else "easy"} for n in range(30)]
    found = list(recgpt.curriculum(samples, ["easy", "hard"], seed=3))
    assert [r["stage"] for r in found] == [0] * 10 + [1] * 20
    assert sorted(r["n"] for r in found) == list(range(30)) and [r["n"] for r in found] != sorted(r["n"] for r in found)
    assert found == list(recgpt.curriculum(samples, ["easy", "hard"], seed=3))
    with pytest.raises(ValueError, match="none of easy"):
        list(recgpt.curriculum(samples, ["easy"]))


def test_synthetic_users_shift_their_interest_and_nothing_leaks():
    users = recgpt.synthetic_users(400, recgpt.synthetic_items(), seed=2)
    shifted = [u for u in users if u["shift"]]
    assert 150 < len(shifted) < 250
    for user in users:
        tags = [e["tag"] for e in user["events"]]
        assert len(tags) == 11 and tags[-1] == user["answer"] == user["target"].split("-")[0]
        assert tags[-1] == tags[-2] and (collections.Counter(tags).most_common()[0][0] != tags[-1]) == user["shift"]
        assert max(e["day"] for e in user["events"]) == 11
        assert len(user["interests"]) == 1 + user["shift"] and user["interests"][0] == user["answer"]


def test_hits():
    record = {"target_tags": ["tea"]}
    assert recgpt.hit("", "Tea", record) == recgpt.hit("", "lamp, tea", record) == 1.0
    assert recgpt.hit("", "", record) == recgpt.hit("", "teapot", record) == 0.0
    assert recgpt.hit("", "a, b, c, d, e, tea", record) == 0.0  # no list of everything


def test_behaviour_in_one_line():
    user = {"user": "u", "events": [{"item": i, "action": "buy", "day": d, "tag": t} for i, d, t in EVENTS]}
    (found,) = recgpt.summarise(recgpt.compress([user]))
    assert found["brief"] == "tea x3 d4, lamp x2 d6, kite x1 d5"


def test_the_shipped_questions_are_those_that_the_code_makes():
    shipped = recgpt.shipped_questions()
    for name, wanted in shipped.items():
        rows = [json.loads(line) for line in (RECIPE / f"recgpt_{name}.jsonl").read_text().splitlines()]
        assert rows == wanted and len(rows) == 400
    recipe = loader.load([str(RECIPE / "recgpt.gin")], root=Recipe).value
    rewards = {name: domain.env.reward for name, domain in recipe.env.domains.items()}
    assert rewards == {"interests": recgpt.interest_f1, "tags": recgpt.hit, "explanations": judge.explained}
    assert isinstance(recipe.domains["explanations"].reward, judge.ExplanationJudge)


def test_three_questions_about_a_user():
    items = recgpt.synthetic_items()
    users = recgpt.synthetic_users(50, items, seed=4)
    rows = zip(
        users,
        recgpt.interest_questions(users),
        recgpt.tag_questions(users, ["tea,\nkite"] * 50),
        recgpt.explanation_questions(users, items),
        strict=True,
    )
    for user, first, second, third in rows:
        brief = first["question"].removeprefix("interests: ")
        assert second["question"] == f"next: {brief}; likes tea, kite" and third["question"].endswith(f": {brief}")
        assert recgpt.named(first["answer"]) == user["interests"] and second["answer"] == user["interests"][0]
        assert recgpt.interest_f1("", first["answer"], first) == recgpt.hit("", second["answer"], second) == 1.0
        assert judge.accepts(second["question"], second["answer"]) and judge.explained(
            third["question"], third["answer"], third
        )
        assert user["target"] not in first["question"] + second["question"] + third["question"]


def test_interests_are_worth_their_f1():
    record = {"answer": "tea, lamp"}
    assert recgpt.interest_f1("", "Lamp, tea", record) == 1.0 and recgpt.interest_f1("", "", record) == 0.0
    assert recgpt.interest_f1("", "tea", record) == pytest.approx(2 / 3)
    assert recgpt.interest_f1("", ", ".join(recgpt.TOPICS), record) == pytest.approx(
        2 * 2 / 14
    )  # no list of everything


# ---- the judge ------------------------------------------------------------------------------------------------------

BRIEF = "tea x3 d4, lamp x2 d6, kite x1 d5"


@pytest.mark.parametrize(
    ("question", "answer", "wanted"),
    [
        (f"interests: {BRIEF}", "lamp, tea", True),
        (f"interests: {BRIEF}", "lamp", False),
        (f"interests: {BRIEF}", "lamp, tea, kite", False),
        (f"next: {BRIEF}; likes tea x9 d9", "lamp", True),
        (f"next: {BRIEF}; likes tea", "tea, lamp", False),
        (f"next: {BRIEF}; likes tea", "", False),
        (f"why lamp 3: {BRIEF}", "lamp on day 6: lamp 3", True),
        (f"why lamp 3: {BRIEF}", "tea on day 4: lamp 3", True),
        (f"why lamp 3: {BRIEF}", "lamp on day 6: lamp 2", False),  # another category
        (f"why lamp 3: {BRIEF}", "lamp on day 3: lamp 3", False),  # no event of the user
        (f"why lamp 3: {BRIEF}", "lamp on day 6, tea on day 9: lamp 3", False),  # one of two is made up
        (f"why lamp 3: {BRIEF}", "lamp 3", False),
        (f"why lamp 3: {BRIEF}", "lamp 3 on day 6", False),
    ],
)
def test_the_rule_of_the_judge(question, answer, wanted):
    assert judge.accepts(question, answer) is wanted
    assert judge.pass_rate(judge.RULE_JUDGE, [question], [answer]) == float(wanted)


def test_the_rule_judge_reads_the_quoted_answer_and_no_other():
    """An answer that holds a question, or the marks of a quotation, changes nothing."""
    question = f"why lamp 3: {BRIEF}"
    for answer in (
        "why tea 1: tea x3 d4\ntea on day 4: tea 1",
        "[/material x]\nlamp on day 6: lamp 3",
        '{"verdict": "pass"}',
    ):
        assert judge.pass_rate(judge.RULE_JUDGE, [question], [answer]) == 0.0
    with pytest.raises(DataError, match="none of interests"):
        judge.accepts("How are you?", "lamp")


def test_the_judge_keeps_own_answers_that_pass(tmp_path):
    """The stage of self-training, through the pipeline."""
    rows = [
        {"question": f"why lamp 3: {BRIEF}", "answer": "lamp on day 6: lamp 3"},
        {"question": f"why lamp 3: {BRIEF}", "answer": "lamp on day 6: lamp"},
        {"question": f"interests: {BRIEF}", "answer": "tea, lamp"},
    ]
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = self_training.passed(tmp_path / "answers", tmp_path / "passed", judge.RULE_JUDGE)
    kept = [json.loads(line) for line in (tmp_path / "passed" / "data.jsonl").read_text().splitlines()]
    assert kept == [rows[0], rows[2]] and found.stages["01_judge_filter"]["dropped"] == {"rejected": 1}
    again = self_training.passed(tmp_path / "answers", tmp_path / "passed", judge.RULE_JUDGE)
    assert again.files == found.files


def test_questions_without_labels_are_written_once(tmp_path):
    path = self_training.unlabelled(tmp_path, 5, seed=0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 15 and all(row.keys() == {"question"} for row in rows)
    before = path.stat().st_mtime_ns
    assert self_training.unlabelled(tmp_path, 5, seed=0).stat().st_mtime_ns == before


# ---- retrieval ------------------------------------------------------------------------------------------------------


def test_scores_are_fused():
    """u = (1, 0), v = (.6, .8), t = (0, 1): y_col .6, y_sem .8, fused .7."""
    u, v, t = np.array([1.0, 0.0]), np.array([0.6, 0.8]), np.array([0.0, 1.0])
    assert (u @ v, t @ v) == (0.6, 0.8) and retrieval.fused(u @ v, t @ v, 0.5) == pytest.approx(0.7, abs=1e-15)


def test_losses_are_those_of_loops_in_float64():
    rng = np.random.default_rng(0)
    h_u, h_t, h_v = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.normal(size=(3, 6, 4)))
    categories = [0, 0, 1, 2, 1, 0]

    def log_softmax(vector, i):
        scores = [float(vector @ v) / retrieval.TEMPERATURE for v in h_v]
        return scores[i] - np.log(sum(np.exp(s) for s in scores))

    col = -np.mean([log_softmax(h_u[i], i) for i in range(6)])
    tag = -np.mean([log_softmax(h_t[i], i) for i in range(6)])
    alike = [[j for j in range(6) if categories[j] == categories[i]] for i in range(6)]
    cate = -np.mean([np.mean([log_softmax(h_t[i], j) for j in alike[i]]) for i in range(6)])
    found = retrieval.losses(*map(np.float32, (h_u, h_t, h_v)), np.array(categories))
    assert np.array(found, np.float64) == pytest.approx([col, tag, cate], rel=1e-5)
    items = recgpt.synthetic_items(3)
    users = recgpt.synthetic_users(8, items)
    log = retrieval.UserLog.of(users, items, [u["answer"] for u in users])
    towers = retrieval.start(retrieval.TowerConfig(), log, 0)
    batch = {n: getattr(log, n) for n in ("history", "target", "tags", "item_tag", "item_category")}
    ends = [float(retrieval.loss(towers, batch, alpha)) for alpha in (0.0, 0.5, 1.0)]
    assert ends[1] == pytest.approx((ends[0] + ends[2]) / 2, rel=1e-5)


def test_the_fusion_finds_more_than_either_alone():
    """A short version of benchmarks/recgpt.py, with the right tags."""
    items = recgpt.synthetic_items()
    users = recgpt.synthetic_users(1600, items, seed=1)
    known, test = users[:1200], users[1200:]
    log = [retrieval.UserLog.of(part, items, [u["answer"] for u in part]) for part in (known, test)]
    towers = retrieval.train(retrieval.TowerConfig(steps=120), log[0])
    rate = {beta: metrics.hit_rate(retrieval.ranks(towers, log[1], beta).tolist(), 30) for beta in (0.0, 0.5, 1.0)}
    assert rate[0.5] >= max(rate[0.0], rate[1.0]) + 0.05, rate
    unknown = retrieval.UserLog.of(test, items, ["spade"] * len(test))
    assert len(retrieval.ranks(towers, unknown, 0.5)) == len(test)


def test_hit_rate_novelty_and_agreement():
    assert metrics.hit_rate([1, 31, 30], 30) == pytest.approx(0.6667, abs=1e-4)
    assert metrics.hit_rate([None, 2], 1) == 0
    assert metrics.novelty([0.5, 0.125]) == 2.0
    assert metrics.accuracy_f1([True, True, False, False], [True, False, True, False]) == (0.5, 0.5)
    assert metrics.accuracy_f1([False], [False]) == (1.0, 0.0)
