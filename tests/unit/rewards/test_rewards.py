"""Rewards in place of the environment's: their effect on a trajectory, their composition, and their faults."""

import asyncio
import dataclasses
import math

import pytest

from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.metrics import check_row
from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.rewards.compose import Clip, Gate, Shaping, Sum, Veto, on_curve
from rolljax.rewards.environment import Environment
from rolljax.rewards.scoring import Scoring, open_scoring, rewarded
from rolljax.rollout.episodes import Rollouts, ScriptedPolicy
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Group
from tests.synthetic_rewards import episode

LAKE = FrozenLake(size=3, max_turns=8)
AROUND = RewardContext(LAKE)


@dataclasses.dataclass(frozen=True)
class Fixed(RewardConfig):
    """A reward that is always the same, or an error."""

    value: object
    success: bool | None = None
    wait_s: float = 0.0

    @property
    def name(self):
        return "fixed"

    def open(self, around):
        return FixedScorer(self)


@dataclasses.dataclass
class FixedScorer:
    cfg: Fixed
    closed: bool = False
    asked: int = 0

    async def score(self, task, trajectory):
        self.asked += 1
        if self.cfg.wait_s:
            await asyncio.sleep(self.cfg.wait_s)
        if isinstance(self.cfg.value, Exception):
            raise self.cfg.value
        return self.cfg.value if isinstance(self.cfg.value, Reward) else Reward(self.cfg.value, {}, self.cfg.success)

    def counts(self):
        return {"calls": self.asked}

    async def close(self):
        self.closed = True


def scored(reward, trajectory, **settings):
    scoring = Scoring(reward.open(AROUND), **settings)
    return asyncio.run(scoring.score(trajectory))


def value(reward, trajectory=None):
    found = scored(reward, trajectory or episode(0.0))
    assert found.status != "failed", found.fault
    return found.reward


# ---- one trajectory


def test_the_value_replaces_the_reward_and_the_last_turn_has_it():
    found = scored(Fixed(0.75, True), episode(1.0, -0.5, 0.25))
    assert (found.reward, found.success, found.reward_parts) == (0.75, True, {})
    assert [t.reward for t in found.turns] == [0.0, 0.0, 0.75]


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (1 / 3, 1e-9, -7.7, 0.1), (0.7,)])
def test_the_environments_own_reward_stays_to_the_bit(rewards):
    before = episode(*rewards, success=True)
    found = scored(Environment(), before)
    assert found.to_json() == before.to_json()


def test_turns_of_a_sum_add_up_to_it_as_credit_reads_them():
    reward = Sum({"env": Environment(), "judge": Fixed(0.5)}, {"judge": 2.0})
    found = scored(reward, episode(0.25, 0.0, 1.0))
    assert [t.reward for t in found.turns] == [0.25, 0.0, 2.0] and found.reward == 2.25
    credit = Episodes.of([[found]], limit_tok=8)
    assert credit.turn_rewards.sum() == credit.rewards[0] == 2.25


def test_a_turn_that_was_said_last_may_stand_elsewhere():
    found = rewarded(episode(0.0, 1.0, 0.0), Reward(0.5, by_turn=(0.0, 1.0, 0.0)), last=1)
    assert [t.reward for t in found.turns] == [0.0, 0.5, 0.0]


def test_what_failed_is_not_scored():
    broken = episode(0.0, status="failed")
    assert scored(Fixed(RuntimeError("asked")), broken) is broken
    empty = dataclasses.replace(broken, turns=(), status="ok")
    assert scored(Fixed(RuntimeError("asked")), empty) is empty


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        (InfraError("down", stage="endpoint"), "infra", "down"),
        (EnvError("its code raised"), "env", "its code raised"),
        (KeyError("x"), "env", "KeyError"),
        (math.nan, "env", "not a finite number"),
        (Reward(1.0, {"a": math.inf}), "env", "a is inf"),
        (Reward(1.0, by_turn=(1.0, 2.0)), "env", "2 turns for 1"),
        ("1", "env", "not a finite number"),
    ],
)
def test_without_a_verdict_there_is_no_reward(what, kind, says):
    found = scored(Fixed(what), episode(1.0))
    assert (found.status, found.fault.kind, found.fault.stage) == ("failed", kind, "reward")
    assert says in found.fault.detail and not found.fault.retryable and found.lost


