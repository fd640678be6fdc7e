"""The rollouts of a phase: which groups are trained, dropped, replaced and continued, and that short answers are not
preferred.

Real rollouts, environments, event loop and buffer; the policy's answers are as long as the random numbers of their
address say, as the sampler's are. A token takes a second of a virtual clock, so that nothing depends on the machine.
"""

import asyncio
import dataclasses
import functools
import heapq
import json
import math
import types

import numpy as np
import pytest

from rolljax.concurrency.event_loop import EventLoop, Stopped
from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.pool import PoolConfig, open_pool
from rolljax.envs.run_limits import RUN_S, AdaptiveTimeout, RunLimits
from rolljax.envs.tasks import TaskStream, open_stream
from rolljax.errors import EnvError, HangError, TrainerError
from rolljax.metrics import MetricsReport
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.episodes import RolloutConfig, Rollouts
from rolljax.rollout.group_buffer import TailBatching
from rolljax.rollout.mixture_rules import Curriculum
from rolljax.run.consumed import ConsumedStep, DrawAccount
from rolljax.run.folder import RunFolder
from rolljax.run.progress import RunProgress
from rolljax.run.replay import RunLog, open_rollouts
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.types import Completion, Message, Sampled, Task

PROMPTS, SIBLINGS, SPARES, LIMIT = 8, 2, 2, 400


@dataclasses.dataclass(frozen=True)
class OneAnswer(EnvSpec):
    """Any answer ends the episode; one that begins with `x` is right. Every `broken`th task's environment is broken
    (0: none)."""

    runs = "inline"
    max_turns: int = 1
    broken: int = 0

    @property
    def name(self):
        return "one_answer"

    def task(self, index):
        return Task("one_answer", index, f"task {index}")

    def make(self):
        return OneAnswerEnv(self.broken)


class OneAnswerEnv(Env):
    def __init__(self, broken):
        self.broken = broken

    def reset(self, task):
        self.index = task.index
        return (Message("user", task.content),)

    def step(self, action):
        if self.broken and self.index % self.broken == 0:
            raise EnvError("out of order", stage="step")
        right = action.startswith("x")
        return StepResult((), float(right), terminated=True, success=right)

    def reference_answer(self):
        return "x"


@functools.cache
def token(letter):
    """Return the byte tokenizer's id of a letter."""
    return byte_tokenizer().convert_tokens_to_ids(letter)


