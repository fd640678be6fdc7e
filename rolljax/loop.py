"""The loop: from tasks to published weights, step after step. One coroutine runs every phase in every mode.

| call                       | consumes                   | produces                  | waits for, unblocked by        |
|----------------------------|----------------------------|---------------------------|--------------------------------|
| `recorder.start_step`      |                            | the report of the step    | nothing                        |
| `rollouts.measure`         | the train state            | shares of domains         | the device                     |
| `rollouts.start`           | the task stream            | groups in flight          | nothing                        |
| `rollouts.take`            | complete groups, by age    | the groups of this step   | groups; the end of an episode  |
| `rollouts.start`           | the task stream            | groups of later steps     | nothing                        |
| `recorder.keeping_crashes` | a batch that is not finite | its file                  | the disk                       |
| `channel.sleep`            |                            | the sampler's memory      | the end of a dispatch          |
| `trainer.step`             | kept trajectories, state   | train state, metrics      | the device                     |
| `rollouts.end_step`        | trajectories               | start states; a log line  | nothing                        |
| `player.reward_row`        | trajectories               | metrics of rewards        | nothing                        |
| `progress.end_step`        |                            | version + 1               | nothing                        |
| `sampler.drain_far`        | samplers' mismatch         | samplers without requests | nothing                        |
| `channel.publish`          | the trainer's weights      | the sampler's weights     | the end of a dispatch          |
| `player.evaluate`          | held-out tasks             | their trajectories        | the slowest episode            |
| `recorder.show_evaluation` | these trajectories         | lines of the console      | nothing                        |
| `recorder.commit`          | all of the above           | rollouts, row, checkpoint | the disk                       |

`trainer.step` is credit, packing, all updates, and the gate: a step that is not finite ends the run before anything of
it is published or saved. `rollouts.take` returns the groups, and the trajectories of them that filters kept
(`StepGroups.kept`).

`Phase.async_ratio` alone sets synchronous or asynchronous training: at 0 the second `rollouts.start` starts nothing, so
every token is of the newest weights; above 0 the groups of later steps are in flight while the trainer works, and
continue after `channel.publish`. At 0, on shared devices, the sampler also frees its weights and KV pages
(`channel.sleep`) until `channel.publish` makes them again, so that the memory of a step is that of sampling or that of
the update, whichever is more. All time is read from the event loop: on a virtual clock the same coroutine is the
simulator (`rolljax.simulation`). If `rollouts` are the log of another run (`rolljax.run.replay`), nothing is sampled,
and weights are published for evaluations alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

from rolljax.concurrency.event_loop import Stopped
from rolljax.concurrency.lockstep import SINGLE_PROCESS, Leader, SingleProcess
from rolljax.concurrency.waits import Watchdog
from rolljax.console.progress import Console
from rolljax.envs.tasks import open_stream
from rolljax.recipe import Phase, Recipe
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import Preflight
from rolljax.run.progress import ALL_STEPS, RunProgress
from rolljax.run.protocols import (
    LoopChannel,
    LoopClock,
    LoopPlayer,
    LoopRecorder,
    LoopSampler,
    LoopTrainer,
    StepSource,
    TaskSource,
)
from rolljax.run.recorder import Recorder
from rolljax.run.remote_samplers import RemoteRun
from rolljax.run.replay import RunLog, open_rollouts
from rolljax.run.reward_models import TrainedRewardModels
from rolljax.run.runtime import Runtime
from rolljax.run.step_metrics import add_gaps, add_groups, add_heldout, add_sampler, timed
from rolljax.run.tracking import tracking
from rolljax.run.trainer import LOCKSTEP_CALLS, Trainer
from rolljax.storage.layout import VERDICTS


def train(
    preflight: Preflight,
    folder: RunFolder,
    console: Console,
    should_stop: Callable[[], bool] = lambda: False,
    team: SingleProcess | Leader = SINGLE_PROCESS,
    began: float | None = None,
    log: RunLog | None = None,
) -> tuple[Trainer, RunProgress]:
    """Run every phase, from the folder's newest good checkpoint on; return the trainer and the run's progress.

    In a run of several processes the first one calls this; the others follow it (`train.follow`).

    Args:
      began: `time.perf_counter()` at the start of the process, for the account of its seconds.
      log: the log of a run to replay: its steps are trained first (`run.replay`).

    Raises:
      Stopped: `should_stop` returned True; everything up to the last complete step is saved.
      TrainerError: a loss or gradient was not finite; nothing of that step was published or saved.
      EnvError: no trajectory survived for `recorder.MAX_FAILED_STEPS` steps. HangError: a wait ran past its deadline.
    """
    recipe = preflight.recipe
    trainer = team.share("trainer", Trainer(preflight, folder, preflight.chat.tokenizer), LOCKSTEP_CALLS)
    progress, on_disk = open_trainer(trainer, preflight, folder, console)
    watchdog = Watchdog(console.say, console.waiting, folder.path / "crash")
    recorder = Recorder(recipe, folder, console, watchdog, trainer, progress, on_disk)
    if progress.finished:
        return trainer, progress
    stream = open_stream(recipe.env, recipe.seed, recipe.evaluation.held_out_frac)
    if progress.stream_position:
        stream.restore(progress.stream_position)
    console.say("compiling the sampler")
    with (
        tracking(recipe, folder, progress.total_steps, console.warn) as recorder.trackers,
        Runtime(
            preflight,
            trainer.weights,
            progress.version,
            should_stop,
            team,
            watchdog,
            str(folder.path / VERDICTS),
            TrainedRewardModels(preflight, folder),
            RemoteRun(folder.path, folder.epoch, console.say),
        ) as runtime,
    ):
        try:
            parts = (runtime.player, runtime.sampler, trainer, runtime.channel, runtime.clock, recorder)
            runtime.clock.run(train_phases(recipe, stream, *parts, began, log))
        except Stopped:
            recorder.save()
            raise
        finally:
            console.end_phase()
    return trainer, progress


async def train_phases(
    recipe: Recipe,
    stream: TaskSource,
    player: LoopPlayer,
    sampler: LoopSampler,
    trainer: LoopTrainer,
    channel: LoopChannel,
    clock: LoopClock,
    recorder: LoopRecorder,
    began: float | None = None,
    log: RunLog | None = None,
) -> None:
    """Train every phase of the run that is not done yet, and evaluate each at its end."""
    progress = recorder.progress
    is_new = not progress.heldout_reward
    await clock.call(trainer.compile_ahead)  # the sampler is compiled by now
    with timed(progress.other_wall_s, "start", began):
        if is_new:
            recorder.put_evaluation("start", await player.evaluate(progress.total_steps))
    if is_new:
        await clock.call(recorder.save)
    while not progress.finished:
        phase = recipe.phases[progress.phase]
        recorder.start_phase(phase)
        while progress.is_in(phase):
            await clock.call(channel.publish, progress.version)  # steps of a log publish nothing
            warn = recorder.console.warn
            async with open_rollouts(recipe, player, sampler, clock, stream, progress, warn, log) as rollouts:
                while progress.is_in(phase) and rollouts.has_step():
                    await train_step(recipe, phase, rollouts, player, sampler, trainer, channel, clock, recorder)
                    clock.check_stop()
        recorder.console.wait("evaluating on held-out tasks")
        with timed(progress.phase_wall_s, phase.name):
            await clock.call(channel.publish, progress.version)
            recorder.put_evaluation(phase.name, await player.evaluate(progress.total_steps))
        progress.phase_end.setdefault(phase.name, ALL_STEPS)
        progress.finished = progress.phase + 1 == len(recipe.phases)
        if not progress.finished:
            progress.begin_next_phase()
            with timed(progress.other_wall_s, "start"):
                await clock.call(trainer.open_phase, progress)
                await clock.call(trainer.compile_ahead)
        await clock.call(recorder.save)
        recorder.end_phase(phase)


async def train_step(
    recipe: Recipe,
    phase: Phase,
    rollouts: StepSource,
    player: LoopPlayer,
    sampler: LoopSampler,
    trainer: LoopTrainer,
    channel: LoopChannel,
    clock: LoopClock,
    recorder: LoopRecorder,
) -> None:
    """Train one step of a phase. At its end state and progress agree, so that they can be saved as they are."""
    progress, version = recorder.progress, recorder.progress.version
    report, before = recorder.start_step(), sampler.stats
    with report.part("rollout"):
        await rollouts.measure(trainer)
    rollouts.start(version)
    with report.part("rollout"):
        groups = await rollouts.take(version)
    rollouts.start(version)
    with report.part("update"), recorder.keeping_crashes():
        await clock.call(channel.sleep, phase)
        trained = await clock.call(trainer.step, groups.kept, progress.algorithm_state, progress.step)
    groups, progress.algorithm_state = groups.with_columns(trained.columns), dict(trained.algorithm_state)
    report.add_row(trained.row)
    add_groups(report, groups, trained.num_trained, version, recipe.env)
    logged = rollouts.end_step(groups, report)
    is_sampled = phase.samples and groups.logged is None
    if is_sampled:
        report.add_row(player.reward_row(groups.all))
        add_sampler(report, before, sampler.stats, recipe.sampler.slots * report.total_s())
        add_gaps(report, trained.gaps)
    progress.end_step(phase)
    drained = sampler.drain_far(trained.gaps) if is_sampled else ()
    progress.drained_samplers += [{"step": progress.total_steps, **dataclasses.asdict(each)} for each in drained]
    evaluate_now = phase.eval_every > 0 and progress.step % phase.eval_every == 0
    if is_sampled or evaluate_now:
        with report.part("publish"):
            report.add_row(await clock.call(channel.publish, progress.version))
    if evaluate_now:
        with report.part("eval"):
            found = await player.evaluate(progress.total_steps, interruptible=False)
        add_heldout(report, found, recipe.env)
        recorder.show_evaluation(found)
    if end := groups.logged.phase_end if groups.logged else early_end(phase, report.get("heldout/reward_mean")):
        progress.phase_end[phase.name] = end
    await clock.call(recorder.commit, phase, groups, logged, report)


def early_end(phase: Phase, heldout_reward: float | None) -> str:
    """Return why a phase ends with this step, before its last one; empty if it does not."""
    goal = phase.stop_at_reward
    is_reached = goal is not None and heldout_reward is not None and heldout_reward >= goal
    return f"held-out reward reached {goal:g}" if is_reached else ""


def open_trainer(
    trainer: Trainer, preflight: Preflight, folder: RunFolder, console: Console
) -> tuple[RunProgress, RunProgress | None]:
    """Load the newest checkpoint into the trainer, or start at the beginning.

    Returns the progress of the run, and the progress that the newest checkpoint has on disk (None: there is none)."""
    phases, saved = preflight.recipe.phases, folder.latest(console.say)
    on_disk = copy.deepcopy(saved.progress) if saved else None
    if saved and saved.progress.finished and saved.progress.has_more(phases):
        saved.progress.reopen(phases)
    progress = saved.progress if saved else RunProgress()
    if saved:
        trainer.restore(saved)
    else:
        trainer.open_phase(progress)
    for text in (*preflight.recipe.warnings(), *preflight.warnings):
        console.say(f"warning: {text}")
    folder.forget_after(progress.total_steps, console.say, progress.recorded, preflight.recipe.keep_rollouts)
    return progress, on_disk
