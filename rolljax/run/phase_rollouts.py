"""The rollouts of one phase: start groups, wait for them, and train or drop them, as `GroupBuffer` decides."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rolljax.concurrency.event_loop import Stopped
from rolljax.errors import RolljaxError, TrainerError
from rolljax.metrics import MetricsReport
from rolljax.recipe import Recipe
from rolljax.rollout.builder import fault_of
from rolljax.rollout.domains import group_filters, open_shares
from rolljax.rollout.episodes import Barrier
from rolljax.rollout.group_buffer import DROPPED, Dropped, GroupBuffer, GroupEntry
from rolljax.rollout.shares import StepPlan
from rolljax.rollout.start_states import fallback
from rolljax.run.alerts import unfilled_step
from rolljax.run.consumed import ConsumedStep
from rolljax.run.progress import RunProgress
from rolljax.run.protocols import LoopClock, LoopPlayer, LoopSampler, LoopTrainer, TaskSource
from rolljax.run.step_metrics import StepGroups
from rolljax.run.validation import reference_groups
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Group, Key, Task, Trajectory


class PhaseRollouts:
    """Groups of trajectories for the steps of phase `progress.phase`, from the task stream. Use as an asynchronous
    context manager, in the event loop of `clock`.

    Args:
      warn: receives a sentence, once, if dynamic sampling cannot fill a step.
    """

    def __init__(
        self,
        recipe: Recipe,
        player: LoopPlayer,
        sampler: LoopSampler,
        clock: LoopClock,
        stream: TaskSource,
        progress: RunProgress,
        warn: Callable[[str], None],
    ) -> None:
        phase = recipe.phases[progress.phase]
        self._recipe, self._phase, self._index = recipe, phase, progress.phase
        self._clock, self._stream, self._progress = clock, stream, progress
        self._starts = player.start_curriculum(phase, progress)
        rollouts = player.rollouts(player.actor(phase), hash_observations=self._starts is not None)
        self._hold = sampler.hold if phase.samples and player.agents is None else None
        self._filters = group_filters(recipe.filters, recipe.domains)
        self._run_limits = recipe.env.run_limits()
        if self._run_limits:
            self._run_limits.restore(progress.run_times)
        self._rollouts = dataclasses.replace(rollouts, run_limits=self._run_limits, guide=player.guide(phase))
        self._warn: Callable[[str], None] | None = warn
        self._together = player.pool.opens_at_once and not phase.async_ratio
        self._shares = open_shares(recipe.env, phase)
        if self._shares and progress.mixture:
            self._shares.restore(progress.mixture)
        plan = StepPlan(phase.prompts_per_step, self._shares.shares) if self._shares else None
        self._buffer = GroupBuffer(phase.admission(in_rounds=self._together), plan)
        self._validation: dict[str, list[Group]] = {}
        self._tasks: dict[int, Task] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._done: dict[int, Group] = {}
        self._kept: dict[int, list[Trajectory]] = {}
        """The trajectories to train on, of each group in `_done`."""
        self._dropped: list[Group] = []
        self._ready_s: dict[int, float] = {}
        """When each group that waits was ready, on the event loop's clock."""
        self._unlogged: dict[Dropped, list[int]] = {why: [] for why in DROPPED}
        self._version = progress.version
        self._before: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        if progress.groups:
            self._restore(progress)

    async def __aenter__(self) -> PhaseRollouts:
        self._ready_s = dict.fromkeys(self._done, asyncio.get_running_loop().time())
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Stopped) and self._phase.async_ratio:
            self.note(is_saved=True)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def has_step(self) -> bool:
        """Return whether another step is available: always, as the stream of tasks has no end."""
        return True

    async def measure(self, trainer: LoopTrainer) -> None:
        """Measure the perplexities of student and teacher for the mixture's rule, if the rule needs them before this
        step."""
        step = self._progress.step
        if self._shares is None or not (tasks := self._shares.asks(step)):
            return
        if not self._validation:
            played = reference_groups(self._recipe, self._rollouts, tasks)
            self._validation = await self._clock.within(
                played, "the validation tasks of the mixture", self._recipe.wait_s
            )
        self._shares.measured(step, await self._clock.call(trainer.perplexities, self._validation))

    # ---- starting

    def start(self, version: int) -> None:
        """Start the groups that may start now, with the current policy, of `version`."""
        self._version = version
        entries = list(iter(lambda: self._buffer.start(version), None))
        if not entries:
            return
        phase, spares = self._phase, [self._phase.spares(kept=e.kept) for e in entries]
        barrier = Barrier(sum(phase.group_size + s for s in spares), self._hold) if self._together else None
        for entry, spare in zip(entries, spares, strict=True):
            if entry.prompt_index not in self._tasks:
                self._tasks[entry.prompt_index] = self._stream.of(entry.domain)
            self._running[entry.prompt_index] = asyncio.ensure_future(self._run(entry, spare, barrier))
            self._running[entry.prompt_index].add_done_callback(self._ended)

    async def _run(self, entry: GroupEntry, spare: int, barrier: Barrier | None) -> None:
        """Play one group, and give it to the buffer."""
        self._finished(await self._group(self._tasks[entry.prompt_index], entry.prompt_index, spare, barrier))

    def _ended(self, running: asyncio.Task[None]) -> None:
        """Store the error of a group that failed, and wake up `take`, which raises it."""
        if not running.cancelled() and self._error is None:
            self._error = running.exception()
        self._changed.set()

    async def _group(self, task: Task, prompt_index: int, spare: int, barrier: Barrier | None) -> Group:
        phase, key = self._phase, Key(self._index, prompt_index, 0)
        try:
            start = await self._starts.choose(task, prompt_index) if self._starts else None
        except RolljaxError as e:  # the expert's episode failed, and with it the group
            if barrier:
                barrier.leave(phase.group_size + spare)
            keys = [dataclasses.replace(key, sibling=s) for s in range(phase.group_size)]
            lost = tuple(Trajectory(k, task, (), 0.0, {}, False, "failed", fault_of(e)) for k in keys)
            return Group(task, prompt_index, lost)
        group = await self._rollouts.group(
            task,
            stream=self._index,
            prompt_index=prompt_index,
            group_size=phase.group_size,
            spare=spare,
            start=start,
            barrier=barrier,
        )
        if start is None or not phase.algorithm.imitates:
            return group
        return dataclasses.replace(group, demonstration=fallback(start, group.trajectories))

    def _finished(self, group: Group) -> None:
        del self._running[group.prompt_index]
        failed, kept = all(t.status == "failed" for t in group.trajectories), self._filters.group(group)
        if self._buffer.finished(group.prompt_index, has_signal=self._has_signal(group, kept), failed=failed):
            self._done[group.prompt_index], self._kept[group.prompt_index] = group, kept
            self._ready_s[group.prompt_index] = asyncio.get_running_loop().time()
        else:
            del self._tasks[group.prompt_index]
            self._dropped.append(group)
            self._unlogged["failed" if failed else "no_signal"].append(group.prompt_index)
        self.start(self._version)  # which is further by now, maybe, than where this one began

    def _has_signal(self, group: Group, kept: list[Trajectory]) -> bool:
        """Return whether the phase's algorithm learns anything from a group, if it asks."""
        if not self._phase.algorithm.dynamic_sampling_rounds:
            return True
        trained = self._filters.step([group], [kept])
        episodes = Episodes.of(trained, limit_tok=self._recipe.max_answer_tok, step=self._progress.step)
        return bool(trained) and bool(self._phase.algorithm.has_signal(episodes).any())

    # ---- collecting

    async def take(self, version: int) -> StepGroups:
        """Wait for the groups of the step at `version` and return them; drop groups that are too old for the next step.

        With dynamic sampling (DAPO, arXiv 2503.14476) groups without a signal were replaced before.

        Raises:
          TrainerError: no group has a signal, after as many replacements as are allowed. HangError: it took longer than
            `Recipe.wait_s`. Stopped: the run stops on request.
        """
        taken = await self._clock.within(
            self._take(version), f"the groups of step {self._progress.step + 1}", self._recipe.wait_s
        )
        now = asyncio.get_running_loop().time()
        waits_s = [now - self._ready_s.pop(e.prompt_index) for e in taken]
        groups = [self._done.pop(e.prompt_index) for e in taken]
        kept = self._filters.step(groups, [self._kept.pop(e.prompt_index) for e in taken])
        dropped, self._dropped = self._dropped, []
        self._check_signal(taken, len(groups) + len(dropped), bool(kept))
        return StepGroups(groups, [e.age(version) for e in taken], dropped, waits_s, kept=kept)

    async def _take(self, version: int) -> list[GroupEntry]:
        while True:
            if self._error:
                raise self._error
            if (taken := self._buffer.take(version)) is not None:
                for entry in taken:
                    del self._tasks[entry.prompt_index]
                for entry in self._buffer.expire(version + 1):
                    self._let_go(entry)
                return taken
            self._changed.clear()
            await self._changed.wait()

    def _let_go(self, entry: GroupEntry) -> None:
        if entry.prompt_index in self._running:
            self._running.pop(entry.prompt_index).cancel()
        self._done.pop(entry.prompt_index, None)
        self._kept.pop(entry.prompt_index, None)
        self._ready_s.pop(entry.prompt_index, None)
        self._unlogged["late"].append(entry.prompt_index)
        if self._phase.begins_again:
            return  # its task is needed again
        del self._tasks[entry.prompt_index]

    def _check_signal(self, taken: Sequence[GroupEntry], drawn: int, is_trained: bool) -> None:
        phase, found = self._phase, sum(e.has_signal for e in taken)
        rounds = phase.algorithm.dynamic_sampling_rounds
        if not found and is_trained:
            raise TrainerError(
                f"step {self._progress.step + 1} of {phase.name}: after {rounds} dynamic-sampling rounds none of "
                f"{drawn} groups has a signal; look at rollouts/ for whether tasks are all too easy or all too hard, "
                "or raise GroupFilter.dynamic_sampling_rounds"
            )
        if found < len(taken) and self._warn:
            self._warn(unfilled_step(phase, found, drawn))
            self._warn = None

    # ---- the end of a step

    def end_step(self, step: StepGroups, report: MetricsReport) -> ConsumedStep:
        """Update the start states from a step's episodes, and record in the progress the state from which the next step
        continues.

        Args:
          report: gets the metrics of the step's groups.

        Returns:
          The step's line in the run's log.
        """
        progress, buffer = self._progress, self._buffer
        now = Counter({"started": buffer.num_started, **buffer.dropped})
        since = {name: float(now[name] - self._before[name]) for name in ("started", "no_signal", "failed", "late")}
        self._before = now
        lengths = [t.num_sampled_tok for g in step.dropped for t in g.trajectories if t.status != "failed"]
        report.add("groups/started_n", since["started"])
        report.add("groups/no_signal_n", since["no_signal"])
        report.add("groups/spare_failed_n", since["failed"])
        report.add("groups/late_n", since["late"])
        report.add("groups/waiting_n", len(buffer))
        report.add("groups/ready_n", buffer.num_ready)
        report.add("groups/wait_s", *step.waits_s or [0.0])
        report.add("groups/no_signal_len_tok", *lengths)
        report.add_histogram("stale/start_", np.bincount(step.start_ages or [0]))
        if self._phase.tail_batching:
            report.add("groups/long_rounds_n", buffer.in_long_round)
        if self._shares:
            for name, share in self._buffer.plan.shares(progress.step).items():
                report.add(f"domain/{name}/share_frac", share)
            report.add_row(self._shares.row())
            self._shares.learn(step.all)
        if self._rollouts.guide:
            report.add_row(self._rollouts.guide.row(step.all))
        if self._starts:
            self._starts.learn(step.all, progress.step)
            progress.start_states = self._starts.state()
            report.add_row(self._starts.row(step.all))
        dropped, self._unlogged = self._unlogged, {why: [] for why in DROPPED}
        self.note(is_saved=(progress.total_steps + 1) % self._recipe.save_every == 0)
        return self._logged(step, dropped)

    def _logged(self, step: StepGroups, dropped: dict[Dropped, list[int]]) -> ConsumedStep:
        progress, every = self._progress, step.all
        return ConsumedStep(
            step=progress.total_steps + 1,
            phase=self._phase.name,
            version=progress.version,
            prompt_indices=[g.prompt_index for g in step.trained],
            start_versions=[progress.version - age for age in step.start_ages],
            dropped=dict(dropped.items()),
            waiting=progress.groups["tasks"],
            stream_position=progress.stream_position,
            cancelled={str(g.prompt_index): g.cancelled for g in every if g.cancelled},
            mixture={"shares": progress.mixture, "plan": progress.groups["buffer"]["plan"]} if self._shares else {},
            demonstrations={str(g.prompt_index): g.demonstration.to_json() for g in every if g.demonstration},
        )

    def note(self, *, is_saved: bool) -> None:
        """Store in the progress the position of the task stream, and the groups that are in flight.

        Args:
          is_saved: store ready groups as well; otherwise they start again.
        """
        state = self._buffer.state()
        waiting = {prompt_index: g for prompt_index, g in self._done.items() if is_saved and not _has_experts(g)}
        for entry in state["entries"]:
            entry["ready"] = entry["prompt_index"] in waiting
        tasks = {str(prompt_index): task.index for prompt_index, task in self._tasks.items()}
        if self._run_limits:
            self._progress.run_times = self._run_limits.state()
        if self._shares:
            self._progress.mixture = self._shares.state()
        self._progress.stream_position = self._stream.state()
        self._progress.groups = {"buffer": state, "tasks": tasks}
        self._progress.groups |= {
            "counted": dict(self._before),
            "unlogged": {why: list(d) for why, d in self._unlogged.items()},
        }
        self._progress.waiting = "".join(json.dumps(g.to_json()) + "\n" for g in waiting.values())

    def _restore(self, progress: RunProgress) -> None:
        self._tasks = {
            int(prompt_index): self._recipe.env.task(i) for prompt_index, i in progress.groups["tasks"].items()
        }
        domains = {prompt_index: task.env for prompt_index, task in self._tasks.items()} if self._shares else None
        self._buffer.restore(progress.groups["buffer"], domains)
        groups = [Group.from_json(json.loads(line)) for line in progress.waiting.splitlines()]
        self._done = {g.prompt_index: g for g in groups}
        self._kept = {g.prompt_index: self._filters.group(g) for g in groups}
        self._before = Counter(progress.groups["counted"])
        self._unlogged = {why: list(progress.groups["unlogged"][why]) for why in DROPPED}


def _has_experts(group: Group) -> bool:
    """Return whether turns of a group hold experts, which are not written; such a group is sampled again."""
    return any(turn.experts is not None for t in group.trajectories for turn in t.turns)
