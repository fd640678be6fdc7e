"""Mixtures: domains as one environment, their streams and pools, what is dry, and what is refused."""

import asyncio
import json

import numpy as np
import pytest

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.pool import MixedPool, PoolConfig, open_pool
from rolljax.envs.questions import Questions
from rolljax.envs.tasks import MixtureStream, TaskStream, first_tasks, held_out, is_held_out, open_stream
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.metrics import MetricsReport
from rolljax.recipe import Phase, Recipe
from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.rollout.domain_rewards import open_rewards
from rolljax.rollout.domains import DomainSettings, group_filters
from rolljax.rollout.filters import FilterConfig
from rolljax.rollout.group_buffer import TailBatching
from rolljax.rollout.mixture_rules import Curriculum, Ddk, MixtureShares, Perplexities, Scheduled
from rolljax.run.step_metrics import add_domains, add_heldout
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.types import Group, Key, SamplingParams, Task, Trajectory, Turn


class Say(EnvSpec):
    """Tasks `word 0`, `word 1`, ...; the right answer is the number. num: different ones (None: without end)."""

    def __init__(self, word, num=None, turns=1, runs="inline"):
        self.word, self.num, self._turns, self.runs = word, num, turns, runs

    name = property(lambda self: self.word)
    max_turns = property(lambda self: self._turns)
    num_tasks = property(lambda self: self.num)

    def task(self, index):
        return Task(self.word, index, f"{self.word} {index % self.num if self.num else index}")

    def make(self):
        return SayEnv(self)

    def final_answer(self, task, text):
        return f"{self.word}:{text.strip()}"


class SayEnv(Env):
    def __init__(self, spec):
        self.spec = spec

    def reset(self, task):
        assert task.env == self.spec.word, "a task of another environment"
        self.answer = task.content.split()[1]
        from rolljax.types import Message

        return (Message("user", task.content),)

    def step(self, action):
        right = action.strip() == self.answer
        return StepResult((), float(right), terminated=True, success=right)

    def reference_answer(self):
        return self.answer


def mixture(**weights):
    return Mixture({name: Domain(Say(f"say_{name}"), weight) for name, weight in weights.items()})


# ---- one environment


def test_indices_are_tasks_and_tasks_are_indices():
    spec = mixture(a=1.0, b=3.0, c=0.5)
    for index in range(30):
        task = spec.task(index)
        assert task == spec.task(task.index) and task.index == index
        inner = spec.inner(task)
        assert inner == spec.of[task.env].env.task(index // 3) and spec.outer(task.env, inner) == task
    assert [spec.task(i).env for i in range(4)] == ["a", "b", "c", "a"]
    with pytest.raises(EnvError, match="'d'; the mixture has a, b, c"):
        spec.inner(Task("d", 0, ""))


def test_everything_goes_by_the_domain():
    two = Domain(Say("long", turns=6), max_turns=3)
    spec = Mixture({"short": Domain(Say("short")), "long": two})
    assert spec.max_turns == 3 and [spec.turns_of(spec.task(i)) for i in (0, 1)] == [1, 3]
    assert spec.final_answer(spec.task(1), " 7") == "long:7"
    env = spec.make()
    for index in (4, 5):
        initial_messages = env.reset(spec.task(index))
        assert initial_messages[0].content == spec.task(index).content
        assert env.step(env.reference_answer()).success
    with pytest.raises(EnvError, match="not reset"):
        spec.make().step("x")
    assert dict(spec.specs) == {"short": spec.of["short"].env, "long": two.env}
    assert dict(Say("x").specs).keys() == {"x"}


def test_a_mixture_by_reference():
    ref = "mixture(domains={'sums': 'questions(path=\"sums.jsonl\")', 'lake': 'frozen_lake(size=4)'})"
    spec = make_spec(ref)
    assert isinstance(spec, Mixture) and isinstance(spec.of["sums"].env, Questions)
    again = make_spec(ref_of(spec))
    assert [again.task(i) for i in range(6)] == [spec.task(i) for i in range(6)]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mixture({}), "is empty"),
        (lambda: Mixture({"a/b": Domain(Say("x"))}), "no name for a domain"),
        (lambda: Mixture({"a": Domain(mixture(b=1.0))}), "is a mixture already"),
        (lambda: mixture(a=0.0), "0 for every domain"),
        (lambda: Domain(Say("x"), max_turns=2), "more than an episode of x can have"),
        (lambda: Domain(Say("x"), weight=-1), "weight"),
    ],
)
def test_what_is_no_mixture_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


