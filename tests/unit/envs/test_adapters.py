"""Adapters of other libraries' environments: gymnasium, textarena, GEM's calls, tau-bench."""

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

import rolljax
from rolljax.envs import checks
from rolljax.envs.adapters.gem import Gem, step_result
from rolljax.envs.adapters.gymnasium import Gymnasium
from rolljax.envs.adapters.taubench import TauBench
from rolljax.envs.adapters.textarena import GAMES, NEEDS, TextArena
from rolljax.envs.catalog import make_spec, ref_of, task_of
from rolljax.errors import ConfigError, EnvError

ROOT = Path(rolljax.__file__).parents[1]
TAUBENCH = os.environ.get("ROLLJAX_TAUBENCH", "")
"""A checkout of tau-bench."""


def play(spec, index, act, most=50):
    """Return the first text and the results of an episode."""
    env = spec.make()
    initial_messages, results = env.reset(spec.task(index)), []
    while len(results) < most and not (results and (results[-1].terminated or results[-1].truncated)):
        results.append(env.step(act(env) if callable(act) else act[len(results)]))
    env.close()
    return initial_messages[-1].content, results


# ---- gymnasium


@pytest.mark.parametrize(
    "spec, total",
    [
        (Gymnasium("FrozenLake-v1", {"is_slippery": False}), 1),
        (Gymnasium("FrozenLake-v1", {"is_slippery": False, "desc": ["SFF", "HHF", "HHG"]}), 1),
        (Gymnasium("CliffWalking-v1"), -13),
        (Gymnasium("CliffWalking-v1", reward="success"), 1),
        (Gymnasium("Taxi-v4", reward="success"), 1),
    ],
)
def test_reference_walks_solve_the_toy_worlds(spec, total):
    assert make_spec(ref_of(spec)) == spec == pickle.loads(pickle.dumps(spec))
    for index in range(5):
        _, results = play(spec, index, lambda env: env.reference_answer())
        assert results[-1].success and results[-1].terminated
        assert sum(r.reward for r in results) == total


CORRIDOR = """
import gymnasium

class Corridor(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.at = 0
        return self.at, {}

    def step(self, action):
        self.at += action
        return self.at, float(self.at == 2), self.at == 2, False, {}

gymnasium.register("own/Corridor-v0", entry_point=Corridor, max_episode_steps=9, reward_threshold=1.0)
gymnasium.register("FrozenLakeOfMine-v0", entry_point="gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", kwargs={"is_slippery": False})
"""


def test_the_module_before_a_colon_registers_the_id(tmp_path, monkeypatch):
    """As `gymnasium.make("module:Id-v0")` does."""
    (tmp_path / "corridors_of_a_test.py").write_text(CORRIDOR)
    monkeypatch.syspath_prepend(tmp_path)
    spec, task = task_of("gymnasium:corridors_of_a_test:own/Corridor-v0#0")
    assert (spec.name, task.env, spec.actions) == ("own/Corridor-v0", "own/Corridor-v0", ("0", "1"))
    env = spec.make()
    env.reset(task)
    assert not env.step("1").success and env.step("1").success
    lake = task_of("gymnasium:corridors_of_a_test:FrozenLakeOfMine-v0#0")[0]
    assert lake.actions[0] == "left" and lake.make().reset(lake.task(0))[0].content.startswith("Walk from S to G")
    with pytest.raises(ConfigError, match="names a module that cannot be imported: No module named 'no_such'"):
        task_of("gymnasium:no_such.module:Corridor-v0#0")
    with pytest.raises(ConfigError, match="gymnasium does not make corridors_of_a_test:Nothing-v0"):
        task_of("gymnasium:corridors_of_a_test:Nothing-v0#0")


