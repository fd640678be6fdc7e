"""DLCoT: traces taken apart, pruned and rewritten."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import dlcot_toy

from rolljax.config import loader
from rolljax.data.pipeline import Pipeline
from rolljax.errors import ConfigError, DataError
from rolljax.recipes.dlcot import dlcot
from rolljax.recipes.dlcot.dlcot import Trace
from rolljax.recipes.dlcot.dlcot_stages import Deconstruct, Prune, Rewrite
from tests.stages import through


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
    assert all(line.startswith("And ") for line in fresh)  # what the model mended
    assert all(any(f"so {r['answer']}." in line for line in r["trace"].splitlines()) for r in rows)
    assert ledgers[1]["counts"]["parts_cut"] > 40


def test_prune_needs_a_trace_taken_apart(tmp_path):
    with pytest.raises(DataError, match="put Deconstruct before"):
        through(tmp_path, Prune(), records=[{"trace": "x"}])
    with pytest.raises(ConfigError, match="has no effect"):
        Prune(how="redundant", spans=True)


@pytest.mark.parametrize("name", ["dlcot/data"])
def test_recipes_can_be_read(name):
    found = loader.load([name], root=Pipeline).value
    assert found.labels and all(found.model_of(s) for s in found.stages if s.asks)
