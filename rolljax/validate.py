"""Check an environment before training on it: `python -m rolljax.validate ENV [--tasks N]`.

Runs the checks that rolljax's own environments pass (`rolljax.envs.checks`), tries a hundred answers that take no
thought (`rolljax.envs.constants`), then plays it with a random player and with one that says nothing: what they solve,
a policy solves without learning anything. Exit code 0, or 3 if a check fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolljax import cli

if TYPE_CHECKING:
    from rolljax.envs.base import EnvSpec

MUCH = 0.2
"""Share of tasks from which on it is worth a warning that a player without knowledge solves them."""

CONSTANT_TASKS = 30
"""Most tasks on which every constant answer is tried."""
CONSTANTS_S = 20.0
"""Seconds after which no further task is begun for that."""

Row = tuple[str, str, str]
"""What was looked at; ok, fail, warn or nothing; what was seen."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rolljax.validate", description="Check an environment.")
    parser.add_argument("env", metavar="ENV", help="sokoban, 'frozen_lake(size=5)', rg:chain_sum, module.Class, ...")
    parser.add_argument("--tasks", type=int, default=50, metavar="N", help="how many tasks to play (default: 50)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    def run() -> int:
        from rich.console import Console
        from rich.table import Table

        from rolljax.envs.catalog import make_spec
        from rolljax.errors import ConfigError, EnvError

        if args.tasks < 1:
            raise ConfigError("must be at least 1", setting="--tasks", value=args.tasks)
        spec = make_spec(args.env)
        console = Console(highlight=False, markup=False, emoji=False)
        table = Table("check", "", "seen", title=args.env, title_justify="left")
        styles = {"ok": "green", "fail": "red", "warn": "yellow", "": ""}
        failed = 0
        with console.status("checking") if console.is_terminal else console:
            for name, verdict, seen in [
                *check(spec, args.tasks),
                *thoughtless(spec, args.tasks),
                *measure(spec, args.tasks),
            ]:
                table.add_row(name, verdict, seen, style=styles[verdict])
                failed += verdict == "fail"
        console.print(table)
        if failed:
            raise EnvError(f"{spec.name} fails {failed} of the checks")
        return 0

    return cli.run_verb(run)


def check(spec: EnvSpec, num_tasks: int) -> Iterator[Row]:
    """Every check, whatever becomes of the others."""
    from rolljax.envs.checks import CHECKS
    from rolljax.errors import ConfigError, RolljaxError

    for name, run in CHECKS.items():
        try:
            yield name, "ok", run(spec, num_tasks)
        except ConfigError:  # of this machine or the settings: every check would say it again
            raise
        except RolljaxError as e:
            yield name, "fail", str(e)
        except Exception as e:  # border: whatever an environment raises is what was found
            yield name, "fail", f"{type(e).__name__}: {e}"


def thoughtless(spec: EnvSpec, num_tasks: int) -> Iterator[Row]:
    """Answers that take no thought: what wins more than chance without being gold is a hole."""
    from rolljax.envs import checks

    name, num_tasks = "constant answers", min(num_tasks, CONSTANT_TASKS)
    try:
        found = checks.constant_wins(spec, num_tasks, CONSTANTS_S)
    except Exception as e:  # border: as above
        yield name, "fail", f"{type(e).__name__}: {e}"
    else:
        verdict = "fail" if found.hole is not None else "warn" if found.best.share > MUCH or found.pays else ""
        yield name, verdict, str(found)


def measure(spec: EnvSpec, num_tasks: int) -> Iterator[Row]:
    """Players that know nothing, and speed."""
    from rolljax.envs import checks

    try:
        tasks = [spec.task(i) for i in range(num_tasks)]
        player, how = checks.random_player(spec)
        for name, act in ((how, player), ("empty answers", checks.always(""))):
            solved = checks.success_frac(spec, tasks, act)
            yield name, "warn" if solved > MUCH else "", f"solve {solved:.1%} of {num_tasks} tasks"
        start = time.perf_counter()
        steps = sum(len(checks.play(spec, task, player).results) for task in tasks)
        yield "speed", "", f"{steps / (time.perf_counter() - start):,.0f} steps/s, reset included"
    except Exception as e:  # border: as above
        yield "players", "fail", f"{type(e).__name__}: {e}"


if __name__ == "__main__":
    sys.exit(main())
