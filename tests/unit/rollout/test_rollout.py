"""Episodes: token streams are plain concatenations, ends have a status, failures an owner."""

import asyncio
import dataclasses
import math
import time

import numpy as np
import pytest

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.catalog import task_of
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError, InfraError, SamplerError
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.rollout.episodes import RolloutConfig, Rollouts, ScriptedPolicy
from rolljax.rollout.start_states import Chunk, Start, digest
from rolljax.types import EVAL_STREAM, Completion, Fault, Key, Message, Sampled, Task

LAKE = Task("frozen_lake", 0, "SFF\nHFH\nFFG")
KEY = Key(0, 0, 0)
PLAIN = RolloutConfig()


@dataclasses.dataclass(eq=False)
class Script:
    """A policy that reads its answers from a list, one per turn, and remembers what it was shown.

    An answer that ends with "..." is cut short: no closing token, finish reason `reason`.
    """

    version = 0

    chat: object
    answers: list
    reason: str = "length"
    seen: dict = dataclasses.field(default_factory=dict)

    async def act(self, prompt_ids, episode, key, turn, min_version=0):
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


def roll(chat, spec, policy, task, *, cfg=PLAIN, max_context=500, max_answer_tok=64, hash_observations=False, **how):
    """Return one trajectory of `KEY`, or with `group_size` a group."""
    pool = EnvPool(PoolConfig(), spec)
    rollouts = Rollouts(pool, chat, policy, spec.max_turns, max_context, max_answer_tok, cfg, hash_observations)
    try:
        if "group_size" in how:
            return asyncio.run(rollouts.group(task, **how))
        return asyncio.run(rollouts.trajectory(task, KEY, **how))
    finally:
        pool.close()


def play(chat, answers, spec=None, task=LAKE, reason="length", **settings):
    policy = Script(chat, answers, reason)
    return roll(chat, spec or FrozenLake(size=3, max_turns=5), policy, task, **settings), policy


@pytest.mark.parametrize(("turns", "status"), [(1, "truncated"), (2, "failed")])
def test_one_turn_goes_with_a_template_that_rewrites_earlier_turns(turns, status):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.last else '' }}<|end|>{% endfor %}"
    chat, pool = Chat(tokenizer), EnvPool(PoolConfig(), FrozenLake(size=3, max_turns=5))
    rollouts = Rollouts(pool, chat, Script(chat, ["right", "right"]), turns, 500, 64)
    try:
        assert asyncio.run(rollouts.trajectory(LAKE, KEY)).status == status
    finally:
        pool.close()


def test_a_stream_is_prompts_and_samples_one_after_the_other(chat):
    answers = ["right", "nowhere", "down", "down", "right"]
    got, policy = play(chat, answers)
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


def test_reference_answers_play_through_the_same_function(chat):
    lake = FrozenLake()
    group = roll(chat, lake, ScriptedPolicy(chat, 64), lake.task(4), stream=1, prompt_index=3, group_size=2)
    assert [t.key for t in group.trajectories] == [Key(1, 3, 0), Key(1, 3, 1)]
    assert (group.prompt_index, group.rewards.tolist()) == (3, [1, 1])
    for trajectory in group.trajectories:
        assert trajectory.status == "ok" and trajectory.success
        assert all((t.versions == -1).all() and not t.sampler_logp.any() for t in trajectory.turns)


@dataclasses.dataclass(frozen=True)
class Choice(EnvSpec):
    """Two turns; each has a better and a worse answer, and the second turn is no example for supervised training."""

    runs = "inline"

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

    def reference_answer(self):
        return f"good {self.turn}"

    def rejected(self):
        return f"bad {self.turn}"


def test_pairs_are_a_reference_answer_and_a_rejected_one(chat):
    pairs = ScriptedPolicy(chat, 64, pairs=True)
    group = roll(chat, Choice(), pairs, Choice().task(0), stream=0, prompt_index=0, group_size=2)
    assert [[t.text for t in m.turns] for m in group.trajectories] == [["good 0", "good 1"], ["bad 0", "bad 1"]]
    assert group.rewards.tolist() == [2, -2]
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            np.testing.assert_array_equal(turn.tokens, chat.answer_ids(turn.text))
            assert (turn.versions == -1).all() and not turn.sampler_logp.any()


def test_an_environment_without_rejected_answers_says_so(chat):
    pairs, lake = ScriptedPolicy(chat, 64, pairs=True), FrozenLake()
    group = roll(chat, lake, pairs, lake.task(4), stream=0, prompt_index=0, group_size=2)
    assert [t.status for t in group.trajectories] == ["ok", "failed"]
    failed = group.trajectories[1]
    assert failed.fault.kind == "env" and "no rejected answers" in failed.fault.detail


