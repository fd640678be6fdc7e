"""Tables of the measured pieces, and docs/accelerators.md.

    python benchmarks/accelerator/summary.py --results build/accelerator    # DIR/summary.md, goals on the terminal
    python benchmarks/accelerator/summary.py --page                         # docs/accelerators.md

The page is made from the committed files in the folders in `benchmarks/accelerator/results/`.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import GPUS, HERE, LIMIT_S, ROOT
from run import PIECES

PAGE = ROOT / "docs" / "accelerators.md"
RESULTS = HERE / "results"
Content = dict[str, Any]
"""Content of one JSON file."""
Rows = list[dict[str, Any]]


def read(folder: Path) -> dict[str, Content]:
    """Read the pieces in a folder, in the order of `PIECES`."""
    paths = {name: folder / f"{name}.json" for name in PIECES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


# ---- goals ----------------------------------------------------------------------------------------------------------


def best(rows: Rows, name: str, choose: Callable[[Any], float], **where: Any) -> float | None:
    """Return the largest or smallest figure of that name among rows with these fields."""
    found = [row[name] for row in rows if name in row and all(row.get(k) == v for k, v in where.items())]
    return choose(found) if found else None


def goals(pieces: Mapping[str, Content]) -> list[tuple[str, float | None, bool]]:
    """Return each goal for a device, its figure (None: not measured), and whether it is reached."""
    rows = {name: pieces[name]["figures"] if name in pieces else [] for name in PIECES}
    wanted: list[tuple[str, float | None, Callable[[float], bool]]] = [
        ("decode: at least .60 of the memory roofline", best(rows["decode"], "of_roofline", max), lambda x: x >= 0.6),
        ("update: at least .50 of peak FLOP/s, 4B", best(rows["update"], "mfu", max, shape="4B"), lambda x: x >= 0.5),
        ("sampler against trainer: largest log-prob gap, bfloat16, at most .01",
         best(rows["parity"], "gap_max", max, dtype="bfloat16"), lambda x: x <= 1e-2),
        ("sampler against trainer: k3, bfloat16, at most 1e-4",
         best(rows["parity"], "k3", max, dtype="bfloat16"), lambda x: x <= 1e-4),
        ("decode: at least 1.3 times torch", best(rows["torch_side"], "ratio", min, what="decode"), lambda x: x >= 1.3),
        ("training step: at least 1.3 times torch",
         best(rows["torch_side"], "ratio", min, what="update"), lambda x: x >= 1.3),
    ]  # fmt: skip
    return [(goal, value, value is not None and reached(value)) for goal, value, reached in wanted]


# ---- tables ---------------------------------------------------------------------------------------------------------


def cell(value: Any) -> str:
    """Format a figure for a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return f"{len(value)}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def table(rows: Rows) -> str:
    """Format rows with the same kind of figures as one Markdown table; failures last."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "failed"))
    names += ["failed"] if any("failed" in row for row in rows) else []
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def report(pieces: Mapping[str, Content], level: str) -> str:
    """Return all tables of one device. level: the `#` of the headings."""
    parts = ["| goal | measured | reached |\n|---|---|---|"]
    parts[0] += "".join(
        f"\n| {goal} | {'not measured' if value is None else cell(value)} | {'yes' if reached else 'no'} |"
        for goal, value, reached in goals(pieces)
    )
    for name, content in pieces.items():
        parts.append(f"{level} {name}: {PIECES[name]}")
        ended = "" if content["done"] else f" It did not come to its end: {content['failed'] or 'it was stopped'}."
        versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
        parts.append(f"{content['date'][:10]}, {content['device']}, {content['seconds']:.0f} s; {versions}.{ended}")
        kinds: dict[Any, Rows] = {}
        for row in content["figures"]:
            kinds.setdefault(row.get("what"), []).append(row)
        parts += [table(rows) for rows in kinds.values()]
    return "\n\n".join(parts)


def estimates() -> str:
    """Return the table of estimated seconds, by piece and card."""
    lines = [
        f"| piece | what it measures | {' | '.join(f'{gpu.name}, s' for gpu in GPUS)} |",
        "|---" * (2 + len(GPUS)) + "|",
    ]
    for name, text in PIECES.items():
        estimate = importlib.import_module(name).estimate
        lines.append(f"| {name} | {text} | " + " | ".join(f"{estimate(False, gpu):.0f}" for gpu in GPUS) + " |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of docs/accelerators.md."""
    folders = sorted(path for path in RESULTS.iterdir() if path.is_dir()) if RESULTS.exists() else []
    text = (HERE / "page.md").read_text().replace("{limit}", f"{LIMIT_S / 60:.0f}").replace("{estimates}", estimates())
    found = "\n\n".join(f"## {folder.name}\n\n{report(read(folder), '###')}" for folder in folders)
    return text.replace("{results}", found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tables of the measured pieces.")
    parser.add_argument("--results", type=Path, help="folder of JSON files; writes summary.md there")
    parser.add_argument("--page", action="store_true", help="write docs/accelerators.md from the committed results")
    args = parser.parse_args()
    if args.results:
        pieces = read(args.results)
        (args.results / "summary.md").write_text(f"# Measured\n\n{report(pieces, '##')}\n")
        for goal, value, reached in goals(pieces):
            measured = "not measured" if value is None else cell(value)
            print(f"{'reached    ' if reached else 'not reached'}  {goal}: {measured}")
    if args.page:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