class VirtualClock:
    """Advances to the next event when the event loop is idle. settle: passes of the event loop until then."""

    def __init__(self, settle=12):
        self.now, self.settle = 0.0, settle
        self._waiting = []

    async def sleep(self, seconds, order=(0, 0)):
        """Wait; what ends at the same moment ends in the order of `order`."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self.now + seconds, *order, id(future), future))
        await future

    async def run(self, pool):
        """Advance, but not while environments work: they are in threads."""
        while True:
            passes = 0
            while passes < self.settle:
                await asyncio.sleep(0)
                passes = 0 if pool.stats.under_way else passes + 1
            while self._waiting and self._waiting[0][-1].done():
                heapq.heappop(self._waiting)  # it was given up
            if self._waiting:
                self.now, *_, future = heapq.heappop(self._waiting)
                future.set_result(None)


class Drawn:
    """Answers whose lengths are drawn by their address, log-normal with a mean of about 27 tokens.

    by_sibling: standard deviation of the logarithm between siblings; by_prompt: between prompts. right: chance of a
    right answer. version: of the policy, now. begun: draws of the started answers. slow: draws whose answers
    take longer than any while the policy is of version 0. experts: say which experts of a mixture each token took.
    """

    def __init__(self, by_prompt=0.0, by_sibling=0.8, right=1.0):
        self.by_prompt, self.by_sibling, self.right = by_prompt, by_sibling, right
        self.clock, self.version, self.begun, self.error, self.slow = VirtualClock(), 0, [], None, set()
        self.experts = False

    async def act(self, prompt_ids, episode, key, turn, min_version=0):
        self.begun.append(key.prompt_index)
        first = self.version
        if self.error:
            raise self.error
        prompt, own = (np.random.default_rng([key.stream, key.prompt_index, s]) for s in (1000, key.sibling))
        size = 3.0 + self.by_prompt * prompt.normal() + self.by_sibling * own.normal()
        length = int(np.clip(np.exp(size), 1, LIMIT))
        longer = 10 * LIMIT if key.prompt_index in self.slow and first == 0 else 0
        await self.clock.sleep(length + longer, (key.prompt_index, key.sibling))
        tokens = np.full(length, token("x" if own.random() < self.right else "y"), np.int32)
        versions = np.linspace(first, self.version, length).astype(np.int32)
        sampled = Sampled.of(tokens, np.zeros(length, np.float32), versions)
        if self.experts:
            sampled = dataclasses.replace(sampled, experts=np.zeros((length, 2, 1), np.int32))
        return Completion(sampled, "stop")


def phase(steps, rounds=0, **settings):
    groups = GroupFilter(dynamic_sampling_rounds=rounds) if rounds else None
    algorithm = Grpo(clip_low=None, clip_high=None, filter=groups)
    return Phase("only", algorithm, steps, prompts_per_step=PROMPTS, group_size=SIBLINGS, **settings)


class Run:
    """What a loop does with the rollouts of a phase, without a model. train_s: that training a step takes."""

    agents = None

    def __init__(self, chat, phase, policy=None, broken=0, train_s=20, spec=None):
        spec = spec or OneAnswer(broken=broken)
        self.phase, self.policy, self.train_s = phase, policy or Drawn(), train_s
        self.recipe = Recipe(spec, (phase,), rollout=RolloutConfig(retries=0), wait_s=60.0)
        self.preflight = types.SimpleNamespace(chat=chat)
        self.sampler = types.SimpleNamespace(hold=lambda: lambda: None)
        self.pool, self.event_loop = open_pool(PoolConfig(), spec), EventLoop(lambda: False)
        self.progress, self.stream = RunProgress(), open_stream(spec, 0, 0.1)
        self.warned, self.steps, self.rows, self.lines = [], [], [], []
        self.log = None

    def actor(self, phase):
        return self.policy

    def start_curriculum(self, phase, progress):
        return None

    def guide(self, phase):
        return None

    def rollouts(self, policy, *, hash_observations=False):
        return Rollouts(self.pool, self.preflight.chat, policy, 1, 1000, LIMIT, self.recipe.rollout)

    async def train_step(self, rollouts):
        """Train a step as `loop.train_step` does; groups sampled by an older policy are older."""
        version = self.policy.version = self.progress.version
        rollouts.start(version)
        groups = await rollouts.take(version)
        rollouts.start(version)
        await self.policy.clock.sleep(self.train_s)
        for group, age in zip(groups.trained, groups.start_ages, strict=True):
            told = [t.turns[0].versions[0] for t in group.trajectories if t.turns]
            assert not told or version - min(told) <= age <= np.ceil(self.phase.async_ratio)
        line = rollouts.end_step(groups, report := MetricsReport())
        report.add("groups/trained_n", len(groups.trained))
        row = report.row()
        self.steps.append(groups)
        self.rows.append(row)
        self.lines.append(line)
        self.progress.end_step(self.phase)

    async def _until(self, step, stop):
        time = asyncio.ensure_future(self.policy.clock.run(self.pool))
        try:
            last = min(step, self.phase.steps)
            while stop or self.progress.step < last:
                parts = (self.recipe, self, self.sampler, self.event_loop, self.stream)
                async with open_rollouts(*parts, self.progress, self.warned.append, self.log) as rollouts:
                    while self.progress.step < last and rollouts.has_step():
                        await self.train_step(rollouts)
                    if stop and self.progress.step == last:
                        await stop(self, rollouts)
                        raise Stopped
        finally:
            time.cancel()

    def until(self, step, stop=None):
        """Run the steps up to `step`; request a stop at `stop`, after the last one."""
        try:
            self.event_loop.run(self._until(step, stop))
        except Stopped:
            self.go_on()
        return self

    def all(self):
        return self.until(self.phase.steps)

    def go_on(self):
        """Continue from the record of the progress alone."""
        record = json.loads(json.dumps(dataclasses.asdict(self.progress)))
        self.progress, self.stream = RunProgress(**record), open_stream(self.recipe.env, 0, 0.1)
        if self.progress.stream_position:
            self.stream.restore(self.progress.stream_position)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.event_loop.close()
        self.pool.close()

    # ---- what came of it

    @property
    def trained(self):
        return [g for groups in self.steps for g in groups.trained]

    @property
    def prompt_indices(self):
        return [g.prompt_index for g in self.trained]

    @property
    def mean_length(self):
        return np.mean([t.num_sampled_tok for g in self.trained for t in g.trajectories])

    def total(self, name):
        return sum(row[f"groups/{name}_n"] for row in self.rows)

    def check_conserved(self):
        """Check step by step that no group is lost."""
        before = 0
        for row in self.rows:
            gone = sum(row[f"groups/{name}_n"] for name in ("trained", "no_signal", "spare_failed", "late"))
            assert before + row["groups/started_n"] == gone + row["groups/waiting_n"]
            before = row["groups/waiting_n"]
        account, gone = DrawAccount(self.phase), set()
        for line in self.lines:
            account.add(line)
            gone |= {*line.prompt_indices, *(draw for draws in line.dropped.values() for draw in draws)}
            assert gone | {*map(int, line.waiting)} == {*range(account.num_drawn)}
            assert not {*line.prompt_indices} & {*map(int, line.waiting)}

    def write_log(self, folder):
        """Write a run's files of its steps; return the log for a replay."""
        folder = RunFolder(folder)
        (folder.path / "rollouts").mkdir(parents=True)
        lines = []
        for line, groups in zip(self.lines, self.steps, strict=True):
            digest = folder.write_rollouts(line.step, (t for g in groups.all for t in g.trajectories))
            lines.append(dataclasses.replace(line, rollouts=digest))
            folder.write_consumed(lines[-1])
        assert [ConsumedStep(**row) for row in folder.rows("consumed.jsonl")] == lines
        return RunLog(folder, lines)

    def check_tasks(self):
        """Check that every prompt index has the task at that place of the stream."""
        stream = TaskStream(self.recipe.env, 0, 0.1)
        tasks = [next(stream) for _ in range(max(self.prompt_indices) + 1)]
        assert all(g.task == tasks[g.prompt_index] for g in self.trained)
        assert all(
            t.task == g.task and t.key.prompt_index == g.prompt_index for g in self.trained for t in g.trajectories
        )


