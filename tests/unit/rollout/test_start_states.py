"""Where episodes start: behind a piece of an expert's episode (IPA, arXiv 2512.24873)."""

import asyncio
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError, EnvError
from rolljax.recipes.rome.key_door_chain import KeyDoorChain
from rolljax.rollout.start_states import RECENT, Chunk, ExpertStarts, Start, StartCurriculum, crucial_fork, fallback
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Fault, Group, Key, Trajectory, Turn

CHAIN = KeyDoorChain(length=5, max_turns=6)


@pytest.fixture(scope="module")
def pool():
    pool = EnvPool(PoolConfig(), CHAIN)
    yield pool
    pool.close()


def starts(pool, chat, **settings):
    return StartCurriculum(ExpertStarts(**settings), pool, chat, seed=3, max_turns=CHAIN.max_turns)


def choose(s, task, count=1, first=0):
    async def every():
        return [await s.choose(task, draw) for draw in range(first, first + count)]

    return asyncio.run(every())


def turn(text, chat, version=0):
    tokens = chat.answer_ids(text)
    n = len(tokens)
    return Turn(np.zeros(1, np.int32), tokens, np.zeros(n, np.float32), np.full(n, version), "stop", 0.0, text)


def went(
    chat, task, replayed, successes, *, turns="abcde", observation_hashes=None, status="ok", expert=None, fault=None
):
    """Return a group whose trajectories start with `replayed` replayed turns and have these results."""
    fault = fault or (Fault("infra", "step", "gone") if status == "failed" else None)

    def one(i, success):
        made = tuple(turn(x, chat, -1 if k < replayed else 0) for k, x in enumerate(turns))
        said = {"observation_hashes": observation_hashes, "expert": expert}
        return Trajectory(Key(0, 0, i), task, made, float(success), {}, success, status, fault, **said)

    return Group(task, 0, tuple(one(i, s) for i, s in enumerate(successes)))


# ---- the crucial fork -----------------------------------------------------------------------------------------------


def test_the_crucial_chunk_is_where_the_rate_jumps():
    assert crucial_fork([(0, 16), (1, 16), (12, 16), (13, 16)]) == 1
    assert crucial_fork([(0, 16), (5, 16), (16, 16)]) == 1  # the larger of two jumps


@pytest.mark.parametrize(
    "rates",
    [
        [],
        [(3, 8)],
        [(0, 7), (7, 7)],  # too few
        [(4, 16), (8, 16)],  # a gap of .25
        [(3, 8), (6, 8)],  # .375, but p = .16
        [(12, 16), (1, 16)],  # it falls
    ],
)
def test_no_chunk_stands_out(rates):
    assert crucial_fork(rates) is None


def test_the_test_behind_it_is_fishers():
    """The number of equally likely ways to deal out the successes, counted one by one."""
    for s0, n0, s1, n1 in [(1, 8, 5, 8), (2, 9, 6, 8), (0, 8, 4, 8), (1, 8, 4, 8)]:
        deals = list(itertools.combinations(range(n0 + n1), s0 + s1))
        p = sum(sum(i >= n0 for i in deal) >= s1 for deal in deals) / len(deals)
        assert (crucial_fork([(s0, n0), (s1, n1)], 0.01) == 0) == (p < 0.05), (s0, n0, s1, n1, p)


# ---- rollback -------------------------------------------------------------------------------------------------------


def test_rollback_starts_behind_all_but_the_last_chunk(pool, chat):
    s, task = starts(pool, chat), CHAIN.task(2)
    (start,) = choose(s, task)
    keys = task.content.split()[2]
    assert "".join(c.text for c in start.chunks) == keys[:-1] and start.imitate == 4
    for chunk in start.chunks:
        np.testing.assert_array_equal(chunk.tokens, chat.answer_ids(chunk.text))


def test_the_start_moves_back_one_chunk_when_enough_succeed(pool, chat):
    s, task = starts(pool, chat, window=4, threshold=0.75), CHAIN.task(0)
    distances = []
    for successes in ([1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]):
        (start,) = choose(s, task)
        s.learn([went(chat, task, len(start.chunks), map(bool, successes))], 0)
        distances.append(s.distance)
    assert distances == [1, 2, 2, 3]


def test_rollback_ends_with_starts_at_the_beginning(pool, chat):
    s, task = starts(pool, chat, window=1), CHAIN.task(0)
    for _ in range(9):
        (start,) = choose(s, task)
        s.learn([went(chat, task, len(start.chunks), [True])], 0)
    (start,) = choose(s, task)
    assert s.distance == 5 and not start.chunks and start.expert.turns == 5


def test_failures_of_the_machine_say_nothing(pool, chat):
    s, task = starts(pool, chat, window=2), CHAIN.task(0)
    choose(s, task)
    s.learn([went(chat, task, 4, [True, True], status="failed")], 0)
    assert s.distance == 1 and s.row([])["start_states/distance_n"] == 1


