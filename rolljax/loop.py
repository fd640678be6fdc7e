"""The loop: from tasks to published weights, one step after the other. One loop for every phase and every mode.

| stage   | consumes                 | produces             | waits for              | unblocked by             |
|---------|--------------------------|----------------------|------------------------|--------------------------|
| fill    | the task stream          | groups in flight     | nothing                |                          |
| collect | groups of this step      | trajectories         | the slowest trajectory | sampler and environments |
| credit  | rewards                  | advantages, drops    | nothing                |                          |
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
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from rolljax.buffer import Buffer, Stopped
from rolljax.checkpoint import Checkpoints, Progress
from rolljax.envs.tasks import TaskStream
from rolljax.errors import EnvError, TrainerError
from rolljax.metrics import NAMES
from rolljax.progress import Console
from rolljax.recipe import Phase
from rolljax.rooms import Plan, Rooms, mean_reward, start_params
from rolljax.runfolder import RunFolder
from rolljax.sampler.client import SamplerStats
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import Sample, TokenBatch, pack
from rolljax.trainer.state import TrainState
from rolljax.trainer.update import init_state, make_update, state_shardings
from rolljax.types import Group, Task, Trajectory

MAX_FAILED_STEPS = 3
"""Steps in a row without one surviving trajectory after which the run stops."""
Row = dict[str, float]


class Clock:
    """Seconds by part of the step."""

    def __init__(self) -> None:
        self.row: Row = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        key = f"time/{name}_s"
        self.row[key] = self.row.get(key, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self._start


@dataclasses.dataclass(eq=False)
class Learner:
    """The trainer's programs for one phase."""

    plan: Plan
    phase: Phase

    def __post_init__(self) -> None:
        recipe, phase = self.plan.recipe, self.phase
        num_updates = phase.steps * phase.updates_per_step
        self.tx = phase.optimizer.build(num_updates)
        self.shape = phase.pack_shape(recipe.sampler.max_context, recipe.max_answer_tok, recipe.env.max_turns)
        self.update = make_update(
            self.plan.mesh, self.plan.model, phase.algorithm, self.tx, phase.optimizer.rate(num_updates)
        )

    def init(self, params) -> TrainState:
        return init_state(self.plan.mesh, self.plan.model, self.tx, params)

    def restore(self, checkpoints: Checkpoints) -> TrainState:
        params = self.plan.model.abstract()
        count = jax.ShapeDtypeStruct((), np.int32)
        abstract = TrainState(params, jax.eval_shape(self.tx.init, params), count)  # type: ignore[arg-type]
        return checkpoints.state(abstract, state_shardings(self.plan.mesh, self.plan.model, self.tx))


def train(
    plan: Plan, folder: RunFolder, console: Console, should_stop: Callable[[], bool] = lambda: False
) -> tuple[TrainState, Progress]:
    """Run every phase from where the folder's last checkpoint stands; returns the final state.

    Raises:
      Stopped: `should_stop` said so; everything up to the last whole step is saved.
      TrainerError: a loss or gradient was not finite; nothing of that step was published or saved.
      EnvError: no trajectory survived for `MAX_FAILED_STEPS` steps. HangError: a wait ran past its deadline.
    """
    recipe, checkpoints = plan.recipe, folder.checkpoints()
    progress = checkpoints.progress()
    learner = Learner(plan, recipe.phases[progress.phase if progress else 0])
    state = learner.restore(checkpoints) if progress else learner.init(start_params(plan))
    progress = progress or Progress()
    folder.forget_after(progress.total_steps)
    stream = TaskStream(recipe.env, recipe.seed, recipe.evaluation.held_out_frac)
    if progress.stream_position:
        stream.restore(progress.stream_position)
    console.say("compiling the sampler")
    with Rooms(plan, state.params, progress.version, should_stop) as rooms:
        try:
            if not progress.heldout_reward:
                evaluate(rooms, progress, "start")
                checkpoints.save(state, progress)
            while not progress.finished:
                phase = learner.phase
                console.start_phase(phase.name, phase.steps, progress.step)
                for after_step in steps(learner, state, progress, stream, rooms, folder, console):
                    state = after_step
                    if progress.total_steps % recipe.save_every == 0:
                        checkpoints.save(state, progress)
                    if should_stop():
                        raise Stopped
                console.wait("evaluating on held-out tasks")
                with timed(progress, phase.name):
                    rooms.publish(state.params, progress.version)
                    evaluate(rooms, progress, phase.name)
                progress.finished = progress.phase + 1 == len(recipe.phases)
                if not progress.finished:
                    progress.phase, progress.step = progress.phase + 1, 0
                    learner = Learner(plan, recipe.phases[progress.phase])
                    state = learner.init(state.params)
                checkpoints.save(state, progress)
                console.end_phase()
                console.say(border_line(phase.name, progress))
        except Stopped:
            checkpoints.save(state, progress)
            raise
        finally:
            console.end_phase()
            checkpoints.close()
    return state, progress