def test_a_turn_keeps_the_weight_its_environment_gave_it(chat):
    got, _ = play(chat, ["good", "bad"], Choice(), Choice().task(0))
    assert [t.weight for t in got.turns] == [1.0, 0.25] and [t.reward for t in got.turns] == [1, -1]


@pytest.mark.parametrize("reason", ["length", "context"])
def test_an_answer_cut_short_ends_the_episode_as_truncated(chat, reason):
    got, _ = play(chat, ["right", "do..."], reason=reason)
    assert (
        got.status == "truncated"
        and len(got.turns) == 2
        and got.fault == Fault("limit", "answer", f"an answer was cut: {reason}")
    )
    assert got.turns[-1].finish_reason == reason and got.turns[-1].tokens[-1] not in chat.stop_ids


def test_an_episode_that_outgrows_the_context_is_truncated(chat):
    whole, _ = play(chat, ["right", "down", "down", "right"])
    two_turns = sum(len(t.prompt_ids) + len(t.tokens) for t in whole.turns[:2])
    third_prompt = two_turns + len(whole.turns[2].prompt_ids)
    got, policy = play(chat, ["right", "down", "down", "right"], max_context=third_prompt)
    assert got.status == "truncated" and len(got.turns) == 2 and len(got.stream()[0]) == two_turns
    assert all(len(ids) < third_prompt for ids in policy.seen[0])
    got, _ = play(chat, ["right", "down", "down", "right"], max_context=third_prompt + 1)
    assert len(got.turns) == 3


def test_the_environments_own_limit_is_a_truncation(chat):
    got, _ = play(chat, ["x"] * 5)
    assert got.status == "truncated" and len(got.turns) == 5 and got.reward == 0


# ---- failures -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Faulty(EnvSpec):
    """Two turns of reward 1. `fault` happens at `where`; at "step" to those who say "bad" only."""

    runs = "inline"

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

    def reference_answer(self):
        return "good"

    def close(self):
        if self.spec.where == "close":
            raise self.spec.fault


def group_of(chat, spec, answers):
    """Return a group in which sibling i answers `answers[i]` in every turn."""

    class PerSibling:
        version = 0

        async def act(self, prompt_ids, episode, key, turn, min_version=0):
            return await Script(chat, [answers[key.sibling]] * 2).act(prompt_ids, episode, key, turn)

    return roll(chat, spec, PerSibling(), spec.task(0), stream=0, prompt_index=0, group_size=len(answers))


@pytest.mark.parametrize("fault", [KeyError("hole"), math.nan, math.inf, None], ids=str)
def test_a_failing_step_fails_its_trajectory_and_no_other(chat, fault):
    group = group_of(chat, Faulty("step", fault), ["good", "bad", "good"])
    assert [t.status for t in group.trajectories] == ["ok", "failed", "ok"]
    failed = group.trajectories[1]
    assert failed.fault.kind == "env" and failed.fault.stage == "step" and failed.attempts == 1
    assert failed.turns == () and not failed.success
    assert np.isfinite(group.rewards).all() and group.rewards.tolist() == [2, 0, 2]


def test_time_that_was_waited_in_vain_is_the_environments(chat):
    """Of the calls that fail as well: what is slow until it passes its limit is not a fast environment."""

    class Slow(FaultyEnv):
        def step(self, action):
            time.sleep(0.2)
            return super().step(action)

    class SlowFaulty(Faulty):
        def make(self):
            return Slow(self)

    (failed,) = group_of(chat, SlowFaulty("step", OSError("gone")), ["bad"]).trajectories
    assert failed.status == "failed" and failed.env_s >= 0.2


@pytest.mark.parametrize("where", ["reset", "make"])
def test_an_environment_that_cannot_start_fails_with_its_owner(chat, where):
    group = group_of(chat, Faulty(where, OSError("no display")), ["good", "good"])
    assert [t.status for t in group.trajectories] == ["failed", "failed"]
    assert all(t.fault.kind == "env" and "OSError: no display" in t.fault.detail for t in group.trajectories)


def test_a_failing_close_is_not_the_episodes_failure(chat):
    (trajectory,) = group_of(chat, Faulty("close", OSError("x")), ["good"]).trajectories
    assert trajectory.status == "ok" and trajectory.reward == 2


