"""The accelerator benchmarks, without running them: limits, files, tables, the page. `e2e/test_accelerator.py` runs them."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Put the folder of the scripts on the path, as when one of them runs; unload its modules afterwards."""
    folder = ROOT / "benchmarks" / "accelerator"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    names = {path.stem for path in folder.glob("*.py")}
    assert not names & set(sys.modules)
    yield
    for name in names & set(sys.modules):
        del sys.modules[name]


def modules():
    run, common = importlib.import_module("run"), importlib.import_module("common")
    return run, common, importlib.import_module("summary")


def test_every_piece_is_estimated_below_its_limit():
    run, common, _ = modules()
    for name in run.PIECES:
        estimate = importlib.import_module(name).estimate
        for gpu in common.GPUS[:2]:
            assert 0 < estimate(False, gpu) < common.LIMIT_S, (name, gpu.name)
            assert estimate(True, gpu) < common.LIMIT_S


def test_the_page_is_made_from_the_committed_results():
    *_, summary = modules()
    assert (ROOT / "docs" / "accelerators.md").read_text() == summary.page()


def test_a_piece_that_ends_early_keeps_its_rows_and_is_not_done(tmp_path):
    _, common, summary = modules()
    piece = common.Piece("decode", tmp_path, tiny=True)
    piece.record({"what": "decode", "shape": "tiny", "of_roofline": 0.7})
    assert not common.is_done(tmp_path / "decode.json", tiny=True)
    piece.write(failed="ValueError: no")
    text = summary.report(summary.read(tmp_path), "##")
    assert "0.7" in text and "did not come to its end: ValueError: no" in text
    piece.write(done=True, failed=None)
    assert common.is_done(tmp_path / "decode.json", tiny=True)
    assert not common.is_done(tmp_path / "decode.json", tiny=False)  # a dry run is no measurement
    (tmp_path / "decode.json").write_text("{")
    assert not common.is_done(tmp_path / "decode.json", tiny=True)


def test_a_row_that_fails_says_why_and_the_next_one_goes_on(tmp_path):
    from rolljax.errors import ConfigError

    _, common, _ = modules()
    piece = common.Piece("update", tmp_path, tiny=True)
    for error in (ValueError("first line\nsecond line"), ConfigError("is not here", setting="A.b", value=1), None):
        with piece.attempt({"what": "update"}) as row:
            row["before"] = 1.0
            if error:
                raise error
    first, second, third = json.loads((tmp_path / "update.json").read_text())["figures"]
    assert first == {"what": "update", "before": 1.0, "failed": "ValueError: first line"}
    assert second["cannot"].startswith("A.b is not here") and "failed" not in second
    assert third == {"what": "update", "before": 1.0}
    assert not piece.has_time({"what": "update"}, common.LIMIT_S + 1)
    assert "left out" in piece.content["figures"][-1]["failed"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_what_jax_calls_the_device(kind, name):
    _, common, _ = modules()
    found = common.peaks_of(kind)
    assert (found and found.name) == name


def test_goals_are_judged_by_the_figures():
    _, _, summary = modules()
    decode = [{"what": "decode", "of_roofline": 0.4}, {"what": "decode", "of_roofline": 0.61}, {"what": "prefill"}]
    update = [{"what": "update", "shape": "0.6B", "mfu": 0.7}, {"what": "update", "shape": "4B", "mfu": 0.49}]
    parity = [{"what": "gap", "dtype": "bfloat16", "gap_max": 0.02, "k3": 5e-5}]
    side = [{"what": "decode", "ratio": 2.0}, {"what": "decode", "ratio": 1.2}]
    figures = {"decode": decode, "update": update, "parity": parity, "torch_side": side}
    found = summary.goals({name: {"figures": rows} for name, rows in figures.items()})
    assert [(value, reached) for _, value, reached in found] == [
        (0.61, True),
        (0.49, False),
        (0.02, False),
        (5e-5, True),
        (1.2, False),
        (None, False),
    ]