def steps(
    learner: Learner,
    state: TrainState,
    progress: Progress,
    stream: TaskStream,
    rooms: Rooms,
    folder: RunFolder,
    console: Console,
) -> Iterator[TrainState]:
    """The steps of one phase. Each state that is yielded agrees with `progress`, so it can be saved as it is."""
    phase, recipe = learner.phase, rooms.recipe
    sampled = phase.algorithm.source == "sampler"
    rollouts = rooms.rollouts(rooms.policy(phase.temperature) if sampled else rooms.gold())
    stream_id = progress.phase

    async def start(step: int, tasks: list[Task]) -> list[Group]:
        size = phase.group_size
        groups = [rollouts.group(t, stream=stream_id, step=step, index=i, group_size=size) for i, t in enumerate(tasks)]
        return list(await asyncio.gather(*groups))

    buffer = Buffer(
        rooms.background,
        stream,
        start,
        prompts_per_step=phase.prompts_per_step,
        staleness=phase.staleness,
        num_steps=phase.steps,
    )
    try:
        while progress.step < phase.steps and phase.name not in progress.phase_end:
            clock, before = Clock(), rooms.sampler.stats
            buffer.fill(progress.step)
            with clock.part("rollout"):
                groups = buffer.collect(progress.step, recipe.wait_s)
            with clock.part("pack"):
                kept, row = credit(phase.algorithm, groups)
                batches = [
                    pack(kept[u :: phase.updates_per_step], learner.shape, phase.temperature)
                    for u in range(min(phase.updates_per_step, len(kept)))
                ]
            with clock.part("update"):
                state, stats = update(learner, state, batches, folder, progress.total_steps + 1)
            row |= stats | describe(groups, batches, progress.version)
            if sampled:
                row |= sampler_work(before, rooms.sampler.stats)
            progress.step, progress.total_steps, progress.version = (
                progress.step + 1,
                progress.total_steps + 1,
                progress.version + 1,
            )
            progress.stream_position = buffer.position()
            progress.phase_steps[phase.name] = progress.step
            row["groups/waiting_n"] = buffer.num_waiting
            evaluate_now = phase.eval_every and progress.step % phase.eval_every == 0
            if sampled or evaluate_now:
                with clock.part("publish"):
                    rooms.publish(state.params, progress.version)
            if evaluate_now:
                with clock.part("eval"):
                    row["heldout/reward_mean"] = mean_reward(rooms.evaluate(progress.total_steps, interruptible=False))
                if phase.stop_at_reward is not None and row["heldout/reward_mean"] >= phase.stop_at_reward:
                    progress.phase_end[phase.name] = f"held-out reward reached {phase.stop_at_reward:g}"
            if progress.step == phase.steps:
                progress.phase_end.setdefault(phase.name, "all steps done")
            check_alive(groups, progress)
            with clock.part("save"):
                if progress.total_steps % recipe.rollouts_every == 0:
                    folder.write_rollouts(progress.total_steps, (t for g in groups for t in g.trajectories))
            report(row | clock.row, clock, phase, progress, folder, console)
            yield state
    finally:
        buffer.cancel()


def credit(algorithm: Algorithm, groups: Sequence[Group]) -> tuple[list[list[Sample]], Row]:
    """Advantages of every group that teaches something, and what was dropped and why.

    Failed trajectories take no part: a failure of the infrastructure is not a wrong answer.
    """
    alive = [[t for t in g.trajectories if t.status != "failed" and t.turns] for g in groups]
    whole = [a for a, g in zip(alive, groups, strict=True) if len(a) >= min(2, len(g.trajectories))]
    advantages = algorithm.advantages([np.array([t.reward for t in a], np.float32) for a in whole])
    kept = [
        [Sample.of(t, float(x)) for t, x in zip(trajectories, values, strict=True)]
        for trajectories, values in zip(whole, advantages, strict=True)
        if values is not None
    ]
    return kept, {
        "groups/started_n": len(groups),
        "groups/trained_n": len(kept),
        "groups/dropped_failed_n": len(groups) - len(whole),
        "groups/dropped_degenerate_n": len(whole) - len(kept),
    }