# ---- lengths ----------------------------------------------------------------------------------------------------------

EVERY_PROMPT = {
    "ratio 1": {"async_ratio": 1.0},
    "ratio 2.5": {"async_ratio": 2.5},
    "ratio 1, restarted": {"async_ratio": 1.0, "late": "resample"},
    "spares, restarted": {"spare_prompts": SPARES, "late": "resample"},
    "tail batching": {"tail_batching": TailBatching(1.25)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY_PROMPT)
def test_trained_answers_are_as_long_as_in_synchronous_training(chat, name):
    """Every prompt is trained once, in less time, and the answers are as long; lengths are mostly the prompt's."""
    lengths = {"by_prompt": 0.8, "by_sibling": 0.02}
    with Run(chat, phase(24), Drawn(**lengths)) as plain, Run(chat, phase(24, **EVERY_PROMPT[name])) as run:
        run.policy = Drawn(**lengths)
        plain.all(), run.all()
    assert plain.mean_length == pytest.approx(27, rel=0.15)
    assert run.mean_length == pytest.approx(plain.mean_length, rel=0.02)
    for each in (plain, run):
        assert sorted(each.prompt_indices) == list(range(24 * PROMPTS))
        each.check_conserved(), each.check_tasks()
    assert run.policy.clock.now < plain.policy.clock.now
    assert (run.total("late") > 0) == (name not in ("ratio 1", "ratio 2.5"))
    assert max(row["stale/start_max_ver"] for row in run.rows) == np.ceil(run.phase.async_ratio)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.0])
