"""What a row of metrics says of a step, against NumPy on the same trajectories."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.metrics import MetricsReport, check_row
from rolljax.run.step_metrics import add_sampler, add_trajectories
from rolljax.sampler.prompt_queue import SamplerStats
from rolljax.types import Group
from tests.synthetic import groups_of

VERSION = 9


def row_of(add, *args, **kwargs):
    add(report := MetricsReport(), *args, **kwargs)
    return report.row()


def groups(seed, oldest):
    """Return groups whose tokens have versions from `VERSION - oldest` on, growing within a turn."""
    rng = np.random.default_rng(seed)

    def aged(turn):
        return dataclasses.replace(
            turn, versions=np.sort(rng.integers(VERSION - oldest, VERSION + 1, len(turn.tokens))).astype(np.int32)
        )

    made = []
    for g, siblings in enumerate(groups_of(rng)):
        members = (dataclasses.replace(t, turns=tuple(map(aged, t.turns))) for t in siblings)
        made.append(Group(siblings[0].task, g, tuple(members)))
    return made


@pytest.mark.parametrize(("seed", "oldest"), [(0, 0), (1, 1), (2, 3), (3, 8)])
def test_ages_of_tokens(seed, oldest):
    step = groups(seed, oldest)
    row = row_of(add_trajectories, step, VERSION)
    ages = VERSION - np.concatenate([turn.versions for g in step for t in g.trajectories for turn in t.turns])
    p50, p99 = np.percentile(ages, (50, 99), method="inverted_cdf")
    assert row["stale/mean_ver"] == pytest.approx(ages.mean())
    assert (row["stale/p50_ver"], row["stale/p99_ver"], row["stale/max_ver"]) == (p50, p99, ages.max())
    assert check_row(row) == []


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_ages_that_are_counted(ages):
    row = row_of(MetricsReport.add_histogram, "stale/start_", np.bincount(ages))
    p50, p99 = np.percentile(ages, (50, 99), method="inverted_cdf")
    want = {"mean": np.mean(ages), "p50": p50, "p99": p99, "max": max(ages)}
    assert row == pytest.approx({f"stale/start_{name}_ver": value for name, value in want.items()})


def test_without_a_token_nothing_is_old():
    assert set(row_of(MetricsReport.add_histogram, "stale/", np.zeros(3, np.int64)).values()) == {0}


def test_what_the_sampler_did():
    before = SamplerStats(aborted=2, aborted_tok=50, held_s=10.0, slot_steps=100, busy_slot_steps=60)
    now = SamplerStats(aborted=5, aborted_tok=140, held_s=22.0, slot_steps=300, busy_slot_steps=110)
    row = row_of(add_sampler, before, now, slot_s=16.0)
    assert row["sampler/idle_frac"] == pytest.approx(1 - 12 / 16)
    assert row["sampler/slot_frac"] == pytest.approx(50 / 200)
    assert (row["sampler/abort_n"], row["sampler/abort_len_tok"]) == (3, 30)
    assert check_row(row) == []
    idle = row_of(add_sampler, now, now, slot_s=16.0)
    assert idle["sampler/idle_frac"] == 1 and "sampler/abort_len_tok" not in idle
    assert row_of(add_sampler, before, now, slot_s=11.999)["sampler/idle_frac"] == 0
