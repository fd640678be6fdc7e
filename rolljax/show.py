"""Look at a run in a terminal: `python -m rolljax.show RUN [--step N] [--best | --worst | --failed] [--compare RUN2]`.

Without an option: the results of the run, its curves, and the place of its rollouts. `--step N`: that step's groups,
the widest spread of rewards first. `--best`, `--worst`, `--failed`: trajectories of the step (by default the newest),
turn by turn. `--compare RUN2`: curves and settings of two runs, side by side. Text of models and environments is shown
as it is: characters that a terminal would obey or hide are escaped.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.console.terminal import sparkline, visible
from rolljax.errors import CheckpointError, ConfigError, boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from rolljax.storage.run_reader import RunReader
    from rolljax.types import Trajectory

CURVES = (
    "reward/mean", "reward/success_frac", "heldout/reward_mean", "loss/total", "rollout/len_tok", "rollout/trunc_frac",
    "rollout/fail_frac", "policy/entropy_nat", "mismatch/k3_nat", "kl/ref_nat", "optim/grad_norm", "stale/mean_ver",
    "time/step_s", "tput/sample_tok_s",
)  # fmt: skip
WIDTH, SPARK = 120, 40
"""Width of the page without a terminal, and of a curve."""
TASK_CHARS = 60
LIMIT = 3
"""Default of `--limit`: the number of trajectories to show."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.show", description="Look at a run in a terminal.")
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="a step whose rollouts are kept")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="trajectories of the step with the highest reward")
    which.add_argument("--worst", action="store_true", help="with the lowest")
    which.add_argument("--failed", action="store_true", help="lost to a failure, with whose it was")
    parser.add_argument(
        "--limit", type=int, metavar="N", help=f"at most N trajectories (default: {LIMIT}) or groups of --step (all)"
    )
    parser.add_argument("--compare", metavar="RUN2", help="another run, side by side with this one")
    parser.add_argument("--metric", action="append", metavar="NAME", help="a curve to show; repeatable")
    parser.add_argument("--no_color", action="store_true", help="no colours (also: the variable NO_COLOR)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)

    def run() -> int:
        from rich.console import Console

        page = Console(markup=False, highlight=False, emoji=False, no_color=True if args.no_color else None)
        if not page.is_terminal:
            page = Console(markup=False, highlight=False, emoji=False, width=WIDTH)
        check_arguments(args)
        folder = open_run(args.run)
        if args.compare:
            compare(page, folder, open_run(args.compare), args.metric or CURVES)
        elif args.best or args.worst or args.failed:
            show_trajectories(page, folder, args)
        elif args.step is not None:
            show_step(page, folder, args.step, args.limit)
        else:
            show_run(page, folder, args.metric or CURVES)
        return 0

    return cli.run_verb(run)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a limit that cannot be used, or that limits nothing."""
    if args.limit is not None and args.limit < 1:
        raise ConfigError("must be at least 1", setting="--limit", value=args.limit)
    if args.limit is not None and (
        args.compare or not (args.best or args.worst or args.failed or args.step is not None)
    ):
        remedy = "add --best, --worst, --failed or --step N"
        raise ConfigError("limits nothing here", setting="--limit", value=args.limit, remedy=remedy)


def open_run(path: str) -> RunReader:
    """Open the run folder at a path.

    Raises:
      ConfigError: there is none.
    """
    from rolljax.storage.layout import RESOLVED
    from rolljax.storage.run_reader import RunReader

    if not (Path(path) / RESOLVED).is_file():
        remedy = "name the folder that rolljax.train wrote, under runs/"
        raise ConfigError(f"is not a run folder: it has no {RESOLVED}", setting="RUN", value=path, remedy=remedy)
    return RunReader(path)


# ---- a run, and two


def show_run(page: Console, folder: RunReader, names: Sequence[str]) -> None:
    """Print a run's results, its curves, and the steps with rollouts."""
    from rolljax.run.summary import summary_lines

    for line in summary_lines(folder):
        page.print(line, soft_wrap=True)
    if rows := folder.rows():
        table = make_table("metric", "steps 1 to " + str(rows[-1]["step"]), "first", "last", "lowest", "highest")
        for name, values in curves(rows, names):
            ends = [number(v) for v in (values[0], values[-1], min(values), max(values))]
            table.add_row(*cells(name, sparkline(values, SPARK), *ends))
        page.print(table)
    if steps := folder.rollout_steps():
        held = f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        page.print(f"rollouts: {held}; --step {steps[-1]} for its groups, --best, --worst, --failed for trajectories")


def compare(page: Console, one: RunReader, two: RunReader, names: Sequence[str]) -> None:
    """Print the curves of two runs side by side, and the settings that differ."""
    from rolljax.run.summary import summary_lines

    for folder in (one, two):
        for line in summary_lines(folder)[:1]:
            page.print(line, soft_wrap=True)
    title = [folder.path.resolve().name for folder in (one, two)]
    table = make_table("metric", title[0], "last", title[1], "last", "difference")
    of_two = dict(curves(two.rows(), names))
    for name, values in curves(one.rows(), names):
        other = of_two.pop(name, [])
        change = f"{other[-1] - values[-1]:+.4g}" if other else ""
        last = number(other[-1]) if other else "-"
        table.add_row(
            *cells(name, sparkline(values, SPARK // 2), number(values[-1]), sparkline(other, SPARK // 2), last, change)
        )
    for name, other in of_two.items():
        table.add_row(*cells(name, "", "-", sparkline(other, SPARK // 2), number(other[-1]), ""))
    page.print(table)
    settings = [folder.resolved() for folder in (one, two)]
    differ = make_table("setting", *title)
    for path in sorted(settings[0].keys() | settings[1].keys()):
        before, now = (repr(s[path]) if path in s else "-" for s in settings)
        if before != now:
            differ.add_row(*cells(path, before, now))
    page.print(differ if differ.row_count else "all settings are the same")


def curves(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
    """Yield the values of each metric over the steps that have it, in the order of `names`; rewards of reference
    answers, on which supervised phases train, are left out.

    Raises:
      ConfigError: no metric has this name.
    """
    from rolljax.config.check import nearest
    from rolljax.metrics import is_known

    present = {name for row in rows for name in row}
    for name in names:
        if name not in present and not is_known(name):
            raise ConfigError(
                "is no metric", setting="--metric", value=name, remedy=nearest(name, present, "metrics of this run")
            )
        shown = [row for row in rows if "tput/sample_tok_s" in row or not name.startswith("reward/")]
        if values := [row[name] for row in shown if isinstance(row.get(name), (int, float))]:
            yield name, values


# ---- a step


def show_step(page: Console, folder: RunReader, step: int, limit: int | None = None) -> None:
    """Show the groups of a step, the widest spread of rewards first. limit: at most this many; None: all."""
    from rolljax.console.progress import step_line

    trajectories = read_step(folder, step)
    row = next((row for row in folder.rows() if row["step"] == step), None)
    if row is not None:
        phase = row.get("phase", "")
        done = sum(r.get("phase", "") == phase for r in folder.rows())
        page.print(visible(f"step {step}: {step_line(phase, row, done)}", lines=False), soft_wrap=True)
    groups: dict[tuple[int, int], list[Trajectory]] = {}
    for t in trajectories:
        groups.setdefault((t.key.stream, t.key.prompt_index), []).append(t)
    table = make_table("prompt_index", "task", "rewards", "mean", "spread", "tokens", "not ok")
    ordered = sorted(groups.items(), key=lambda item: -spread(item[1]))[:limit]
    for (_, prompt_index), group in ordered:
        rewards = [t.reward for t in group]
        told = " ".join(f"{r:.3g}" for r in rewards)
        tokens = sum(t.num_sampled_tok for t in group) / len(group)
        mean, wrong = sum(rewards) / len(group), sum(t.status != "ok" for t in group)
        table.add_row(*cells(str(prompt_index), short(group[0].task.content), told, f"{mean:.3f}",
        f"{spread(group):.3f}", f"{tokens:.1f}", str(wrong or "")))  # fmt: skip
    page.print(table)
    shown = f"{len(ordered)} of {len(groups)}" if len(ordered) < len(groups) else f"{len(groups)}"
    page.print(f"{shown} groups, {len(trajectories)} trajectories; --best, --worst and --failed show some in full")


def spread(group: Sequence[Trajectory]) -> float:
    """Return the standard deviation of a group's rewards."""
    mean = sum(t.reward for t in group) / len(group)
    return (sum((t.reward - mean) ** 2 for t in group) / len(group)) ** 0.5


def read_step(folder: RunReader, step: int) -> list[Trajectory]:
    """Return the trajectories of a step.

    Raises:
      ConfigError: the step has none.
    """
    steps = folder.rollout_steps()
    if step not in steps:
        near = min(steps, key=lambda s: abs(s - step), default=None)
        remedy = f"the nearest is {near} (of {len(steps)})" if near is not None else "this run kept none"
        raise ConfigError("has no rollouts", setting="--step", value=step, remedy=remedy)
    return folder.trajectories(step)


# ---- trajectories


def show_trajectories(page: Console, folder: RunReader, args: argparse.Namespace) -> None:
    """Print the best, worst or failed trajectories of a step, turn by turn."""
    step = newest(folder, failed=args.failed) if args.step is None else args.step
    if step is None:
        page.print("no rollouts that are kept have failed" if args.failed else "this run kept no rollouts")
        return
    every = read_step(folder, step)
    failed = [t for t in every if t.status == "failed"]
    alive = sorted((t for t in every if t.status != "failed"), key=lambda t: t.reward, reverse=args.best)
    found = failed if args.failed else alive
    shown = found[: args.limit or LIMIT]
    page.print(f"step {step}: {len(shown)} of {len(found)} {'failed' if args.failed else 'trajectories'}")
    decode = decoder(folder)
    for t in shown:
        show_trajectory(page, t, decode)


def newest(folder: RunReader, *, failed: bool) -> int | None:
    """Return the newest step with rollouts; failed: among steps that lost a trajectory. None if there is none."""
    kept = folder.rollout_steps()
    if failed:
        lost = {row["step"] for row in folder.rows() if row.get("rollout/fail_frac", 0) > 0}
        kept = [step for step in kept if step in lost]
    return kept[-1] if kept else None


def show_trajectory(page: Console, t: Trajectory, decode: Callable[[Sequence[int]], str] | None) -> None:
    """Print a trajectory: its address, how it ended, and the prompt and the answer of each turn."""
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.text import Text

    ended = f"{t.status}{', solved' if t.success else ''}" + (f"; fault of {t.fault}" if t.fault else "")
    parts = ", ".join(f"{name} {value:.4g}" for name, value in t.reward_parts.items())
    page.print(Rule(Text(f"prompt {t.key.prompt_index}, sibling {t.key.sibling}"), style="dim"))
    page.print(Text(visible(f"reward {t.reward:.4g}{f' ({parts})' if parts else ''}; {ended}")))
    page.print(Text(visible(f"task {t.task.env} {t.task.index}: {t.task.content}")))
    for i, turn in enumerate(t.turns, 1):
        told = decode(turn.prompt_ids.tolist()) if decode else f"{len(turn.prompt_ids)} tokens (no tokenizer found)"
        fresh = ", a new sequence" if turn.restart else ""
        page.print(Panel(Text(visible(told), style="dim"), title=f"told{fresh}", title_align="left"))
        logp = f", mean log-prob {turn.sampler_logp.mean():.3f}" if len(turn.tokens) else ""
        title = f"turn {i}: {len(turn.tokens)} tokens, {turn.finish_reason}{logp}, reward {turn.reward:.4g}"
        page.print(Panel(Text(visible(turn.text)), title=title, title_align="left"))


def decoder(folder: RunReader) -> Callable[[Sequence[int]], str] | None:
    """Return a function that decodes the run's token ids; None if its tokenizer is not found."""
    from rolljax.storage.layout import RESULT

    model = folder.resolved().get("model")
    places = [folder.path / RESULT, *([Path(model)] if isinstance(model, str) else [])]
    found = next((file for place in places if (file := place / "tokenizer.json").is_file()), None)
    if found is not None:
        from tokenizers import Tokenizer

        with boundary(CheckpointError, f"{found} is damaged"):
            tokenizer = Tokenizer.from_file(str(found))
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    elif isinstance(model, str):
        return None
    else:
        from rolljax.model.tokenizer import byte_tokenizer

        decode = byte_tokenizer().decode

    def text(ids: Sequence[int]) -> str:
        with boundary(CheckpointError, "the rollouts hold tokens that the run's tokenizer does not know"):
            return str(decode(list(ids)))

    return text


# ---- a page


def make_table(*columns: str) -> Any:
    """Return an empty table; its cells are text and never markup (`cells`)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(Text(visible(name)), overflow="fold")
    return table


def cells(*texts: str) -> list[Any]:
    """Return texts as the cells of a row."""
    from rich.text import Text

    return [Text(visible(text)) for text in texts]


def short(text: str) -> str:
    """Return the end of a task on one line."""
    return visible(text[-TASK_CHARS:], lines=False)


def number(value: float) -> str:
    """Format a number of a metric, with four digits or as a whole."""
    return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
