"""The loop: from tasks to published weights, one step after the other. One loop for every phase and every mode.

| stage   | consumes                 | produces             | waits for              | unblocked by             |
|---------|--------------------------|----------------------|------------------------|--------------------------|
| fill    | the task stream          | groups in flight     | nothing                |                          |
| collect | groups of this step      | trajectories         | the slowest trajectory | sampler and environments |
| read    | trajectories, TrainState | what credit asks for | the device             | nothing                  |
| credit  | Episodes                 | advantages, drops    | nothing                |                          |
| pack    | trajectories, advantages | TokenBatch x updates | nothing                |                          |
| update  | TokenBatch, TrainState   | TrainState, stats    | the device             | the previous update      |
| gate    | stats                    | a stop, or nothing   | stats on the host      | the update               |
| publish | parameters               | version + 1          | the running dispatch   | at most one dispatch     |
| save    | TrainState, Progress     | a checkpoint         | the disk               | Orbax's commit           |
| report  | all of the above         | a metrics row        | nothing                |                          |

With `staleness` 0 fill starts this step's groups only, so every token is sampled by the newest weights; with more, the
groups of the next steps are in flight while the trainer works.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np

from rolljax.cluster.lockstep import ALONE, Alone, Leader
from rolljax.envs.tasks import TaskStream
from rolljax.errors import EnvError, RolljaxError, TrainerError
from rolljax.metrics import ENV_PREFIX
from rolljax.model import hf
from rolljax.model.decoder import Params
from rolljax.model.lora import Base
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.episodes import Barrier, Rollouts, fault_of
from rolljax.rollout.filters import faults_row, filter_groups
from rolljax.rollout.starts import StartCurriculum, fallback
from rolljax.run import durable, reference_policies
from rolljax.run.buffer import Buffer, Due
from rolljax.run.checkpoint import Progress, Saved
from rolljax.run.console import Console
from rolljax.run.folder import RESULT, RunFolder
from rolljax.run.initial_weights import base_weights, plain_params, start_params
from rolljax.run.notices import Notices, samples
from rolljax.run.preflight import Preflight, ResolvedRecipe
from rolljax.run.runtime import Runtime, mean_reward
from rolljax.sampler.client import SamplerStats
from rolljax.threads.event_loop import Stopped
from rolljax.threads.watchdog import Watchdog
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.phase_trainer import NotFinite, PhaseTrainer, Step
from rolljax.trainer.state import ParamState, TrainState, fingerprint
from rolljax.trainer.update import ReferencePolicies
from rolljax.types import Group, Key, Task, Trajectory

ALL_STEPS = "all steps done"
"""Why a phase ended that did all of them."""
MAX_FAILED_STEPS = 3
"""Steps in a row without one filter_groups trajectory after which the run stops."""
PARTS = {
    "rollout": "rollouts",
    "update": "the update (the first of a phase is compiled)",
    "publish": "the sampler to take new weights",
    "eval": "the held-out evaluation",
    "save": "the rollouts to be written",
}
"""Parts of a step, and what is waited for in them."""
Row = dict[str, float]


class Clock:
    """Seconds by part of the step; the watchdog is told which one it is."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.row: Row = {}
        self._watchdog = watchdog
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._watchdog.waiting_for(PARTS[name]):
            yield
        key = f"time/{name}_s"
        self.row[key] = self.row.get(key, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self._start


def make_trainer(
    plan: ResolvedRecipe, index: int, references: ReferencePolicies, base: Base | None = None
) -> PhaseTrainer:
    """The trainer of one phase."""
    recipe, phase = plan.recipe, plan.recipe.phases[index]
    return PhaseTrainer(
        plan.mesh,
        plan.model,
        phase.algorithm,
        phase.optimizer,
        recipe.pack_shape(phase),
        steps=phase.steps,
        groups_per_step=phase.prompts_per_step,
        updates_per_step=phase.updates_per_step,
        epochs=phase.epochs,
        temperature=phase.temperature,
        limit_tok=recipe.max_answer_tok,
        seed=recipe.seed,
        references=references,
        base=base,
        replay_experts=recipe.sampler.record_experts and phase.algorithm.source == "sampler",
    )


def begin(plan: ResolvedRecipe, folder: RunFolder, saved: Saved | None) -> tuple[Base | None, PhaseTrainer, TrainState]:
    """What a run starts with, or goes on with from a checkpoint."""
    base = base_weights(plan)
    if saved:
        return base, *reopen_phase(plan, folder, saved, base)
    return base, *open_phase(plan, folder, Progress(), start_params(plan), base)


def open_phase(
    plan: ResolvedRecipe,
    folder: RunFolder,
    progress: Progress,
    params: Params,
    base: Base | None,
    previous: ParamState | None = None,
) -> tuple[PhaseTrainer, TrainState]:
    """The trainer and the fresh state of the phase that begins now."""
    policies = reference_policies.load(plan, progress.phase, folder, params, base, starts=True)
    trainer = make_trainer(plan, progress.phase, policies, base)
    return trainer, trainer.init(params, previous)


def reopen_phase(
    plan: ResolvedRecipe, folder: RunFolder, saved: Saved, base: Base | None
) -> tuple[PhaseTrainer, TrainState]:
    """The trainer and the saved state of the phase that goes on."""
    progress = saved.progress
    empty = make_trainer(plan, progress.phase, {}, base)
    state = folder.checkpoints.state(saved.name, empty.abstract(), empty.shardings)
    if progress.finished:  # it is only looked at
        return empty, state
    policies = reference_policies.load(plan, progress.phase, folder, state.params, base, starts=progress.step == 0)
    return dataclasses.replace(empty, references=policies), state


def has_more(progress: Progress, phases: Sequence[Phase]) -> bool:
    """Whether a finished run can go on: its last phase did all its steps and has more now, or another one follows."""
    phase = phases[progress.phase]
    more_steps = progress.step < phase.steps and progress.phase_end[phase.name] == ALL_STEPS
    return more_steps or progress.phase + 1 < len(phases)


def reopen(progress: Progress, phases: Sequence[Phase]) -> None:
    """Let a finished run go on that has more to do."""
    phase = phases[progress.phase]
    progress.finished = False
    if progress.phase_end[phase.name] == ALL_STEPS:
        del progress.phase_end[phase.name]


def result(plan: ResolvedRecipe, folder: RunFolder, state: TrainState, tokenizer: Any) -> str:
    """Write the trained policy as a Hugging Face folder; returns the fingerprint of the whole state.

    Args:
      tokenizer: goes along; None in processes that do not lead, which write nothing.
    """
    whole = plan.model.full_params(state.params, base_weights(plan))
    source = plan.recipe.model if isinstance(plan.recipe.model, str) else None
    path = folder.path / RESULT
    with durable.folder(path) if tokenizer else contextlib.nullcontext(path) as place:
        hf.save(place, plan.model.plain, plain_params(plan, whole), tokenizer, source=source)
    return fingerprint(state)


def train(
    plan: Preflight,
    folder: RunFolder,
    console: Console,
    should_stop: Callable[[], bool] = lambda: False,
    team: Alone | Leader = ALONE,
    began: float | None = None,
) -> tuple[TrainState, Progress]:
    """Run every phase from where the folder's last whole checkpoint stands; returns the final state.

    Where the run is several processes this is the first of them, and `follow.follow` what the others do: whatever
    touches the mesh here stands in a turn of `team`.

    Args:
      began: `time.perf_counter()` when the process set out, for the account of its seconds.

    Raises:
      Stopped: `should_stop` said so; everything up to the last whole step is saved.
      TrainerError: a loss or gradient was not finite; nothing of that step was published or saved.
      EnvError: no trajectory survived for `MAX_FAILED_STEPS` steps. HangError: a wait ran past its deadline.
    """
    recipe, saved = plan.recipe, folder.latest(console.say)
    on_disk = copy.deepcopy(saved.progress) if saved else None
    if saved and saved.progress.finished and has_more(saved.progress, recipe.phases):
        reopen(saved.progress, recipe.phases)
    with team.turn("begin", saved):
        base, trainer, state = begin(plan, folder, saved)
    progress = saved.progress if saved else Progress()

    watchdog = Watchdog(console.say, console.waiting, folder.path / "crash")

    def save() -> None:
        nonlocal on_disk
        if progress == on_disk:
            return
        name = folder.checkpoints.next_name(progress)
        with timed(progress.other_wall_s, "save"):
            with watchdog.waiting_for("the checkpoint to be written"), team.turn("save", (name, progress)):
                folder.checkpoints.save(name, state, progress)
            folder.retain(recipe.keep_checkpoints, recipe.keep_rollouts)
        on_disk = copy.deepcopy(progress)

    for text in recipe.warnings():
        console.say(f"warning: {text}")
    folder.forget_after(progress.total_steps, console.say)
    if progress.finished:
        return state, progress
    stream = TaskStream(recipe.env, recipe.seed, recipe.evaluation.held_out_frac)
    if progress.stream_position:
        stream.restore(progress.stream_position)
    console.say("compiling the sampler")
    with Runtime(plan, trainer.full_params(state.params), progress.version, should_stop, team, watchdog) as rooms:
        try:
            is_new = not progress.heldout_reward
            with timed(progress.other_wall_s, "start", began):
                if is_new:
                    show(console, evaluate(rooms, progress, "start"))
            if is_new:
                save()
            while not progress.finished:
                phase = recipe.phases[progress.phase]
                console.start_phase(phase.name, phase.steps, progress.step)
                for after_step in steps(trainer, state, progress, stream, rooms, folder, console):
                    state = after_step
                    if progress.total_steps % recipe.save_every == 0:
                        save()
                    if should_stop():
                        raise Stopped
                console.wait("evaluating on held-out tasks")
                with timed(progress.phase_wall_s, phase.name):
                    rooms.publish(trainer.full_params(state.params), progress.version)
                    show(console, evaluate(rooms, progress, phase.name))
                progress.phase_end.setdefault(phase.name, ALL_STEPS)
                progress.finished = progress.phase + 1 == len(recipe.phases)
                if not progress.finished:
                    progress.phase, progress.step, progress.carry, progress.starts = progress.phase + 1, 0, {}, {}
                    progress.put_off = []
                    with timed(progress.other_wall_s, "start"), team.turn("open_phase", progress):
                        trainer, state = open_phase(plan, folder, progress, state.params, base, state.critics)
                save()
                console.end_phase()
                console.say(border_line(phase.name, progress))
        except Stopped:
            save()
            raise
        finally:
            console.end_phase()
    return state, progress


def steps(
    trainer: PhaseTrainer,
    state: TrainState,
    progress: Progress,
    stream: TaskStream,
    rooms: Runtime,
    folder: RunFolder,
    console: Console,
) -> Iterator[TrainState]:
    """The steps of one phase. Each state that is yielded agrees with `progress`, so it can be saved as it is."""
    recipe = rooms.recipe
    phase = recipe.phases[progress.phase]
    sampled = phase.algorithm.source == "sampler"
    starts, notices = open_starts(rooms, phase, progress), Notices(recipe, phase)
    rollouts = rooms.rollouts(rooms.actor(phase), listen=starts is not None)

    async def start(due: list[Due], wanted: int) -> list[Group]:
        episodes = len(due) * (phase.group_size + phase.spare_siblings)
        hold = rooms.sampler.hold if sampled and rooms.agents is None else None
        barrier = Barrier(episodes, hold) if rooms.pool.opens_at_once else None
        return await start_groups(rollouts, starts, phase, progress.phase, due, wanted, barrier)

    buffer = Buffer(
        rooms.background,
        stream,
        start,
        prompts_per_step=phase.prompts_per_step,
        staleness=phase.staleness,
        num_steps=phase.steps,
        spares=phase.spare_groups,
        put_off=[Due(recipe.env.task(index), step, group) for index, step, group in progress.put_off],
    )
    try:
        while progress.step < phase.steps and phase.name not in progress.phase_end:
            clock, before = Clock(rooms.watchdog), rooms.sampler.stats
            buffer.fill(progress.step)
            with clock.part("rollout"):
                groups, short = collect(buffer, trainer, phase, progress.step, recipe, notices)
            with clock.part("update"):
                whole = filter_groups(groups, recipe.filters)
                with rooms.team.turn("step", (whole, progress.carry, progress.step)):
                    made = update(trainer, state, whole, folder, progress)
            state, progress.carry = made.state, dict(made.carry)
            for text in [short, *notices.step(groups)]:
                if text:
                    console.warn(text)
            row = made.row | describe(groups, progress.version) | faults_row(groups)
            row |= buffer.row()
            row |= {
                "groups/started_n": len(groups) + row["groups/cancelled_n"],
                "groups/trained_n": made.num_trained,
                "groups/dropped_failed_n": len(groups) - len(whole),
                "groups/dropped_credit_n": len(whole) - made.num_trained,
            }
            if sampled:
                row |= sampler_work(before, rooms.sampler.stats)
            if starts:
                starts.learn(groups, progress.step)
                progress.starts = starts.state()
                row |= starts.row(groups)
            progress.step, progress.total_steps, progress.version = (
                progress.step + 1,
                progress.total_steps + 1,
                progress.version + 1,
            )
            progress.stream_position = buffer.position()
            progress.put_off = [[d.task.index, d.step, d.index] for d in buffer.put_off()]
            progress.phase_steps[phase.name] = progress.step
            evaluate_now = phase.eval_every and progress.step % phase.eval_every == 0
            if sampled or evaluate_now:
                with clock.part("publish"):
                    rooms.publish(trainer.full_params(state.params), progress.version)
            if evaluate_now:
                with clock.part("eval"):
                    found = rooms.evaluate(progress.total_steps, interruptible=False)
                row["heldout/reward_mean"] = mean_reward(found)
                show(console, found)
                if phase.stop_at_reward is not None and row["heldout/reward_mean"] >= phase.stop_at_reward:
                    progress.phase_end[phase.name] = f"held-out reward reached {phase.stop_at_reward:g}"
            check_alive(groups, progress)
            with clock.part("save"):
                if progress.total_steps % recipe.rollouts_every == 0:
                    folder.write_rollouts(progress.total_steps, (t for g in groups for t in g.trajectories))
            report(row | clock.row, clock, phase, len(groups), progress, folder, console)
            yield state
    finally:
        buffer.cancel()


def open_starts(rooms: Runtime, phase: Phase, progress: Progress) -> StartCurriculum | None:
    """Where the phase's episodes start, as far as that was learned already."""
    if phase.starts is None:
        return None
    recipe = rooms.recipe
    starts = StartCurriculum(phase.starts, rooms.pool, rooms.plan.chat, recipe.seed, recipe.env.max_turns)
    if progress.starts:
        starts.restore(progress.starts)
    return starts


async def start_groups(
    rollouts: Rollouts,
    starts: StartCurriculum | None,
    phase: Phase,
    stream: int,
    due: Sequence[Due],
    wanted: int,
    barrier: Barrier | None = None,
) -> list[Group]:
    """`wanted` of the groups that are due, those that are complete first."""
    groups = [start_group(rollouts, starts, d.task, phase, Key(stream, d.step, d.index, 0), barrier) for d in due]
    return await first_complete(groups, wanted)


async def start_group(
    rollouts: Rollouts, starts: StartCurriculum | None, task: Task, phase: Phase, key: Key, barrier: Barrier | None
) -> Group:
    """One group, from where it is to start. `key`: of its first trajectory."""
    try:
        begin = await starts.choose(task, key.step, key.group) if starts else None
    except RolljaxError as e:  # the expert's episode failed, and with it the group
        if barrier:
            barrier.leave(phase.group_size + phase.spare_siblings)
        keys = [dataclasses.replace(key, sibling=s) for s in range(phase.group_size)]
        lost = tuple(Trajectory(k, task, (), 0.0, {}, False, "failed", fault_of(e)) for k in keys)
        return Group(task, key.step, key.group, lost)
    group = await rollouts.group(
        task,
        stream=key.stream,
        step=key.step,
        index=key.group,
        group_size=phase.group_size,
        spare=phase.spare_siblings,
        start=begin,
        barrier=barrier,
    )
    if begin is None or not phase.algorithm.imitates:
        return group
    return dataclasses.replace(group, demonstration=fallback(begin, group.trajectories))


async def first_complete(groups: Sequence[Coroutine[None, None, Group]], wanted: int) -> list[Group]:
    """The first `wanted` groups to be complete, in their order; the others are let go."""
    running = [asyncio.ensure_future(g) for g in groups]
    try:
        if len(running) == wanted:
            return list(await asyncio.gather(*running))
        done: list[Group] = []
        lost: list[Group] = []
        for future in asyncio.as_completed(running):
            group = await future
            whole = all(t.status != "failed" for t in group.trajectories)
            (done if whole else lost).append(group)
            if len(done) == wanted:
                break
        return sorted(done + lost[: wanted - len(done)], key=lambda g: (g.step, g.index))
    finally:
        for group_future in running:
            group_future.cancel()


def collect(
    buffer: Buffer, trainer: PhaseTrainer, phase: Phase, step: int, recipe: Recipe, notices: Notices
) -> tuple[list[Group], str]:
    """The groups of a step, and what is to be said of them; with dynamic sampling, until enough of them
    have a signal.

    Raises:
      TrainerError: after all dynamic-sampling rounds not one group has a signal.
    """
    groups, rounds = buffer.collect(step, recipe.wait_s), trainer.algorithm.dynamic_sampling_rounds
    for done in range(rounds + 1):
        useful = num_useful(groups, trainer, step, recipe) if rounds else phase.prompts_per_step
        if useful >= phase.prompts_per_step or done == rounds:
            break
        groups += buffer.more(step, phase.prompts_per_step - useful, recipe.wait_s)
    if not useful and filter_groups(groups, recipe.filters):
        raise TrainerError(
            f"step {step + 1} of {phase.name}: after {rounds} dynamic-sampling rounds none of {len(groups)} groups "
            "has a signal; "
            "look at rollouts/ for whether tasks are all too easy or all too hard, or raise "
            "GroupFilter.dynamic_sampling_rounds"
        )
    return groups, notices.dynamic_sampling_rounds(useful, len(groups))


def num_useful(groups: Sequence[Group], trainer: PhaseTrainer, step: int, recipe: Recipe) -> int:
    """How many groups of a step teach something."""
    episodes = Episodes.of(filter_groups(groups, recipe.filters), limit_tok=trainer.limit_tok, step=step)
    return len(np.unique(episodes.groups[trainer.algorithm.has_signal(episodes)]))


def update(
    trainer: PhaseTrainer,
    state: TrainState,
    groups: Sequence[Sequence[Trajectory]],
    folder: RunFolder,
    progress: Progress,
) -> Step:
    """All updates of a step, and the gate: a step that is not finite ends the run here."""
    try:
        return trainer.step(state, groups, progress.carry, progress.step)
    except NotFinite as e:
        arrays = {name: np.asarray(array) for name, array in e.batch.arrays().items()}
        path = folder.write_crash(f"step_{progress.total_steps + 1}", arrays)
        raise TrainerError(f"{e}; nothing of this step was published or saved; the batch is in {path}") from e


def describe(groups: Sequence[Group], version: int) -> Row:
    """Statistics of a step's trajectories."""
    trajectories = [t for g in groups for t in g.trajectories]
    alive = [t for t in trajectories if t.status != "failed"]
    rewards = np.array([t.reward for t in alive]) if alive else np.zeros(1)
    ages = [version - turn.versions for t in alive for turn in t.turns if (turn.versions >= 0).all()]
    age = np.concatenate(ages) if ages else np.zeros(1)
    own = sorted({name for t in alive for name in t.metrics})
    return {
        **{f"{ENV_PREFIX}{name}": _mean(t.metrics.get(name, 0.0) for t in alive) for name in own},
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/success_frac": _mean(t.success for t in alive),
        "rollout/len_tok": _mean(t.num_sampled_tok for t in alive),
        "rollout/turns_n": _mean(len(t.turns) for t in alive),
        "rollout/trunc_frac": _mean(t.status == "truncated" for t in trajectories),
        "rollout/fail_frac": _mean(t.status == "failed" for t in trajectories),
        "stale/mean_ver": float(age.mean()),
        "stale/max_ver": float(age.max()),
    }


def sampler_work(before: SamplerStats, now: SamplerStats) -> Row:
    """What the sampler did since `before`."""
    did = {name: value - getattr(before, name) for name, value in dataclasses.asdict(now).items()}
    return {
        "sampler/prefill_tok": did["prefill_tok"],
        "sampler/reuse_frac": did["reused_tok"] / max(did["reused_tok"] + did["prefill_tok"], 1),
        "sampler/dispatches_n": did["dispatches"],
        "sampler/slot_frac": did["busy_slot_steps"] / max(did["slot_steps"], 1),
        "sampler/preempt_n": did["preemptions"],
        "time/prefill_s": did["prefill_s"],
        "time/decode_s": did["generate_s"],
        "time/schedule_s": did["host_s"],
    }


def check_alive(groups: Sequence[Group], progress: Progress) -> None:
    """Stop a run whose environments or sampler only fail."""
    failed = [t for g in groups for t in g.trajectories if t.status == "failed"]
    all_failed = len(failed) == sum(len(g.trajectories) for g in groups)
    progress.failed_steps = progress.failed_steps + 1 if all_failed else 0
    if progress.failed_steps >= MAX_FAILED_STEPS:
        raise EnvError(f"no trajectory survived for {MAX_FAILED_STEPS} steps; the last one: {failed[-1].fault}")


def report(
    row: Row, clock: Clock, phase: Phase, num_groups: int, progress: Progress, folder: RunFolder, console: Console
) -> None:
    """Write the step's row and show it."""
    seconds = clock.total()
    row["time/step_s"] = seconds
    if phase.algorithm.source == "sampler":
        sampled = row["rollout/len_tok"] * num_groups * phase.group_size
        row["tput/sample_tok_s"] = sampled / max(row["time/rollout_s"], 1e-9)
    row["tput/train_tok_s"] = row["train/tokens_n"] / max(row["time/update_s"], 1e-9)
    progress.phase_wall_s[phase.name] = progress.phase_wall_s.get(phase.name, 0.0) + seconds
    place = {"step": progress.total_steps, "phase_step": progress.step, "version": progress.version}
    folder.write_row({**place, "phase": phase.name, **row})
    console.step(place | row)


def evaluate(rooms: Runtime, progress: Progress, name: str) -> list[Trajectory]:
    """Held-out reward at a phase border, put on record."""
    trajectories = rooms.evaluate(progress.total_steps)
    entry = {"phase": name, "step": progress.total_steps, "mean": mean_reward(trajectories), "n": len(trajectories)}
    progress.heldout_reward = [e for e in progress.heldout_reward if e["phase"] != name] + [entry]
    return trajectories


def show(console: Console, trajectories: list[Trajectory]) -> None:
    """Held-out reward, and what a good and a bad answer look like."""
    console.say(f"held-out reward {mean_reward(trajectories):.3f} of {len(trajectories)} tasks")
    for line in samples(trajectories):
        console.say(line)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str, since: float | None = None) -> Iterator[None]:
    """Add the seconds inside, or since `time.perf_counter()` was `since`, to those of `name`."""
    start = time.perf_counter() if since is None else since
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def border_line(name: str, progress: Progress) -> str:
    """One line for the end of a phase."""
    before, now = progress.heldout_reward[-2], progress.heldout_reward[-1]
    steps, seconds = progress.phase_steps.get(name, 0), progress.phase_wall_s[name]
    return (
        f"{name}: {progress.phase_end[name]} after {steps} steps, {seconds:.0f} s; "
        f"held-out reward {before['mean']:.3f} -> {now['mean']:.3f} ({now['n']} tasks)"
    )


def _mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0
