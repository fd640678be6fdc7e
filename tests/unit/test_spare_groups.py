"""Spare groups: which are put off, when they come back, and that nobody is trained on short answers only.

Real rollouts, buffer and selection; the policy's answers are as long as the random numbers of their address say, as the
sampler's are. Time is a pass of the event loop for each token, so that nothing here depends on the machine.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.tasks import TaskStream
from rolljax.errors import ConfigError
from rolljax.recipe import Phase
from rolljax.rollout.barrier import Barrier
from rolljax.rollout.episodes import Rollouts
from rolljax.run.buffer import Buffer
from rolljax.run.groups import GroupDue, start_groups
from rolljax.threads.event_loop import EventLoop
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.types import Completion, Message, Sampled, Task

PROMPTS, SIBLINGS, SPARES, LIMIT = 8, 2, 2, 200


@dataclasses.dataclass(frozen=True)
class OneAnswer(EnvSpec):
    """Any answer ends the episode."""

    runs = "inline"

    max_turns: int = 1

    @property
    def name(self):
        return "one_answer"

    def task(self, index):
        return Task("one_answer", index, f"task {index}")

    def make(self):
        return OneAnswerEnv()


class OneAnswerEnv(Env):
    def reset(self, task):
        return (Message("user", task.content),)

    def step(self, action):
        return StepResult((), 1.0, terminated=True)

    def gold(self):
        return "x"


class Drawn:
    """Answers whose lengths are drawn by their address, log-normal with a mean of about 27 tokens."""

    async def act(self, prompt_ids, episode, key, turn):
        rng = np.random.default_rng([key.stream, key.step, key.group, key.sibling, turn])
        length = int(np.clip(rng.lognormal(3.0, 0.8), 1, LIMIT))
        for _ in range(length):
            await asyncio.sleep(0)
        tokens = np.full(length, ord("x"), np.int32)
        return Completion(Sampled.of(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32)), "stop")


def phase(steps, spares, staleness=0):
    return Phase(
        "only",
        Grpo(clip_low=None, clip_high=None),
        steps,
        prompts_per_step=PROMPTS,
        group_size=SIBLINGS,
        spare_groups=spares,
        staleness=staleness,
    )


class Run:
    """A loop's use of the buffer, without a trainer."""

    def __init__(self, chat, steps, spares, staleness=0):
        self.phase = phase(steps, spares, staleness)
        spec = OneAnswer()
        self.pool, self.stream = EnvPool(PoolConfig(), spec), TaskStream(spec, 0, 0.1)
        self.rollouts = Rollouts(self.pool, chat, Drawn(), 1, 500, LIMIT)
        self.background = EventLoop(lambda: False)
        self.buffer = self.make()

    def make(self, put_off=()):
        p = self.phase
        return Buffer(
            self.background,
            self.stream,
            self.start,
            prompts_per_step=p.prompts_per_step,
            staleness=p.staleness,
            num_steps=p.steps,
            spares=p.spare_groups,
            put_off=put_off,
        )

    async def start(self, due, wanted):
        together = Barrier(len(due) * SIBLINGS)
        return await start_groups(self.rollouts, None, self.phase, 0, due, wanted, together)

    def step(self, step):
        """The groups of a step, and its row of counts."""
        self.buffer.fill(step)
        groups = self.buffer.collect(step, 60)
        return groups, self.buffer.row()

    def all(self):
        return [self.step(s) for s in range(self.phase.steps)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.background.close()
        self.pool.close()


def mean_length(steps):
    return np.mean([t.num_sampled_tok for groups, _ in steps for g in groups for t in g.trajectories])


def addresses(steps):
    return [(g.step, g.index) for groups, _ in steps for g in groups]


@pytest.mark.parametrize("staleness", [0, 2])
def test_trained_answers_are_as_long_as_without_spares(chat, staleness):
    with Run(chat, 150, 0) as plain, Run(chat, 150, SPARES, staleness) as spared:
        without, found = plain.all(), spared.all()
    assert sum(len(groups) for groups, _ in found) == 150 * PROMPTS
    assert mean_length(found) == pytest.approx(mean_length(without), rel=0.02)
    # what the first to be complete are, where the others are let go for good
    short = [(groups, None) for groups, row in found if row["groups/cancelled_n"]]
    assert mean_length(short) < 0.85 * mean_length(without)


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_group_that_was_begun_is_trained_once_by_its_first_address(chat, staleness):
    with Run(chat, 12, SPARES, staleness) as run:
        steps = run.all()
        assert run.buffer.put_off() == []
        stream = TaskStream(OneAnswer(), 0, 0.1)
        num_tasks = len(addresses(steps))
        assert {g.task for groups, _ in steps for g in groups} == {next(stream) for _ in range(num_tasks)}
    assert len(set(addresses(steps))) == num_tasks == 12 * PROMPTS
    for step, (groups, row) in enumerate(steps):
        late = [g for g in groups if g.step < step]
        assert [t.key.step for g in groups for t in g.trajectories] == [g.step for g in groups for _ in range(SIBLINGS)]
        assert all(g.step == step - staleness - 1 for g in late)
        assert row["groups/back_n"] == len(late) == (SPARES if step // (staleness + 1) % 2 else 0)
        assert row["groups/cancelled_n"] == (0 if late else SPARES)


def test_a_group_comes_back_with_the_answers_that_made_it_slow(chat):
    with Run(chat, 2, SPARES) as run:
        first, _ = run.step(0)
        late = run.buffer.put_off()
        second, _ = run.step(1)
        lengths = {
            due: [t.num_sampled_tok for t in group.trajectories]
            for due in late
            for group in second
            if (group.step, group.index) == (due.step, due.index)
        }
    assert len(lengths) == SPARES
    slowest = max(max(t.num_sampled_tok for t in g.trajectories) for g in first)
    assert all(max(found) >= slowest for found in lengths.values())


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("done", range(1, 8))
def test_a_run_that_goes_on_takes_back_what_was_put_off(chat, staleness, done):
    with Run(chat, 8, SPARES, staleness) as whole:
        want = whole.all()
    with Run(chat, 8, SPARES, staleness) as run:
        before = [run.step(s) for s in range(done)]
        run.buffer.fill(min(done, 7))
        position, put_off = run.buffer.position(), run.buffer.put_off()
        run.buffer.cancel()
        assert run.buffer.put_off() == put_off and run.buffer.position() == position
        run.stream.restore(position)
        run.buffer = run.make(put_off)
        after = [run.step(s) for s in range(done, 8)]
    found = addresses(before + after)
    assert len(set(found)) == len(found) == 8 * PROMPTS
    tasks = [{g.task for groups, _ in steps for g in groups} for steps in (want, before + after)]
    assert tasks[0] == tasks[1]


def test_further_groups_have_numbers_of_their_own(chat):
    """Of a step that began spares: a number is an address of random numbers, and none is used twice."""
    with Run(chat, 4, SPARES) as run:
        first, _ = run.step(0)
        more = run.buffer.more(0, 3, 60)
        late = run.buffer.put_off()
    numbers = [g.index for g in first + more] + [due.index for due in late]
    assert sorted(numbers) == list(range(PROMPTS + SPARES + 3))


def test_what_could_never_come_back_is_not_begun(chat):
    with Run(chat, 3, SPARES) as run:
        assert [row["groups/cancelled_n"] for _, row in run.all()] == [SPARES, 0, 0]
    with pytest.raises(ConfigError, match="could not take them all back"):
        phase(4, PROMPTS + 1)
    with pytest.raises(ConfigError, match="no step is left"):
        phase(3, 1, staleness=2)


def test_groups_that_are_due_are_their_addresses():
    task = OneAnswer().task(3)
    assert GroupDue(task, 1, 2) == GroupDue(task, 1, 2) != GroupDue(task, 2, 2)