def test_ages_and_waits_of_groups(chat, ratio):
    with Run(chat, phase(12, async_ratio=ratio)) as run:
        run.all()
    for row, step in zip(run.rows, run.steps, strict=True):
        p50, p99 = np.percentile(step.start_ages, (50, 99), method="inverted_cdf")
        want = (np.mean(step.start_ages), p50, p99, max(step.start_ages))
        assert tuple(row[f"stale/start_{name}_ver"] for name in ("mean", "p50", "p99", "max")) == pytest.approx(want)
        assert row["groups/wait_s"] == pytest.approx(np.mean(step.waits_s)) and min(step.waits_s) >= 0
    assert any(row["stale/start_max_ver"] > row["stale/start_p50_ver"] for row in run.rows) == (ratio == 0.5)


def test_long_rounds_are_those_of_prompts_that_waited(chat):
    with Run(chat, phase(24, tail_batching=TailBatching()), Drawn(by_prompt=0.8)) as run:
        run.all()
    long = [row["groups/long_rounds_n"] for row in run.rows]
    counts = [{run.policy.begun.count(g.prompt_index) for g in step.trained} for step in run.steps]
    short = math.ceil(1.25 * SIBLINGS)
    assert all(
        found == ({short + SIBLINGS} if is_long else {short}) for found, is_long in zip(counts[:-1], long, strict=False)
    )
    assert counts[-1] == {SIBLINGS, short + SIBLINGS} and long[-1], "the last one takes what is left"
    assert 0.1 < np.mean(long) < 0.4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_long_siblings_are_trained_as_often_as_short_ones(chat, ratio):
    with Run(chat, phase(24)) as plain, Run(chat, phase(24, async_ratio=ratio)) as run:
        plain.all(), run.all()
    assert run.mean_length == pytest.approx(plain.mean_length, rel=0.02)


@pytest.mark.parametrize("settings", [{"spare_prompts": SPARES}, {"async_ratio": 1.0}], ids=["spares", "ratio 1"])
def test_what_is_let_go_for_good_was_long(chat, settings):
    lengths = {"by_prompt": 0.8, "by_sibling": 0.02}
    with Run(chat, phase(24), Drawn(**lengths)) as plain, Run(chat, phase(24, late="drop", **settings)) as run:
        run.policy, run.train_s = Drawn(**lengths), 0
        plain.all(), run.all()
    assert len(set(run.prompt_indices)) == len(run.prompt_indices) == 24 * PROMPTS and run.total("late") > 0
    if "spare_prompts" in settings:
        assert [row["groups/late_n"] for row in run.rows] == [SPARES] * 24
        assert [row["groups/waiting_n"] for row in run.rows] == [0] * 24
    assert run.mean_length < 0.95 * plain.mean_length
    run.check_conserved(), run.check_tasks()


def test_of_spare_siblings_the_slowest_are_let_go(chat):
    with Run(chat, phase(20, spare_siblings=2)) as run:
        run.all()
    assert all(len(g.trajectories) == SIBLINGS and g.cancelled == 2 for g in run.trained)
    with Run(chat, phase(20)) as plain:
        plain.all()
    assert run.mean_length < 0.8 * plain.mean_length


