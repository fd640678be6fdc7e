"""Evaluate a model: `python -m rolljax.eval --run RUN | --model HF_DIR | --endpoint URL [--env ENV ...] [--to DIR]`.

Prints one table in Markdown: reward, pass@k, avg@k and maj@k with confidence intervals, for each environment and over
all of them; `--json` prints the same as one JSON object. Without `--env` the tasks are the held-out ones of the run, or
of the recipe that `--gin` names. `--to DIR` keeps every answer; the same command continues an evaluation that was
interrupted. `--compare DIR_A DIR_B` compares two that are complete (docs/evaluation.md).

`--benchmark bsa|usb|recgpt|FILE --items FILE --judge URL` has judges look at the answers (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError

if TYPE_CHECKING:
    from rolljax.chat_models.client import EndpointConfig
    from rolljax.config.loader import Loaded
    from rolljax.envs.base import EnvSpec
    from rolljax.evaluation.judged.base import JudgedReport
    from rolljax.evaluation.models import EvaluatedModel
    from rolljax.evaluation.report import EvaluationReport
    from rolljax.evaluation.settings import Attempts, Benchmark
    from rolljax.model.decoder import Dtype
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Step

KEY = "OPENAI_API_KEY"
SHOWN = 3
"""Settings that one notice names."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
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
    tries.add_argument("--chat_template", metavar="FILE|plain", help=f"with --model: {cli.TEMPLATE_HELP}")
    tries.add_argument("--dtype", choices=["float32", "bfloat16"], help="of computations (default: the recipe's)")
    tries.add_argument("--concurrency", type=int, metavar="N", help="episodes at a time (default: 256; endpoint: 64)")
    judged = parser.add_argument_group("judges")
    judged.add_argument(
        "--benchmark", metavar="NAME", help="bsa, usb, recgpt or a gin file of a JudgedEvaluation; --set changes it"
    )
    judged.add_argument("--items", metavar="FILE", help="of the benchmark")
    judged.add_argument("--judge", action="append", default=[], metavar="URL", help="repeatable; several vote")
    judged.add_argument("--judge_model", action="append", default=[], metavar="NAME", help="of each --judge, in order")
    judged.add_argument(
        "--show_texts", action="store_true", help="keep items, answers and verdicts in clear, not hashed"
    )
    server = parser.add_argument_group("endpoint")
    server.add_argument("--model_name", default="", help="default: the only one that the server lists")
    server.add_argument(
        "--api_key_env", default=KEY, metavar="NAME", help="variable with the key (default: %(default)s)"
    )
    server.add_argument("--timeout_s", type=float, default=600.0, help="of a request (default: %(default)s)")
    server.add_argument("--retries", type=int, default=5, help="of a request that fails (default: %(default)s)")
    server.add_argument(
        "--completions", action="store_true", help="a base model: ask /v1/completions, with the texts as they are"
    )
    server.add_argument("--request", metavar="JSON", help="fields of every request; null takes one away")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--to", metavar="DIR", help="keep every answer and the report there; continue an unfinished evaluation"
    )
    out.add_argument("--fresh", action="store_true", help="delete the evaluation in that folder first")
    out.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    out.add_argument(
        "--weight", action="append", default=[], metavar="NAME=W", help="of an environment in the weighted mean"
    )
    out.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        if args.compare:
            print(compared(args))
            return 0
        check_arguments(args)
        if args.benchmark:
            report = evaluate_judged(args)
            print(json.dumps(report.to_json()) if args.json else report.markdown())
            return 0
        recipe = None
        if args.run or args.gin:
            recipe = read_recipe(args, config)
        found = evaluate(
            run=args.run,
            model=args.model,
            endpoint=read_endpoint(args),
            key=os.environ.get(args.api_key_env, ""),
            step=cli.read_step(args.step),
            recipe=recipe,
            envs=args.env,
            tasks=args.tasks,
            held_out_frac=args.held_out_frac,
            max_answer_tok=args.max_answer_tok,
            attempts=read_attempts(args, recipe),
            max_context=args.max_context,
            dtype=args.dtype,
            chat_template=args.chat_template,
            to=args.to,
            fresh=args.fresh,
        )
        print(json.dumps(found.to_json()) if args.json else found.markdown())
        if found.failed and args.to:
            print(f"the same command asks the {found.failed} failed attempt(s) again", file=sys.stderr)
        return 0

    return cli.run_verb(run, lambda: config[0] if config else None)