# ---- the crucial chunk of one expert (arXiv 2512.24873, section 3.2.4.4) ---------------------------------------------


def test_behind_the_crucial_chunk_nothing_is_imitated(pool, chat):
    s, task = starts(pool, chat, window=1000), CHAIN.task(0)
    (start,) = choose(s, task)
    groups = [went(chat, task, j, [j > 1] * 16, expert=start.expert) for j in (1, 2, 4)]
    s.learn(groups, 0)
    assert s.fork(start.expert) == 1 and s.row(groups)["start_states/fork_frac"] == 1
    (start,) = choose(s, task)
    assert (len(start.chunks), start.imitate, start.crucial) == (4, 2, None)


def test_rates_belong_to_one_expert(pool, chat):
    """One task is mastered, the other one's third chunk is not: pooled, neither has a gap that says so."""
    s, tasks = starts(pool, chat, window=1000), [CHAIN.task(i) for i in (0, 1)]
    experts = [choose(s, t)[0].expert for t in tasks]
    assert experts[0] != experts[1]
    for j in (2, 3, 4):
        s.learn([went(chat, tasks[0], j, [True] * 32, expert=experts[0])], 0)
        s.learn([went(chat, tasks[1], j, [j > 2] * 8, expert=experts[1])], 0)
    assert [s.fork(e) for e in experts] == [None, 2]


def test_tasks_with_the_same_episode_have_one_expert(pool, chat):
    """Walks of one corridor are different tasks, and the expert's episode is the same one."""
    s = starts(pool, chat)
    (one,), (walk,), (other,) = (choose(s, CHAIN.task(i)) for i in (0, 4, 1))
    assert CHAIN.task(0).id != CHAIN.task(4).id and one.expert == walk.expert != other.expert


def test_a_rate_is_the_present_policys(pool, chat):
    s, task = starts(pool, chat, window=1000), CHAIN.task(0)
    (start,) = choose(s, task)
    s.learn([went(chat, task, 4, [False] * 100, expert=start.expert)], 0)
    assert s.fork(start.expert) == 4
    s.learn([went(chat, task, 4, [True] * RECENT, expert=start.expert)], 1)
    assert s.fork(start.expert) is None


def test_the_last_chunk_can_be_the_crucial_one(pool, chat):
    """Behind the whole episode the success rate is 1: it is the expert's own success."""
    s, task = starts(pool, chat, window=1000), CHAIN.task(0)
    (start,) = choose(s, task)
    s.learn([went(chat, task, 4, [False] * 8, expert=start.expert)], 0)
    (start,) = choose(s, task)
    assert len(start.chunks) == 4 and start.crucial.text == task.content.split()[2][4]


def test_a_loop_is_no_success(pool, chat):
    s, task = starts(pool, chat, window=1000), CHAIN.task(0)
    (start,) = choose(s, task)
    looped = Fault("agent", "repeat", "again")
    s.learn([went(chat, task, 4, [False] * 8, expert=start.expert, status="failed", fault=looped)], 0)
    assert s.fork(start.expert) == 4


# ---- the fallback of eq. 10: no episode succeeds at the fork --------------------------------------------------------


def at_the_fork(chat, text="abcde", keep=2):
    chunks = [Chunk(x, chat.answer_ids(x), "") for x in text]
    whole = Start.full("", chunks)
    return dataclasses.replace(whole, chunks=whole.chunks[:keep], imitate=keep, crucial=chunks[keep])


def test_the_crucial_chunk_is_imitated_where_all_fail(chat):
    """Eq. 10 imitates the expert's chunks c*_1 to c*_f; the last one was not replayed."""
    start, task = at_the_fork(chat), CHAIN.task(0)
    failed = went(chat, task, 2, [False] * 4, turns="abx", expert=start.expert).trajectories
    shown = fallback(start, failed)
    assert [t.text for t in shown.turns] == ["a", "b", "c"] and shown.num_replayed == 3 and not shown.success
    np.testing.assert_array_equal(shown.turns[2].tokens, chat.answer_ids("c"))
    np.testing.assert_array_equal(shown.turns[2].prompt_ids, failed[0].turns[2].prompt_ids)
    # as often as the chunks before it, which all four replay
    assert [t.weight for t in shown.turns] == [0, 0, 4]


@pytest.mark.parametrize("successes", [[True], [False, True, False]])
def test_one_success_at_the_fork_is_enough(chat, successes):
    start = at_the_fork(chat)
    assert fallback(start, went(chat, CHAIN.task(0), 2, successes, turns="abx").trajectories) is None


