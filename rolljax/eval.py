"""Evaluate: `python -m rolljax.eval --run RUN` or `--model HF_DIR --gin FILE`, on held-out tasks.

Prints one JSON object: mean reward with its standard error, solved share, number of tasks. `--set
'Evaluation.temperature = 0'` evaluates greedily, `'Evaluation.tasks = 1000'` on more tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rolljax import cli
from rolljax.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from rolljax.config.loader import Loaded
    from rolljax.recipe import Recipe


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line; `--help` says what each is. None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.eval", description="Evaluate on held-out tasks.")
    cli.add_config_arguments(parser, required=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its latest checkpoint and its config")
    what.add_argument("--model", help="local Hugging Face folder (needs --gin for the tasks)")
    parser.add_argument("--save", metavar="FILE", help="also write every trajectory, one JSON object per line")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command, with its arguments; returns its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        import numpy as np

        from rolljax.run import preflight
        from rolljax.run.runtime import Runtime
        from rolljax.run.trained import initial_params, trained_params

        config.append(read_config(args))
        checked = preflight.check(config[0].value)
        params, version = trained_params(checked, args.run) if args.run else (initial_params(checked), 0)
        with Runtime(checked, lambda: params, version) as runtime:
            trajectories = runtime.event_loop.run(runtime.evaluate(version))
        alive = [t for t in trajectories if t.status != "failed"]
        rewards = np.array([t.reward for t in alive])
        if not alive:
            raise CheckpointError(f"every trajectory failed; the last one: {trajectories[-1].fault}")
        result = {
            "env": checked.recipe.env.name,
            "reward_mean": float(rewards.mean()),
            "reward_stderr": float(rewards.std(ddof=1) / len(rewards) ** 0.5) if len(rewards) > 1 else 0.0,
            "success_frac": float(np.mean([t.success for t in alive])),
            "n": len(alive),
            "failed": len(trajectories) - len(alive),
            "temperature": checked.recipe.evaluation.temperature,
            "version": version,
        }
        if args.save:
            with open(args.save, "w") as f:
                f.writelines(json.dumps(t.to_json()) + "\n" for t in trajectories)
        print(json.dumps(result))
        return 0

    return cli.run_verb(run, lambda: config[0] if config else None)


def read_config(args: argparse.Namespace) -> Loaded[Recipe]:
    """The recipe of a run, or the one given with `--gin` around a model folder."""
    from rolljax.run.folder import stored_config

    if args.run:
        return cli.load_recipe([stored_config(args.run), *args.gin], args.set)
    if not args.gin:
        raise ConfigError("says which tasks to evaluate on", setting="--gin", remedy="--gin quickstart, for instance")
    return cli.load_recipe(args.gin, [*args.set, f"Recipe.model = {args.model!r}"])


if __name__ == "__main__":
    sys.exit(main())
