"""Play an environment yourself: `python -m rolljax.play ENV [--task N] [--scripted]`.

ENV is a short name with or without settings (`sokoban`, `'frozen_lake(size=5)'`), `rg:chain_sum`, or `module.Class`.
The terminal shows the messages that a policy would receive, and you type its answers, a line per turn; Ctrl-D ends.
`--scripted` watches the scripted player instead.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError, EnvError, boundary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rolljax.envs.base import Env
    from rolljax.types import Message


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.play", description="Play an environment in the terminal.")
    parser.add_argument("env", metavar="ENV", help="sokoban, 'frozen_lake(size=5)', rg:chain_sum#3, module.Class, ...")
    parser.add_argument("--task", type=int, metavar="N", help="index of the task (default: the one behind #, or 0)")
    parser.add_argument("--scripted", action="store_true", help="let the scripted player play")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)

    def run() -> int:
        from rich.console import Console

        from rolljax.envs.base import NUM_INDICES
        from rolljax.envs.catalog import make_spec

        spec = make_spec(args.env)
        behind = re.search(r"#(\d+)$", args.env.strip())
        index = args.task if args.task is not None else int(behind[1]) if behind else 0
        if not 0 <= index < NUM_INDICES:
            raise ConfigError("is no index of a task", setting="--task", value=index, remedy=f"0 to {NUM_INDICES - 1}")
        console = Console(highlight=False, markup=False, emoji=False)
        with boundary(EnvError, f"{spec.name}, task {index}"):
            task, env = spec.task(index), spec.make()
            try:
                show(console, env.reset(task))
                if not args.scripted:
                    console.print(what_to_type(env), style="dim")
                console.print(play(console, env, spec.max_turns, args.scripted))
            finally:
                env.close()
        return 0

    return cli.run_verb(run)


def what_to_type(env: Env) -> str:
    """Return a line of instructions, with an example action if the environment has one that gives nothing away."""
    from rolljax.envs.checks import HasRandomAction

    example = f", such as {env.random_action(random.Random(0))!r}" if isinstance(env, HasRandomAction) else ""
    return (
        f"Type what the policy would say{example}; a line is a turn. Ctrl-D ends, --scripted shows the scripted player."
    )


def play(console: Any, env: Env, max_turns: int, reference: bool) -> str:
    """Play turns until the episode or the input ends; return how it ended."""
    reward, solved = 0.0, False
    for turn in range(1, max_turns + 1):
        action = env.reference_answer() if reference else ask(console)
        if action is None:
            return f"left after {turn - 1} turns, reward {reward:g}"
        if reference:
            console.print(f"> {action}", style="bold")
        result = env.step(action)
        reward, solved = reward + result.reward, solved or result.success
        show(console, result.messages)
        numbers = {"reward": result.reward, **result.metrics}
        told = ", ".join(f"{name} {value:g}" for name, value in numbers.items() if value)
        console.print(f"turn {turn} of {max_turns}" + (f": {told}" if told else ""), style="dim")
        if result.terminated or result.truncated:
            return f"{'solved' if solved else 'cut' if result.truncated else 'lost'}: {turn} turns, reward {reward:g}"
    return f"cut: {max_turns} turns, reward {reward:g}"


def ask(console: Any) -> str | None:
    """Read a line from the player; None at the end of input."""
    try:
        return console.input("> ")
    except EOFError:
        console.print()
        return None


def show(console: Any, messages: Sequence[Message]) -> None:
    """Print the messages to the policy, one box each."""
    from rich.panel import Panel
    from rich.text import Text

    from rolljax.console.terminal import visible

    for m in messages:
        console.print(Panel(Text(visible(m.content)), title=m.role, title_align="left", expand=False))


if __name__ == "__main__":
    sys.exit(main())
