"""A run folder in Python: metrics, curves, trajectories."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from rolljax.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rolljax.config.loader import Loaded
    from rolljax.recipe import Recipe
    from rolljax.types import Trajectory

SHOWN = 32
"""Most trajectories of a table in a notebook."""
SHOWN_CHARS = 400
"""Most characters of a text in such a table."""


class Run:
    """A run, read from its folder: the result of `rolljax.train`, or an earlier run.

    Args:
      path: the run folder. config: the run's settings, if they are in memory (default: read from the folder when first
        used).

    Raises:
      CheckpointError: `path` is not a run folder.
    """

    def __init__(self, path: str | os.PathLike[str], config: Loaded[Recipe] | None = None) -> None:
        from rolljax.storage.run_reader import RunReader

        self.path = Path(path)
        self._files = RunReader(self.path)
        self._files.config_file()
        self._config = config

    def __repr__(self) -> str:
        rewards = [f"{entry['mean']:.3f}" for entry in self.heldout_reward]
        said = f"{self.num_steps} steps, {self.stop_reason or 'not at its end'}"
        return f"Run({str(self.path)!r}: {said}; held-out reward {' -> '.join(rewards) or 'not known'})"

    @property
    def config(self) -> Loaded[Recipe]:
        """The settings: `.value` is the `Recipe`, `.resolved` every setting by its path.

        Raises:
          ConfigError: the settings name an object that this process lacks, such as a class of another notebook.
        """
        if self._config is None:
            self._config = self.config_with({})
        return self._config

    def config_with(self, settings: Mapping[str, object]) -> Loaded[Recipe]:
        """Return the settings with others over them, `Class.field` -> value. Pass here the values that the folder could
        not store (a function of a notebook).

        Raises:
          ConfigError: as `config`, or a setting cannot be used.
        """
        from rolljax.config import loader
        from rolljax.recipe import Recipe

        if self._config is not None:
            return loader.given(self._config.value, settings) if settings else self._config
        return loader.load([self._files.config_file()], settings, root=Recipe)

    @property
    def given_recipe(self) -> Recipe | None:
        """The recipe, if it is in memory: this process trained the run, or `config` was read. Otherwise None."""
        return self._config.value if self._config is not None else None

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: held-out rewards, steps, seconds, why it stopped; empty until it has
        stopped."""
        return self._files.summary()

    @property
    def stop_reason(self) -> str:
        """The reason why the run stopped; empty while it is in progress."""
        return str(self.summary.get("stop_reason", ""))

    @property
    def is_finished(self) -> bool:
        """Return whether all phases are done. If not, the same call of `rolljax.train` continues the run."""
        from rolljax.storage.run_reader import DONE

        return self.stop_reason == DONE

    @property
    def heldout_reward(self) -> list[dict[str, Any]]:
        """Mean reward on held-out tasks at the start and after every phase: `phase`, `step`, `mean`, `n`."""
        return list(self.summary.get("heldout_reward", []))

    @property
    def num_steps(self) -> int:
        """Steps on record."""
        return len(self._files.rows())

    @property
    def metrics(self) -> Any:
        """One row per step, as metrics.jsonl has them (docs/metrics.md): a pandas `DataFrame` where pandas is
        installed, else a list of dicts."""
        rows = self._files.rows()
        try:
            import pandas
        except ModuleNotFoundError:
            return rows
        return pandas.DataFrame(rows)

    def curves(self) -> Figure:
        """Plot reward, entropy, mismatch and seconds over the steps, as curves.png does; a notebook shows the figure.

        Raises:
          DataError: no step is on record.
        """
        from rolljax.library.notebook import shown_figure
        from rolljax.storage.curves import figure

        rows = self._files.rows()
        if not rows:
            raise DataError(f"{self.path} has no step on record yet")
        return shown_figure(figure(rows, self.heldout_reward))

    @property
    def steps(self) -> list[int]:
        """Steps whose trajectories are on disk."""
        return self._files.rollout_steps()

    def trajectories(self, step: int | None = None) -> Trajectories:
        """Return every trajectory of a step: task, turns with their tokens and log-probs, reward, status.

        Args:
          step: one of `steps`; default: the last.

        Raises:
          DataError: the step has none. CheckpointError: their file is damaged.
        """
        known = self.steps
        if not known or (step is not None and step not in known):
            nearest = f"; nearest: {min(known, key=lambda s: abs(s - (step or 0)))}" if known else ""
            raise DataError(f"{self.path} holds no rollouts of step {step if step is not None else 'any'}{nearest}")
        return Trajectories(self._files.trajectories(known[-1] if step is None else step))

    @property
    def weights(self) -> tuple[str, Path]:
        """The location of the newest weights: ("hf", a Hugging Face folder) of a finished run, else ("ckpt", the run
        folder).

        Raises:
          CheckpointError: nothing is saved yet.
        """
        from rolljax.storage.layout import CHECKPOINTS, RESULT

        if self.is_finished and (self.path / RESULT / "config.json").is_file():
            return "hf", self.path / RESULT
        if not (self.path / CHECKPOINTS).is_dir():
            raise CheckpointError(f"{self.path} holds no checkpoint yet")
        return "ckpt", self.path


class Trajectories(list["Trajectory"]):
    """Trajectories in a list; a notebook shows them, and slices of them, as a table."""

    @overload
    def __getitem__(self, at: SupportsIndex) -> Trajectory: ...
    @overload
    def __getitem__(self, at: slice) -> Trajectories: ...
    def __getitem__(self, at: SupportsIndex | slice) -> Trajectory | Trajectories:
        found = super().__getitem__(at)
        return Trajectories(found) if isinstance(at, slice) else found  # type: ignore[arg-type, return-value]

    def __repr__(self) -> str:
        mean = f", mean reward {sum(t.reward for t in self) / len(self):.3f}" if self else ""
        return f"{len(self)} trajectories{mean}"

    def sorted(self) -> Trajectories:
        """Return the trajectories sorted by group, and by reward within a group, the best first."""
        return Trajectories(sorted(self, key=lambda t: (t.key.prompt_index, -t.reward)))

    def _repr_html_(self) -> str:
        rows = "".join(map(_table_row, self[:SHOWN]))
        more = f"<p>and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in ("task", "answer", "reward", "status"))
        return f"<table><tr>{head}</tr>{rows}</table>{more}"


def _table_row(t: Trajectory) -> str:
    """Format task, answers, reward and status as cells; their texts are the policy's, so they are escaped."""
    said = " ⏎ ".join(turn.text for turn in t.turns)
    cells = (t.task.content, said, f"{t.reward:g}", t.status + (f": {t.fault}" if t.fault else ""))
    return "<tr>" + "".join(f"<td style='text-align:left'><code>{_cell(text)}</code></td>" for text in cells) + "</tr>"


def _cell(text: str) -> str:
    """Return text for a cell: cut, control characters written out, escaped."""
    cut = text[:SHOWN_CHARS] + ("…" if len(text) > SHOWN_CHARS else "")
    return html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in cut))