# ---- tasks


def test_each_domain_keeps_its_tasks_and_its_split():
    spec = mixture(a=3.0, b=1.0)
    heldout = held_out(spec, 20, 0.2)
    assert [t.env for t in heldout] == ["a"] * 15 + ["b"] * 5
    assert [spec.inner(t) for t in heldout[:15]] == held_out(spec.of["a"].env, 15, 0.2)
    stream, alone = MixtureStream(spec, 3, 0.2), TaskStream(spec.of["a"].env, 3, 0.2)
    drawn = [stream.of("a") for _ in range(50)]
    assert [spec.inner(t) for t in drawn] == [next(alone) for _ in range(50)]
    assert not any(is_held_out(spec.inner(t), 0.2) for t in drawn)
    assert [t.env for t in first_tasks(spec, 4)] == ["a", "a", "a", "b"]
    rare = mixture(a=1000.0, b=1.0)
    assert [t.env for t in held_out(rare, 3, 0.2)] == ["a", "a", "b"]  # every domain is evaluated
    with pytest.raises(DataError, match="not enough for the 2 domains"):
        held_out(rare, 1, 0.2)


def test_the_position_of_every_domain_is_saved():
    spec = Mixture({"a": Domain(Say("a")), "b": Domain(Say("b", 9)), "c": Domain(Say("c"), num_tasks=4)})
    stream, order = open_stream(spec, 0, 0.1), np.random.default_rng(0).choice(list("abc"), 80)
    whole = [stream.of(name) for name in order]
    stream = open_stream(spec, 0, 0.1)
    assert [stream.of(name) for name in order[:37]] == whole[:37]
    again = open_stream(spec, 0, 0.1)
    again.restore(json.loads(json.dumps(stream.state())))
    assert [again.of(name) for name in order[37:]] == whole[37:]


@pytest.mark.parametrize("domain", [Domain(Say("few", 12)), Domain(Say("many"), num_tasks=11)])
def test_a_domain_that_has_an_end_is_renewed(domain):
    spec = Mixture({"x": domain})
    stream = open_stream(spec, 0, 0.1)
    num = len({t.content for t in (stream.of("x") for _ in range(40))})
    assert 8 <= num <= 12
    stream = open_stream(spec, 0, 0.1)
    rounds = [[stream.of("x").content for _ in range(num)] for _ in range(3)]
    assert all(len(set(r)) == num for r in rounds), "a task came again before all had come"
    assert sorted(rounds[0]) == sorted(rounds[1]) and rounds[0] != rounds[1]


def test_rows_that_ask_the_same_and_record_different_answers_are_all_trained_on():
    """A held-out question is held out with all of its answers."""
    rows = [{"question": f"q{i // 2}", "answer": str(i)} for i in range(40)]
    spec = Mixture({"x": Domain(Questions(records=rows))})
    out = {task.content for task in held_out(spec, 2, 0.5)}
    stream = open_stream(spec, 0, 0.5)
    want = [i for i, row in enumerate(rows) if not is_held_out(Questions(records=rows).task(i), 0.5)]
    for _ in range(2):
        assert sorted(spec.inner(stream.of("x")).index for _ in want) == want
    assert len(want) < 40 and not out & {rows[i]["question"] for i in want}


