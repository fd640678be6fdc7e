"""The report of a finished pipeline: numbers, a table, a picture."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolljax.storage import durable

REPORT, TABLE, PICTURE = "report.json", "report.md", "report.png"
MOST_HISTOGRAMS = 5


def write(
    folder: Path,
    num_in: int,
    files: Mapping[str, int],
    stages: Mapping[str, Mapping[str, Any]],
    samples: Sequence[str] = (),
) -> None:
    """Write report.png, report.md and last report.json, which marks the pipeline as finished.

    Args:
      num_in: rows of the input. files: name -> records. stages: label -> its report.
      samples: a few of the output records, as text.
    """
    durable.write(folder / PICTURE, _picture(num_in, stages))
    durable.write(folder / TABLE, markdown(num_in, files, stages, samples))
    found = {"num_in": num_in, "files": dict(files), "stages": dict(stages)}
    durable.write(folder / REPORT, json.dumps(found, indent=1) + "\n")


def markdown(
    num_in: int, files: Mapping[str, int], stages: Mapping[str, Mapping[str, Any]], samples: Sequence[str] = ()
) -> str:
    """Return the report as Markdown."""
    num_out = sum(files.values())
    lines = [f"# {num_in} records in, {num_out} out", ""]
    lines += ["| stage | in | out | dropped | model answers | seconds |", "|---|---:|---:|---|---:|---:|"]
    for label, s in stages.items():
        dropped = ", ".join(f"{why} {n}" for why, n in sorted(s["dropped"].items(), key=lambda x: (-x[1], x[0])))
        asked = s["asked"].get("calls", 0) + s["asked"].get("cached", 0)
        row = (label, s["num_in"], s["num_out"], dropped, asked or "", f"{s['seconds']:.1f}")
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "| file | records |", "|---|---:|", *(f"| {name} | {n} |" for name, n in files.items())]
    if samples:
        lines += ["", "## What came out", "", *(f"    {text}" for text in samples)]
    for label, s in stages.items():
        said = {**s["counts"], **{name: f"{x:.6g}" for name, x in s["numbers"].items()}}
        if said or s["samples"]:
            lines += ["", f"## {label}", ""]
        lines += [f"- {name}: {value}" for name, value in said.items()]
        for why, shown in s["samples"].items():
            lines += ["", f"Dropped, {why}:", "", *(f"    {text}" for text in shown)]
    return "\n".join(lines) + "\n"


def _picture(num_in: int, stages: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Plot the number of records after every stage, and histograms of the stages' observations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    histograms = [(f"{label}: {name}", xs) for label, s in stages.items() for name, xs in s["observed"].items() if xs]
    histograms = histograms[:MOST_HISTOGRAMS]
    figure, axes = plt.subplots(1, 1 + len(histograms), figsize=(5 + 3 * len(histograms), 3.2), squeeze=False)
    names, counts = ["in", *stages], [num_in, *(s["num_out"] for s in stages.values())]
    axes[0][0].barh(names, counts, color="#4c6ef5")
    axes[0][0].invert_yaxis()
    axes[0][0].set_xlabel("records")
    for i, n in enumerate(counts):
        axes[0][0].text(n, i, f" {n}", va="center", fontsize=8)
    for axis, (title, xs) in zip(axes[0][1:], histograms, strict=True):
        axis.hist(xs, bins=20, color="#868e96")
        axis.set_title(title, fontsize=8)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    plt.close(figure)
    return out.getvalue()