def test_a_taxi_ride_pays_what_gymnasium_pays():
    import gymnasium

    spec = Gymnasium("Taxi-v4", seed=4)
    env, theirs = spec.make(), gymnasium.make("Taxi-v4")
    env.reset(spec.task(9))
    theirs.reset(seed=4 * 1_000_003 + 9)
    rng, result = random.Random(0), None
    for _ in range(20):
        action = rng.choice(spec.actions)
        result, (_, reward, over, *_) = env.step(action.upper() + " \n"), theirs.step(spec.actions.index(action))
        assert (result.reward, result.terminated) == (reward, over)
    assert not result.success


def test_slippery_ice_is_walked_as_well_as_it_can_be():
    """The best policy reaches the goal in about 0.74 of gymnasium's 100 steps; here with 100 too."""
    spec = Gymnasium("FrozenLake-v1", max_turns=100)
    solved = [play(spec, index, lambda env: env.reference_answer(), 100)[1][-1].success for index in range(60)]
    assert 0.55 < sum(solved) / len(solved) < 0.92
    assert len({spec.task(i).id for i in range(20)}) == 20


def test_equal_openings_are_one_task_where_chance_plays_no_part():
    assert len({Gymnasium("CliffWalking-v1").task(i).id for i in range(20)}) == 1
    assert len({Gymnasium("Taxi-v4").task(i).id for i in range(20)}) > 10


def test_what_is_no_action_costs_a_turn():
    for text in ("", "\x00", "5", "²", "x" * 10**6, "left right"):
        initial_messages, results = play(Gymnasium("FrozenLake-v1", max_turns=2), 0, [text, text])
        assert "left, down, right, up" in initial_messages and "[S]FFF" in initial_messages
        assert [r.metrics["no_moves_n"] for r in results] == [1, 1] and results[-1].truncated
        assert "[S]FFF" in results[0].messages[0].content


def test_blackjack_and_balancing_are_played_but_have_no_reference():
    spec = Gymnasium("Blackjack-v1")
    results = [play(spec, index, ["stick"])[1][-1] for index in range(40)]
    assert {r.reward for r in results} <= {-1, 0, 1, 1.5} and any(r.success for r in results)
    assert all(r.success == (r.reward > 0) for r in results)
    with pytest.raises(EnvError, match="no reference"):
        play(spec, 0, lambda env: env.reference_answer())
    initial_messages, results = play(Gymnasium("CartPole-v1", max_turns=500), 0, lambda env: "0", 500)
    assert "0, 1" in initial_messages and 5 < len(results) < 20 and results[-1].terminated and not results[-1].success


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Gymnasium("Pendulum-v1"), "has actions Box"),
        (lambda: Gymnasium("Taxi-v3"), "Taxi-v4"),
        (lambda: Gymnasium("NoSuch-v0"), "NoSuch"),
        (lambda: Gymnasium("phys2d/CartPole-v1"), "JAX"),
        (lambda: Gymnasium("FrozenLake-v1", {"size": 5}), "does not make"),
        (lambda: Gymnasium("Taxi-v4", max_turns=0), "at least 1"),
        (lambda: Gymnasium("Taxi-v4", reward="both"), "neither"),
        (lambda: TextArena("Chess-v0"), "no game for one player"),
        (lambda: TextArena("Wordle-v0"), "word list"),
        (lambda: Gem("rg:countdown"), "executing the answer"),
        (lambda: Gem("x", maker="make"), "no module.function"),
        (lambda: TauBench("/nowhere"), "no checkout"),
    ],
)
def test_what_cannot_be_adapted_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_a_task_of_other_settings_is_refused():
    for spec in (Gymnasium("Taxi-v4"), TextArena(), Gem("any", maker="tests.made.up")):
        with pytest.raises(EnvError, match="is not one of"):
            spec.make().reset(dataclasses.replace(spec, seed=2).task(0))


# ---- textarena

TEXTARENA = pytest.importorskip("importlib.util").find_spec("textarena") is not None
needs_textarena = pytest.mark.skipif(not TEXTARENA, reason="textarena is not installed")
SAID = ["[up]", "[0]", "[1 1]", "nonsense", "\x00", "[" + "9" * 4000 + "]", "x" * 100_000]


