"""Trains again on the groups that another run trained on: `train --replay RUN`.

In an asynchronous run, or one with spares, timing decides which groups a step trains and which weights sampled which of
their tokens. `consumed.jsonl` and `rollouts/` of a run record these decisions. A run that takes its steps from this
record ends at the same bits. After the last recorded step it samples its own rollouts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError, boundary
from rolljax.metrics import MetricsReport
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.domains import group_filters
from rolljax.run.consumed import ConsumedStep, DrawAccount
from rolljax.run.folder import RunFolder, setting_of_phase
from rolljax.run.phase_rollouts import PhaseRollouts
from rolljax.run.progress import RunProgress
from rolljax.run.protocols import LoopClock, LoopPlayer, LoopSampler, LoopTrainer, TaskSource
from rolljax.run.step_metrics import StepGroups
from rolljax.storage.layout import CONSUMED, RESOLVED, rollouts_file
from rolljax.storage.run_reader import parse_trajectories
from rolljax.types import Group, Trajectory

COMPUTING = ("mesh.", "placement", "attention", "remat")
"""Settings (path prefixes) that a replay may change, in addition to `folder.RESUMABLE`: they change how a step is
computed, not the update that it makes (but for rounding). `COMPUTING_OF_PHASE` has such settings of a phase."""
COMPUTING_OF_PHASE = ("row_len", "micro_rows")
RECORDING = "a run that is to be replayed needs rollouts_every = 1 and keep_rollouts = None"


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The record of a run's trained steps."""

    folder: RunFolder
    """Folder of the logged run."""
    steps: Sequence[ConsumedStep]
    """The lines of its log, from step 1 on."""

    def describe(self) -> str:
        """Return one line about the steps that can be replayed."""
        return f"{len(self.steps)} steps of {self.folder.path} can be replayed with these settings"

    def after(self, progress: RunProgress, phase: Phase) -> ConsumedStep | None:
        """Return the step after `progress`; None if the log ends there, or `phase` does."""
        rest = self.steps[progress.total_steps : progress.total_steps + 1]
        return next((line for line in rest if line.phase == phase.name), None)

    def groups(self, line: ConsumedStep) -> StepGroups:
        """Return the groups of a step, from its file of rollouts.

        Raises:
          CheckpointError: the file is missing, or has changed since it was written.
        """
        path = rollouts_file(self.folder.path, line.step)
        with boundary(CheckpointError, f"reading {path}"):
            data = reading.read_bytes(path)
        if hashlib.sha256(data).hexdigest() != line.rollouts:
            raise CheckpointError(
                f"{path} is not what step {line.step} of that run wrote, by its SHA-256 in {CONSUMED}"
            )
        with boundary(CheckpointError, f"reading {path}, which another version of rolljax may have written"):
            return step_groups(line, parse_trajectories(data, path))

    def check_continues(self, folder: RunFolder) -> str:
        """Check that the rest of the logged run can be replayed in `folder`.

        Returns:
          One line for the user.

        Raises:
          ConfigError: a step in `folder` trained on other samples than the logged run, or rollouts of a coming step are
            missing.
        """
        name, saved = self.folder.path, folder.latest(lambda _: None)
        done = saved.progress.total_steps if saved else 0
        for ours, theirs in zip(_lines(folder, done), self.steps, strict=False):
            if not _same(ours, theirs):
                remedy = "name another --run_dir, or start over with --fresh"
                raise _refused(self.folder, f"trained other samples in step {ours.step} than {folder.path}", remedy)
        last = len(self.steps)
        missing = [line.step for line in self.steps[done:] if not rollouts_file(self.folder.path, line.step).is_file()]
        if missing:
            text = (
                f"has no rollouts of {len(missing)} of its steps {done + 1} to {last}, the first of step {missing[0]}"
            )
            raise _refused(self.folder, text, RECORDING)
        if done >= last:
            return f"nothing is left to replay of the {last} steps of {name}: the run continues with its own rollouts"
        return f"replaying steps {done + 1} to {last} of {name}; after them the run continues with its own rollouts"


def read_log(run: str | Path, config: Any, into: RunFolder) -> RunLog:
    """Read the log of the run in folder `run`, to replay it in another folder with the settings of `config`, a
    `config.Loaded`.

    Raises:
      ConfigError: there is no log, the settings differ, the record is not complete, or the folders are the same.
    """
    folder = RunFolder(run)
    if os.path.realpath(run) == os.path.realpath(into.path):
        raise _refused(folder, "is the run that is to be trained", "name another --run_dir")
    if not (folder.path / RESOLVED).is_file() or not (folder.path / CONSUMED).is_file():
        raise _refused(folder, f"is not a run folder with a {CONSUMED}", "name the folder of a run (its --run_dir)")
    steps = _lines(folder)
    if not steps:
        raise _refused(folder, f"has no step in its {CONSUMED}", "name a run that has trained")
    _check_settings(folder, config, steps)
    _check_recorded(config.value)
    return RunLog(folder, steps)


def _lines(folder: RunFolder, until: int | None = None) -> list[ConsumedStep]:
    rows = {row["step"]: row for row in folder.rows(CONSUMED)}
    last = max(rows, default=0) if until is None else until
    if lost := [step for step in range(1, last + 1) if step not in rows]:
        raise _refused(folder, f"lacks step {lost[0]} in its {CONSUMED}", "it is damaged: name another run")
    try:
        return [ConsumedStep(**rows[step]) for step in range(1, last + 1)]
    except TypeError:
        remedy = "train that run again with this one"
        raise _refused(folder, f"has a {CONSUMED} of another version of rolljax", remedy) from None