def test_a_sampler_that_stops_is_the_samplers_failure(chat):
    got, _ = play(chat, ["right", SamplerError("the sampler has stopped")])
    assert (got.status, got.fault) == ("failed", Fault("infra", "sampler", "the sampler has stopped"))
    assert len(got.turns) == 1


@dataclasses.dataclass(frozen=True)
class Flaky(EnvSpec):
    """Loses its machine in the second turn of the first `failures` episodes of this process."""

    runs = "inline"

    failures: int
    max_turns: int = 2

    @property
    def name(self):
        return "flaky"

    def task(self, index):
        return Task("flaky", index, f"task {index}")

    def make(self):
        return FlakyEnv(self.failures)


class FlakyEnv(Env):
    begun = 0

    def __init__(self, failures):
        FlakyEnv.begun += 1
        self.turn, self.fails = 0, FlakyEnv.begun <= failures

    def reset(self, task):
        return (Message("user", task.content),)

    def step(self, action):
        self.turn += 1
        if self.turn == 2 and self.fails:
            raise InfraError("the machine is gone", stage="step")
        return StepResult((Message("user", "next"),) if self.turn == 1 else (), 1.0, terminated=self.turn == 2)

    def reference_answer(self):
        return "good"


@pytest.mark.parametrize("failures, status", [(2, "ok"), (3, "failed")])
def test_a_lost_machine_is_another_attempt_from_the_same_start_with_the_same_randomness(chat, failures, status):
    FlakyEnv.begun = 0
    got, policy = play(chat, ["a", "b"], Flaky(failures), Flaky(failures).task(0), cfg=RolloutConfig(retries=2))
    assert (got.status, got.attempts, FlakyEnv.begun) == (status, 3, 3)
    assert [len(ids) for ids in policy.seen[0]] == [len(ids) for ids in policy.seen[0][:2]] * 3
    if status == "ok":
        assert got.fault is None and got.reward == 2 and len(got.turns) == 2
    else:
        assert got.fault == Fault("infra", "step", "the machine is gone", retryable=True)


# ---- limits and rules -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Echo(EnvSpec):
    """Says a letter of its own and how many turns there were; ends with "stop"."""

    runs = "inline"

    max_turns: int = 9

    @property
    def name(self):
        return "echo"

    def task(self, index):
        return Task("echo", index, f"task {index}")

    def make(self):
        return EchoEnv()


class EchoEnv(Env):
    def reset(self, task):
        self.turn = 0
        return (Message("system", "rules"), Message("user", "begin"))

    def step(self, action):
        self.turn += 1
        over = action == "stop"
        messages = () if over else (Message("user", f"seen {action if action == 'same' else self.turn}"),)
        return StepResult(messages, 1.0, terminated=over, metrics={"steps_n": 1.0})

    def reference_answer(self):
        return "stop"


def test_dropped_exchanges_leave_the_opening_and_the_newest(chat):
    answers = [f"answer {i}" for i in range(6)] + ["stop"]
    whole, _ = play(chat, answers, Echo(), Echo().task(0))
    assert whole.starts.tolist() == [0] and whole.status == "ok"
    initial_messages = chat.prompt_ids((Message("system", "rules"), Message("user", "begin")))
    exchange = len(whole.turns[1].prompt_ids) + len(whole.turns[1].tokens)
    room = len(initial_messages) + 4 * exchange
    cfg = RolloutConfig("drop_oldest", restarts=2, keep_frac=0.7)
    got, policy = play(chat, answers, Echo(), Echo().task(0), cfg=cfg, max_context=room, max_answer_tok=12)
    assert got.status == "ok" and got.reward == whole.reward == 7 and got.metrics == {"steps_n": 7.0}
    assert [t.restart for t in got.turns] == [False, False, False, False, True, False, True]
    streams = policy.seen[0]
    assert all(len(ids) + 12 <= room for ids in streams)
    for k, turn in enumerate(got.turns):
        if turn.restart:
            np.testing.assert_array_equal(turn.prompt_ids, streams[k])
            np.testing.assert_array_equal(streams[k][: len(initial_messages)], initial_messages)
            # after the opening: the newest exchanges, with the tokens that were sampled
            newest = np.concatenate([whole.turns[k - 1].tokens, whole.turns[k].prompt_ids])
            np.testing.assert_array_equal(streams[k][-len(newest) :], newest)
            assert len(streams[k]) <= 0.7 * room
    tokens, sampled, _ = got.stream()
    np.testing.assert_array_equal(tokens[sampled], np.concatenate([t.tokens for t in whole.turns]))
    np.testing.assert_array_equal(tokens[got.starts[1] :][: len(streams[4])], streams[4])


