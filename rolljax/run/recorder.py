"""Write the results of a run, step by step: checkpoints, rollouts, metrics rows, and the console's output."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence

from rolljax.concurrency.waits import Watchdog
from rolljax.console.progress import Console
from rolljax.errors import EnvError, TrainerError
from rolljax.recipe import Phase, Recipe
from rolljax.run.alerts import Alerts, samples
from rolljax.run.consumed import ConsumedStep
from rolljax.run.folder import RunFolder
from rolljax.run.progress import RunProgress
from rolljax.run.step_metrics import StepGroups, StepReport, mean_reward, timed
from rolljax.run.tracking import answers_text
from rolljax.run.trainer import Trainer
from rolljax.storage.curves import draw
from rolljax.trackers.feed import Trackers
from rolljax.trainer.phase_trainer import NotFinite
from rolljax.types import Group, Trajectory

MAX_FAILED_STEPS = 3
"""Steps in a row without one surviving trajectory after which the run stops."""


class Recorder:
    """Writes to the run folder, and tells the console.

    Args:
      progress: of the run; it changes with every step. saved: the progress in the newest checkpoint.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        console: Console,
        watchdog: Watchdog,
        trainer: Trainer,
        progress: RunProgress,
        saved: RunProgress | None,
    ) -> None:
        self._recipe, self._folder, self.console, self._watchdog = recipe, folder, console, watchdog
        self._trainer, self.progress = trainer, progress
        self._saved = copy.deepcopy(saved)
        self.trackers = Trackers()
        self._alerts: Alerts | None = None
        self._checkpoint_s = 0.0

    def start_phase(self, phase: Phase) -> None:
        """Start or continue a phase."""
        self._alerts = Alerts(self._recipe, phase)
        self.console.start_phase(phase.name, phase.steps, self.progress.step)

    @contextlib.contextmanager
    def keeping_crashes(self) -> Iterator[None]:
        """Run a training step inside this context: non-finite values end the run, and the batch is saved.

        Raises:
          TrainerError: a loss or gradient was not finite; nothing of the step is published or saved.
        """
        try:
            yield
        except NotFinite as e:
            path = self._folder.write_crash(f"step_{self.progress.total_steps + 1}", e.batch.arrays())
            raise TrainerError(f"{e}; nothing of this step was published or saved; the batch is in {path}") from e

    def start_step(self) -> StepReport:
        """Return the report of a step that starts now."""
        return StepReport(self._watchdog, asyncio.get_running_loop().time)

    def _check_alive(self, groups: Sequence[Group]) -> None:
        """Stop a run whose environments or sampler only fail.

        Raises:
          EnvError: no trajectory survived for `MAX_FAILED_STEPS` steps.
        """
        failed = [t for g in groups for t in g.trajectories if t.status == "failed"]
        all_failed = len(failed) == sum(len(g.trajectories) for g in groups)
        self.progress.failed_steps = self.progress.failed_steps + 1 if all_failed else 0
        if self.progress.failed_steps >= MAX_FAILED_STEPS:
            raise EnvError(f"no trajectory survived for {MAX_FAILED_STEPS} steps; the last one: {failed[-1].fault}")

    def commit(self, phase: Phase, step: StepGroups, logged: ConsumedStep, report: StepReport) -> None:
        """Write the rollouts, the log and the metrics of a step that is done, and a checkpoint if one is due.

        Raises:
          EnvError: no trajectory survived for `MAX_FAILED_STEPS` steps.
        """
        progress, recipe, groups, digest = self.progress, self._recipe, step.all, ""
        assert self._alerts is not None
        for text in self._alerts.step(groups):
            self.console.warn(text)
        self._check_alive(groups)
        with report.part("save"):
            if progress.total_steps % recipe.rollouts_every == 0:
                every = (t for g in groups for t in g.trajectories)
                digest = self._folder.write_rollouts(progress.total_steps, every)
            end = progress.phase_end.get(phase.name, "")
            self._folder.write_consumed(dataclasses.replace(logged, phase_end=end, rollouts=digest))
        seconds = report.total_s()
        report.add("time/step_s", seconds)
        report.add("time/checkpoint_s", self._checkpoint_s)
        self._checkpoint_s = 0.0
        row = report.row()
        if phase.samples and not step.logged:
            sampled = row["rollout/len_tok"] * len(groups) * phase.group_size
            row["tput/sample_tok_s"] = sampled / max(row["time/rollout_s"], 1e-9)
        row["tput/train_tok_s"] = row["train/tokens_n"] / max(row["time/update_s"], 1e-9)
        progress.phase_wall_s[phase.name] = progress.phase_wall_s.get(phase.name, 0.0) + seconds
        place = {"step": progress.total_steps, "phase_step": progress.step, "version": progress.version}
        self._folder.write_row(written := {**place, "phase": phase.name, **row, **self.trackers.row()})
        self.trackers.log(progress.total_steps, written)
        if phase.samples:
            self.console.answers(samples([t for g in groups for t in g.trajectories]))
        self.console.step(place | row)
        for text in self._alerts.row(row):
            self.console.warn(text)
        progress.weights_reward = _finite(row.get("heldout/reward_mean"))
        if progress.total_steps % recipe.save_every == 0 or self._is_to_stay():
            self.save()

    def _is_to_stay(self) -> bool:
        """Return whether the current weights belong to the best by held-out reward; of equal ones the earlier do."""
        reward, keep = self.progress.weights_reward, self._recipe.keep_best
        if reward is None or not keep:
            return False
        kept = [self._folder.checkpoints.heldout_reward(name) for name in self._folder.checkpoints.best(keep)]
        return len(kept) < keep or any(other is not None and other < reward for other in kept)

    def save(self) -> None:
        """Commit a checkpoint, unless the newest is of this moment."""
        if self.progress == self._saved:
            return
        seconds = self.progress.other_wall_s.get("save", 0.0)
        name = self._folder.checkpoints.next_name(self.progress)
        self.progress.recorded = self._folder.recorded()
        with timed(self.progress.other_wall_s, "save"):
            with self._watchdog.waiting_for("the checkpoint to be written"):
                self._trainer.save(name, self.progress)
            recipe = self._recipe
            self._folder.retain(recipe.keep_checkpoints, recipe.keep_rollouts, recipe.keep_best)
        self._checkpoint_s += self.progress.other_wall_s["save"] - seconds
        self._saved = copy.deepcopy(self.progress)

    def put_evaluation(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Record the held-out reward at the `start` or after phase `name`."""
        progress = self.progress
        mean = mean_reward(trajectories)
        entry = {"phase": name, "step": progress.total_steps, "mean": mean, "n": len(trajectories)}
        progress.weights_reward = _finite(mean)
        progress.heldout_reward = [e for e in progress.heldout_reward if e["phase"] != name] + [entry]
        self._folder.write_heldout(name, trajectories)
        self.show_evaluation(trajectories)

    def show_evaluation(self, trajectories: Sequence[Trajectory]) -> None:
        """Show the held-out reward, and a good and a bad answer as examples."""
        if self.trackers:
            self.trackers.text(self.progress.total_steps, "heldout/answers", answers_text(trajectories))
        self.console.say(f"held-out reward {mean_reward(trajectories):.3f} of {len(trajectories)} tasks")
        for line in samples(trajectories):
            self.console.say(line)

    def end_phase(self, phase: Phase) -> None:
        """Record the end of a phase after its evaluation."""
        progress = self.progress
        before, now = progress.heldout_reward[-2], progress.heldout_reward[-1]
        if self.trackers:
            self.trackers.figure(progress.total_steps, "curves", draw(self._folder.rows(), progress.heldout_reward))
        steps, seconds = progress.phase_steps.get(phase.name, 0), progress.phase_wall_s[phase.name]
        self.console.end_phase()
        self.console.say(
            f"{phase.name}: {progress.phase_end[phase.name]} after {steps} steps, {seconds:.0f} s; "
            f"held-out reward {before['mean']:.3f} -> {now['mean']:.3f} ({now['n']} tasks)"
        )


def _finite(value: float | None) -> float | None:
    """Return a finite number as a float, else None."""
    return None if value is None or not math.isfinite(value) else float(value)