def update(
    learner: Learner, state: TrainState, batches: Sequence[TokenBatch], folder: RunFolder, step: int
) -> tuple[TrainState, Row]:
    """All updates of a step, and the gate: a step that is not finite ends the run here."""
    all_stats: list[Row] = []
    for batch in batches:
        state, stats = learner.update(state, batch)
        all_stats.append({k: float(v) for k, v in jax.device_get(stats).items()})
        if not all_stats[-1].pop("optim/finite"):
            path = folder.write_crash(f"step_{step}", {n: getattr(batch, n) for n in TokenBatch.ARRAYS})
            raise TrainerError(
                f"step {step}: loss {all_stats[-1]['loss/total']}, gradient norm {all_stats[-1]['optim/grad_norm']}; "
                f"nothing of this step was published or saved; the batch is in {path}"
            )
    row: Row = {"optim/updates_n": len(batches)}
    reduce: dict[str, Callable[[list[float]], float]] = {
        "mean": lambda v: float(np.mean(v)),
        "max": max,
        "first": lambda v: v[0],
        "last": lambda v: v[-1],
    }
    for name in all_stats[0] if all_stats else ():
        row[name] = reduce[NAMES[name].reduction]([s[name] for s in all_stats])
    return state, row


def describe(groups: Sequence[Group], batches: Sequence[TokenBatch], version: int) -> Row:
    """Statistics of a step's trajectories and batches."""
    trajectories = [t for g in groups for t in g.trajectories]
    alive = [t for t in trajectories if t.status != "failed"]
    rewards = np.array([t.reward for t in alive]) if alive else np.zeros(1)
    ages = [version - turn.versions for t in alive for turn in t.turns if (turn.versions >= 0).all()]
    age = np.concatenate(ages) if ages else np.zeros(1)
    filled = sum(int((b.segment_ids > 0).sum()) for b in batches)
    computed = sum(int(b.num_micro) * b.tokens.shape[1] * b.tokens.shape[2] for b in batches)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/success_frac": _mean(t.success for t in alive),
        "reward/zero_std_frac": _mean(np.ptp(g.rewards) == 0 for g in groups),
        "rollout/len_tok": _mean(t.num_sampled_tok for t in alive),
        "rollout/turns_n": _mean(len(t.turns) for t in alive),
        "rollout/trunc_frac": _mean(t.status == "truncated" for t in trajectories),
        "rollout/fail_frac": _mean(t.status == "failed" for t in trajectories),
        "stale/mean_ver": float(age.mean()),
        "stale/max_ver": float(age.max()),
        "train/tokens_n": filled,
        "train/trained_tok_n": sum(float(b.num_tokens) for b in batches),
        "train/pack_frac": filled / max(computed, 1),
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
        raise EnvError(
            f"no trajectory survived for {MAX_FAILED_STEPS} steps; the last one failed in {failed[-1].error_owner}: "
            f"{failed[-1].error}"
        )


def report(row: Row, clock: Clock, phase: Phase, progress: Progress, folder: RunFolder, console: Console) -> None:
    """Write the step's row and show it."""
    seconds = clock.total()
    row["time/step_s"] = seconds
    if phase.algorithm.source == "sampler":
        sampled = row["rollout/len_tok"] * phase.prompts_per_step * phase.group_size
        row["tput/sample_tok_s"] = sampled / max(row["time/rollout_s"], 1e-9)
    row["tput/train_tok_s"] = row["train/tokens_n"] / max(row["time/update_s"], 1e-9)
    progress.phase_wall_s[phase.name] = progress.phase_wall_s.get(phase.name, 0.0) + seconds
    place = {"step": progress.total_steps, "phase_step": progress.step, "version": progress.version}
    folder.write_row({**place, "phase": phase.name, **row})
    console.step(place | row)


def evaluate(rooms: Rooms, progress: Progress, name: str) -> list[Trajectory]:
    """Held-out reward at a phase border, put on record."""
    trajectories = rooms.evaluate(progress.total_steps)
    entry = {"phase": name, "step": progress.total_steps, "mean": mean_reward(trajectories), "n": len(trajectories)}
    progress.heldout_reward = [e for e in progress.heldout_reward if e["phase"] != name] + [entry]
    return trajectories


@contextlib.contextmanager
def timed(progress: Progress, phase: str) -> Iterator[None]:
    """Count the seconds inside to a phase."""
    start = time.perf_counter()
    yield
    progress.phase_wall_s[phase] = progress.phase_wall_s.get(phase, 0.0) + time.perf_counter() - start


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