@needs_textarena
@pytest.mark.parametrize("game", GAMES)
def test_every_game_for_one_player_is_played(game, capsys):
    """The same moves give the same game, whatever other games do in between."""
    spec = TextArena(f"{game}-v0-very-easy" if game == "Sudoku" else f"{game}-v0")
    assert make_spec(ref_of(spec)) == spec
    initial_messages, results = play(spec, 3, SAID)
    assert len(initial_messages) > 50 and sum(r.reward for r in results[:-1]) == 0
    assert -1 <= results[-1].reward <= 1 and not results[-1].messages
    before = random.getstate()
    again, other = spec.make(), TextArena("2048-v0").make()
    assert again.reset(spec.task(3))[0].content == initial_messages and random.getstate() == before
    other.reset(TextArena("2048-v0").task(0))
    for move, text, result in zip(["[Up]", "[Left]"] * 10, SAID, results, strict=False):
        other.step(move)
        assert again.step(text) == result
    assert random.getstate() == before


@needs_textarena
def test_games_have_tasks_by_index():
    checks.tasks_are_their_index(TextArena(seed=3), 20)


@needs_textarena
def test_a_guessed_number_and_a_game_that_is_cut():
    spec = TextArena("GuessTheNumber-v0", seed=2)
    for index in range(3):
        low, high, results, env = 1, 20, [], spec.make()
        env.reset(spec.task(index))
        while not results or not results[-1].terminated:
            guess = (low + high) // 2
            results.append(env.step(f"I say [{guess}]"))
            if results[-1].messages:
                low, high = (guess + 1, high) if "higher" in results[-1].messages[0].content else (low, guess - 1)
        assert (results[-1].reward, results[-1].success) == (1, True) and len(results) <= 5
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("[1]")
    _, results = play(TextArena("2048-v0", max_turns=3), 0, ["[Up]", "[Left]", "[Down]"])
    assert results[-1].truncated and not results[-1].terminated and results[-1].reward == 0


@needs_textarena
def test_games_are_the_same_in_every_process():
    games = ["Minesweeper-v0", "Set-v0", "Mastermind-v0", "Secretary-v0", "Cryptarithm-v0"]
    code = (
        "from rolljax.envs.adapters.textarena import TextArena as T; import json\n"
        f"print(json.dumps([T(g).make().reset(T(g).task(5))[0].content for g in {games}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    here = [play(TextArena(g), 5, ["stop"] * 9)[0] for g in games]
    assert json.loads(done.stdout.splitlines()[-1]) == here


def test_missing_libraries_name_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match="pip install 'textarena"):
        TextArena().make().reset(TextArena().task(0))
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ConfigError, match="pip install 'gem-llm"):
        Gem().make().reset(Gem().task(0))


def test_no_game_is_both_offered_and_refused():
    assert not set(GAMES) & set(NEEDS) and len(set(GAMES)) == 22


# ---- GEM's calls


class Guess:
    """Guess a number from 1 to 10 in 4 turns, by GEM's rules and rewards, with the number from the global generator."""

    def __init__(self, id, target=None):
        self.target, self.given = target, target

    def reset(self, seed=None):
        random.seed(seed)
        self.target, self.turns = self.given or random.randint(1, 10), 0
        return "Guess from 1 to 10.", {"suffix": "Enter your guess."}

    def step(self, action):
        self.turns += 1
        head, _, tail = action.rpartition("\\boxed{")
        if not tail[:-1].isdecimal():
            return "no guess", -0.1, True, self.turns == 4, {}
        guess = int(tail[:-1])
        if guess == self.target:
            return "right", 1.0, True, False, {}
        if self.turns == 4:
            return "too late", 1 - abs(guess - self.target) / 9, True, True, {}
        random.random()
        return ("higher" if guess < self.target else "lower"), 0, False, False, {"prefix": "Hint:"}


