"""Simulate a run: `python -m rolljax.simulate --gin FILE [--timings FILE | --run RUN] [--sweep async_ratio=0,.5,1,2]`.

The loop, the group buffer and the rollouts are those of a run; the engine, the environments and the trainer only take
time, on a virtual clock. docs/scaling.md explains the output and the format of timings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rolljax.config.loader import Loaded
    from rolljax.recipe import Recipe
    from rolljax.simulation.report import Summary
    from rolljax.simulation.runtime import SimulatedRecorder, SimulatedRuntime
    from rolljax.simulation.timings import Timings

PLACES = {
    "Timings": (),
    "EngineTimings": ("engine",),
    "ClusterTimings": ("cluster",),
    "EnvTimings": ("env",),
    "RewardTimings": ("rewards",),
    "TrainerTimings": ("trainer",),
    "Slices": ("slices",),
    "StreamTraining": ("stream",),
    "NetworkTimings": ("network",),
    "ServingTimings": ("serving",),
}
"""The path of each class of timings in a file of timings."""


UNKNOWN = (
    "no timings are given, so lengths and seconds are defaults, not those of this recipe, its model or its chips; give "
    "--run RUN (measured), --timings FILE (of `rolljax.plan --json FILE`, or your own), or --set EngineTimings.step_s=S"
)
"""The warning of a simulation without timings."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m rolljax.simulate", description="Play a recipe's steps on a virtual clock."
    )
    cli.add_config_arguments(parser, required=True)
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--timings", metavar="FILE", help="lengths and seconds, as JSON; what plan --json wrote; or a shipped name"
    )
    given.add_argument("--run", type=Path, metavar="RUN", help="a run folder whose lengths and seconds are taken")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each phase, at most (default: 20)")
    parser.add_argument(
        "--sweep",
        metavar="NAME=A,B,...",
        help="a simulation for each value of a setting (of Phase, or Class.field)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write figures as JSON, and pictures, here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        own = [s for s in args.set if s.partition(".")[0].strip() in PLACES]
        config.append(cli.load_recipe(args.gin, [s for s in args.set if s not in own]))
        recipe = config[0].value
        record = timings_record(args, recipe)
        for setting in own:
            name, _, value = setting.partition("=")
            record = with_timing(record, name.strip(), literal(value))
        if not args.timings and not args.run:
            warn(UNKNOWN)
        if args.sweep:
            sweep(recipe, record, args)
        else:
            one(recipe, record, args)
        return 0

    return cli.run_verb(run, lambda: config[0] if config else None)


# ---- simulating


def simulate(recipe: Recipe, timings: Timings, steps: int | None = None) -> tuple[SimulatedRuntime, SimulatedRecorder]:
    """Play the phases of a recipe that sample, at most `steps` of each, on a virtual clock.

    Returns:
      The simulated runtime, with its clock and sampler, and a recorder with all that a run would have written.

    Raises:
      ConfigError: no phase samples. HangError: the loop waits for an event that can never happen.
    """
    from rolljax import loop
    from rolljax.simulation import clock
    from rolljax.simulation.episodes import SimulatedTasks
    from rolljax.simulation.runtime import SimulatedRecorder, SimulatedRuntime

    recipe = sampling_part(recipe, steps)

    async def play() -> tuple[SimulatedRuntime, SimulatedRecorder]:
        runtime = SimulatedRuntime(recipe, timings)
        recorder = SimulatedRecorder(runtime)
        await loop.train_phases(recipe, SimulatedTasks(), *runtime.parts(), recorder)
        for task in runtime.beside:
            if task.done():
                task.result()
        return runtime, recorder

    return clock.run(play())


def sampling_part(recipe: Recipe, steps: int | None) -> Recipe:
    """Return the recipe with only the phases that sample, at most `steps` of each, from the start of a task, without
    checkpoints."""
    phases = tuple(
        dataclasses.replace(p, steps=min(p.steps, steps or p.steps), start_states=None)
        for p in recipe.phases
        if p.samples
    )
    if not phases:
        raise ConfigError(
            "learn from reference answers: there is nothing to sample",
            setting="Recipe.phases",
            value=[p.name for p in recipe.phases],
            remedy="a recipe with a phase of reinforcement learning",
        )
    return dataclasses.replace(recipe, phases=phases, agent=None, save_every=10**9)


def applied(record: Mapping[str, Any], recipe: Recipe, where: str = "") -> Timings:
    """Build timings from JSON; slices use the recipe's model."""
    from rolljax.model import hf
    from rolljax.model.decoder import DecoderConfig
    from rolljax.simulation import roofline
    from rolljax.simulation.timings import Timings, from_json

    timings = from_json(record, Timings, where)
    if timings.slices is None:
        return timings
    model = recipe.model if isinstance(recipe.model, DecoderConfig) else hf.read_config(recipe.model)
    return roofline.applied(timings, model)


# ---- settings


def timings_record(args: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Return the JSON of the named timings, or of the defaults."""
    from rolljax.simulation import fitting
    from rolljax.simulation.timings import to_json

    if args.run:
        return to_json(fitting.fitted(args.run, recipe))
    return read_timings(args.timings) if args.timings else {}


def read_timings(name: str) -> dict[str, Any]:
    """Return the timings of a JSON file by its path, or by its name if it comes with rolljax (`timings/NAME`).

    A file of `rolljax.plan --json`, or the `simulation.json` of another simulation, has them under `timings`.
    """
    from rolljax.config.files import CONFIGS

    inside = Path(name.removeprefix("configs/").removesuffix(".json") + ".json")
    places = [Path(name), *(folder / inside for folder in CONFIGS)]
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        shipped = sorted(f"timings/{p.stem}" for folder in CONFIGS for p in folder.glob("timings/*.json"))
        raise ConfigError(
            "does not exist", setting="--timings", value=name, remedy=f"a JSON file, or of {', '.join(shipped)}"
        )
    try:
        record = json.loads(path.read_text())
    except (ValueError, OSError) as e:
        raise ConfigError(f"is not JSON: {e}", setting="--timings", value=str(path)) from None
    if not isinstance(record, dict):
        raise ConfigError("holds no JSON object", setting="--timings", value=str(path))
    if "timings" not in record:
        return record
    if not isinstance(record["timings"], dict):
        raise ConfigError(
            "is a plan without the programs of a step",
            setting="--timings",
            value=str(path),
            remedy="run rolljax.plan without --only, with programs that fit",
        )
    return record["timings"]


def literal(text: str) -> Any:
    """Parse a Python literal; return any other text unchanged."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def with_timing(record: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the timings with setting `Class.field` at a value."""
    cls, _, field = name.partition(".")
    place, found = PLACES[cls], dict(record)
    inner = found
    for part in place:
        inner[part] = dict(inner.get(part) or {})
        inner = inner[part]
    inner[field] = value
    return found


def with_setting(recipe: Recipe, name: str, value: Any) -> Recipe:
    """Return the recipe with `Phase.field`, `SamplerConfig.field` or `Recipe.field` at a value."""
    cls, _, field = name.rpartition(".")
    try:
        match cls:
            case "" | "Phase":
                of = [dataclasses.replace(p, **{field: _number(p, field, value)}) for p in recipe.phases if p.samples]
                return dataclasses.replace(recipe, phases=tuple(of))
            case "SamplerConfig":
                return dataclasses.replace(recipe, sampler=dataclasses.replace(recipe.sampler, **{field: value}))
            case "Recipe":
                return dataclasses.replace(recipe, **{field: value})
    except TypeError:
        pass
    raise ConfigError(
        "is no setting to sweep",
        setting="--sweep",
        value=name,
        remedy=f"a field of Phase (async_ratio), or Class.field of SamplerConfig, Recipe, {', '.join(PLACES)}",
    )


def _number(phase: Any, field: str, value: Any) -> Any:
    """Return the value as a float if the field of the phase is a float."""
    return float(value) if isinstance(getattr(phase, field, None), float) else value


# ---- printed output


def one(recipe: Recipe, record: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Simulate, print the numbers, write numbers and timeline."""
    from rolljax.simulation import report
    from rolljax.simulation.timings import to_json

    timings = applied(record, recipe, args.timings or "")
    runtime, recorder = simulate(recipe, timings, args.steps)
    summary = report.summarize(runtime, recorder)
    say(report.table(summary), summary.warnings)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        found = {**summary.to_json(), "timings": to_json(timings), "rows": recorder.rows}
        (args.out / "simulation.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "timeline.png").write_bytes(report.timeline(runtime, recorder))


def sweep(recipe: Recipe, record: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Simulate with each value of a setting, print a row for each, write numbers and curves."""
    from rolljax.simulation import report

    name, _, values = args.sweep.partition("=")
    found: dict[str, Summary] = {}
    for text in filter(None, values.split(",")):
        value, timings_of, recipe_of = literal(text), record, recipe
        if name.partition(".")[0] in PLACES:
            timings_of = with_timing(record, name, value)
        else:
            recipe_of = with_setting(recipe, name, value)
        timings = applied(timings_of, recipe_of, args.timings or "")
        found[text.strip()] = report.summarize(*simulate(recipe_of, timings, args.steps))
    if not found:
        raise ConfigError("has no values", setting="--sweep", value=args.sweep, remedy="async_ratio=0,.5,1,2")
    say(report.sweep_table(name, found), list(dict.fromkeys(w for s in found.values() for w in s.warnings)))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        numbers = {value: s.to_json() for value, s in found.items()}
        (args.out / "sweep.json").write_text(json.dumps(numbers, indent=1) + "\n")
        (args.out / "sweep.png").write_bytes(report.sweep_figure(name, found))


def say(table: Any, warnings: Sequence[str]) -> None:
    """Print a table on stdout, and the problems that a real run would have on stderr."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)
    for text in warnings:
        warn(text)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(f"warning: {text}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