def test_restarts_are_limited(chat):
    answers = [f"answer {i}" for i in range(8)] + ["stop"]
    cfg = RolloutConfig("drop_oldest", restarts=1, keep_frac=0.5)
    got, _ = play(chat, answers, Echo(), Echo().task(0), cfg=cfg, max_context=80, max_answer_tok=12)
    assert sum(t.restart for t in got.turns) == 1
    assert got.status == "truncated" and got.fault.stage == "context"


LOOPING = ["x", "same", "same", "same", "-", "-", "-", "-", "-"]


def test_a_loop_is_discarded_and_begun_again(chat):
    """arXiv 2512.24873, section 3.2.4.1, dynamic trajectory filtering: rejected, and a new one from the same state."""
    cfg = RolloutConfig(repeats=3)
    got, policy = play(chat, [*LOOPING, "x", "y", "stop"], Echo(), Echo().task(0), cfg=cfg)
    assert got.status == "ok" and [t.text for t in got.turns] == ["x", "y", "stop"] and got.reward == 3
    assert (got.loops, got.attempts) == (1, 1)
    np.testing.assert_array_equal(policy.seen[0][4], policy.seen[0][0])
    got, _ = play(chat, ["x"] * 8 + ["stop"], Echo(), Echo().task(0), cfg=cfg)
    assert got.status == "ok" and not got.loops  # the same answer, but what it does is not the same


def test_what_always_loops_is_left_out(chat):
    got, _ = play(chat, LOOPING * 3, Echo(), Echo().task(0), cfg=RolloutConfig(repeats=3, retries=2))
    assert got.status == "failed" and (got.fault.kind, got.fault.stage) == ("agent", "repeat")
    assert (got.loops, got.attempts) == (3, 1)


def test_a_loop_behind_an_expert_is_begun_again_behind_it(chat):
    """What the expert said twice is no loop of the policy's; its own one is, and starts at the same place."""
    _, whole = recorded(chat, ["same", "same", "stop"])
    start = dataclasses.replace(whole, chunks=whole.chunks[:2])
    answers = ["-", "-", "x", "same", "same", "-", "-", "-", "-", "-", "-", "y", "stop"]
    got, _ = play(chat, answers, Echo(), Echo().task(0), cfg=RolloutConfig(repeats=2), start=start)
    assert [t.text for t in got.turns] == ["same", "same", "y", "stop"] and got.status == "ok"
    assert (got.loops, got.num_replayed, got.expert) == (1, 2, whole.expert)


def test_a_loop_counts_in_an_evaluation(chat):
    cfg = RolloutConfig(repeats=3)
    group = roll(chat, Echo(), Script(chat, LOOPING), LAKE, cfg=cfg, stream=EVAL_STREAM, prompt_index=0, group_size=1)
    (got,) = group.trajectories
    assert len(got.turns) == 4 and got.status == "truncated" and not got.loops
    assert (got.fault.kind, got.fault.stage) == ("agent", "repeat")


