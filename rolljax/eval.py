"""Evaluate a model: `python -m rolljax.eval --run RUN | --model HF_DIR | --endpoint URL [--env ENV ...] [--to DIR]`.

Prints one table in Markdown: reward, pass@k, avg@k and maj@k with confidence intervals, for each environment and over
all of them; `--json` prints the same as one JSON object. Without `--env` the tasks are the held-out ones of the run, or
of the recipe that `--gin` names. `--to DIR` keeps every answer; the same command goes on with an evaluation that was
interrupted. `--compare DIR_A DIR_B` compares two that are complete (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError

if TYPE_CHECKING:
    from rolljax.config.loader import Loaded
    from rolljax.evaluation.models import EvaluatedModel
    from rolljax.evaluation.report import Report
    from rolljax.evaluation.settings import Attempts, Benchmark
    from rolljax.recipe import Recipe

KEY = "OPENAI_API_KEY"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rolljax.eval", description="Evaluate a model on tasks.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its newest checkpoint (or --step) and its config")
    what.add_argument("--model", metavar="HF_DIR", help="local Hugging Face folder")
    what.add_argument("--endpoint", metavar="URL", help="OpenAI-compatible server, like http://127.0.0.1:8000/v1")
    what.add_argument("--compare", nargs=2, metavar="DIR", help="two evaluations that --to kept: second against first")
    parser.add_argument("--step", help="with --run: of a kept checkpoint, or 'best': of the highest held-out reward")
    tasks = parser.add_argument_group("tasks")
    cli.add_config_arguments(tasks, required=False)
    tasks.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="ENV",
        help="'rg:chain_sum', 'questions(path=...)', ...; repeatable",
    )
    tasks.add_argument("--tasks", type=int, metavar="N", help="of each environment, or all it has (default: 256)")
    tasks.add_argument("--held_out_frac", type=float, metavar="F", help="take the tasks of this held-out split")
    tasks.add_argument("--max_answer_tok", type=int, metavar="N", help="most tokens of an answer (default: 512)")
    tries = parser.add_argument_group("attempts")
    tries.add_argument("--attempts", type=int, default=1, metavar="N", help="at each task (default: %(default)s)")
    tries.add_argument("--k", help="of pass@k and maj@k, with commas (default: 1,2,4,... and N)")
    tries.add_argument("--temperature", type=float, help="0 is greedy (default: the recipe's, or 1)")
    tries.add_argument("--top_p", type=float, default=1.0)
    tries.add_argument("--top_k", type=int, default=0)
    tries.add_argument("--min_p", type=float, default=0.0)
    tries.add_argument("--seed", type=int, help="of what is sampled (default: the recipe's, or 0)")
    tries.add_argument("--max_context", type=int, metavar="N", help="tokens of prompt and answer")
    tries.add_argument("--dtype", choices=["float32", "bfloat16"], help="of computations (default: the recipe's)")
    tries.add_argument("--concurrency", type=int, metavar="N", help="episodes at a time (default: 256; endpoint: 64)")
    server = parser.add_argument_group("endpoint")
    server.add_argument("--model_name", default="", help="default: the only one that the server lists")
    server.add_argument(
        "--api_key_env", default=KEY, metavar="NAME", help="variable with the key (default: %(default)s)"
    )
    server.add_argument("--timeout_s", type=float, default=600.0, help="of a request (default: %(default)s)")
    server.add_argument("--retries", type=int, default=5, help="of a request that fails (default: %(default)s)")
    server.add_argument("--request", metavar="JSON", help="fields of every request; null takes one away")
    out = parser.add_argument_group("output")
    out.add_argument("--to", metavar="DIR", help="keep every answer and the report there; go on with what is there")
    out.add_argument("--fresh", action="store_true", help="delete the evaluation in that folder first")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    out.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        if args.compare:
            print(compared(args))
            return 0
        check_arguments(args)
        recipe = None
        if args.run or args.gin:
            config.append(read_config(args))
            recipe = config[0].value
        found = evaluated(args, recipe)
        print(json.dumps(found.to_json()) if args.json else found.markdown())
        if found.failed and args.to:
            print(f"the same command asks the {found.failed} failed attempt(s) again", file=sys.stderr)
        return 0

    return cli.run_verb(run, lambda: config[0] if config else None)


def compared(args: argparse.Namespace) -> str:
    """What `--compare` prints."""
    from rolljax.evaluation import answers, report
    from rolljax.evaluation.settings import Attempts

    first, second = map(answers.read, args.compare)
    records, text = report.compare(first, second, Attempts(confidence=args.confidence, seed=args.seed or 0))
    return json.dumps(records) if args.json else text


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that have no effect or do not go together."""
    if not (args.run or args.gin or args.env):
        raise ConfigError("says which tasks to evaluate on", setting="--env or --gin", remedy="--env rg:chain_sum, say")
    useless = {
        "--step": args.step is not None and not args.run,
        "--fresh": args.fresh and not args.to,
        "--set": bool(args.set) and not (args.run or args.gin),
        "--model_name": bool(args.model_name) and not args.endpoint,
        "--request": args.request is not None and not args.endpoint,
        "--max_context": args.max_context is not None and bool(args.endpoint),
        "--dtype": args.dtype is not None and bool(args.endpoint),
    }
    for name, is_useless in useless.items():
        if is_useless:
            raise ConfigError("can have no effect here", setting=name, remedy="leave it out")