def test_a_reward_that_never_comes_is_the_infrastructures_fault():
    found = scored(Fixed(1.0, wait_s=3600.0), episode(1.0), deadline_s=0.01)
    assert found.fault.kind == "infra" and "no reward after 0.01 s" in found.fault.detail


def test_tasks_of_an_environment_may_have_a_reward_of_their_own():
    lake, other = Fixed(1.0).open(AROUND), Fixed(2.0).open(AROUND)
    scoring = Scoring(other, {"frozen_lake": lake})

    async def both():
        found = [(await scoring.score(episode(0.0, env=env))).reward for env in ("frozen_lake", "sokoban")]
        await scoring.close()
        return found

    assert asyncio.run(both()) == [1.0, 2.0] and lake.closed and other.closed
    only = Scoring(None, {"frozen_lake": lake})
    untouched = episode(0.3, env="sokoban")
    assert asyncio.run(only.score(untouched)) is untouched


def test_rows_are_of_the_table():
    scoring = open_scoring(Sum({"a": Fixed(1.0), "b": Fixed(0.5)}), AROUND, 10.0)

    async def two():
        return [await scoring.score(episode(0.0)) for _ in range(2)]

    done = asyncio.run(two())
    lost = scored(Fixed(InfraError("down")), episode(0.0))
    row = scoring.row([Group(done[0].task, 0, (*done, lost))])
    assert row["rewards/part/a"] == 1.0 and row["rewards/part/b"] == 0.5
    assert (row["rewards/calls_n"], row["rewards/lost_n"]) == (4.0, 1.0) and not check_row(row)
    assert scoring.row([])["rewards/calls_n"] == 0.0


def test_parts_are_means_over_the_domains_that_have_them():
    scoring = open_scoring(Fixed(1.0), AROUND, 10.0)
    parts = {
        "frozen_lake": [{"judge": 1.0, "book": 1.0}, {"judge": 1.0}],
        "sokoban": [{"boxes": 0.5}, {}, {"boxes": 1.0}],
    }
    groups = []
    for env, found in parts.items():
        trajectories = [dataclasses.replace(episode(0.0, env=env), reward_parts=own) for own in found]
        groups.append(Group(trajectories[0].task, 0, tuple(trajectories)))
    row = scoring.row(groups)
    assert {name: row[f"rewards/part/{name}"] for name in ("judge", "book", "boxes")} == {
        "judge": 1.0,
        "book": 0.5,
        "boxes": 0.5,
    }
    assert open_scoring(None, AROUND, 10.0) is None


# ---- composition


def test_gate():
    worth = Fixed(0.8)
    assert value(Gate(worth), episode(1.0, success=True)) == 0.8
    assert value(Gate(worth, otherwise=-1.0), episode(1.0)) == -1.0
    assert value(Gate(worth, by=Fixed(0.5), at_least=0.5)) == 0.8
    assert value(Gate(worth, by=Fixed(0.49), at_least=0.5)) == 0.0


def test_clip():
    assert value(Clip(Fixed(3.0), high=1.0)) == 1.0 and value(Clip(Fixed(-3.0), low=-1.0)) == -1.0
    kept = scored(Clip(Environment(), low=0.0, high=2.0), episode(0.5, 1.0))
    assert [t.reward for t in kept.turns] == [0.5, 1.0]
    cut = scored(Clip(Environment(), high=1.0), episode(2.0, 3.0))
    assert [t.reward for t in cut.turns] == [0.0, 1.0]
    with pytest.raises(ConfigError, match="bounds nothing"):
        Clip(Fixed(0.0))
    with pytest.raises(ConfigError, match="at most 1"):
        Clip(Fixed(0.0), low=2.0, high=1.0)


