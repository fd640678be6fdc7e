"""Episodes: token streams are plain concatenations, ends have a status, failures an owner."""

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.frozen_lake import FrozenLake
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import SamplerError
from rolljax.rollout import GoldPolicy, Rollouts
from rolljax.types import Completion, Key, Message, Sampled, Task

LAKE = Task("frozen_lake", 0, "SFF\nHFH\nFFG")
KEY = Key(0, 0, 0, 0)


@pytest.fixture(scope="module")
def pool():
    pool = EnvPool(PoolConfig())
    yield pool
    pool.close()


@dataclasses.dataclass(eq=False)
class Script:
    """A policy that reads its answers from a list, one per turn, and remembers what it was shown.

    An answer that ends with "..." is cut short: no closing token, finish reason `reason`.
    """

    chat: object
    answers: list
    reason: str = "length"
    seen: dict = dataclasses.field(default_factory=dict)

    async def act(self, prompt_ids, env, key, turn):
        self.seen.setdefault(key.sibling, []).append(prompt_ids)
        answer = self.answers[turn]
        if isinstance(answer, Exception):
            raise answer
        cut = answer.endswith("...")
        tokens = self.chat.answer_ids(answer.removesuffix("..."))[: -1 if cut else None]
        n = len(tokens)
        logp = -np.arange(1, n + 1, dtype=np.float32) - 100 * turn
        sampled = Sampled.of(tokens, logp, np.full(n, turn, np.int32))
        return Completion(sampled, self.reason if cut else "stop", 0.25, 0.5)


def play(chat, pool, answers, spec=None, task=LAKE, max_context=500, reason="length"):
    policy = Script(chat, answers, reason)
    rollouts = Rollouts(spec or FrozenLake(size=3, max_turns=5), pool, chat, policy, max_context)
    return asyncio.run(rollouts.trajectory(task, KEY)), policy


def test_a_stream_is_prompts_and_samples_one_after_the_other(chat, pool):
    answers = ["right", "nowhere", "down", "down", "right"]
    got, policy = play(chat, pool, answers)
    assert (got.status, got.success, got.reward, got.key, got.task) == ("ok", True, 1.0, KEY, LAKE)
    assert got.reward_parts == {"goal": 1.0, "no_move": 1.0}
    assert [t.text for t in got.turns] == answers and [t.reward for t in got.turns] == [0, 0, 0, 0, 1]

    boards = ["PFF\nHFH\nFFG", "SPF\nHFH\nFFG", "SPF\nHFH\nFFG", "SFF\nHPH\nFFG", "SFF\nHFH\nFPG"]
    messages = [Message("user", boards[0])]
    for turn, (board, answer) in enumerate(zip(boards[1:] + [""], answers, strict=True)):
        np.testing.assert_array_equal(policy.seen[0][turn], chat.prompt_ids(messages))
        messages += [Message("assistant", answer), Message("user", board)]

    tokens, sampled, logp = got.stream()
    np.testing.assert_array_equal(tokens, np.concatenate([policy.seen[0][-1], chat.answer_ids("right")]))
    assert tokens[sampled].tolist() == [i for a in answers for i in chat.answer_ids(a).tolist()]
    want_logp = [-(i + 1) - 100 * turn for turn, a in enumerate(answers) for i in range(len(a) + 1)]
    assert logp[sampled].tolist() == want_logp and not logp[~sampled].any()
    assert len(got.stream()[0]) == len(tokens) and got.num_sampled_tok == sampled.sum()
    assert got.sample_s == 0.75 * 5 and [t.versions[0] for t in got.turns] == [0, 1, 2, 3, 4]


def test_gold_answers_play_through_the_same_function(chat, pool):
    rollouts = Rollouts(FrozenLake(), pool, chat, GoldPolicy(pool, chat, 64), 500)
    group = asyncio.run(rollouts.group(FrozenLake().task(4), stream=1, step=2, index=3, group_size=2))
    assert [t.key for t in group.trajectories] == [Key(1, 2, 3, 0), Key(1, 2, 3, 1)]
    assert (group.step, group.index, group.rewards.tolist()) == (2, 3, [1, 1])
    for trajectory in group.trajectories:
        assert trajectory.status == "ok" and trajectory.success
        assert all((t.versions == -1).all() and not t.sampler_logp.any() for t in trajectory.turns)


@dataclasses.dataclass(frozen=True)
class Choice(EnvSpec):
    """Two turns; each has a better and a worse answer, and the second turn is no example for supervised training."""

    max_turns: int = 2

    @property
    def name(self):
        return "choice"

    def task(self, index):
        return Task("choice", index, f"task {index}")

    def make(self):
        return ChoiceEnv()


class ChoiceEnv(Env):
    def reset(self, task):
        self.turn = 0
        return (Message("user", task.content),)

    def step(self, action):
        self.turn += 1
        done = self.turn == 2
        reward = 1.0 if action.startswith("good") else -1.0
        return StepResult(() if done else (Message("user", "next"),), reward, done, weight=0.25 if done else 1.0)

    def gold(self):
        return f"good {self.turn}"

    def rejected(self):
        return f"bad {self.turn}"


def test_pairs_are_a_gold_answer_and_a_rejected_one(chat, pool):
    rollouts = Rollouts(Choice(), pool, chat, GoldPolicy(pool, chat, 64, pairs=True), 500)
    group = asyncio.run(rollouts.group(Choice().task(0), stream=0, step=0, index=0, group_size=2))
    assert [[t.text for t in m.turns] for m in group.trajectories] == [["good 0", "good 1"], ["bad 0", "bad 1"]]
    assert group.rewards.tolist() == [2, -2]
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            np.testing.assert_array_equal(turn.tokens, chat.answer_ids(turn.text))
            assert (turn.versions == -1).all() and not turn.sampler_logp.any()