def test_answers_of_another_form_cost_something(chat):
    cfg = RolloutConfig(answer_format="<.*>|stop", format_penalty=-0.25)
    got, _ = play(chat, ["<a\n>", "b", "stop"], Echo(), Echo().task(0), cfg=cfg)
    assert [t.reward for t in got.turns] == [1, 0.75, 1] and got.reward_parts == {"format": -0.25}


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"answer_format": "("}, "not a regular expression"),
        ({"answer_format": "(?=x).*", "format_penalty": -1.0}, "of RE2"),
        ({"answer_format": "x"}, "no effect"),
        ({"format_penalty": -1.0}, "no effect"),
        ({"repeats": 1}, "after its first answer"),
        ({"retries": -1}, "negative"),
        ({"keep_frac": 1.0}, "less than 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        RolloutConfig(**settings)


# ---- chunks ---------------------------------------------------------------------------------------------------------


def test_a_turn_is_one_chunk_whatever_stands_in_it(chat):
    """Think tags, tool calls and texts that spell special tokens do not split or shift what was sampled."""
    answers = [
        "<think>a < b</think><tool_call>{}</tool_call>",
        "<tool_call>{1}</tool_call><tool_call>{2}</tool_call>",
        "\n\n",
        "é<|user|>x",
        "cut...",
    ]
    got, policy = play(chat, answers, Echo(), Echo().task(0))
    assert [t.text for t in got.turns] == [a.removesuffix("...") for a in answers]
    tokens, sampled, _ = got.stream()
    chunks = np.split(np.flatnonzero(sampled), np.flatnonzero(np.diff(np.flatnonzero(sampled)) > 1) + 1)
    assert len(chunks) == len(answers) == len(got.turns)
    for chunk, turn, shown in zip(chunks, got.turns, policy.seen[0], strict=True):
        np.testing.assert_array_equal(tokens[chunk], turn.tokens)
        np.testing.assert_array_equal(tokens[: chunk[0]], shown)


# ---- starts and spares ----------------------------------------------------------------------------------------------


def recorded(chat, answers):
    """Return an expert's episode of `Echo`."""
    got, _ = play(chat, answers, Echo(), Echo().task(0), hash_observations=True)
    chunks = (Chunk(t.text, t.tokens, h) for t, h in zip(got.turns, got.observation_hashes[1:], strict=True))
    return got, dataclasses.replace(Start.full(got.observation_hashes[0], tuple(chunks)), imitate=1)


def test_a_replayed_beginning_is_the_experts_and_the_rest_the_policys(chat):
    whole, start = recorded(chat, ["a", "b", "stop"])
    assert len(whole.observation_hashes) == 4 and whole.observation_hashes[-1] == digest(())
    two = dataclasses.replace(start, chunks=start.chunks[:2])
    got, policy = play(chat, ["-", "-", "c", "stop"], Echo(), Echo().task(0), start=two)
    assert [t.text for t in got.turns] == ["a", "b", "c", "stop"] and got.status == "ok"
    assert got.num_replayed == 2 and [t.weight for t in got.turns] == [1, 0, 1, 1]
    assert [(t.versions < 0).all() for t in got.turns] == [True, True, False, False]
    np.testing.assert_array_equal(policy.seen[0][0], whole.stream()[0][: len(policy.seen[0][0])])


@pytest.mark.parametrize("part", ["opening", "chunk"])
def test_an_environment_that_says_something_else_is_not_replayed(chat, part):
    _, start = recorded(chat, ["a", "stop"])
    if part == "opening":
        start = dataclasses.replace(start, initial_messages="0" * 16)
    start = dataclasses.replace(start, chunks=(dataclasses.replace(start.chunks[0], digest="0" * 16),))
    got, _ = play(chat, ["-", "stop"], Echo(), Echo().task(0), start=start)
    assert got.status == "failed" and (got.fault.kind, got.fault.stage) == ("env", "replay")


def test_the_first_complete_of_a_group_and_its_spares_make_it(chat):
    class Slow:
        """Sibling 0 never answers; sibling 2 fails."""

        version = 0

        async def act(self, prompt_ids, episode, key, turn, min_version=0):
            if key.sibling == 0:
                await asyncio.sleep(3600)
            if key.sibling == 2:
                raise SamplerError("gone")
            return await Script(chat, ["stop"]).act(prompt_ids, episode, key, turn)

    group = roll(chat, Echo(), Slow(), Echo().task(0), stream=0, prompt_index=0, group_size=3, spare=2)
    assert [t.key.sibling for t in group.trajectories] == [1, 3, 4] and group.cancelled == 2
    assert all(t.status == "ok" for t in group.trajectories)


@pytest.mark.parametrize(
    "reference",
    [
        "rolljax.envs.tools.calculator.Arithmetic#3", "calculator#3", "rg:spell_backward#3", "questions(records=[{'question': 'Two?', 'answer': 'so #### 2'}])#0",
        "mixture(domains={'one': 'calculator', 'two': 'rg:chain_sum'})#5",
    ],
)  # fmt: skip
def test_a_recorded_answer_is_that_of_the_reference_action(reference):
    spec, task = task_of(reference)
    env = spec.make()
    env.reset(task)
    found = spec.reference(task)
    assert found and (found in env.reference_answer() or "calc(" in env.reference_answer())
    assert FrozenLake().reference(LAKE) is None


def test_a_trajectory_has_the_recorded_answer_of_its_task(chat):
    spec, task = task_of("rolljax.envs.tools.calculator.Arithmetic#3")
    got, _ = play(chat, ["17"], spec, task)
    assert got.reference == str(eval(task.content)) and got.status == "ok"
    assert play(chat, ["down"], reason="length")[0].reference is None


def test_an_environment_that_fails_at_its_recorded_answer_has_failed(chat):
    @dataclasses.dataclass(frozen=True)
    class Forgetful(FrozenLake):
        def reference(self, task):
            return {}[task.index]

    got, _ = play(chat, [], Forgetful(size=3, max_turns=5))
    assert got.fault == Fault("env", "", "reference answer of task 0: KeyError: 0") and got.status == "failed"