def test_the_end_of_a_domain_is_an_error_with_when_dry_error():
    spec = Mixture({"x": Domain(Say("few", 12), when_dry="error"), "y": Domain(Say("y"))})
    stream, drawn = open_stream(spec, 0, 0.1), 0
    with pytest.raises(DataError, match=r"few is dry.*Domain.num_tasks"):
        for drawn in range(100):
            stream.of("x")
            if drawn == 5:  # also in a run that goes on
                state, stream = stream.state(), open_stream(spec, 0, 0.1)
                stream.restore(state)
    assert drawn == len({Say("few", 12).task(i).id for i in range(12) if not is_held_out(Say("few", 12).task(i), 0.1)})
    assert stream.of("y").env == "y"
    with pytest.raises(DataError, match="no task left"):
        open_stream(Mixture({"x": Domain(Say("one", 1), num_tasks=1)}), 0, 1.0)


# ---- pools


def test_episodes_run_where_each_domain_belongs():
    spec = Mixture({"here": Domain(Say("here")), "wait": Domain(Say("wait", runs="thread"))})
    pool = open_pool(PoolConfig(), spec)
    assert isinstance(pool, MixedPool) and not pool.opens_at_once and len(pool.inboxes) == 2
    assert open_pool(PoolConfig(), mixture(a=1.0, b=1.0)).opens_at_once

    async def play():
        for index in range(6):
            task = spec.task(index)
            episode = await pool.open(task)
            assert episode.domain == task.env
            assert (await episode.step(await episode.reference_answer())).success
            await episode.close()
        with pytest.raises(EnvError, match="the mixture has"):
            await pool.open(Task("nowhere", 0, ""))

    try:
        asyncio.run(play())
        assert pool.stats.opened == pool.stats.closed == 6 and pool.stats.steps == 6 and not pool.broken
    finally:
        pool.close()


# ---- shares by rule


def test_ddk_by_hand():
    """Equations 1 and 2 of arXiv 2407.16154, worked out in float64."""
    rule, names = Ddk(), ("a", "b", "c")
    weights = dict.fromkeys(names, 1 / 3)
    found = {name: Perplexities(ppl, 4.0) for name, ppl in zip(names, (12.0, 8.0, 6.0), strict=True)}
    first = rule.measured(weights, {}, found)
    assert tuple(first["shares"].values()) == pytest.approx((0.628532, 0.231224, 0.140244), abs=1e-6)
    assert tuple(first["ratios"].values()) == (3.0, 2.0, 1.5)
    second = rule.measured(weights, first, found)
    assert tuple(rule.shares(weights, 0, second).values()) == pytest.approx((0.588564, 0.223764, 0.187672), abs=1e-6)
    worst = found | {"c": Perplexities(1e30, 1.0)}
    memory = first
    for _ in range(30):
        memory = rule.measured(weights, memory, worst)
        shares = rule.shares(weights, 0, memory)
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= (1 - rule.smoothing) / 3
    assert shares["c"] == pytest.approx(2 / 3, abs=1e-3)


def test_ddk_measures_every_so_often_and_once():
    shares = MixtureShares({"a": 1.0, "b": 1.0}, Ddk(every=10, tasks=7))
    found = {"a": Perplexities(3.0, 1.0), "b": Perplexities(1.0, 1.0)}
    for step in range(25):
        assert shares.asks(step) == (7 if step % 10 == 0 else 0)
        if shares.asks(step):
            shares.measured(step, found)
        assert not shares.asks(step)
    again = MixtureShares({"a": 1.0, "b": 1.0}, Ddk(every=10, tasks=7))
    again.restore(json.loads(json.dumps(shares.state())))
    assert again.row() == shares.row() and again.shares(25) == shares.shares(25) and not again.asks(20)
    assert shares.row()["domain/a/perplexity_ratio"] == 3.0