def test_a_group_begins_again_with_the_answers_that_made_it_slow(chat):
    with Run(chat, phase(3, spare_prompts=SPARES, late="resample")) as run, Run(chat, phase(3)) as plain:
        run.policy.slow = {3, 5}
        run.all(), plain.all()
    first, second, _ = run.steps
    assert [g.prompt_index for g in first.trained] == [0, 1, 2, 4, 6, 7, 8, 9]
    assert {3, 5} < {g.prompt_index for g in second.trained}
    assert [run.policy.begun.count(d) for d in (3, 4, 5)] == [2 * SIBLINGS, SIBLINGS, 2 * SIBLINGS]
    want = {g.prompt_index: [t.num_sampled_tok for t in g.trajectories] for g in plain.trained}
    assert want == {g.prompt_index: [t.num_sampled_tok for t in g.trajectories] for g in run.trained}


# ---- dynamic sampling -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", [{}, {"async_ratio": 1.0}, {"async_ratio": 2.0, "late": "resample"}])
def test_groups_without_a_signal_are_replaced(chat, settings):
    with Run(chat, phase(25, rounds=30, **settings), Drawn(right=0.5)) as run:
        run.all()
        dropped = [g for groups in run.steps for g in groups.dropped]
    assert all(len({t.reward for t in g.trajectories}) == 2 for g in run.trained)
    assert all(len({t.reward for t in g.trajectories}) == 1 for g in dropped)
    assert run.total("no_signal") == len(dropped) > 100 and not run.warned
    for row, step in zip(run.rows, run.steps, strict=True):
        lengths = [t.num_sampled_tok for g in step.dropped for t in g.trajectories]
        assert row.get("groups/no_signal_len_tok") == (pytest.approx(np.mean(lengths)) if lengths else None)
    assert (
        not {g.prompt_index for g in dropped} & set(run.prompt_indices) and len(set(run.prompt_indices)) == 25 * PROMPTS
    )
    run.check_conserved(), run.check_tasks()


def test_groups_without_a_signal_are_replaced_while_others_run(chat):
    """Above ratio 0 a new group starts without waiting for the slowest one."""
    with Run(chat, phase(3, rounds=30, async_ratio=1.0), Drawn(right=0.5)) as run:
        begun, done = run.policy.begun, run.policy.done = run.policy.begun, []
        act = run.policy.act

        async def noted(prompt_ids, episode, key, turn, min_version=0):
            found = await act(prompt_ids, episode, key, turn)
            done.append((key.prompt_index, set(begun)))
            return found

        run.policy.act = noted
        run.until(1)
    assert any(max(seen) >= 2 * PROMPTS and draw < 2 * PROMPTS for draw, seen in done)


def test_a_step_that_cannot_be_filled_says_so_once(chat):
    with Run(chat, phase(3, rounds=1), Drawn(right=0.15)) as run:
        run.all()
    assert [len(groups.trained) for groups in run.steps] == [PROMPTS] * 3
    assert max(row["groups/no_signal_n"] for row in run.rows) <= PROMPTS
    assert len(run.warned) == 1 and "dynamic_sampling_rounds" in run.warned[0]


def test_a_step_in_which_nothing_has_a_signal_is_an_error(chat):
    with (
        Run(chat, phase(3, rounds=2)) as run,
        pytest.raises(TrainerError, match="2 dynamic-sampling rounds none of 24"),
    ):
        run.all()


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"async_ratio": 1.0}, {"tail_batching": TailBatching()}])
def test_episodes_that_fail_are_data(chat, settings):
    """A group of failed episodes comes to the step like any other, if no spare group can take its place."""
    with Run(chat, phase(10, **settings), broken=4) as run:
        run.all()
    failed = [g for g in run.trained if all(t.status == "failed" for t in g.trajectories)]
    assert {g.prompt_index for g in failed} == {g.prompt_index for g in run.trained if g.task.index % 4 == 0} and failed
    assert len(run.trained) == 10 * PROMPTS and len(set(run.prompt_indices)) == len(run.prompt_indices)
    run.check_conserved(), run.check_tasks()