def read_config(args: argparse.Namespace) -> Loaded[Recipe]:
    """The recipe of a run, or the one given with `--gin`, around a model folder if there is one."""
    from rolljax.run.folder import stored_config

    if args.run:
        return cli.load_recipe([stored_config(args.run), *args.gin], args.set)
    return cli.load_recipe(args.gin, [*args.set, *([f"Recipe.model = {args.model!r}"] if args.model else [])])


def evaluated(args: argparse.Namespace, recipe: Recipe | None) -> Report:
    """Do what the options say."""
    from rolljax.evaluation.progress import Progress
    from rolljax.evaluation.run import evaluate

    benchmarks, attempts = read_benchmarks(args, recipe), read_attempts(args, recipe)
    with open_model(args, recipe, benchmarks) as model, Progress(model.name) as progress:
        return evaluate(
            model, benchmarks, attempts, to=args.to, fresh=args.fresh, show=progress.show, warn=progress.say
        )


def read_benchmarks(args: argparse.Namespace, recipe: Recipe | None) -> list[Benchmark]:
    """The tasks that the options name: of `--env`, or else of the recipe.

    An environment of the recipe's own name gives held-out tasks, as the model may have been trained on the others.
    """
    import dataclasses

    from rolljax.envs.catalog import make_spec
    from rolljax.evaluation.settings import Benchmark

    own = None if recipe is None else Benchmark.of_recipe(recipe)
    said = {"num_tasks": args.tasks, "held_out_frac": args.held_out_frac, "max_answer_tok": args.max_answer_tok}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if not args.env:
        assert own is not None
        return [dataclasses.replace(own, **changes)]
    found = []
    for spec in map(make_spec, args.env):
        of_recipe: dict[str, Any] = {} if own is None else {"pool": own.pool, "max_answer_tok": own.max_answer_tok}
        if own is not None and spec.name == own.env.name:
            of_recipe["held_out_frac"] = own.held_out_frac
        found.append(Benchmark(spec, **of_recipe | changes))
    return found


def read_attempts(args: argparse.Namespace, recipe: Recipe | None) -> Attempts:
    """How every task is tried."""
    from rolljax.evaluation.settings import Attempts

    try:
        at = tuple(int(k) for k in args.k.split(",")) if args.k else ()
    except ValueError:
        raise ConfigError("are whole numbers with commas", setting="--k", value=args.k, remedy="--k 1,4,8") from None
    temperature = args.temperature if args.temperature is not None else recipe.evaluation.temperature if recipe else 1.0
    seed = args.seed if args.seed is not None else recipe.seed if recipe else 0
    most: dict[str, Any] = {} if args.concurrency is None else {"concurrency": args.concurrency}
    return Attempts(
        args.attempts,
        at,
        temperature,
        args.top_p,
        args.top_k,
        args.min_p,
        seed,
        confidence=args.confidence,
        **most,
    )


def open_model(args: argparse.Namespace, recipe: Recipe | None, benchmarks: list[Benchmark]) -> EvaluatedModel:
    """The model that the options name, its weights loaded."""
    import dataclasses

    if args.endpoint:
        from rolljax.evaluation.endpoint import EndpointConfig, EndpointModel

        most: dict[str, Any] = {} if args.concurrency is None else {"concurrency": args.concurrency}
        cfg = EndpointConfig(
            args.endpoint, args.model_name, args.timeout_s, args.retries, request=read_request(args.request), **most
        )
        return EndpointModel(cfg, os.environ.get(args.api_key_env, ""))
    from rolljax.evaluation import models

    if recipe is None:
        longest = max(b.max_answer_tok for b in benchmarks)
        recipe = models.folder_recipe(
            args.model, benchmarks[0].env, max_context=args.max_context, max_answer_tok=longest, dtype=args.dtype
        )
    else:
        recipe = models.with_context(recipe, args.max_context)
        recipe = dataclasses.replace(recipe, dtype=args.dtype or recipe.dtype)
    return models.of_run(recipe, args.run, cli.read_step(args.step)) if args.run else models.of_folder(recipe)


def read_request(text: str | None) -> dict[str, Any]:
    """`--request` as fields.

    Raises:
      ConfigError: it is no JSON object.
    """
    try:
        fields = json.loads(text or "{}")
    except ValueError as e:
        fields = e
    if not isinstance(fields, dict):
        raise ConfigError(
            "is not a JSON object", setting="--request", value=text, remedy="""'{"return_token_ids": true}'"""
        )
    return fields


if __name__ == "__main__":
    sys.exit(main())