def compared(args: argparse.Namespace) -> str:
    """Return the output of `--compare`."""
    from rolljax.evaluation import answers, report
    from rolljax.evaluation.settings import Attempts

    first, second = map(answers.read, args.compare)
    records, text = report.compare(first, second, Attempts(confidence=args.confidence, seed=args.seed or 0))
    return json.dumps(records) if args.json else text


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that have no effect or do not go together."""
    useless = {
        "--step": args.step is not None and not args.run,
        "--fresh": args.fresh and not args.to,
        "--set": bool(args.set) and not (args.run or args.gin or args.benchmark),
        "--items": args.items is not None and not args.benchmark,
        "--judge": bool(args.judge) and not args.benchmark,
        "--judge_model": len(args.judge_model) > len(args.judge),
        "--show_texts": args.show_texts and not args.benchmark,
        "--model_name": bool(args.model_name) and not args.endpoint,
        "--request": args.request is not None and not args.endpoint,
        "--completions": args.completions and not args.endpoint,
        "--chat_template": args.chat_template is not None and not args.model,
        "--max_context": args.max_context is not None and bool(args.endpoint),
        "--dtype": args.dtype is not None and bool(args.endpoint),
    }
    if args.benchmark:  # which says these by itself
        said = ("env", "gin", "tasks", "held_out_frac", "max_answer_tok", "k", "temperature", "weight", "seed")
        useless |= {f"--{name}": getattr(args, name) not in (None, []) for name in said} | {
            "--attempts": args.attempts > 1
        }
    for name, is_useless in useless.items():
        if is_useless:
            raise ConfigError("can have no effect here", setting=name, remedy="leave it out")


def read_recipe(args: argparse.Namespace, config: list[Loaded[Recipe]]) -> Recipe:
    """Return the recipe of a run, or the one given with `--gin`, with a model folder if there is one. If `--env` names
    the tasks, the settings of a run's policy suffice.

    Args:
      config: receives the loaded config, which knows the file and line of a setting.
    """
    from rolljax.storage.run_reader import RunReader

    if args.run and not (args.gin or args.set):
        return recipe_of_run(args.run, config, others=bool(args.env))
    if args.run:
        config.append(cli.load_recipe([RunReader(args.run).config_file(), *args.gin], args.set))
    else:
        around = [f"Recipe.model = {args.model!r}"] if args.model else []
        config.append(cli.load_recipe(args.gin, [*args.set, *around]))
    return config[0].value


def recipe_of_run(run: str | Path, config: list[Loaded[Recipe]] | None = None, *, others: bool = False) -> Recipe:
    """Return the recipe of a run, from its folder.

    Args:
      config: see `read_recipe`. others: the tasks are those of other environments; if the run's own cannot be imported,
        its policy's settings suffice.
    """
    from rolljax.run.policy import policy_recipe
    from rolljax.storage.run_reader import RunReader

    try:
        loaded = cli.load_recipe([RunReader(run).config_file()], [])
    except ConfigError as e:
        if others:
            return policy_recipe(run)
        e.remedy = "; ".join(filter(None, (e.remedy, "or ask tasks that are here: --env NAME (envs=[...])")))
        raise
    if config is not None:
        config.append(loaded)
    return loaded.value


def own_settings(run: str | Path, spec: EnvSpec) -> str:
    """Return a notice if an environment named for an evaluation has other settings than the run's of the same class;
    empty if not."""
    from rolljax.config.check import full_name
    from rolljax.config.resolved import flatten
    from rolljax.storage.run_reader import RunReader

    resolved, cls = RunReader(run).resolved(), full_name(type(spec))
    places = [p.removesuffix(".__class__") for p, name in resolved.items() if p.startswith("env") and name == cls]
    here = {path.removeprefix("env."): value for path, value in flatten(spec, "env").items()}
    told = []
    for place in places:
        there = {p.removeprefix(f"{place}."): v for p, v in resolved.items() if p.startswith(f"{place}.")}
        differ = [n for n in here if n in there and there[n] != json.loads(json.dumps(here[n]))]
        if not differ:
            return ""
        told.append(", ".join(f"{n} is {here[n]!r:.60} here, {there[n]!r:.60} in the run" for n in differ[:SHOWN]))
    what = f"notice: --env {spec.name} has settings of its own, not the run's"
    return f"{what}: {told[0]}. Without --env the run's own held-out tasks are asked" if told else ""


def evaluate(
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    endpoint: EndpointConfig | str | None = None,
    key: str = "",
    step: Step | None = None,
    recipe: Recipe | None = None,
    envs: Sequence[EnvSpec | str] = (),
    tasks: int | None = None,
    held_out_frac: float | None = None,
    max_answer_tok: int | None = None,
    attempts: Attempts | None = None,
    max_context: int | None = None,
    dtype: Dtype | None = None,
    chat_template: str | None = None,
    to: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvaluationReport:
    """Evaluate a model on tasks; `print(report.markdown())`, `report["chain_sum"].estimates["pass@1"]`.

    Args:
      run, model, endpoint: one of them: a run folder, a Hugging Face folder, a server (with `key`, if it asks for one).
      step: of the run: a kept checkpoint, or `best`; None: the newest.
      recipe: settings; None: those stored in the run's folder, if there is a run.
      envs: whose tasks; empty: the recipe's held-out ones. tasks: how many of each. held_out_frac: their split; None:
        of an environment with the name of the recipe's its held-out tasks, of others all.
      max_answer_tok, max_context: tokens of an answer, and of prompt and answer; None: the recipe's, or 512 and 4096.
      attempts: how each task is tried; None: once, at the recipe's temperature and seed.
      dtype: of computations; None: the recipe's, or float32 on CPU and else bfloat16.
      chat_template: of a Hugging Face folder: as `Recipe.chat_template`; None: the recipe's, or the folder's own.
      to: folder for every answer and the report; an unfinished evaluation in it continues. fresh: delete it first.
      quiet: show no progress on stderr. should_stop: asked all the while; True ends it with `Stopped`.

    Raises:
      ConfigError, CheckpointError, DataError, InfraError, HangError: see `evaluation.run.evaluate`.
    """
    from rolljax.console.progress import ProgressBar
    from rolljax.evaluation import run as evaluation
    from rolljax.evaluation.settings import Attempts

    if sum(x is not None for x in (run, model, endpoint)) != 1:
        raise ConfigError("is needed, and only one", setting="run, model or endpoint")
    if recipe is None and run is not None:
        recipe = recipe_of_run(run, others=bool(envs))
    said = {"num_tasks": tasks, "held_out_frac": held_out_frac, "max_answer_tok": max_answer_tok}
    benchmarks = benchmarks_of(recipe, envs, {name: value for name, value in said.items() if value is not None})
    if attempts is None:
        attempts = Attempts(temperature=recipe.evaluation.temperature, seed=recipe.seed) if recipe else Attempts()
    with contextlib.ExitStack() as stack:
        if endpoint is not None:
            opened = open_endpoint(endpoint, key)
        else:
            opened = open_local(run, model, step, recipe, benchmarks, max_context, dtype, chat_template)
        stack.enter_context(opened)
        show, warn = lambda _: None, lambda _: None
        if not quiet:
            bar = stack.enter_context(ProgressBar(opened.name, at_once=True))
            show, warn = lambda standing: standing.show(bar, opened.name), bar.say
        for env in (b.env for b in benchmarks if run is not None and envs):
            if notice := own_settings(str(run), env):
                warn(notice)
        return evaluation.evaluate(
            opened, benchmarks, attempts, to=to, fresh=fresh, show=show, warn=warn, should_stop=should_stop
        )


def evaluate_judged(args: argparse.Namespace) -> JudgedReport:
    """Run the evaluation of `--benchmark`."""
    from rolljax.chat_models.client import EndpointConfig
    from rolljax.config import loader
    from rolljax.console.progress import ProgressBar
    from rolljax.evaluation.judged.base import JudgedEvaluation
    from rolljax.evaluation.judged.run import benchmark_of
    from rolljax.evaluation.judged.run import evaluate_judged as run_judged
    from rolljax.run.policy import policy_recipe

    name = args.benchmark if args.benchmark.endswith(".gin") else f"{args.benchmark}/judged"
    items = [] if args.items is None else [f"items = {args.items!r}"]
    cfg = loader.load([name], [*items, *args.set], root=JudgedEvaluation).value
    given = itertools.zip_longest(args.judge, args.judge_model, fillvalue="")
    judges = (*cfg.judges, *(EndpointConfig(url, model) for url, model in given))
    many = {} if args.concurrency is None else {"concurrency": args.concurrency}
    cfg = dataclasses.replace(cfg, judges=judges, confidence=args.confidence, **many)
    if args.endpoint:
        opened = open_endpoint(read_endpoint(args) or args.endpoint, os.environ.get(args.api_key_env, ""))
    else:
        recipe = None if args.run is None else policy_recipe(args.run)
        tasks = [benchmark_of(cfg, cfg.benchmark.items())]
        step = cli.read_step(args.step)
        limits = (args.max_context, args.dtype, args.chat_template)
        opened = open_local(args.run, args.model, step, recipe, tasks, *limits)
    with opened, ProgressBar(opened.name, at_once=True) as bar:
        return run_judged(
            opened,
            cfg,
            to=args.to,
            fresh=args.fresh,
            show_texts=args.show_texts,
            show=lambda standing: standing.show(bar, opened.name),
            warn=bar.say,
        )


def benchmarks_of(recipe: Recipe | None, envs: Sequence[EnvSpec | str], changes: Mapping[str, Any]) -> list[Benchmark]:
    """Return the tasks of environments, or else of the recipe.

    An environment of the recipe's own name gives held-out tasks, as the model may have been trained on the others.

    Args:
      changes: fields of `Benchmark` that override the recipe's.
    """
    from rolljax.envs.catalog import make_spec
    from rolljax.evaluation.settings import Benchmark

    own = None if recipe is None else Benchmark.of_recipe(recipe)
    if not envs:
        if own is None:
            raise ConfigError("says which tasks to evaluate on", setting="--env or --gin", remedy="--env rg:chain_sum")
        return [dataclasses.replace(own, **changes)]
    found = []
    for env in envs:
        spec = make_spec(env) if isinstance(env, str) else env
        of_recipe: dict[str, Any] = {} if own is None else {"pool": own.pool, "max_answer_tok": own.max_answer_tok}
        if own is not None and spec.name in {own_spec.name for own_spec in own.env.specs.values()}:
            of_recipe |= {"held_out_frac": own.held_out_frac, "reward": own.reward}
        found.append(Benchmark(spec, **of_recipe | dict(changes)))
    return found


def open_endpoint(endpoint: EndpointConfig | str, key: str) -> EvaluatedModel:
    """Return the model at an endpoint, for an evaluation. endpoint: a URL, or the full settings. key: the API key."""
    from rolljax.chat_models.client import EndpointConfig
    from rolljax.evaluation.endpoint import EndpointModel

    return EndpointModel(EndpointConfig(endpoint) if isinstance(endpoint, str) else endpoint, key)


def open_local(
    run: str | Path | None,
    model: str | Path | None,
    step: Step | None,
    recipe: Recipe | None,
    benchmarks: Sequence[Benchmark],
    max_context: int | None,
    dtype: Dtype | None,
    chat_template: str | None,
) -> EvaluatedModel:
    """Load a run's model, or a folder's."""
    from rolljax.evaluation import models

    if recipe is None:
        longest = max(b.max_answer_tok for b in benchmarks)
        recipe = models.folder_recipe(
            str(model), benchmarks[0].env, max_context=max_context, max_answer_tok=longest, dtype=dtype
        )
    else:
        recipe = dataclasses.replace(models.with_context(recipe, max_context), dtype=dtype or recipe.dtype)
        if model is not None:
            recipe = dataclasses.replace(recipe, model=str(model))
    if chat_template is not None:
        recipe = dataclasses.replace(recipe, chat_template=chat_template)
    return models.of_folder(recipe) if run is None else models.of_run(recipe, run, step)


def read_attempts(args: argparse.Namespace, recipe: Recipe | None) -> Attempts:
    """Return how every task is attempted."""
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
        weights=read_weights(args.weight),
        **most,
    )


def read_weights(given: Sequence[str]) -> dict[str, float]:
    """Parse `--weight` into names and numbers.

    Raises:
      ConfigError: a text is no name with a number.
    """
    found = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError("is no name with a number", setting="--weight", value=text, remedy="--weight gsm8k=2")
    return found


def read_endpoint(args: argparse.Namespace) -> EndpointConfig | None:
    """Return the server in the options, or None."""
    if not args.endpoint:
        return None
    from rolljax.chat_models.client import EndpointConfig

    most: dict[str, Any] = {} if args.concurrency is None else {"concurrency": args.concurrency}
    request = read_request(args.request)
    return EndpointConfig(
        args.endpoint,
        args.model_name,
        args.timeout_s,
        args.retries,
        request=request,
        completions=args.completions,
        **most,
    )


def read_request(text: str | None) -> dict[str, Any]:
    """Parse `--request` into fields.

    Raises:
      ConfigError: the text is no JSON object.
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