def _check_settings(folder: RunFolder, config: Any, steps: Sequence[ConsumedStep]) -> None:
    names = [phase.name for phase in config.value.phases]
    last = names.index(steps[-1].phase) if steps[-1].phase in names else -1
    for path, theirs, own in folder.changes(config):
        phase, name = setting_of_phase(path)
        more = last >= 0 and (phase > last or (phase == last and name == "steps"))
        if not (more or path.startswith(COMPUTING) or name in COMPUTING_OF_PHASE):
            raise ConfigError(
                f"is {own!r}, but {theirs!r} in the run that is to be replayed",
                setting=path,
                remedy=f"replay it with its own settings: --gin {folder.path}/config.gin",
            )


def _check_recorded(recipe: Recipe) -> None:
    if recipe.sampler.record_experts:
        raise ConfigError(
            "keeps for every token the experts that it took, which no file of rollouts holds: such a run cannot be "
            "replayed",
            setting="SamplerConfig.record_experts",
            value=True,
            remedy="leave it out of a run that is to be replayed",
        )


def _refused(folder: RunFolder, text: str, remedy: str) -> ConfigError:
    return ConfigError(text, setting="--replay", value=str(folder.path), remedy=remedy)


def _same(ours: ConsumedStep, theirs: ConsumedStep) -> bool:
    """Return whether two runs trained the same in a step; one of them may not have written its rollouts."""
    if not (ours.rollouts and theirs.rollouts):
        ours, theirs = (dataclasses.replace(line, rollouts="") for line in (ours, theirs))
    return ours == theirs


def step_groups(line: ConsumedStep, trajectories: Sequence[Trajectory]) -> StepGroups:
    """Return the groups of a step according to its log, from all trajectories of its file."""
    members: dict[int, list[Trajectory]] = {}
    for t in trajectories:
        members.setdefault(t.key.prompt_index, []).append(t)
    shown = {prompt_index: Trajectory.from_json(record) for prompt_index, record in line.demonstrations.items()}
    groups = {
        prompt_index: Group(
            own[0].task,
            prompt_index,
            tuple(own),
            line.cancelled.get(str(prompt_index), 0),
            shown.get(str(prompt_index)),
        )
        for prompt_index, own in members.items()
    }
    trained = [groups.pop(prompt_index) for prompt_index in line.prompt_indices]
    return StepGroups(trained, [line.version - v for v in line.start_versions], [*groups.values()], [], line)


class ReplayedRollouts:
    """The groups of the steps in another run's log. It has the methods of `PhaseRollouts`, but opens no environment and
    samples nothing."""

    def __init__(
        self, recipe: Recipe, player: LoopPlayer, clock: LoopClock, progress: RunProgress, log: RunLog
    ) -> None:
        self._clock, self._progress, self._log = clock, progress, log
        self._phase = recipe.phases[progress.phase]
        self._starts = player.start_curriculum(self._phase, progress)
        self._filters = group_filters(recipe.filters, recipe.domains)
        self._account = DrawAccount(self._phase)
        for line in log.steps[: progress.total_steps]:
            if line.phase == self._phase.name:
                self._account.add(line)

    async def __aenter__(self) -> ReplayedRollouts:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: no rollout is in flight."""

    def has_step(self) -> bool:
        """Return whether the log has another step of this phase."""
        return self._log.after(self._progress, self._phase) is not None

    async def measure(self, trainer: LoopTrainer) -> None:
        """Do nothing: the log has the domains of the groups."""

    def start(self, version: int) -> None:
        """Do nothing: the groups exist already."""

    async def take(self, version: int) -> StepGroups:
        """Return the groups of the step at `version`.

        Raises:
          CheckpointError: its file of rollouts has changed since it was written.
        """
        line = self._log.after(self._progress, self._phase)
        assert line is not None and line.version == version, "the log has no such step"
        step = await self._clock.call(self._log.groups, line)
        kept = self._filters.step(step.trained, [self._filters.group(g) for g in step.trained])
        return dataclasses.replace(step, kept=kept)

    def end_step(self, step: StepGroups, report: MetricsReport) -> ConsumedStep:
        """Copy the other run's record of the step into the progress; see `PhaseRollouts.end_step`."""
        progress, account, line = self._progress, self._account, step.logged
        assert line is not None, "the step is not of the log"
        before = account.num_started
        account.add(line)
        report.add("groups/started_n", account.num_started - before)
        report.add("groups/no_signal_n", len(line.dropped["no_signal"]))
        report.add("groups/spare_failed_n", len(line.dropped["failed"]))
        report.add("groups/late_n", len(line.dropped["late"]))
        report.add("groups/waiting_n", len(account.in_flight))
        report.add_histogram("stale/start_", np.bincount(step.start_ages or [0]))
        if self._starts:
            self._starts.learn(step.all, progress.step)
            progress.start_states = self._starts.state()
            report.add_row(self._starts.row(step.all))
        progress.stream_position, progress.waiting = line.stream_position, ""
        progress.mixture = line.mixture.get("shares", {})
        progress.groups = account.groups(line.version)
        return line


def open_rollouts(
    recipe: Recipe,
    player: LoopPlayer,
    sampler: LoopSampler,
    clock: LoopClock,
    stream: TaskSource,
    progress: RunProgress,
    warn: Callable[[str], None],
    log: RunLog | None,
) -> PhaseRollouts | ReplayedRollouts:
    """Return the source of the next steps of a phase: the log of another run as long as it lasts, else the task
    stream."""
    if log is None:
        return PhaseRollouts(recipe, player, sampler, clock, stream, progress, warn)
    replayed = ReplayedRollouts(recipe, player, clock, progress, log)
    if replayed.has_step():
        return replayed
    if progress.stream_position:
        stream.restore(progress.stream_position)
    return PhaseRollouts(recipe, player, sampler, clock, stream, progress, warn)
