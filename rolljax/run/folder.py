"""The run folder: every file that a run writes; a run writes nothing outside it.

config.gin            the settings that were read, complete and runnable
config.resolved.json  every setting with its value, defaults included
env.json              versions, devices, command
starts.jsonl          one object per start: its epoch, and for a restart how the process before ended
metrics.jsonl         one object per step (`metrics.NAMES`)
consumed.jsonl        per step the draws it trained, and the fate of the others (`consumed.ConsumedStep`)
chat_template.jinja   the chat template, if it is not the one of the model's folder
rollouts/step_N.jsonl every trajectory of step N: tokens, log-probs, rewards, status
rollouts/heldout_NAME.jsonl  the same for held-out tasks, at the start and after every phase
ckpt/                 checkpoints (Orbax)
reward_models/PHASE/  the reward model of a phase that has trained one and is over (Orbax)
hf/                   the result as a Hugging Face folder, with a model card
curves.png            reward and health over steps
summary.json          held-out reward at each phase border, steps, wall seconds, stop reason; of a run that is complete
                      it is written last
trackers/             one folder for each of `Recipe.trackers`: its output and its state
crash/                the evidence of a crash or hang

All files are written through `durable`: the same command continues a run that was killed at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError
from rolljax.recipe import Recipe
from rolljax.run.checkpoint import Checkpoints, Saved
from rolljax.run.consumed import ConsumedStep
from rolljax.run.progress import RunProgress
from rolljax.storage import damage, durable, journal, starts
from rolljax.storage.environment import environment
from rolljax.storage.layout import (
    CHECKPOINTS,
    CONFIG,
    CONSUMED,
    CURVES,
    ENVIRONMENT,
    LOCK,
    METRICS,
    RESOLVED,
    RESULT,
    ROLLOUTS,
    STARTS,
    SUMMARY,
    TEMPLATE,
    heldout_file,
    rollout_files,
    rollouts_file,
)
from rolljax.storage.lock import check_ours, locked
from rolljax.storage.run_reader import DONE, RunReader
from rolljax.storage.run_reader import row as row_of
from rolljax.types import Trajectory

RESUMABLE = (
    "save_every",
    "keep_",
    "rollouts_every",
    "wait_s",
    "pool.",
    "agent.concurrency",
    "agent.output_bytes",
    "trackers",
)
"""Settings (path prefixes) that may differ when a run is continued: they change no number. Settings of phases that have
not started may differ too, and `steps` of the current phase (`RunFolder.prepare`)."""
_OF_CALLS = re.compile(
    r"reward\b.*\.(url|key_env|timeout_s|retries|backoff_s|concurrency|deadline_s|max_calls|down_after|probe_s|outage_s)"
)
"""Settings of rewards about the calls of judges (address, retries, limits). They may differ too."""
_OURS = (RESOLVED, "a run folder", "--run_dir")
"""Arguments of `check_ours`."""
_OF_PHASE = re.compile(r"phases\[(\d+)\]\.(.*)")
HELDOUT = "heldout"
"""Entry of `RunFolder.recorded` with the files of held-out answers."""
FOUND_S = 30.0
"""Longest delay with which a shared file system shows one process another's writes."""