def guess(**settings):
    return Gem("Guess", settings, maker=f"{__name__}.Guess")


def boxed(*numbers):
    return ["\\boxed{" + str(n) + "}" for n in numbers]


def test_objects_of_gem_have_tasks_by_index():
    checks.tasks_are_their_index(guess(), 20)


def test_gems_five_values_become_ours():
    initial_messages, results = play(guess(target=7), 0, boxed(5, 9, 7))
    assert initial_messages == "Guess from 1 to 10.\nEnter your guess."
    assert [r.messages[0].content for r in results[:2]] == ["Hint:\nhigher", "Hint:\nlower"]
    assert [r.reward for r in results] == [0, 0, 1] and results[-1].success and results[-1].terminated
    _, results = play(guess(target=7), 0, boxed(1, 2, 3, 4))
    assert results[-1].reward == pytest.approx(2 / 3)
    assert results[-1].terminated and not results[-1].truncated and not results[-1].success
    _, results = play(guess(target=7), 0, ["seven"])
    assert (results[-1].reward, results[-1].terminated, results[-1].success) == (-0.1, True, False)


def test_an_episode_is_lent_the_global_generator():
    spec, before = guess(), random.getstate()
    targets = []
    for index in range(20):
        env = spec.make()
        env.reset(spec.task(index))
        targets.append(env._object.target)
        env.step(boxed(11)[0])
    assert random.getstate() == before and len(set(targets)) > 3
    env = spec.make()
    env.reset(spec.task(7))
    assert env._object.target == targets[7]


def test_what_the_environment_says_of_success_goes_before_the_reward():
    assert step_result(("", 0, True, False, {"success": True}), False, 1).success
    assert not step_result(("", 1, True, False, {"success": False}), False, 1).success
    assert not step_result(("", 1, False, False, {"success": True}), False, 1).success
    assert step_result(("", 1, False, False, {}), True, 1).truncated


# ---- tau-bench


@pytest.mark.skipif(not TAUBENCH, reason="ROLLJAX_TAUBENCH names no checkout of tau-bench")
def test_reference_actions_solve_the_tasks_of_tau_bench():
    for domain, split in (("retail", "test"), ("airline", "test"), ("retail", "train")):
        spec = TauBench(TAUBENCH, domain, split)
        checks.reference_solves(spec, 4, reward=1.0)
        checks.tasks_are_their_index(spec, 20)
    checks.ends_are_final(spec, 2)
    checks.interleave(spec, 2)


@pytest.mark.skipif(not TAUBENCH, reason="ROLLJAX_TAUBENCH names no checkout of tau-bench")
def test_what_a_policy_may_say_to_tau_bench():
    spec = TauBench(TAUBENCH, "airline", max_turns=12)
    env = spec.make()
    system, user = env.reset(spec.task(0))
    assert system.role == "system" and "book_reservation" in system.content and user.content in spec.task(0).content
    for text, role, said in [
        ('{"name": "calculate", "arguments": {"expression": "2 + 2*3"}}', "tool", "8.0"),
        ('{"name": "calculate", "arguments": {"expression": "9**9**9**9"}}', "tool", "Error"),
        ('<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call>', "tool", "1.0"),
        ('{"name": "no_tool", "arguments": {}}', "tool", "Unknown action"),
        ('{"name": "get_user_details", "arguments": {"user_id": [1]}}', "tool", "Error"),
        ('{"name": 5}', "user", "Yes"),
        ("{" * 5000, "user", "Yes"),
        ("\x00", "user", "Yes"),
        ("x" * 10**6, "user", "Yes"),
    ]:
        (message,) = env.step(text).messages
        assert message.role == role and message.content.startswith(said), text
    result = env.step("DONE")
    assert result.terminated and result.reward == 0 and not result.success
