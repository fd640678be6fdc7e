"""Tables of evaluations: several environments, weights, categories, against numbers made by hand in float64."""

import math

import numpy as np
import pytest

from rolljax.envs.catalog import make_spec
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError
from rolljax.evaluation.report import ALL, MEAN, WEIGHTED, report, score_task
from rolljax.evaluation.settings import Attempts
from rolljax.evaluation.statistics import bootstrap
from rolljax.types import EVAL_STREAM, Fault, Key, Task, Trajectory


def attempts_at(env, index, solved):
    """Return attempts at one task; None stands for a failed one."""
    task = Task(env, index, f"task {index}")
    return [
        Trajectory(
            Key(EVAL_STREAM, index, i),
            task,
            (),
            float(bool(right)),
            {},
            bool(right),
            "failed" if right is None else "ok",
            Fault("infra", "sample", "") if right is None else None,
        )
        for i, right in enumerate(solved)
    ]


def table_of(tasks, cfg):
    """Return a report. tasks: (environment, category, results of the attempts)."""
    scores = [score_task(i, attempts_at(env, i, s), cfg, None, kind) for i, (env, kind, s) in enumerate(tasks)]
    return report("model", scores, cfg, {})


def test_three_domains_of_eight_attempts_are_one_table_to_paste():
    """Every line of a table has the same number of cells, and every number is that of the definition."""
    rng = np.random.default_rng(0)
    tasks = [
        (env, "", (rng.random(8) < p).tolist())
        for env, p in (("math", 0.7), ("code", 0.4), ("chat", 0.9))
        for _ in range(5)
    ]
    cfg = Attempts(8, weights={"math": 2, "code": 1, "chat": 1}, resamples=500)
    found = table_of(tasks, cfg)
    assert [row.name for row in found.rows] == ["math", "code", "chat", ALL, MEAN, WEIGHTED]
    text = found.markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6 and len({line.count("|") for line in lines}) == 1 and text.count("**model**") == 1
    assert lines[0].split("|")[1].strip() == "environment" and "| avg@8 |" in " ".join(lines[0].split())
    assert "Weights: math 2, code 1, chat 1." in text

    def mean_of(env, score):
        return math.fsum(score(s) for e, _, s in tasks if e == env) / 5

    for name, score in (
        ("avg@8", lambda s: sum(s) / 8),
        ("pass@4", lambda s: 1 - math.comb(8 - sum(s), 4) / math.comb(8, 4)),
        ("pass@8", lambda s: float(any(s))),
    ):
        of = {env: mean_of(env, score) for env in cfg.weights}
        for env in of:
            assert found[env].estimates[name].mean == pytest.approx(of[env], abs=1e-15)
        assert found[MEAN].estimates[name].mean == pytest.approx(math.fsum(of.values()) / 3, abs=1e-15)
        assert found[WEIGHTED].estimates[name].mean == pytest.approx(
            (2 * of["math"] + of["code"] + of["chat"]) / 4, abs=1e-15
        )
        row = found[WEIGHTED].estimates[name]
        assert row.low <= row.mean <= row.high


def test_weights_are_those_of_the_environments():
    tasks = [("a", "", [True]), ("b", "", [False])]
    with pytest.raises(ConfigError, match="look at b, c"):
        table_of(tasks, Attempts(weights={"a": 1, "c": 1}))
    with pytest.raises(ConfigError, match="no weight for a"):
        Attempts(weights={"a": 0})
    assert [row.name for row in table_of(tasks, Attempts()).rows] == ["a", "b", ALL, MEAN]
    assert table_of(tasks, Attempts(weights={"a": 3, "b": 1}))[WEIGHTED].estimates["pass@1"].mean == 0.75


def test_a_weighted_bootstrap_is_the_plain_one_where_weights_are_equal():
    values = [np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.25])]
    equal, plain = bootstrap(values, weights=[3, 3], resamples=300), bootstrap(values, resamples=300)
    assert (equal.low, equal.high) == pytest.approx((plain.low, plain.high), abs=1e-15)
    alone = bootstrap([values[0]], resamples=300)
    assert bootstrap(values, weights=[1, 0], resamples=300).low == alone.low


def test_categories_have_a_table_with_the_deviation_between_runs():
    """avg@3 of (1,0,1) and (0,0,1) is .5; single runs solve 1/2, 0 and 1 of the two tasks."""
    tasks = [
        ("terminal", "games", [1, 0, 1]),
        ("terminal", "debugging", [1, 1, 1]),
        ("terminal", "games", [0, 0, 1]),
        ("sums", "", [1, 1, 0]),
        ("terminal", "security", [1, None, 0]),
    ]
    found = table_of(tasks, Attempts(3))
    assert [row.name for row in found.categories] == ["terminal: debugging", "terminal: games", "terminal: security"]
    games = found["terminal: games"]
    assert games.estimates["avg@3"].mean == 0.5 and games.std == pytest.approx(np.std([0.5, 0, 1], ddof=1))
    assert games.estimates["pass@2"].mean == pytest.approx((1 + 2 / 3) / 2, abs=1e-15)
    assert found["terminal: debugging"].std == 0 and found["terminal: security"].std is None
    assert found["terminal: security"].failed == 1
    text = found.markdown()
    assert text.count("\n|:") == 2 and "| category " in text and "| std |" in " ".join(text.split())
    assert found.to_json()["categories"][1]["name"] == "terminal: games"
    assert "std" not in table_of([("a", "x", [1])], Attempts()).markdown()


def test_environments_say_what_kind_a_task_is(tmp_path):
    terminal = make_spec("terminal")
    kinds = {terminal.category(terminal.task(i)) for i in range(12)}
    assert {"games", "security", "debugging", "data-processing"} <= kinds and "" not in kinds
    rows = [{"question": "2+2?", "answer": "4", "meta": {"kind": "easy"}}]
    spec = Questions(records=rows, category_key="meta.kind")
    assert spec.category(spec.task(0)) == "easy"
    assert Questions(records=rows).category(spec.task(0)) == ""