class RunFolder(RunReader):
    """The files of one run, to write them."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._written: dict[str, durable.Written] = {}
        """Logs, by name, as far as this process has written them."""
        self._heldout: dict[str, str] = {}
        """SHA-256 of the files of held-out answers, by evaluation."""
        self.epoch = 0
        """Number of this process among the leaders of the run so far (`begin`); 0: it does not lead it."""

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes of this machine from writing here.

        Raises:
          ConfigError: one is at it already, or the folder holds something else.
        """
        return locked(self.path, *_OURS)

    def mark(self) -> str:
        """Leave a mark for other processes of the run, and return it; the folder is locked by this one."""
        text = secrets.token_hex()
        with durable.storing(self.path / LOCK):
            (self.path / LOCK).write_text(text)
        return text

    def check_shared(self, config: Any, mark: str) -> None:
        """Check that this is the folder of the process that left `mark`, and that its settings are those of `config`.

        Raises:
          ConfigError: one of them is not.
        """
        from rolljax.config.resolved import diff

        deadline = time.monotonic() + FOUND_S
        while not _holds(self.path / LOCK, mark):
            if time.monotonic() > deadline:
                raise ConfigError(
                    "is not the folder that the first process writes to",
                    setting="--run_dir",
                    value=str(self.path.absolute()),
                    remedy="name a folder on a file system that all processes share",
                )
            time.sleep(0.1)
        for path, theirs, own in diff(self.resolved(), config.resolved):
            raise ConfigError(
                f"is {own!r} here, but {theirs!r} in the first process",
                setting=path,
                remedy="start all processes with the same configs and settings",
            )

    def prepare(self, config: Any, *, fresh: bool) -> list[str]:
        """Make the folder, or check that this config may continue the run in it.

        Args:
          config: a `config.Loaded`. fresh: delete an earlier run first.

        Returns:
          Notes for the user about settings that were changed.

        Raises:
          ConfigError: the folder holds something else, or a run with other settings. CheckpointError: it is damaged.
          StorageError: it cannot be written.
        """
        check_ours(self.path, *_OURS)
        with durable.storing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        for place in (self.path, self.path / ROLLOUTS, self.path / CHECKPOINTS):
            if place.is_dir() and (place == self.path or place.is_symlink()):  # a link to another disk
                durable.sweep(place)
        if fresh:
            self._clear()
        stored = self.path / RESOLVED
        notes = self._check_same(config) if stored.is_file() else []
        durable.write(stored, json.dumps(config.resolved, indent=1) + "\n")  # from here on it is a run folder
        with durable.storing(self.path / ROLLOUTS):
            (self.path / ROLLOUTS).mkdir(exist_ok=True)
        durable.write(self.path / CONFIG, config.operative)
        durable.write(self.path / ENVIRONMENT, json.dumps(environment(), indent=1) + "\n")
        return notes

    def begin(self, *, fresh: bool = False, after: str = "") -> int:
        """Record that this process leads the run from now on, and return its epoch, which is larger than all before.

        The folder is locked. Call it once, after `prepare`.

        Args:
          fresh: see `prepare`. after: how the process before ended, if this one replaces it (`commands.restarts`).

        Raises:
          StorageError: it cannot be recorded. CheckpointError: the record of earlier starts cannot be read.
        """
        self.epoch = starts.add(self.path, fresh=fresh, after=after)
        return self.epoch

    def keep_template(self, template: str | None) -> None:
        """Store the chat template of the run for later readers. None: the run uses the template of the model's folder.

        Raises:
          ConfigError: the run has steps that were made with another template.
        """
        path = self.path / TEMPLATE
        stored = path.read_text(encoding="utf-8") if path.is_file() else None
        if stored == template:
            return
        if self.rows():
            theirs = "the one of the model's folder" if stored is None else f"{path}"
            raise ConfigError(
                f"is another template now than the run in {self.path} was made with, which is {theirs}",
                setting="Recipe.chat_template",
                remedy="restore it, name another --run_dir, or start over with --fresh",
            )
        if template is None:
            durable.remove(path)
        else:
            durable.write(path, template)

    def _clear(self) -> None:
        """Delete an earlier run: checkpoints first, so that no command continues from a part of it, and last the file
        that marks a run folder. The record of starts stays, so that epochs grow."""
        first_last = {CHECKPOINTS: 0, RESOLVED: 2}
        for entry in sorted(self.path.iterdir(), key=lambda e: first_last.get(e.name, 1)):
            if entry.name not in (LOCK, STARTS):
                durable.remove(entry)

    def stored_fields(self, cls: type, *, leave_out: Collection[str]) -> dict[str, Any]:
        """Return fields of the root of the stored settings, built without the file that names them.

        Args:
          cls: of the root. leave_out: names of fields that are not needed.

        Raises:
          CheckpointError: see `resolved`. ConfigError: a class of a field cannot be found here.
        """
        from rolljax.config import resolved

        return resolved.build_fields(self.resolved(), cls, leave_out)

    def changes(self, config: Any) -> list[tuple[str, object, object]]:
        """Return settings that change numbers and differ from those of the run in this folder: path, value there, value
        now.

        Args:
          config: a `config.Loaded`.
        """
        from rolljax.config.resolved import ABSENT, diff

        stored = self.resolved()
        found = diff(stored, config.resolved)
        if any(before == ABSENT for _, before, _ in found):
            found = diff(self._with_new_settings(stored), config.resolved)
        return [c for c in found if not (c[0].startswith(RESUMABLE) or _OF_CALLS.fullmatch(c[0]))]

    def _with_new_settings(self, stored: Mapping[str, object]) -> Mapping[str, object]:
        """Return the stored settings, with the defaults of settings that rolljax did not have when the run started."""
        try:
            from rolljax.config import loader

            return {**loader.load([self.config_file()], [], root=Recipe).resolved, **stored}
        except ConfigError:  # of a recipe made of objects, or with settings that are gone; or gin is not installed
            return stored

    def _check_same(self, config: Any) -> list[str]:
        """Raise `ConfigError` if a changed setting applies to steps that are already done; otherwise return notes for
        the user."""
        changes = self.changes(config)
        notes: list[str] = []
        saved = self.latest(notes.append) if changes else None
        progress = saved.progress if saved else RunProgress()
        for path, before, now in changes:
            index, name = setting_of_phase(path)
            if index > progress.phase:  # nothing of it is done yet
                continue
            if index < progress.phase or name != "steps":
                raise ConfigError(
                    f"is {now!r} now, but the run in {self.path} was made with {before!r}",
                    setting=path,
                    remedy="go back to the old value, name another --run_dir, or start over with --fresh",
                )
            if config.value.phases[index].steps < progress.step:
                raise ConfigError(
                    f"is {now!r} now, but {progress.step} steps of this phase are done in {self.path}",
                    setting=path,
                    remedy=f"set it to {progress.step} or more, name another --run_dir, or start over with --fresh",
                )
            notes += _steps_note(config.value, index, before, progress)
        return notes

    def phase_start(self, phase: str) -> Path:
        """Return the folder for the initial weights of a phase, kept if its algorithm refers to them."""
        return self.path / "phase_start" / phase

    def reward_model(self, phase: str) -> Path:
        """Return the folder for the reward model that a phase has trained."""
        return self.path / "reward_models" / phase

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / CHECKPOINTS)

    def latest(self, warn: Callable[[str], None]) -> Saved | None:
        """Return the newest complete checkpoint; None if nothing is done yet. Only this process reads.

        Args:
          warn: receives a sentence about each newer one that is damaged.

        Raises:
          CheckpointError: none is whole, or there is none although steps are done.
        """
        saved = self.checkpoints.latest(warn)
        if saved is None and (rows := self.rows()):
            raise CheckpointError(
                f"{self.path} has {len(rows)} steps on record, but no checkpoint to continue from; --fresh starts over"
            )
        return saved

    def retain(self, checkpoints: int, rollouts: int | None, best: int = 0) -> None:
        """Delete all checkpoints except the newest `checkpoints` and the `best` ones with the highest held-out rewards.

        Of the files of rollouts up to the oldest of the newest checkpoints, keep the newest `rollouts` (None: all). A
        run that resumes from any of the newest checkpoints thus ends with the same files.
        """
        self._retain_rollouts(rollouts, self.checkpoints.retain(checkpoints, best))

    def _retain_rollouts(self, keep: int | None, until: int) -> None:
        if keep is None:
            return
        files = rollout_files(self.path)
        for step in sorted(step for step in files if step <= until)[:-keep]:
            durable.remove(files[step])

    # ---- metrics and rollouts

    def forget_after(
        self,
        step: int,
        warn: Callable[[str], None],
        recorded: Mapping[str, Any] | None = None,
        keep_rollouts: int | None = None,
    ) -> None:
        """Delete metrics rows and rollouts of steps after `step`, because the run repeats these steps.

        Args:
          warn: receives a sentence for each file of earlier steps that is missing or has changed.
          recorded: lengths and SHA-256 of these files when the checkpoint was saved (`recorded`). keep_rollouts: see
            `retain`.

        Raises:
          CheckpointError: a pipe, a folder or a device has the name of one of these files.
        """
        recorded = recorded or {}
        self._heldout = dict(recorded.get(HELDOUT, {}))
        for name in damage.LOGS:
            path = self.path / name
            data = journal.read_bytes(path)
            if problem := damage.of_log(path, data, step, recorded):
                warn(f"warning: {problem}")
            rows = {row["step"]: row for row in journal.parse(data, row_of).values}
            kept = b"".join(journal.line_of(rows[s]) for s in sorted(rows) if s <= step)
            if path.exists():
                durable.write(path, kept)
            self._written[name] = durable.Written()
            self._written[name].add(kept)
        for of_step, file in rollout_files(self.path).items():
            if of_step > step:
                durable.remove(file)
        if problem := damage.told(self.path / ROLLOUTS, self._changed_files(keep_rollouts)):
            warn(f"warning: {problem}")

    def _changed_files(self, keep: int | None) -> list[str]:
        """Describe missing and changed files of rollouts, a sentence each. If only the newest files are kept, older
        ones may be missing."""
        digests = {row["step"]: row.get("rollouts") for row in self.rows(CONSUMED)}
        written = [step for step, sha256 in digests.items() if sha256 and isinstance(sha256, str)]
        if keep is not None:
            first = min(self.rollout_steps(), default=min(written[-keep:], default=0))
            written = [step for step in written if step >= first]
        folder = self.path / ROLLOUTS
        wanted = {heldout_file(self.path, name).name: str(sha256) for name, sha256 in self._heldout.items()}
        wanted |= {rollouts_file(self.path, step).name: str(digests[step]) for step in reversed(written)}
        return damage.of_files(folder, wanted)

    def recorded(self) -> dict[str, Any]:
        """Return length and SHA-256 of the logs, and the SHA-256 of files of held-out answers, for a checkpoint."""
        logs = {name: self._log(name).to_json() for name in damage.LOGS}
        return {**logs, HELDOUT: dict(self._heldout)}

    def _log(self, name: str) -> durable.Written:
        if name not in self._written:
            self._written[name] = durable.Written()
            if (self.path / name).is_file():
                self._written[name].add(reading.read_bytes(self.path / name))
        return self._written[name]

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        log = self._log(name)
        log.add(journal.append(self.path / name, record))

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Append one step to metrics.jsonl."""
        self._append(METRICS, row)

    def write_consumed(self, step: ConsumedStep) -> None:
        """Append a step to consumed.jsonl."""
        self._append(CONSUMED, dataclasses.asdict(step))

    def write_rollouts(self, step: int, trajectories: Iterable[Trajectory]) -> str:
        """Write rollouts/step_N.jsonl; returns its SHA-256 in hexadecimal digits."""
        return _write_trajectories(rollouts_file(self.path, step), trajectories)

    def write_heldout(self, evaluation: str, trajectories: Iterable[Trajectory]) -> None:
        """Write rollouts/heldout_NAME.jsonl."""
        self._heldout[evaluation] = _write_trajectories(heldout_file(self.path, evaluation), trajectories)

    def write_crash(self, name: str, arrays: Mapping[str, Any]) -> Path:
        """Keep the batch that led to a stop."""
        import numpy as np

        path, data = self.path / "crash" / f"{name}.npz", io.BytesIO()
        np.savez(data, **arrays)
        with durable.storing(path):
            path.parent.mkdir(exist_ok=True)
        durable.write(path, data.getvalue())
        return path

    # ---- the end

    def finish(
        self, progress: RunProgress, reason: str, state_sha256: str = "", keep_rollouts: int | None = None
    ) -> None:
        """Draw the curves and write the summary.

        Args:
          state_sha256: the fingerprint of the whole train state.
          keep_rollouts: number of newest files of rollouts to keep (None: all).
        """
        from rolljax.storage import model_card
        from rolljax.storage.curves import draw

        rows = self.rows()
        durable.write(self.path / CURVES, draw(rows, progress.heldout_reward))
        if reason == DONE:
            self._retain_rollouts(keep_rollouts, progress.total_steps)
            of = f"The weights after step {progress.total_steps}, the last."
            model_card.write(self.path / RESULT, self.path, progress.heldout_reward, rows, of)
        self.write_summary(progress, reason, state_sha256)

    def write_summary(self, progress: RunProgress, stop_reason: str, state_sha256: str = "") -> None:
        """Write summary.json."""
        summary = {
            "stop_reason": stop_reason,
            "steps": progress.total_steps,
            "phase_steps": progress.phase_steps,
            "phase_end": progress.phase_end,
            "phase_wall_s": progress.phase_wall_s,
            "other_wall_s": progress.other_wall_s,
            "wall_s": sum(progress.phase_wall_s.values()) + sum(progress.other_wall_s.values()),
            "heldout_reward": progress.heldout_reward,
            "version": progress.version,
            "state_sha256": state_sha256,
            "drained_samplers": progress.drained_samplers,
            "restarts": [dataclasses.asdict(start) for start in starts.restarts(self.path)],
        }
        durable.write(self.path / SUMMARY, json.dumps(summary, indent=1) + "\n")

    def is_complete(self, progress: RunProgress) -> bool:
        """Return whether all final files of a run exist and belong to this end."""
        try:
            said = [self.summary().get(key) for key in ("stop_reason", "phase_steps")]
        except CheckpointError:  # it is written again
            return False
        results = (self.path / RESULT).is_dir() and (self.path / CURVES).is_file()
        return progress.finished and results and said == [DONE, progress.phase_steps]


def setting_of_phase(path: str) -> tuple[int, str]:
    """Index of the phase that a path of resolved settings belongs to, and its name there; -1 if it is of none."""
    found = _OF_PHASE.fullmatch(path)
    return (int(found[1]), found[2]) if found else (-1, "")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and reading.read_bytes(path) == text.encode()


def _write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> str:
    """Write a line for each; returns the file's SHA-256."""
    lines = (json.dumps(t.to_json(), separators=(",", ":")) + "\n" for t in trajectories)
    data = "".join(lines).encode()
    durable.write(path, data)
    return hashlib.sha256(data).hexdigest()


def _steps_note(recipe: Recipe, index: int, before: object, progress: RunProgress) -> list[str]:
    """Return a warning if `steps` of a phase in progress has changed and its learning rate falls over all steps."""
    phase = recipe.phases[index]
    critics = phase.algorithm.needs().critics
    optimizers = [phase.optimizer, *([critics.optimizer] if critics else [])]
    falling = sorted({o.schedule for o in optimizers if o.schedule != "constant"})
    if not falling or not progress.step:
        return []
    return [
        f"warning: {phase.name}/Phase.steps is {phase.steps}, and was {before} for the {progress.step} steps that are "
        f"done: the learning rate ({', '.join(falling)}) falls over all steps, so the result is not that of a run that "
        f"had {phase.steps} from its start"
    ]