@pytest.mark.parametrize("late", ["drop", "resample"])
def test_spares_take_the_place_of_groups_that_fail(chat, late):
    with Run(chat, phase(10, spare_prompts=PROMPTS, late=late), broken=8) as run:
        run.all()
    if late == "drop":  # at the end of a phase that trains every prompt no spares are left
        assert all(t.status == "ok" for g in run.trained for t in g.trajectories)
    assert run.total("spare_failed") > 0
    assert all(g.task.index % 8 == 0 for groups in run.steps for g in groups.dropped)
    run.check_conserved(), run.check_tasks()


def test_what_goes_wrong_outside_of_episodes_ends_the_wait(chat):
    with Run(chat, phase(3)) as run:
        run.policy.error = ZeroDivisionError("ours")
        with pytest.raises(ZeroDivisionError, match="ours"):
            run.all()


def test_a_hanging_group_names_its_step(chat):
    with Run(chat, phase(3)) as run:
        run.until(1)
        run.recipe = dataclasses.replace(run.recipe, wait_s=0.3)  # only now: a step itself may take longer

        async def never(*_):
            await asyncio.Event().wait()

        run.policy.act = never
        with pytest.raises(HangError, match="the groups of step 2"):
            run.all()


# ---- continuing -----------------------------------------------------------------------------------------------------


async def at_once(run, rollouts):
    """Return before a group of the next step has started."""


async def begun(run, rollouts):
    """Start the groups of the next step and finish some of them."""
    run.policy.version = run.progress.version
    rollouts.start(run.progress.version)
    await run.policy.clock.sleep(25)


GOING_ON = {
    "synchronous": {},
    "dynamic sampling": {"rounds": 30},
    "ratio .5": {"async_ratio": 0.5},
    "ratio 2": {"async_ratio": 2.0},
    "ratio 2, restarted": {"async_ratio": 2.0, "late": "resample", "spare_prompts": 2},
    "ratio 2, replaced": {"async_ratio": 2.0, "rounds": 30},
    "ratio 1, dropped": {"async_ratio": 1.0, "late": "drop", "spare_prompts": 2},
    "tail batching": {"tail_batching": TailBatching()},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stop", [at_once, begun], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", GOING_ON)
def test_a_run_that_goes_on_loses_nothing_and_trains_nothing_twice(chat, name, stop):
    settings = GOING_ON[name]
    with Run(chat, phase(8, **settings), Drawn(right=0.5 if "rounds" in settings else 1.0)) as run:
        for step in (0, 1, 2, 5):
            run.until(step, stop)
        run.all()
    assert [len(groups.trained) for groups in run.steps] == [PROMPTS] * 8
    assert len(set(run.prompt_indices)) == 8 * PROMPTS
    gone = int(run.total("no_signal"))
    if settings.get("late") != "drop":
        assert len(set(range(8 * PROMPTS + gone)) - set(run.prompt_indices)) == gone
    run.check_conserved(), run.check_tasks()


@pytest.mark.parametrize("name", GOING_ON)
def test_steps_of_a_log_are_trained_again_and_what_follows_is_played(chat, tmp_path, name):
    """The first five steps from another run's record, interrupted behind the third; then three of its own."""
    settings = GOING_ON[name]
    answers = {"by_prompt": 0.8, "right": 0.5 if "rounds" in settings else 1.0}
    with Run(chat, phase(8, **settings), Drawn(**answers)) as run, Run(chat, phase(8, **settings)) as again:
        run.until(5)
        log = again.log = run.write_log(tmp_path)
        again.policy = Drawn(**answers)
        again.until(3).go_on()
        again.until(5)
        assert not again.policy.begun
        again.go_on()
        again.all()
    plain = lambda groups: [[g.to_json() for g in part] for part in (groups.trained, groups.dropped)]  # noqa: E731
    for ours, theirs, line in zip(again.steps, run.steps, log.steps, strict=False):
        assert plain(ours) == plain(theirs) and ours.start_ages == theirs.start_ages and ours.logged == line
    assert [s.logged is None for s in again.steps] == [False] * 5 + [True] * 3
    assert len(set(again.prompt_indices)) == len(again.prompt_indices) == 8 * PROMPTS
    assert not {g.prompt_index for s in again.steps[:5] for g in s.all} & set(again.policy.begun)
    gone = int(again.total("no_signal"))
    if settings.get("late") != "drop":
        assert len(set(range(8 * PROMPTS + gone)) - set(again.prompt_indices)) == gone
    again.check_conserved(), again.check_tasks()


