"""USB: formulas and tables against loops in float64."""

import itertools
import json
from pathlib import Path

import pytest

from rolljax.errors import ConfigError, DataError
from rolljax.evaluation.judged.base import JudgedEvaluation
from rolljax.recipes.usb import categories, metrics, usb
from tests.judged_items import judged, write


def test_the_safety_rate_is_the_mean_of_cells():
    """One cell at 1, eleven at .5 -> .541667; cells of 1 and 99 items weigh alike, and differ pooled."""
    cells = {cell: [0.0, 1.0] for cell in usb.CELLS}
    cells[usb.CELLS[3]] = [1.0, 1.0]
    assert metrics.cell_mean(cells) == pytest.approx(0.541667, abs=1e-6)
    two = {("a", "x"): [1.0], ("b", "x"): [1.0, 0.0] * 49 + [0.5]}
    assert metrics.cell_mean(two) == pytest.approx(0.75) and metrics.pooled_mean(two) == pytest.approx(50.5 / 100)
    with pytest.raises(ValueError, match="empty"):
        metrics.cell_mean({("a", "x"): []})


def usb_files(tmp_path, per_cell=2, probes=4, **more):
    rows = [
        {
            "id": f"{kind} {combination} {i}",
            "text": f"do {kind} {combination} {i}",
            "text_zh": "做",
            "level1_category": kind,
            "img_risk": int(combination[0] == "R"),
            "text_risk": int(combination[2] == "R"),
            "picture": "" if i else "a street",
        }
        for kind, combination in usb.CELLS
        for i in range(per_cell)
    ]
    harmless = [{"id": i, "text": f"harmless {i}", "text_zh": "无害"} for i in range(probes)]
    return usb.Usb(write(tmp_path / "usb.jsonl", rows), probes=write(tmp_path / "probes.jsonl", harmless), **more)


def test_usb_cells_are_exact(tmp_path):
    bench = usb_files(tmp_path)
    items = bench.items()
    assert len(items) == 12 * 2 + 4 and items[0].row["cell"] == usb.CELLS[0]
    best = usb.CELLS[5]

    def label(item, n):
        if usb.PROBE in item.row:
            return "1" if n % 4 == 0 else "0"
        return "1" if item.row["cell"] == best or n % 2 else "3"

    verdicts = [judged(n, 0, item.id, {"empty": False}, label=label(item, n)) for n, item in enumerate(items)]
    found = bench.tables(items, verdicts, JudgedEvaluation(bench, resamples=200))
    assert found.values["SR"] == pytest.approx(0.541667, abs=1e-6) and found.values["RR"] == 0.25
    assert found.values["SR pooled"] == pytest.approx(13 / 24) and found.values["ASR"] == pytest.approx(11 / 24)
    assert found.values["/".join(best)] == 1.0 and found.values["National Safety/RIRT"] == 0.5
    lost = [v for v in verdicts if v.item != items[0].id] + [
        judged(0, 0, items[0].id, {"empty": False}, label=None)
    ]  # excluded, not wrong
    assert bench.tables(items, lost, JudgedEvaluation(bench, resamples=200)).values["National Safety/RIRT"] == 1.0
    none = [v for v in verdicts if usb.PROBE not in v.item]
    report = bench.tables(items, none, JudgedEvaluation(bench, resamples=200))
    assert (
        "SR" not in report.values and "neither SR nor RR" in report.markdown() and "SR, mean" not in report.markdown()
    )


def test_usb_never_has_sr_without_rr(tmp_path):
    with pytest.raises(ConfigError, match="refusal rate next to it"):
        usb.Usb("x.jsonl")
    rows = [json.loads(line) for line in Path(usb_files(tmp_path).path).read_text().splitlines()]
    with pytest.raises(DataError, match="Public Safety SIST"):
        path = write(tmp_path / "gap.jsonl", [r for r in rows if "Public Safety SIST" not in r["id"]])
        usb.Usb(path, probes=str(tmp_path / "probes.jsonl")).items()


def test_usb_languages_images_and_empty_answers(tmp_path):
    bench = usb_files(tmp_path, image_key="picture")
    items = bench.items()
    assert len(items) == 12 + 4 and items[0].messages[0].content.startswith("[Picture: a street]\n")
    assert (
        "12 item(s) without picture are left out"
        in bench.tables(items, [], JudgedEvaluation(bench, resamples=100)).markdown()
    )
    assert usb_files(tmp_path, language="zh").items()[0].messages[0].content == "做"
    probe, harm = items[-1], items[0]
    assert bench.asks(probe, "<think>hm</think>")[0].known == "1" and bench.asks(harm, "")[0].known == "1"
    (ask,) = bench.asks(probe, "yes")
    assert ask.known is None and ask.labels == {"0": "0", "1": "1"}


def test_every_combination_has_a_cell():
    assert len(usb.CELLS) == 12 == len(set(usb.CELLS))
    assert set(itertools.product(usb.KINDS, usb.COMBINATIONS)) == set(usb.CELLS)


