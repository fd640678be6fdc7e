"""The metric table and the check that holds rows against it."""

import math

import numpy as np
import pytest

from rolljax import metrics


def test_a_good_row_has_nothing_wrong():
    row = {"step": 3, "phase": "rl", "reward/mean": -2.5, "reward/success_frac": 1, "optim/lr": 0, "time/step_s": 0.5}
    assert metrics.check_row(row) == []


@pytest.mark.parametrize(
    "row, word",
    [
        ({"reward/men": 1.0}, "reward/men"),
        ({"policy/clip_low_frac": 1.01}, "1.01"),
        ({"optim/grad_norm": -1e-9}, "optim/grad_norm"),
        ({"loss/total": math.nan}, "nan"),
        ({"mismatch/k3_nat": -1e-3}, "mismatch/k3_nat"),
    ],
)
def test_unknown_names_and_values_out_of_range_are_named(row, word):
    (message,) = metrics.check_row({"reward/mean": 0.5, **row})
    assert word in message


def test_every_fault_is_reported():
    assert len(metrics.check_row({"a/b": 1.0, "c/d": 2.0, "reward/std": -1.0})) == 3


def test_domains_have_names_of_their_own():
    assert not metrics.check_row({"domain/math/share_frac": 0.4, "domain/rg:a.b/reward_mean": -2.0})
    (wrong,) = metrics.check_row({"domain/math/share_frac": 1.4})
    assert "domain/math/share_frac = 1.4" in wrong
    assert len(metrics.check_row({"domain/math/other": 1.0, "domain/a/b/share_frac": 0.5})) == 2


def test_names_say_their_unit_and_ranges_are_in_order():
    units = {"s": "s", "frac": "share", "tok": "tokens", "nat": "nats", "ratio": "ratio", "ver": "versions"}
    for name, metric in metrics.NAMES.items():
        assert (
            name.removeprefix("domain/NAME").removeprefix("sampler/NAME").count("/") == 1
            and metric.low < metric.high
            and metric.meaning
        ), name
        suffix = name.rsplit("_", 1)[-1] if "_" in name else ""
        if suffix in units and not name.endswith("tok_s"):
            assert metric.unit == units[suffix], name


def test_markdown_lists_all():
    lines = metrics.markdown().splitlines()
    assert len(lines) == len(metrics.NAMES) + 2
    for line, (name, metric) in zip(lines[2:], metrics.NAMES.items(), strict=True):
        cells = [cell.strip().replace("\0", "|") for cell in line.replace(r"\|", "\0").strip("|").split("|")]
        assert cells[0] == f"`{name}`" and metric.unit in cells and cells[-1] == metric.meaning
        assert len(cells) == 5, f"a | in the text of {name} breaks the table"


def test_parts_of_a_step_become_one_number():
    values = [3.0, 1.0, 5.0]
    want = {"mean": 3.0, "sum": 9.0, "max": 5.0, "first": 3.0, "last": 5.0}
    by_reduction = {metric.reduction: name for name, metric in metrics.NAMES.items()}
    assert set(by_reduction) == set(want), "a reduction that is not tested here"
    for reduction, name in by_reduction.items():
        assert metrics.reduce_parts(name, values) == want[reduction]
        assert metrics.reduce_parts(name, [2.5]) == 2.5


def test_a_metric_that_nobody_knows_cannot_be_reduced():
    with pytest.raises(KeyError, match="reward/men"):
        metrics.reduce_parts("reward/men", [1.0])


def test_a_report_reduces_the_parts_of_each_metric():
    report = metrics.MetricsReport()
    for row in ({"loss/total": 1.0, "policy/ratio_max": 2.0}, {"loss/total": 2.0, "policy/ratio_max": 1.5}):
        report.add_row(row)
    report.add("faults/env_n", 1, 2)
    report.add("groups/no_signal_len_tok")
    report.add("my/own", 1, 4)
    report.add("domain/a/trained_n", 3, 4)
    report.add_histogram("stale/", np.array([1, 2, 0, 1]))
    assert report.get("loss/total") == 1.5 and report.get("groups/no_signal_len_tok") is None
    assert report.row() == {
        "loss/total": 1.5,
        "policy/ratio_max": 2.0,
        "faults/env_n": 3.0,
        "my/own": 2.5,
        "domain/a/trained_n": 7.0,
        "stale/mean_ver": 1.25,
        "stale/p50_ver": 1.0,
        "stale/p99_ver": 3.0,
        "stale/max_ver": 3.0,
    }
