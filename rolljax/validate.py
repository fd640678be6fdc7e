"""Check an environment before training on it: `python -m rolljax.validate ENV [--tasks N] [--seconds S]`.

Runs the checks that rolljax's own environments pass (`rolljax.envs.checks`), tries a hundred constant answers
(`rolljax.envs.constants`), then plays it with a random player and with one that gives empty answers. A policy can solve
the tasks that these players solve without learning anything. Exit code 0, or 3 if a check fails.

An environment with slow steps (a program graded in a sandbox) is checked on fewer tasks than requested: the checks
share the time, and each reports how many tasks it had time for.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from rolljax import cli

if TYPE_CHECKING:
    from rolljax.envs.base import EnvSpec
    from rolljax.envs.checks import Act

MUCH = 0.2
"""If a player without knowledge solves a larger share of the tasks than this, a warning is shown."""

SECONDS = 120.0
"""Seconds in which all checks shall be done."""
CONSTANT_TASKS = 30
"""Most tasks on which every constant answer is tried."""

T = TypeVar("T")
CheckRow = tuple[str, str, str]
"""The name of a check, its verdict (ok, fail, warn or empty), and its finding as text."""


class Budget:
    """The time for all checks. Each check gets an equal share of the time that remains when it starts.

    num_cut: number of checks that did not have time for all tasks.
    """

    def __init__(self, seconds: float, num_checks: int) -> None:
        self.num_cut = 0
        self._end, self._num_left = time.monotonic() + seconds, num_checks

    def share_s(self) -> float:
        """Return the seconds for the next check."""
        share = max(0.0, self._end - time.monotonic()) / max(1, self._num_left)
        self._num_left -= 1
        return share

    def spend(self, run: Callable[[int], T], num_tasks: int) -> tuple[T, str]:
        """Return the result of `run(n)` for as many tasks `n` as the next share allows, at least one, and a note on
        `n`.

        It is called with one task first, then with as many as the remaining time allows at the latest speed.
        """
        end, n = time.monotonic() + self.share_s(), 1
        while True:
            start = time.monotonic()
            result = run(n)
            now = time.monotonic()
            affordable = min(num_tasks, int(n * (end - now) / max(now - start, 1e-6)))
            if n == num_tasks:
                return result, ""
            if affordable <= n:
                self.num_cut += 1
                return result, f" ({n} of {num_tasks} tasks: no time for the other {num_tasks - n})"
            n = affordable


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.validate", description="Check an environment.")
    parser.add_argument("env", metavar="ENV", help="sokoban, 'frozen_lake(size=5)', rg:chain_sum, module.Class, ...")
    parser.add_argument("--tasks", type=int, default=50, metavar="N", help="how many tasks to play (default: 50)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"time for all checks; fewer tasks are played when it is short (default: {SECONDS:g})",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)

    def run() -> int:
        from rich.console import Console
        from rich.table import Table

        from rolljax.envs.catalog import make_spec
        from rolljax.envs.checks import CHECKS
        from rolljax.errors import ConfigError, EnvError

        if args.tasks < 1:
            raise ConfigError("must be at least 1", setting="--tasks", value=args.tasks)
        if not args.seconds > 0:
            raise ConfigError("must be positive", setting="--seconds", value=args.seconds)
        spec = make_spec(args.env)
        console = Console(highlight=False, markup=False, emoji=False)
        table = Table("check", "", "seen", title=args.env, title_justify="left")
        styles = {"ok": "green", "fail": "red", "warn": "yellow", "": ""}
        failed = 0
        budget = Budget(args.seconds, len(CHECKS) + 4)
        with console.status("checking") if console.is_terminal else console:
            if taken := spec.columns_taken():
                table.add_row("columns", "", taken)
            for name, verdict, seen in [
                *check(spec, args.tasks, budget),
                *findings("constant answers", thoughtless(spec, args.tasks, budget)),
                *findings("players", measure(spec, args.tasks, budget)),
            ]:
                table.add_row(name, verdict, seen, style=styles[verdict])
                failed += verdict == "fail"
        console.print(table)
        if budget.num_cut:
            console.print(
                f"{budget.num_cut} checks had no time for all {args.tasks} tasks in {args.seconds:g} s: "
                "give them more with --seconds"
            )
        if failed:
            raise EnvError(f"{spec.name} fails {failed} of the checks")
        return 0

    return cli.run_verb(run)


def findings(name: str, rows: Iterable[CheckRow]) -> Iterator[CheckRow]:
    """Yield the rows, and one more if an exception ends them: an exception of an environment is a finding.

    Raises:
      ConfigError: this machine or the settings are the cause: every check would repeat it.
    """
    from rolljax.errors import ConfigError, EnvError, RolljaxError, boundary

    try:
        with boundary(EnvError, "raised"):
            yield from rows
    except ConfigError:
        raise
    except RolljaxError as e:
        yield name, "fail", str(e)


def check(spec: EnvSpec, num_tasks: int, budget: Budget) -> Iterator[CheckRow]:
    """Run every check, even after others have failed; yield its row, or its rows."""
    from rolljax.envs.checks import CHECKS, NEED_GOLD

    lacks = without_reference(spec)
    for name, run in CHECKS.items():
        if lacks and name in NEED_GOLD:
            yield name, "", lacks
        else:
            yield from findings(name, checked(name, functools.partial(run, spec), num_tasks, budget))


def without_reference(spec: EnvSpec) -> str:
    """Return the result of a check that needs reference answers if there are none; empty if there are any. An
    environment that fails here is left to the checks."""
    from rolljax.envs import checks
    from rolljax.errors import EnvError, RolljaxError, boundary

    try:
        with boundary(EnvError, "raised"):
            return f"not tried: {why}" if (why := checks.lacks_reference(spec)) else ""
    except RolljaxError:
        return ""


def checked(name: str, run: Callable[[int], str], num_tasks: int, budget: Budget) -> Iterator[CheckRow]:
    """Yield the result of one check."""
    seen, note = budget.spend(run, num_tasks)
    yield name, "ok", seen + note


def thoughtless(spec: EnvSpec, num_tasks: int, budget: Budget) -> Iterator[CheckRow]:
    """Try constant answers: one that wins more than chance without being the reference answer is a hole."""
    from rolljax.envs import checks
    from rolljax.envs.constants import CONSTANTS

    name, num_tasks = "constant answers", min(num_tasks, CONSTANT_TASKS)
    share_s = budget.share_s()
    start = time.monotonic()
    checks.play(spec, spec.task(0), checks.always(checks.NONSENSE))
    task_s = len(CONSTANTS) * (time.monotonic() - start)
    if task_s > share_s:
        budget.num_cut += 1
        seen = f"not tried: {len(CONSTANTS)} answers to one task take {task_s:.0f} s, {share_s:.0f} left"
        yield name, "warn", seen
        return
    found = checks.constant_wins(spec, num_tasks, share_s)
    budget.num_cut += found.num_tasks < num_tasks
    verdict = "fail" if found.hole is not None else "warn" if found.best.share > MUCH or found.pays else ""
    yield name, verdict, str(found)


def measure(spec: EnvSpec, num_tasks: int, budget: Budget) -> Iterator[CheckRow]:
    """Measure players that know nothing, and speed."""
    from rolljax.envs import checks

    players = {"empty answers": checks.always("")}
    if (lacks := without_reference(spec)) and not isinstance(spec.make(), checks.HasRandomAction):
        player = checks.always(checks.NONSENSE)
        yield "reference answers of other tasks", "", lacks
    else:
        player, how = checks.random_player(spec)
        players = {how: player} | players
    for name, act in players.items():
        solved, note = budget.spend(functools.partial(solved_frac, spec, act), num_tasks)
        yield name, "warn" if solved > MUCH else "", f"solve {solved:.1%} of the tasks{note}"
    speed, note = budget.spend(functools.partial(steps_per_s, spec, player), num_tasks)
    yield "speed", "", f"{speed:,.0f} steps/s, reset included{note}"


def solved_frac(spec: EnvSpec, act: Act, num_tasks: int) -> float:
    """Share of the first tasks that a player solves."""
    from rolljax.envs import checks

    return checks.success_frac(spec, map(spec.task, range(num_tasks)), act)


def steps_per_s(spec: EnvSpec, act: Act, num_tasks: int) -> float:
    """Return a player's steps per second in the first tasks."""
    from rolljax.envs import checks

    start = time.perf_counter()
    steps = sum(len(checks.play(spec, spec.task(i), act).results) for i in range(num_tasks))
    return steps / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