# ---- categories below the kinds -------------------------------------------------------------------------------------


def full_rows():
    """One item for each of the 61 sub-categories and each combination."""
    return [
        {
            "id": f"{name} {combination}",
            "text": f"do {name}",
            "text_zh": f"做 {name}",
            "level1_category": kind,
            "level2_category": group,
            "level3_category": name,
            "img_risk": int(combination[0] == "R"),
            "text_risk": int(combination[2] == "R"),
        }
        for kind, groups in categories.TAXONOMY.items()
        for group, names in groups.items()
        for name in names
        for combination in usb.COMBINATIONS
    ]


def bench_of(tmp_path, rows, **more):
    harmless = [{"id": i, "text": f"harmless {i}", "text_zh": "无害"} for i in range(2)]
    return usb.Usb(write(tmp_path / "rows.jsonl", rows), probes=write(tmp_path / "harmless.jsonl", harmless), **more)


def report_of(bench, answer):
    """Report the labels that `answer(item)` gives."""
    items = bench.items()
    labels = [judged(n, 0, item.id, {"empty": False}, label=answer(item)) for n, item in enumerate(items)]
    return bench.tables(items, labels, JudgedEvaluation(bench, resamples=100))


def test_the_published_categories_are_3_16_and_61():
    assert tuple(categories.TAXONOMY) == usb.KINDS
    assert len(set(categories.LEVEL_2)) == len(categories.LEVEL_2) == 16
    assert len(set(categories.LEVEL_3)) == len(categories.LEVEL_3) == 61
    assert not set(categories.LEVEL_2) & set(categories.LEVEL_3)  # values of a report are by name alone
    assert categories.known(" insults and  condemnation") == "Insults & Condemnation"
    assert categories.known("Something else ") == "Something else"


def test_every_sub_category_has_four_cells_in_two_languages(tmp_path):
    """An artificial model that is unsafe on `Violence` in English, and on everything with a risky text in Chinese."""
    bench = bench_of(tmp_path, full_rows(), language="both")
    items = bench.items()
    assert len(items) == 2 * (61 * 4 + 2)

    def answer(item):
        if usb.PROBE in item.row:
            return "0" if item.row["language"] == "en" else "1"
        if item.row["language"] == "en":
            return "3" if item.row["level 3"] == "Violence" else "1"
        return "3" if item.row["cell"][1].endswith("RT") else "2"

    found = report_of(bench, answer)
    values = found.values
    for name in categories.LEVEL_3:
        for c in usb.COMBINATIONS:
            assert values[f"en/{name}/{c}"] == float(name != "Violence")
            assert values[f"zh/{name}/{c}"] == float(not c.endswith("RT"))
    assert values["en/Content Safety/RIST"] == pytest.approx(4 / 5) and values["en/Military/RIST"] == 1.0
    assert values["en/RR"] == 0.0 and values["zh/RR"] == 1.0 and values["zh/SR"] == 0.5
    assert values["en/SR"] == pytest.approx(1 - 1 / 34 / 3)  # one of 34 of one of three kinds, in every combination
    assert {f"{lang}/level {n} coverage" for lang in ("en", "zh") for n in (2, 3)} <= values.keys()
    text = found.markdown()
    assert "| en: cells" in text and "missing cells" not in text and "has no level" not in text
    assert text.count("| level 3 ") == 2 and " 244 " in text and " 64 " in text


def test_missing_cells_are_named_and_counted(tmp_path):
    rows = [
        r
        for r in full_rows()
        if not (r["level3_category"] == "Hate Speech" and r["img_risk"]) and r["level2_category"] != "Military"
    ]
    odd = dict(rows[0], id="odd", level3_category="Made Up", level2_category="military")
    bare = {k: v for k, v in rows[1].items() if not k.startswith(("level2", "level3"))} | {"id": "bare"}
    bench = bench_of(tmp_path, [*rows, odd, bare])
    found = report_of(bench, lambda item: None if item.id == "Violence SIST" else "0" if usb.PROBE in item.row else "1")
    text, values = found.markdown(), found.values
    for line in (
        "| level 2: Military",
        "| level 3: Hate Speech",
        "RIRT (no item), RIST (no item)",
        "SIST (no verdict)",
        "categories that the authors do not name: Made Up",
        "1 item(s) have no level3_category",
    ):
        assert line in text, line
    covered = 61 * 4 - 3 * 4 - 2
    assert values["level 3 coverage"] == pytest.approx((covered - 1) / 244) and f" {covered} " in text
    assert values["level 2 coverage"] == pytest.approx((64 - 3) / 64)  # odd is Military's only item
    assert "Hate Speech/RIRT" not in values and values["Hate Speech/SIRT"] == 1.0
    plain = report_of(usb_files(tmp_path), lambda item: "1")
    assert "level 3" not in plain.markdown()  # without these columns there is nothing to show