def test_an_environment_without_rejected_answers_says_so(chat, pool):
    rollouts = Rollouts(FrozenLake(), pool, chat, GoldPolicy(pool, chat, 64, pairs=True), 500)
    group = asyncio.run(rollouts.group(FrozenLake().task(4), stream=0, step=0, index=0, group_size=2))
    assert [t.status for t in group.trajectories] == ["ok", "failed"]
    failed = group.trajectories[1]
    assert failed.error_owner == "env" and "no rejected answers" in failed.error


def test_a_turn_keeps_the_weight_its_environment_gave_it(chat, pool):
    got, _ = play(chat, pool, ["good", "bad"], Choice(), Choice().task(0))
    assert [t.weight for t in got.turns] == [1.0, 0.25] and [t.reward for t in got.turns] == [1, -1]


@pytest.mark.parametrize("reason", ["length", "context"])
def test_an_answer_cut_short_ends_the_episode_as_truncated(chat, pool, reason):
    got, _ = play(chat, pool, ["right", "do..."], reason=reason)
    assert got.status == "truncated" and len(got.turns) == 2 and not got.error
    assert got.turns[-1].finish_reason == reason and got.turns[-1].tokens[-1] not in chat.stop_ids


def test_an_episode_that_outgrows_the_context_is_truncated(chat, pool):
    whole, _ = play(chat, pool, ["right", "down", "down", "right"])
    two_turns = sum(len(t.prompt_ids) + len(t.tokens) for t in whole.turns[:2])
    third_prompt = two_turns + len(whole.turns[2].prompt_ids)
    got, policy = play(chat, pool, ["right", "down", "down", "right"], max_context=third_prompt)
    assert got.status == "truncated" and len(got.turns) == 2 and len(got.stream()[0]) == two_turns
    assert all(len(ids) < third_prompt for ids in policy.seen[0])
    got, _ = play(chat, pool, ["right", "down", "down", "right"], max_context=third_prompt + 1)
    assert len(got.turns) == 3


def test_the_environments_own_limit_is_a_truncation(chat, pool):
    got, _ = play(chat, pool, ["x"] * 5)
    assert got.status == "truncated" and len(got.turns) == 5 and got.reward == 0


# ---- failures -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Faulty(EnvSpec):
    """Two turns of reward 1. `fault` happens at `where`; at "step" to those who say "bad" only."""

    where: str
    fault: object

    max_turns: int = 2

    @property
    def name(self):
        return "faulty"

    def task(self, index):
        return Task("faulty", index, f"task {index}")

    def make(self):
        if self.where == "make":
            raise self.fault
        return FaultyEnv(self)


class FaultyEnv(Env):
    def __init__(self, spec):
        self.spec, self.turn = spec, 0

    def reset(self, task):
        if self.spec.where == "reset":
            raise self.spec.fault
        return (Message("user", task.content),)

    def step(self, action):
        self.turn += 1
        reward = 1.0
        if self.spec.where == "step" and action == "bad":
            if isinstance(self.spec.fault, Exception):
                raise self.spec.fault
            reward = self.spec.fault
        return StepResult((Message("user", "next"),) if self.turn == 1 else (), reward, terminated=self.turn == 2)

    def gold(self):
        return "good"

    def close(self):
        if self.spec.where == "close":
            raise self.spec.fault


def group_of(chat, pool, spec, answers):
    """A group in which sibling i answers `answers[i]` in every turn."""

    class PerSibling:
        async def act(self, prompt_ids, env, key, turn):
            return await Script(chat, [answers[key.sibling]] * 2).act(prompt_ids, env, key, turn)

    rollouts = Rollouts(spec, pool, chat, PerSibling(), 500)
    return asyncio.run(rollouts.group(spec.task(0), stream=0, step=0, index=0, group_size=len(answers)))


@pytest.mark.parametrize("fault", [KeyError("hole"), math.nan, math.inf, None], ids=str)
def test_a_failing_step_fails_its_trajectory_and_no_other(chat, pool, fault):
    group = group_of(chat, pool, Faulty("step", fault), ["good", "bad", "good"])
    assert [t.status for t in group.trajectories] == ["ok", "failed", "ok"]
    failed = group.trajectories[1]
    assert failed.error_owner == "env" and ("step of faulty" in failed.error or "not a number" in failed.error)
    assert failed.turns == () and not failed.success
    assert np.isfinite(group.rewards).all() and group.rewards.tolist() == [2, 0, 2]


@pytest.mark.parametrize("where", ["reset", "make"])
def test_an_environment_that_cannot_start_fails_with_its_owner(chat, pool, where):
    group = group_of(chat, pool, Faulty(where, OSError("no display")), ["good", "good"])
    assert [t.status for t in group.trajectories] == ["failed", "failed"]
    assert all(t.error_owner == "env" and "OSError: no display" in t.error for t in group.trajectories)


def test_a_failing_close_is_not_the_episodes_failure(chat, pool):
    (trajectory,) = group_of(chat, pool, Faulty("close", OSError("x")), ["good"]).trajectories
    assert trajectory.status == "ok" and trajectory.reward == 2


def test_a_sampler_that_stops_is_the_samplers_failure(chat, pool):
    got, _ = play(chat, pool, ["right", SamplerError("the sampler has stopped")])
    assert (got.status, got.error_owner, got.error) == ("failed", "sampler", "the sampler has stopped")
    assert len(got.turns) == 1
