"""The trackers of a run, opened and closed with it."""

from __future__ import annotations

import contextlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence

from rolljax.concurrency.event_loop import Stopped
from rolljax.errors import ConfigError, RolljaxError, boundary
from rolljax.recipe import Recipe
from rolljax.run.alerts import best_and_worst
from rolljax.run.folder import RunFolder
from rolljax.storage import durable
from rolljax.trackers import feed
from rolljax.trackers.base import Outcome, RunInfo, TrackerConfig
from rolljax.trackers.feed import Feed, Trackers
from rolljax.types import Trajectory

FOLDER = "trackers"
SHOWN_CHARS = 4000
"""Most of a task or answer that is given to trackers."""


@contextlib.contextmanager
def tracking(recipe: Recipe, folder: RunFolder, done: int, warn: Callable[[str], None]) -> Iterator[Trackers]:
    """Open the trackers of a recipe; when the block ends, report to them how the run ended.

    Args:
      done: steps of the run that are done already. warn: told once of each kind of trouble with one of them.
    """
    configs = recipe.trackers
    feeds = [
        Feed(name, config, _info(folder, name, done), folder.rows, warn)
        for name, config in zip(names(configs), configs, strict=True)
    ]
    trackers = Trackers(feeds)
    outcome: Outcome = "failed"
    try:
        yield trackers
        outcome = "done"
    except Stopped:
        outcome = "stopped"
        raise
    finally:
        trackers.close(outcome, feed.CLOSE_S)


def check(configs: Sequence[TrackerConfig]) -> None:
    """Check that trackers can be opened in separate processes.

    Raises:
      ConfigError: a package is not installed, or a custom class cannot be imported in another process.
    """
    for config in configs:
        config.check()
        name = type(config).__name__
        try:
            with boundary(RolljaxError, "cannot be sent to another process"):
                pickle.loads(pickle.dumps(config))
        except RolljaxError as e:
            raise ConfigError(str(e), setting="Recipe.trackers", value=name, remedy="define it in a module") from e
        if type(config).__module__ == "__main__":
            raise ConfigError(
                "is defined in the program itself, and opened in another process",
                setting="Recipe.trackers",
                value=name,
                remedy="define it in a module that can be imported",
            )


def names(configs: Sequence[TrackerConfig]) -> list[str]:
    """Return a name for each tracker: its class in lower case, with a number if there are several."""
    kinds = [type(config).__name__.lower() for config in configs]
    return [kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]


def answers_text(trajectories: Sequence[Trajectory]) -> str:
    """Return the best and the worst answer (`alerts.best_and_worst`), each with its task."""
    found = best_and_worst(trajectories)
    return "\n\n".join(_told(name, t) for name, t in zip(("best", "worst"), found, strict=False))


def _told(name: str, t: Trajectory) -> str:
    turns = [f"answer {i}: {turn.text[:SHOWN_CHARS]}" for i, turn in enumerate(t.turns, 1)]
    return "\n".join([f"{name}, reward {t.reward:g}", f"task: {t.task.content[:SHOWN_CHARS]}", *turns])


def _info(folder: RunFolder, name: str, done: int) -> RunInfo:
    path = folder.path.absolute()
    place, known = path / FOLDER / name, path / FOLDER / "id"
    place.mkdir(parents=True, exist_ok=True)
    if not known.is_file():
        durable.write(known, secrets.token_hex(8))
    return RunInfo(path.name, known.read_text(), path, place, folder.resolved(), done)
