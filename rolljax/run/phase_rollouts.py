"""The rollouts of one phase: its groups are started ahead, collected step by step, and replaced where they teach
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rolljax.envs.tasks import TaskStream
from rolljax.errors import TrainerError
from rolljax.recipe import Phase
from rolljax.rollout.barrier import Barrier
from rolljax.rollout.filters import filter_groups
from rolljax.rollout.starts import StartCurriculum
from rolljax.run.buffer import Buffer
from rolljax.run.groups import GroupDue, start_groups
from rolljax.run.notices import unfilled_step
from rolljax.run.progress import RunProgress
from rolljax.run.runtime import Runtime
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Group


class PhaseRollouts:
    """Groups of trajectories for the steps of phase `progress.phase`, from the task stream. Use as a context manager.

    Args:
      warn: is told once if dynamic sampling cannot fill a step.
    """

    def __init__(
        self, runtime: Runtime, stream: TaskStream, progress: RunProgress, warn: Callable[[str], None]
    ) -> None:
        recipe, phase = runtime.recipe, runtime.recipe.phases[progress.phase]
        self._runtime, self._recipe, self._phase, self._index = runtime, recipe, phase, progress.phase
        self._starts = _start_curriculum(runtime, phase, progress)
        self._rollouts = runtime.rollouts(runtime.actor(phase), hash_observations=self._starts is not None)
        self._warn: Callable[[str], None] | None = warn
        self._buffer = Buffer(
            runtime.event_loop,
            stream,
            self._start,
            prompts_per_step=phase.prompts_per_step,
            staleness=phase.staleness,
            num_steps=phase.steps,
            spares=phase.spare_groups,
            put_off=[GroupDue(recipe.env.task(index), step, group) for index, step, group in progress.put_off],
        )

    def __enter__(self) -> PhaseRollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.cancel()

    async def _start(self, due: list[GroupDue], wanted: int) -> list[Group]:
        runtime, phase = self._runtime, self._phase
        episodes = len(due) * (phase.group_size + phase.spare_siblings)
        hold = runtime.sampler.hold if phase.samples and runtime.agents is None else None
        barrier = Barrier(episodes, hold) if runtime.pool.opens_at_once else None
        return await start_groups(self._rollouts, self._starts, phase, self._index, due, wanted, barrier)

    def fill(self, step: int) -> None:
        """Start the groups of every step up to `step + staleness` that are not started yet."""
        self._buffer.fill(step)

    def collect(self, step: int) -> list[Group]:
        """The groups of a step; with dynamic sampling (DAPO, arXiv 2503.14476), until enough of them have a signal.

        Raises:
          TrainerError: after all rounds not one group has a signal. HangError, Stopped: see `EventLoop.wait`.
        """
        wait_s, wanted = self._recipe.wait_s, self._phase.prompts_per_step
        groups, rounds = self._buffer.collect(step, wait_s), self._phase.algorithm.dynamic_sampling_rounds
        if not rounds:
            return groups
        found = self._num_with_signal(groups, step)
        for _ in range(rounds):
            if found >= wanted:
                return groups
            groups += self._buffer.more(step, wanted - found, wait_s)
            found = self._num_with_signal(groups, step)
        if not found and filter_groups(groups, self._recipe.filters):
            raise TrainerError(
                f"step {step + 1} of {self._phase.name}: after {rounds} dynamic-sampling rounds none of {len(groups)} "
                "groups has a signal; look at rollouts/ for whether tasks are all too easy or all too hard, or raise "
                f"{type(self._phase.algorithm).__name__}.dynamic_sampling_rounds"
            )
        if found < wanted and self._warn:
            self._warn(unfilled_step(self._phase, found, len(groups)))
            self._warn = None
        return groups

    def _num_with_signal(self, groups: Sequence[Group], step: int) -> int:
        kept = filter_groups(groups, self._recipe.filters)
        episodes = Episodes.of(kept, limit_tok=self._recipe.max_answer_tok, step=step)
        return len(np.unique(episodes.groups[self._phase.algorithm.has_signal(episodes)]))

    def end_step(self, groups: Sequence[Group], progress: RunProgress) -> dict[str, float]:
        """Learn from how a step's episodes went where the next ones start; note in `progress` what comes next.

        Returns:
          Metrics of the step.
        """
        row = self._buffer.row()
        if self._starts:
            self._starts.learn(groups, progress.step)
            progress.starts = self._starts.state()
            row |= self._starts.row(groups)
        progress.stream_position = self._buffer.position()
        progress.put_off = [[d.task.index, d.step, d.index] for d in self._buffer.put_off()]
        return row


def _start_curriculum(runtime: Runtime, phase: Phase, progress: RunProgress) -> StartCurriculum | None:
    """Where the phase's episodes start, as far as that was learned already."""
    if phase.starts is None:
        return None
    recipe = runtime.recipe
    starts = StartCurriculum(phase.starts, runtime.pool, runtime.preflight.chat, recipe.seed, recipe.env.max_turns)
    if progress.starts:
        starts.restore(progress.starts)
    return starts