def test_veto_sets_the_rest_aside():
    """STAgent: full marks in all three dimensions, and made-up facts."""
    rubric = Sum({"plan": Fixed(1.0), "facts": Fixed(1.0), "service": Fixed(1.0)}, {"plan": 0.4, "facts": 0.4})
    assert value(Veto(rubric, by=Fixed(1.0), above=0.5)) == 0.0
    assert value(Veto(rubric, by=Fixed(0.0), above=0.5)) == pytest.approx(1.8)
    assert value(Veto(rubric, by=Fixed(0.2), below=0.5, to=-1.0)) == -1.0
    assert scored(Veto(Fixed(1.0, True), by=Fixed(1.0), above=0.5), episode(0.0, success=True)).success is False
    with pytest.raises(ConfigError, match="can never veto"):
        Veto(rubric, by=rubric)


def test_shaping_goes_along_a_curve():
    points = ((0.0, 0.0), (0.5, 0.1), (1.0, 1.0))
    assert [on_curve(points, x) for x in (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 9.0)] == [0, 0, 0.05, 0.1, 0.55, 1, 1]
    assert value(Shaping(Fixed(0.25), points)) == 0.05
    with pytest.raises(ConfigError, match="does not rise"):
        Shaping(Fixed(0.0), ((1.0, 0.0), (1.0, 1.0)))


def test_parts_have_the_names_of_the_settings():
    reward = Sum({"right": Environment(), "short": Gate(Fixed(0.5), by=Fixed(1.0))}, {"short": 0.5})
    assert scored(reward, episode(1.0)).reward_parts == {
        "right": 1.0, "right/own": 1.0, "short": 0.5, "short/gated": 0.5, "short/gate": 1.0, "short/open": 1.0
    }  # fmt: skip


def test_a_term_without_a_verdict_is_no_verdict():
    """The calls of the other terms are cancelled."""
    reward = Sum({"right": Fixed(1.0), "judge": Fixed(InfraError("down")), "slow": Fixed(1.0, wait_s=3600.0)})
    assert scored(reward, episode(1.0)).fault.kind == "infra"


def test_success_is_what_the_first_term_says_that_says_anything():
    assert scored(Sum({"a": Fixed(1.0), "b": Fixed(1.0, True), "c": Fixed(1.0, False)}), episode(0.0)).success
    assert scored(Sum({"a": Fixed(1.0)}), episode(0.0, success=True)).success


def test_sums_that_cannot_be():
    with pytest.raises(ConfigError, match="has no term"):
        Sum({})
    with pytest.raises(ConfigError, match="weighs what is no term: b"):
        Sum({"a": Fixed(1.0)}, {"b": 1.0})


def test_what_is_free_and_what_is_checked():
    assert Sum({"env": Environment()}).is_free and not Sum({"env": Environment(), "x": Fixed(1.0)}).is_free

    @dataclasses.dataclass(frozen=True)
    class Wrong(Fixed):
        def check(self, around):
            raise ConfigError("has no answers")

    with pytest.raises(ConfigError, match="has no answers"):
        Sum({"a": Gate(Veto(Environment(), by=Wrong(1.0), above=1.0))}).check(AROUND)


# ---- episodes


def test_episodes_come_back_with_their_reward(chat):
    """Episodes are scored concurrently: one that waits for its verdict delays no other."""
    pool, waits, verdicts = EnvPool(PoolConfig(), LAKE), asyncio.Event(), []

    class Late:
        async def score(self, task, trajectory):
            if trajectory.key.sibling == 0:
                await waits.wait()
            else:
                verdicts.append(trajectory.key.sibling)
                if len(verdicts) == 3:
                    waits.set()
            return Reward(float(trajectory.key.sibling))

        def counts(self):
            return {}

        async def close(self):
            pass

    rollouts = Rollouts(pool, chat, ScriptedPolicy(chat, 64), LAKE.max_turns, 500, 64, scoring=Scoring(Late()))
    try:
        group = asyncio.run(rollouts.group(LAKE.task(0), stream=0, prompt_index=0, group_size=4))
    finally:
        pool.close()
    assert group.rewards.tolist() == [0, 1, 2, 3] and sorted(verdicts) == [1, 2, 3]