def test_what_waits_is_saved_and_not_played_again(chat):
    with Run(chat, phase(6, async_ratio=2.0)) as run:
        run.until(2, begun)
        state = run.progress.groups["buffer"]
        ready = {entry["prompt_index"] for entry in state["entries"] if entry["ready"]}
        again = {entry["prompt_index"] for entry in state["entries"]} - ready
        lines = [json.loads(line) for line in run.progress.waiting.splitlines()]
        assert ready == {line["prompt_index"] for line in lines} and ready and again
        run.policy.begun.clear()
        run.all()
    assert not ready & set(run.policy.begun) and again < set(run.policy.begun)
    saved = {line["prompt_index"]: line for line in lines}
    assert [g.to_json() for g in run.trained if g.prompt_index in ready] == [
        saved[d] for d in run.prompt_indices if d in ready
    ]


def test_what_cannot_be_written_is_played_again(chat):
    with Run(chat, phase(4, async_ratio=2.0)) as run:
        run.policy.experts = True
        run.until(2, begun)
        entries = run.progress.groups["buffer"]["entries"]
        assert run.rows[-1]["groups/ready_n"] > 0 and not run.progress.waiting
        assert entries and not any(entry["ready"] for entry in entries)
        run.all()
    assert sorted(run.prompt_indices) == list(range(4 * PROMPTS))
    assert all(turn.experts is not None for g in run.trained for t in g.trajectories for turn in t.turns)
    run.check_conserved()


def test_a_checkpoint_that_is_due_has_what_waits(chat):
    """A killed run continues from this checkpoint."""
    with Run(chat, phase(6, async_ratio=2.0)) as run:
        run.recipe = dataclasses.replace(run.recipe, save_every=3)
        waiting = []
        for step in range(1, 4):
            run.until(step)
            waiting.append(len(run.progress.waiting.splitlines()))
        assert waiting[:2] == [0, 0] and waiting[2] == run.rows[2]["groups/ready_n"] > 0
        run.go_on()
        run.all()
    assert sorted(run.prompt_indices) == list(range(6 * PROMPTS))
    run.check_conserved()


def test_the_end_of_a_phase_has_nothing_left_that_is_waited_for(chat):
    with Run(chat, phase(4, async_ratio=3.0)) as run:
        run.all()
        assert run.rows[-1]["groups/waiting_n"] == 0 and sorted(set(run.policy.begun)) == list(range(4 * PROMPTS))


@pytest.mark.parametrize("name", ["ratio 2", "ratio 2, restarted", "tail batching", "synchronous"])
def test_a_phase_with_more_steps_continues_after_its_end(chat, name):
    with Run(chat, phase(3, **GOING_ON[name])) as run:
        run.all()
        run.go_on()
        run.phase = phase(6, **GOING_ON[name])
        run.recipe = dataclasses.replace(run.recipe, phases=(run.phase,))
        run.all()
    assert sorted(run.prompt_indices) == list(range(6 * PROMPTS))
    run.check_conserved(), run.check_tasks()


# ---- time-outs of programs ------------------------------------------------------------------------------------------

LIMITS = {}
"""What each task's programs were given, in seconds, in the order of their runs."""


