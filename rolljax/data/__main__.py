"""Run a data pipeline: `python -m rolljax.data RECIPE.gin --in A --out B`.

A is a file of rows (JSON Lines, also gzip, a JSON array, Parquet, Arrow), a folder of these or a pattern; B the folder
that records and report are written to. The same command resumes an interrupted one, without asking a model twice
(docs/domains.md).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rolljax import cli

if TYPE_CHECKING:
    from rolljax.config.loader import Loaded
    from rolljax.data.pipeline import Pipeline


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments of the command line; None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.data", description="Run a data pipeline.")
    parser.add_argument("recipe", metavar="RECIPE", help="gin file of a pipeline, or the name of one of rolljax's")
    parser.add_argument("--in", dest="source", required=True, metavar="A", help="rows: a file, a folder, a pattern")
    parser.add_argument("--out", required=True, metavar="B", help="folder for records, report and state to resume from")
    parser.add_argument("--fresh", action="store_true", help="start from scratch: empty that folder first")
    cli.add_config_arguments(parser, required=False)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Pipeline]] = []

    def run() -> int:
        from rolljax.config import loader
        from rolljax.data import pipeline

        config.append(loader.load([args.recipe, *args.gin], args.set, root=pipeline.Pipeline))
        found = pipeline.run(config[0].value, args.source, args.out, fresh=args.fresh, setup=dict(config[0].resolved))
        sys.stdout.write((found.folder / "report.md").read_text().split("\n## ")[0].rstrip() + "\n")
        return 0

    return cli.run_verb(run, lambda: config[0] if config else None)


if __name__ == "__main__":
    sys.exit(main())