def test_scheduled_shares():
    at = {0: {"a": 3.0, "b": 1.0}, 10: {"a": 1.0, "b": 1.0}, 20: {"a": 0.0, "b": 2.0}}
    line = lambda step, between="linear": dict(Scheduled(at, between).shares({"a": 0.5, "b": 0.5}, step, {}))  # noqa: E731
    assert line(0)["a"] == 0.75 and line(5)["a"] == pytest.approx(0.625) and line(10)["a"] == 0.5
    assert line(15)["b"] == pytest.approx(0.75) and line(500) == {"a": 0.0, "b": 1.0}
    assert line(9, "step")["a"] == 0.75 and line(10, "step")["a"] == 0.5


def test_a_curriculum_favours_what_is_neither_hard_nor_easy():
    shares = MixtureShares({"easy": 1.0, "right": 1.0, "hard": 1.0}, Curriculum(memory=0.5))
    assert set(shares.shares(0).values()) == {1 / 3}
    for _ in range(8):
        shares.learn([group("easy", 1, 1, 1), group("right", 1, 0), group("hard", 0, 0, 0)])
    now = shares.shares(8)
    assert now["right"] > 0.7 and now["easy"] == pytest.approx(now["hard"]) and now["hard"] >= 0.1
    for _ in range(8):
        shares.learn([group("hard", 1, 0), group("right", 1, 1)])
    assert shares.shares(16)["hard"] > shares.shares(16)["right"]
    unlucky = MixtureShares({"a": 1.0, "b": 3.0}, Curriculum(width=1e-3))
    unlucky.learn([group("a", 1), group("b", 0)])
    assert unlucky.shares(1) == {"a": 0.25, "b": 0.75}  # nothing is near the target


def group(domain, *solved, status="ok", prompt_index=0):
    task = Task(domain, 0, "x")
    none = np.zeros(0, np.int32)
    turn = Turn(none, none, none.astype(np.float32), none, "stop", 0.0, "x")
    members = (
        Trajectory(Key(0, prompt_index, i), task, (turn,), float(s), {}, bool(s), status) for i, s in enumerate(solved)
    )
    return Group(task, prompt_index, tuple(members))


# ---- what training does with domains


def row_of(add, *args):
    add(report := MetricsReport(), *args)
    return report.row()


def test_rows_by_domain():
    spec = mixture(a=1.0, b=1.0, c=1.0)
    groups = [group("a", 1, 0), group("b", 1, 1, prompt_index=1), group("b", 0, 0, prompt_index=2)]
    row = row_of(add_domains, groups[:2], groups, spec)
    assert row["domain/a/reward_mean"] == 0.5 and row["domain/b/success_frac"] == 0.5
    assert (row["domain/a/trained_n"], row["domain/b/trained_n"], row["domain/c/trained_n"]) == (1, 1, 0)
    assert "domain/c/reward_mean" not in row and row_of(add_domains, groups, groups, Say("a")) == {}
    held = row_of(add_heldout, [t for g in groups for t in g.trajectories], spec)
    assert held["heldout/reward_mean"] == 0.5 and held["domain/b/heldout_mean"] == 0.5


def filtered(groups, cfg, own):
    filters = group_filters(cfg, own)
    return filters.step(groups, [filters.group(g) for g in groups])


def test_each_domain_has_its_own_filter():
    tampering = dataclass_metrics(group("a", 1, 1, prompt_index=1))
    lost = group("b", 0, 0, status="failed", prompt_index=2)
    groups = [tampering, group("b", 1, 0, prompt_index=3), lost, group("a", 1, 0, prompt_index=4)]
    own = {"a": DomainSettings(filters=FilterConfig(tampering="drop"))}
    kept = filtered(groups, FilterConfig(max_failed_frac=0.5), own)
    assert [k[0].key.prompt_index for k in kept] == [3, 4]
    kept = filtered(groups, FilterConfig(max_failed_frac=0.4), own)
    assert [k[0].key.prompt_index for k in kept] == [4]  # too much of b was lost, which says nothing of a
    assert len(filtered(groups, FilterConfig(max_failed_frac=0.4), {})) == 3


def dataclass_metrics(of):
    import dataclasses

    members = tuple(dataclasses.replace(t, metrics={"tamper_n": 1.0}) for t in of.trajectories)
    return dataclasses.replace(of, trajectories=members)