def seconds(index):
    return 4.0 + index % 5


@dataclasses.dataclass(frozen=True)
class Programs(OneAnswer):
    """Answers are programs, which take as long as `seconds` says of their task."""

    def make(self):
        return ProgramsEnv(self.broken)

    def run_limits(self):
        return RunLimits(AdaptiveTimeout(), 30.0)


class ProgramsEnv(OneAnswerEnv):
    def step(self, action):
        LIMITS.setdefault(self.index, []).append(self.run_limit_s)
        result = super().step(action)
        return dataclasses.replace(result, success=result.reward > 0, metrics={RUN_S: seconds(self.index)})


def test_programs_get_the_time_that_right_ones_took(chat):
    """Until one is right, all that there is; it is remembered with the progress of the run."""
    LIMITS.clear()
    with Run(chat, phase(4, async_ratio=1.0), Drawn(right=0.6), spec=Programs()) as run:
        run.until(2, begun)
        before = dict(run.progress.run_times)
        run.all()
    assert before and before.items() <= run.progress.run_times.items()
    right = {g.task.id: seconds(g.task.index) for g in run.trained if any(t.success for t in g.trajectories)}
    assert right.items() <= run.progress.run_times.items() and len(right) < len(run.trained)
    assert all(limits[0] == 30 for limits in LIMITS.values())
    later = {index: limits[-1] for index, limits in LIMITS.items() if limits[-1] < 30}
    assert later and all(limit == 1.5 * seconds(index) for index, limit in later.items())


# ---- domains ----------------------------------------------------------------------------------------------------------

WITH_DOMAINS = {
    "synchronous": {},
    "dynamic sampling": {"rounds": 5},
    "ratio 1.5": {"async_ratio": 1.5},
    "restarted": {"async_ratio": 1.0, "late": "resample", "spare_prompts": SPARES},
    "dropped, dynamic sampling": {"async_ratio": 1.0, "late": "drop", "rounds": 5},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WITH_DOMAINS)
def test_every_step_trains_the_shares_of_its_domains(chat, tmp_path, name):
    """In a whole run, in a continued run, and in a run that replays its log and continues after it."""
    spec = Mixture({"x": Domain(OneAnswer(), 0.55), "y": Domain(OneAnswer(), 0.45, num_tasks=20)})
    settings = WITH_DOMAINS[name] | {"mixture": Curriculum(memory=0.5)}
    answers = {"by_prompt": 0.8, "right": 0.5 if "rounds" in settings else 0.9}
    make = lambda: Run(chat, phase(8, **settings), Drawn(**answers), spec=spec)  # noqa: E731
    with make() as run, make() as again:
        run.until(5)
        log = again.log = run.write_log(tmp_path)
        run.go_on()
        run.all()
        again.until(3).go_on()
        again.until(5)
        assert not again.policy.begun and again.progress.mixture == {**log.steps[4].mixture["shares"]}
        again.go_on()
        again.all()
    for ours, theirs, line in zip(again.steps, run.steps, log.steps, strict=False):
        assert [g.to_json() for g in ours.trained] == [g.to_json() for g in theirs.trained] and ours.logged == line
    for each in (run, again):
        each.check_conserved()
        assert len(set(each.prompt_indices)) == len(each.prompt_indices) == 8 * PROMPTS
        if settings.get("late") != "drop" and "rounds" not in settings:
            assert sorted(each.prompt_indices) == list(range(8 * PROMPTS))  # spares too
        for step, row in zip(run.steps, run.rows, strict=True):
            number = sum(g.task.env == "x" for g in step.trained)
            assert abs(number - PROMPTS * row["domain/x/share_frac"]) < 1
    shares = [row["domain/x/share_frac"] for row in run.rows]
    assert len(set(shares)) > 2 and shares[0] == pytest.approx(0.55)
    assert len({row["domain/x/share_frac"] for row in again.rows[5:]}) > 1