def test_there_is_no_fallback_elsewhere(chat):
    start, task = at_the_fork(chat), CHAIN.task(0)
    failed = went(chat, task, 2, [False] * 4, turns="abx").trajectories
    assert fallback(dataclasses.replace(start, crucial=None), failed) is None
    assert fallback(start, went(chat, task, 2, [False] * 4, turns="ab").trajectories) is None  # nobody got that far
    assert fallback(start, went(chat, task, 2, [False] * 4, status="failed").trajectories) is None


def test_credit_of_the_fallback_is_that_of_eq_10(chat):
    """Gradient of eq. 10 by hand: lambda_IL gamma^(K*-k) for each of the G = 4 times that a chunk is imitated, K* = 5
    the expert's chunks; nothing for the chunks of failures."""
    start, task = at_the_fork(chat), CHAIN.task(0)
    failed = went(chat, task, 2, [False] * 4, turns="abx", expert=start.expert).trajectories
    e = Episodes.of([[*failed, fallback(start, failed)]], limit_tok=4)
    e = dataclasses.replace(e, trainer_logp=e.sampler_logp)
    algorithm = Ipa(imitation=0.1, gamma=0.95)
    credit = algorithm.credit(e, {})
    assert credit.keep.all()
    c = credit.advantages * credit.weights
    per_chunk = [sum(c[n][e.turns[n] == k][0] for n in range(5)) for k in range(3)]
    np.testing.assert_allclose(per_chunk, [4 * 0.1 * 0.95 ** (5 - k) for k in (1, 2, 3)], rtol=1e-12)
    fresh = ~e.expert & e.mask
    assert fresh.any() and (c[fresh] == 0).all()


# ---- parallel -------------------------------------------------------------------------------------------------------


def test_parallel_starts_are_spread_over_all_chunks_and_belong_to_their_address(pool, chat):
    s, task = starts(pool, chat, mode="parallel"), CHAIN.task(1)
    lengths = [len(x.chunks) if x else 0 for x in choose(s, task, 200)]
    counts = np.bincount(lengths, minlength=5)
    assert len(counts) == 5 and counts.min() >= 200 / 5 - 4 * math.sqrt(200 * 0.16)
    again = starts(pool, chat, mode="parallel")
    assert [len(x.chunks) if x else 0 for x in choose(again, task, 200)] == lengths
    assert [len(x.chunks) if x else 0 for x in choose(again, task, 200, first=200)] != lengths


# ---- the policy's own successes as experts --------------------------------------------------------------------------


def test_own_successes_are_replayed_and_refreshed(pool, chat):
    s, task = starts(pool, chat, expert="success", refresh_every=3), CHAIN.task(0)
    assert choose(s, task) == [None]
    s.learn([went(chat, task, 0, [False, True], turns="abc", observation_hashes=("o", "1", "2", "3"))], 0)
    (start,) = choose(s, task)
    assert [(c.text, c.digest) for c in start.chunks] == [("a", "1"), ("b", "2")] and start.initial_messages == "o"
    s.learn([went(chat, task, 0, [True], turns="xyz", observation_hashes=("o", "4", "5", "6"))], 1)
    assert [c.text for c in choose(s, task)[0].chunks][0] == "a"
    s.learn([], 2)
    assert [c.text for c in choose(s, task)[0].chunks][0] == "x"
    assert choose(s, CHAIN.task(1)) == [None]


def test_all_of_its_state_survives_a_stop(pool, chat):
    task = CHAIN.task(0)
    settings = {"expert": "success", "window": 3}
    s = starts(pool, chat, **settings)
    s.learn([went(chat, task, 0, [True, False, True, True], turns="abc", observation_hashes=("o", "1", "2", "3"))], 0)
    choose(s, task)
    (start,) = choose(s, task)
    s.learn([went(chat, task, 2, [True, True, True], expert=start.expert)], 1)
    assert s.state()["rates"] == {start.expert.id: {"2": "111"}}
    again = starts(pool, chat, **settings)
    again.restore(json.loads(json.dumps(s.state())))
    assert again.state() == s.state() and again.row([]) == s.row([]) and again.distance == 2
    left, right = choose(s, task)[0], choose(again, task)[0]
    assert [c.text for c in left.chunks] == [c.text for c in right.chunks] == ["a"]
    np.testing.assert_array_equal(left.chunks[0].tokens, right.chunks[0].tokens)


@dataclasses.dataclass(frozen=True)
class Unsolved(KeyDoorChain):
    """Its scripted answers do not solve it."""

    def make(self):
        env = super().make()
        env.reference_answer = lambda: "a"
        return env


def test_an_expert_that_fails_is_an_error(chat):
    spec = Unsolved(length=5)
    pool = EnvPool(PoolConfig(), spec)
    try:
        with pytest.raises(EnvError, match="do not solve"):
            choose(StartCurriculum(ExpertStarts(), pool, chat, 0, spec.max_turns), spec.task(0))
    finally:
        pool.close()


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"threshold": 1.5}, {"window": 0}, {"refresh_every": 0}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError):
        ExpertStarts(**settings)