class Constant(RewardConfig):
    """The index of the task, as its own environment knows it, plus a number."""

    name, is_free = "constant", True

    def __init__(self, value):
        self.value = value

    def open(self, around):
        return ConstantScorer(self.value, around)


class ConstantScorer:
    def __init__(self, value, around):
        self.value, self.around = value, around

    async def score(self, task, trajectory):
        assert task == trajectory.task and self.around.env.task(task.index) == task
        return Reward(self.value + task.index)

    def counts(self):
        return {"calls": 1}

    async def close(self):
        pass


def test_each_domain_has_its_own_reward():
    spec = mixture(a=1.0, b=1.0, c=1.0)
    own = {"b": DomainSettings(reward=Constant(100.0))}
    scoring = open_rewards(Constant(10.0), own, RewardContext(spec), 5.0)
    base = group("a", 1).trajectories[0]

    async def score(index):
        import dataclasses

        return await scoring.score(dataclasses.replace(base, task=spec.task(index)))

    scored = [asyncio.run(score(i)) for i in (0, 1, 2, 7)]
    assert [t.reward for t in scored] == [10.0, 100.0, 10.0, 102.0]
    assert [t.task for t in scored] == [spec.task(i) for i in (0, 1, 2, 7)]
    assert open_rewards(None, {}, RewardContext(spec), 5.0) is None
    only = open_rewards(None, own, RewardContext(spec), 5.0)
    assert only.scorer(spec.task(0)) is None and only.scorer(spec.task(1)) is not None


def test_each_domain_is_sampled_its_own_way():
    own = DomainSettings(max_answer_tok=4, top_p=0.9, top_k=5)
    params = SamplingParams(0.7, 16, (1,))
    assert own.sampling(params, in_training=True) == SamplingParams(0.7, 4, (1,), top_k=5, top_p=0.9)
    assert own.sampling(params, in_training=False) == SamplingParams(0.7, 4, (1,))
    assert own.truncates and not DomainSettings(max_answer_tok=4, top_k=0).truncates


def build(spec=None, algorithm=None, domains=None, group_size=2, **phase):
    return Recipe(
        spec or mixture(a=1.0, b=1.0),
        (
            Phase(
                "p", algorithm or Grpo(clip_low=None, clip_high=None, dual_clip=None), 3, group_size=group_size, **phase
            ),
        ),
        domains=domains or {},
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: build(tail_batching=TailBatching()), "tail_batching knows no domains"),
        (lambda: build(Say("x"), mixture=Curriculum()), "mixture can have no effect"),
        (lambda: build(Say("x"), domains={"x": DomainSettings()}), "domains can have no effect"),
        (lambda: build(domains={"c": DomainSettings()}), "'c', which is no domain of this run"),
        (lambda: build(domains={"a": DomainSettings(max_answer_tok=99)}), "more than Recipe.max_answer_tok"),
        (lambda: build(mixture=Ddk()), "compares a student with its teacher"),
        (lambda: build(mixture=Scheduled({0: {"a": 1.0, "c": 1.0}})), "'c', which is no domain"),
        (lambda: build(mixture=Scheduled({0: {"a": 1.0}})), "says nothing of b"),
        (lambda: Scheduled({5: {"a": 1.0}}), "from step 0 on"),
        (lambda: build(algorithm=Opd(teachers=(Teacher("run_start", domains=("a", "c")),))), "'c', which is no domain"),
        (lambda: build(algorithm=Opd(teachers=(Teacher("run_start", domains=("a",)),))), "leave out 'b'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_what_can_be_is_not():
    build(mixture=Curriculum(), async_ratio=1.0, late="resample", spare_prompts=2)
    build(algorithm=Distill("run_start"), mixture=Ddk(), group_size=1)
    build(algorithm=Opd(teachers=(Teacher("run_start", domains=("a",)), Teacher("phase_start", domains=("b",)))))
    build(domains={"a": DomainSettings(max_answer_tok=8)})
