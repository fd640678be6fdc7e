"""The verbs as functions: `rolljax.train`, `rolljax.evaluate`, `rolljax.export`, `rolljax.load`.

They do the work of the commands, but raise exceptions (`rolljax.errors`) instead of exiting. They can be called from
any thread. In a running event loop they block the loop; asynchronous code should call them with `asyncio.to_thread`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax.errors import ConfigError
from rolljax.library.run import Run
from rolljax.library.separate_thread import run_apart

if TYPE_CHECKING:
    from rolljax.config.loader import Loaded
    from rolljax.envs.base import EnvSpec
    from rolljax.evaluation.report import EvaluationReport
    from rolljax.evaluation.settings import Attempts
    from rolljax.library.model import LoadedModel
    from rolljax.model.decoder import Dtype
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Step

PathLike = str | os.PathLike[str]
NO_SETTINGS: Mapping[str, object] = {}


def train(
    recipe: Recipe | PathLike | Sequence[PathLike],
    *,
    set: Mapping[str, object] = NO_SETTINGS,
    run_dir: PathLike | None = None,
    fresh: bool = False,
    progress: bool = True,
) -> Run:
    """Train, and return the run. The same call continues a run that was stopped; if all is done, it returns at once.

    Interrupting it (Ctrl-C, a notebook's stop button) saves after the step that is under way and returns the run;
    interrupting it again raises `KeyboardInterrupt` without waiting for that. SIGTERM saves too, and then ends the
    process as it usually does.

    Args:
      recipe: a `Recipe`, the name of one that comes with rolljax ("quickstart"), a gin file, or several, later ones
        over earlier ones.
      set: settings over it, by name: `{"Recipe.seed": 1, "rl/Phase.steps": 20}`. Values are Python's; an environment,
        an algorithm or any other object is passed as it is: `{"Recipe.env": MyEnv(size=5)}`. In a `Recipe` a name is
        `Class.field`, and means every object of the class.
      run_dir: the run folder; default: `runs/` and the name of the recipe, or of its environment.
      fresh: delete an earlier run in that folder first.
      progress: show it: in a notebook as a plot that is redrawn, else on stderr.

    Raises:
      ConfigError: a setting that cannot be used, with the remedy. EnvError, SamplerError, TrainerError,
        CheckpointError, HangError: the error that ended the run. It is also in the run's summary, and `Run(run_dir)`
        has everything that was done until then.
    """
    from rolljax import cli

    cli.quiet()
    from rolljax.commands.train import train as train_run
    from rolljax.concurrency import distributed
    from rolljax.concurrency.lockstep import SINGLE_PROCESS
    from rolljax.library.notebook import console_of

    if distributed.is_asked_for():
        raise ConfigError(
            "names other processes, which rolljax.train of a program does not join",
            setting="JAX_COORDINATOR_ADDRESS",
            remedy="start the same python -m rolljax.train in each of them",
        )
    began, console = time.perf_counter(), console_of(progress)
    folder = Path(run_dir) if run_dir is not None else Path("runs") / _name(recipe)

    def work(told_to_stop: Callable[[], bool]) -> Loaded[Recipe]:
        config = config_of(recipe, set)
        with _located(config):
            train_run(config, folder, console, began, SINGLE_PROCESS, fresh=fresh, told_to_stop=told_to_stop)
        return config

    try:
        config = run_apart(work, console.refresh)
    finally:
        console.refresh(at_end=True)
    return Run(folder, config)


def evaluate(
    source: Run | PathLike,
    *,
    recipe: Recipe | PathLike | None = None,
    set: Mapping[str, object] = NO_SETTINGS,
    envs: Sequence[EnvSpec | str] = (),
    tasks: int | None = None,
    attempts: Attempts | int = 1,
    step: Step | None = None,
    to: PathLike | None = None,
) -> EvaluationReport:
    """Let a model answer tasks: `print(rolljax.evaluate("runs/quickstart", attempts=4).markdown())`.

    Args:
      source: a run or its folder, on the held-out tasks of its recipe. Or a local Hugging Face folder.
      recipe: of a Hugging Face folder: which tasks, and how they are sampled. set: settings over the recipe, as for
        `train`: `{"Evaluation.temperature": 0, "Evaluation.tasks": 1000}`.
      envs: whose tasks, in place of the recipe's. tasks: how many of each.
      attempts: at every task; or all of how tasks are tried. step: of the run: a kept checkpoint, or `best`; None: the
        newest. to: folder for every answer and the report; an unfinished evaluation in it continues.

    Returns:
      The report: a table in a notebook and by `markdown()`; every answer in `trajectories`.

    Raises:
      ConfigError: the tasks cannot be made; CheckpointError: there is nothing to evaluate; InfraError: every answer
      failed. KeyboardInterrupt: it was interrupted.
    """
    from rolljax import cli

    cli.quiet()
    from rolljax import eval as verb
    from rolljax.concurrency.event_loop import Stopped
    from rolljax.evaluation.settings import Attempts

    def work(told_to_stop: Callable[[], bool]) -> EvaluationReport:
        run = _run_of(source)
        if run is None and recipe is None and not envs:
            raise ConfigError("says which tasks to evaluate on", setting="recipe", remedy='recipe="quickstart"')
        if run is not None and recipe is not None:
            raise ConfigError("is for model folders; a run has its own", setting="recipe", remedy="leave it out")
        config, own = None, None
        if run is not None and envs and not set:
            own = run.given_recipe or verb.recipe_of_run(run.path, others=True)
        elif run is not None or recipe is not None:
            config = run.config_with(set) if run else config_of(recipe, set)  # type: ignore[arg-type]
            own = config.value
        how = attempts
        if isinstance(how, int):
            how = Attempts(how, temperature=own.evaluation.temperature, seed=own.seed) if own else Attempts(how)
        with contextlib.nullcontext() if config is None else _located(config):
            return verb.evaluate(
                run=run.path if run else None,
                model=None if run else os.fspath(source),  # type: ignore[arg-type]
                step=step,
                recipe=own,
                envs=envs,
                tasks=tasks,
                attempts=how,
                to=None if to is None else Path(to),
                should_stop=told_to_stop,
            )

    try:
        return run_apart(work)
    except Stopped:
        raise KeyboardInterrupt from None


def export(
    source: Run | PathLike,
    to: PathLike,
    *,
    step: Step | None = None,
    average: Sequence[int] = (),
    adapter: bool = False,
    dtype: Dtype | None = None,
    max_shard_gb: float | None = None,
) -> Path:
    """Write a model as a Hugging Face folder that `transformers` and `load` read; returns its path.

    Args:
      source: a run or its folder; or a Hugging Face folder, which is written again.
      to: the folder, new or empty. step: of the run: a kept checkpoint, or `best`; None: the newest. average: steps
        whose weights are averaged instead. adapter: of a run with adapters these alone, for PEFT.
      dtype: of the weights: "float32" (default) or "bfloat16". max_shard_gb: 10^9 bytes of a file, at most (5).

    Raises:
      ConfigError: the folder holds something, or the run has no adapters. CheckpointError: nothing is saved yet.
    """
    from rolljax import cli

    cli.quiet()
    from rolljax.commands.export import export as write

    run = _run_of(source)
    return run_apart(
        lambda _: write(
            Path(to),
            run=run.path if run else None,
            model=None if run else os.fspath(source),  # type: ignore[arg-type]
            step=step,
            average=average,
            adapter=adapter,
            dtype=dtype,
            max_shard_gb=max_shard_gb,
            recipe=run.given_recipe if run else None,
        )
    )


def load(
    source: Run | PathLike,
    *,
    step: int | str | None = None,
    chat_template: str | None = None,
    slots: int | None = None,
    max_context: int | None = None,
    dtype: Dtype | None = None,
) -> LoadedModel:
    """Load a model for generation: `rolljax.load("runs/quickstart").generate("Hello")`.

    Args:
      source: a run or its folder: its newest weights; or a local Hugging Face folder.
      step: of a run: a kept checkpoint, or "best", the one with the highest held-out reward.
      chat_template: for a folder without one: the path of a file, or "plain" for plain texts.
      slots: answers sampled at the same time. max_context: tokens of prompt and answer. Defaults: the run's own, for a
        folder 64 and at most 4096. dtype: "float32" (default on CPU) or "bfloat16" (default elsewhere).

    Raises:
      CheckpointError: nothing is saved yet. ConfigError: the step is not kept, the source is neither a run nor a model
        folder, or `max_context` is more than the model's.
    """
    from rolljax import cli

    cli.quiet()
    from rolljax import serve
    from rolljax.library.model import LoadedModel

    run = _run_of(source)
    kind, folder = run.weights if run else ("hf", Path(source))  # type: ignore[arg-type]
    if run and step is not None:
        kind, folder = "ckpt", run.path
    sizes: dict[str, Any] = {"slots": slots, "max_context": max_context}
    if run is not None and kind == "hf":
        sizes = _sizes_of(run) | {name: size for name, size in sizes.items() if size is not None}
    return run_apart(
        lambda _: LoadedModel(
            *serve.load(
                run=folder if kind == "ckpt" else None,
                model=folder if kind == "hf" else None,
                step=cli.read_step(None if step is None else str(step)),
                chat_template=chat_template,
                name=(run.path if run else folder).resolve().name,
                dtype=dtype,
                recipe=run.given_recipe if run and kind == "ckpt" else None,
                **sizes,
            )
        )
    )


def config_of(recipe: Recipe | PathLike | Sequence[PathLike], settings: Mapping[str, object]) -> Loaded[Recipe]:
    """Load a recipe given as an object, a gin file or several gin files, and apply settings over it. Raise
    `ConfigError` if anything is wrong."""
    from rolljax.config import loader
    from rolljax.recipe import Recipe

    if isinstance(recipe, Recipe):
        return loader.given(recipe, settings)
    files = [recipe] if isinstance(recipe, (str, os.PathLike)) else list(recipe)
    return loader.load([os.fspath(file) for file in files], settings, root=Recipe)


def _name(recipe: Recipe | PathLike | Sequence[PathLike]) -> str:
    """Return the default name of a run folder."""
    from rolljax.recipe import Recipe

    if isinstance(recipe, Recipe):
        return recipe.env.name
    return Path(recipe if isinstance(recipe, (str, os.PathLike)) else recipe[-1]).stem


def _run_of(source: Run | PathLike) -> Run | None:
    """Return the run of a source; None for a Hugging Face folder."""
    if isinstance(source, Run):
        return source
    return None if (Path(source) / "config.json").is_file() else Run(source)


def _sizes_of(run: Run) -> dict[str, Any]:
    """Return the slots and context of a run's sampler, read from its folder, so that its environment is not needed."""
    from rolljax.storage.run_reader import RunReader

    resolved = RunReader(run.path).resolved()
    return {name: resolved[f"sampler.{name}"] for name in ("slots", "max_context")}


@contextlib.contextmanager
def _located(config: Loaded[Recipe]) -> Iterator[None]:
    """Add the origin of settings to errors about them inside this context."""
    try:
        yield
    except ConfigError as e:
        config.locate(e)
        raise
