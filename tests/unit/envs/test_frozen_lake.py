"""FrozenLake in text: moves, turns, ends."""

import collections
import dataclasses
import random

import pytest

from rolljax.envs import checks
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError, EnvError
from rolljax.types import Task

# S F    the only way is right, down
# H G
SMALL = FrozenLake(size=2, max_turns=3)
LAKE = Task("frozen_lake", 0, "SF\nHG")
GYM_MOVES = ["left", "down", "right", "up"]


def start(spec=SMALL, task=LAKE):
    env = spec.make()
    (message,) = env.reset(task)
    return env, message.content


def test_observation_shows_the_player():
    env, seen = start()
    assert seen == "PF\nHG"
    result = env.step("right")
    assert result.messages[0].content == "SP\nHG" and result.messages[0].role == "user"
    assert (result.reward, result.terminated, result.truncated, result.success) == (0, False, False, False)


def test_the_goal_and_a_hole_end_the_episode():
    env, _ = start()
    env.step("right")
    won = env.step("down")
    assert (won.reward, won.terminated, won.truncated, won.success, won.messages) == (1, True, False, True, ())
    env, _ = start()
    lost = env.step("down")
    assert (lost.reward, lost.terminated, lost.truncated, lost.success) == (0, True, False, False)


@pytest.mark.parametrize("said", [" Right\n", "RIGHT", "right"])
def test_case_and_space_around_a_move_do_not_matter(said):
    env, _ = start()
    assert env.step(said).messages[0].content == "SP\nHG"


@pytest.mark.parametrize("said", ["", "north", "right down", "2", "right."])
def test_an_answer_that_is_no_move_costs_a_turn(said):
    env, seen = start()
    result = env.step(said)
    assert result.messages[0].content == seen and result.reward_parts == {"goal": 0.0, "no_move": 1.0}
    env.step("right")
    assert env.step("down").success, "the third and last turn may still win"

    env, _ = start()
    results = [env.step(said) for _ in range(3)]
    assert [r.truncated for r in results] == [False, False, True]
    assert not results[-1].terminated and results[-1].messages == ()


def test_winning_on_the_last_turn_is_no_truncation():
    env, _ = start(FrozenLake(size=2, max_turns=2))
    env.step("right")
    result = env.step("down")
    assert result.terminated and not result.truncated


def test_steps_outside_an_episode_are_errors():
    env = SMALL.make()
    with pytest.raises(EnvError, match="before reset"):
        env.step("right")
    env.reset(LAKE)
    env.step("down")
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("right")
    env.reset(LAKE)
    assert env.step("right").messages, "a new episode starts from the beginning"


@pytest.mark.parametrize("spec", [FrozenLake(), FrozenLake(size=6, max_turns=16, frozen_prob=0.6, seed=5)])
def test_reference_wins_50_random_lakes(spec):
    for index in range(50):
        env, _ = start(spec, spec.task(index))
        turns, done = 0, False
        while not done:
            result = env.step(env.reference_answer())
            turns, done = turns + 1, result.terminated or result.truncated
        assert result.success and result.reward == 1, spec.task(index).content
        assert turns >= 2 * (spec.size - 1)


def test_lakes_differ_by_index_and_by_seed():
    assert len({FrozenLake().task(i).id for i in range(50)}) > 40
    assert FrozenLake(seed=1).task(0) != FrozenLake(seed=2).task(0)


def test_a_lake_of_another_size_is_refused():
    with pytest.raises(EnvError):
        FrozenLake().make().reset(FrozenLake(size=5, max_turns=12).task(0))


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"size": 1}, "FrozenLake.size"),
        ({"frozen_prob": 0.0}, "FrozenLake.frozen_prob"),
        ({"frozen_prob": 1.2}, "FrozenLake.frozen_prob"),
        ({"max_turns": 5}, "FrozenLake.max_turns"),
    ],
)
def test_impossible_settings_are_refused(wrong, name):
    with pytest.raises(ConfigError, match=name):
        FrozenLake(**wrong)


@pytest.mark.parametrize("slippery", [False, True])
def test_dynamics_are_those_of_gymnasium(slippery):
    """On random maps, by random moves: cells, rewards and ends. On ice each of gymnasium's ways must be met, and no
    other."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

    rng = random.Random(0)
    met, ways = set(), set()
    for index in range(30):
        size = rng.randint(2, 6)
        lake = generate_random_map(size, 0.75, seed=index)
        theirs = FrozenLakeEnv(desc=lake, is_slippery=slippery)
        spec = FrozenLake(size=size, max_turns=1000, slippery=slippery, seed=index)
        cell = 0
        env, _ = start(spec, Task("frozen_lake", 0, "\n".join(lake)))
        for _ in range(60):
            move = rng.choice(["left", "down", "right", "up"])
            result = env.step(move)
            after = env._cell[0] * size + env._cell[1]
            possible = {(to, reward, over) for _, to, reward, over in theirs.P[cell][GYM_MOVES.index(move)]}
            assert (after, result.reward, result.terminated) in possible
            met.add((index, cell, move, after))
            ways |= {(index, cell, move, to) for to, _, _ in possible}
            cell = after
            if result.terminated:
                env, _ = start(spec, Task("frozen_lake", 0, "\n".join(lake)))
                cell = 0
    assert len(met) > 300 and met <= ways
    assert (met == ways) != slippery, "on firm ground there is one way; on ice some are left to be met"


def test_ice_slips_to_each_side_with_a_third():
    spec = FrozenLake(size=5, max_turns=12, slippery=True, frozen_prob=1.0)
    seen = collections.Counter()
    for seed in range(600):
        env, _ = start(
            dataclasses.replace(spec, seed=seed), Task("frozen_lake", 0, "FFFFF\nFFFFF\nFFSFF\nFFFFF\nFFFFG")
        )
        env.step("right")
        seen[env._cell] += 1
    assert set(seen) == {(1, 2), (2, 3), (3, 2)} and min(seen.values()) > 150


def test_reference_on_ice_arrives_more_often_than_the_straight_way():
    spec = FrozenLake(slippery=True, max_turns=30, frozen_prob=0.7)
    firm = FrozenLake(max_turns=30, frozen_prob=0.7)

    def straight(env, turn):
        dry = firm.make()
        dry.reset(Task("frozen_lake", 0, "\n".join(env._lake)))
        dry._cell = env._cell
        return dry.reference_answer()

    tasks = [spec.task(i) for i in range(150)]
    best = checks.success_frac(spec, tasks, checks.reference)
    assert best > checks.success_frac(spec, tasks, straight) + 0.1
    assert checks.success_frac(spec, tasks, checks.reference) == best, "the same task slips the same way"


def test_every_lake_can_be_crossed_in_time_even_where_most_cells_are_holes():
    spec = FrozenLake(size=7, max_turns=12, frozen_prob=0.05)
    lakes = [spec.task(i) for i in range(20)]
    assert len({t.id for t in lakes}) == 20
    assert checks.success_frac(spec, lakes, checks.reference) == 1
