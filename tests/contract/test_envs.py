"""The contract of every environment. The table below must list each EnvSpec in rolljax/envs at least once."""

import importlib
import inspect
import math
import pkgutil
from pathlib import Path

import pytest

from rolljax import envs, recipes
from rolljax.envs import checks
from rolljax.envs.adapters.gymnasium import Gymnasium
from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.base import EnvSpec
from rolljax.envs.games.countdown import Countdown
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.games.game import Game
from rolljax.envs.games.guess_number import GuessNumber
from rolljax.envs.games.house import House
from rolljax.envs.games.key_door import KeyDoor
from rolljax.envs.games.mastermind import Mastermind
from rolljax.envs.games.nim import Nim
from rolljax.envs.games.sokoban import Sokoban
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.questions import Questions
from rolljax.envs.records import Records
from rolljax.envs.tools import PythonTools, ToolEnv
from rolljax.envs.tools.calculator import Arithmetic, CalculatorTask
from rolljax.recipes.complementary.experience import WithExperience
from rolljax.recipes.complementary.extraction import Extraction
from rolljax.recipes.complementary.key_rules import KeyRules
from rolljax.recipes.palette.styled_words import StyledWords
from rolljax.recipes.rome.key_door_chain import KeyDoorChain
from rolljax.recipes.shop_simulator.shop import TINY, Shop
from rolljax.recipes.stagent import travel
from rolljax.recipes.stagent.travel import Travel, TravelDesk
from rolljax.recipes.terminal_bench.number_files import FileChains, NumberFiles
from rolljax.recipes.think_j.digit_sums import DigitSums
from rolljax.recipes.think_j.preferences import Preferences

DATA = Path(__file__).parents[1] / "data"
SPECS = {
    "lake": FrozenLake(),
    "lake_5x5": FrozenLake(size=5, max_turns=12, frozen_prob=0.7, seed=3),
    "sokoban": Sokoban(),
    "sokoban_2": Sokoban(size=7, boxes=2, wall_frac=0.2, max_turns=30, seed=1),
    "guess_number": GuessNumber(),
    "guess_number_boxed": GuessNumber(largest=10, max_turns=4, boxed=True, shaped=True, format_reward=-0.1, seed=2),
    "nim": Nim(),
    "nim_large": Nim(stones=30, most=5, seed=1),
    "countdown": Countdown(),
    "countdown_4": Countdown(count=4, largest=20, max_turns=3, use_all=True, format_reward=0.1, boxed=True),
    "mastermind": Mastermind(),
    "mastermind_2": Mastermind(length=2, digits=6, max_turns=10, boxed=True),
    "key_door": KeyDoor(),
    "key_door_2": KeyDoor(doors=2, room=2, max_turns=14, seed=4),
    "key_door_chain": KeyDoorChain(),
    "key_door_chain_2": KeyDoorChain(length=2, actions=3, num_tasks=7),
    "key_rules": KeyRules(),
    "number_files": NumberFiles(),
    "file_chains": FileChains(),
    "file_chains_aimless": FileChains(aimless=True),
    "with_experience": WithExperience(shown="all"),
    "extraction": Extraction(),
    "styled_words": StyledWords(),
    "styled_words_hinted": StyledWords(length=5, hint_frac=0.5, other=0.2, weights={"capitals": 1.0}, seed=3),
    "house": House(),
    "house_place": House(goals=("place",), things=2, max_turns=20),
    "taxi": Gymnasium("Taxi-v4", reward="success"),
    "chain_sum": ReasoningGym("chain_sum"),
    "spell_backward": ReasoningGym("spell_backward", {"min_word_len": 2, "max_word_len": 4}),
    "spell_backward_partial": ReasoningGym("spell_backward", partial_credit=True),
    "letter_counting": ReasoningGym("letter_counting", seed=9, prompt="{question} Number only."),
    "prime_factorization": ReasoningGym("prime_factorization"),
    "word_sorting": ReasoningGym("word_sorting"),
    "arithmetic": Arithmetic(digits=3, terms=3),
    "calculator": CalculatorTask(),
    "calculator_told": ToolEnv(Arithmetic(), PythonTools(("rolljax.envs.tools.calculator.calc",))),
    "lake_with_tools": ToolEnv(FrozenLake(), PythonTools(("rolljax.envs.tools.calculator.calc",)), parser="fenced"),
    "digit_sums": DigitSums(),
    "digit_sums_critic": DigitSums(digits=3, verdict="plain", brief=False, critic_frac=0.5, seed=1),
    "preferences": Preferences(
        records=[
            {"prompt": f"q{i}", "response_1": "x", "response_2": "y", "strength": s} for i, s in enumerate((-2, 3, 1))
        ]
    ),
    "mixture": Mixture({"lake": Domain(FrozenLake()), "digits": Domain(DigitSums(), 2.0)}),
    "shop": Shop(),
    "shop_dialogue": Shop(dialogue=True, persona=True, style="full", reward="loose", seed=1),
    "shop_tiny": Shop(**TINY),
    "travel": Travel(),
    "travel_tiny": Travel(**travel.TINY),
    "travel_levels": Travel(levels=(1, 3, 6), reward="rubric", veto="tools", calls=11, seed=2),
    "travel_desk": TravelDesk(reward="strict", seed=5),
    "questions": Questions(str(DATA / "word_problems.jsonl")),
    "recorded_answers": Records(str(DATA / "answers.jsonl"), prompt_key="question"),
    "recorded_pairs": Records(str(DATA / "pairs.jsonl")),
    "recorded_conversations": Records(str(DATA / "conversations.jsonl")),
}
ELSEWHERE: dict[str, str] = {
    "rolljax.envs.adapters.textarena.TextArena": "unit/envs/test_adapters.py",
    "rolljax.envs.adapters.gem.Gem": "unit/envs/test_adapters.py",
    "rolljax.envs.adapters.taubench.TauBench": "unit/envs/test_adapters.py",
    "rolljax.envs.adapters.trl.TrlEnvironment": "unit/envs/test_trl.py",
    "rolljax.envs.adapters.verifiers.Verifiers": "e2e/test_verifiers.py",
    "rolljax.envs.adapters.openenv.OpenEnv": "e2e/test_adapters_servers.py",
    "rolljax.envs.adapters.rock.Rock": "e2e/test_adapters_servers.py",
    "rolljax.envs.code_problems.CodeProblems": "e2e/test_code_problems.py",
    "rolljax.recipes.judged_mixtures.judge_training.JudgeTraining": "recipes/test_judged_mixtures_training.py",
    "rolljax.recipes.terminal_bench.terminal.TerminalTasks": "recipes/test_terminal_bench.py",
    "rolljax.recipes.terminal_bench.terminal.HarborTasks": "recipes/test_terminal_bench.py",
}
"""Environments that need another library, a server or a class -> the file under tests/ that runs the checks."""
RANDOM_SUCCESS = {
    "lake": 0.0074,
    "lake_5x5": 0.0015,
    "sokoban": 0.1198,
    "sokoban_2": 0.1268,
    "guess_number": 0.1325,
    "guess_number_boxed": 0.3469,
    "nim": 0.5193,
    "nim_large": 0.5035,
    "countdown": 0.0902,
    "countdown_4": 0.0874,
    "mastermind": 0.0354,
    "mastermind_2": 0.2473,
    "key_door": 0.0277,
    "key_door_2": 0.0013,
    "key_door_chain": 4.0**-8,
    "key_door_chain_2": 3.0**-2,
    "key_rules": 1 / 4,
    "house": 0.0051,
    "house_place": 0.0134,
}
"""Share of tasks that random legal actions solve, from 50 000 episodes each or from arithmetic."""
NUM_TASKS = 20
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def found():
    packages = [*pkgutil.walk_packages(envs.__path__, f"{envs.__name__}.")]
    packages += pkgutil.walk_packages(recipes.__path__, f"{recipes.__name__}.")
    for info in packages:
        module = importlib.import_module(info.name)
        for c in vars(module).values():
            own = inspect.isclass(c) and issubclass(c, EnvSpec) and c.__module__ == module.__name__
            if own and not inspect.isabstract(c):
                yield c


def test_every_environment_stands_in_a_table():
    elsewhere = {c for c in found() if f"{c.__module__}.{c.__qualname__}" in ELSEWHERE}
    assert set(found()) - elsewhere == {type(spec) for spec in SPECS.values()}
    assert len(elsewhere) == len(ELSEWHERE)
    for path, file in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / file).read_text()
        assert path.rpartition(".")[2] in text and "checks." in text, f"{file} does not check {path}"


@each
def test_reference_answers_succeed(spec):
    checks.reference_solves(spec, NUM_TASKS, reward=1.0)


@each
def test_bad_actions_never_succeed_and_never_raise(spec):
    checks.bad_actions_fail(spec, NUM_TASKS)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "spec, num_tasks",
    [pytest.param(spec, 10, id=name) for name, spec in SPECS.items() if name not in ("taxi", "questions")]
    + [pytest.param(spec, 30, id=f"{name}-30", marks=pytest.mark.sweep) for name, spec in SPECS.items()],
)
def test_no_answer_without_thought_wins_more_than_chance(spec, num_tasks):
    checks.no_constant_wins(spec, num_tasks)


@each
def test_results_are_well_formed(spec):
    checks.well_formed(spec, 5)


@each
def test_no_step_outside_of_an_episode(spec):
    checks.ends_are_final(spec, 2)


@each
def test_tasks_are_their_index(spec):
    checks.tasks_are_their_index(spec, NUM_TASKS)


def test_tasks_and_episodes_are_the_same_in_every_process():
    """Another hash seed must not change tasks: resume and the held-out split depend on them."""
    checks.same_in_another_process(list(SPECS.values()))


@each
def test_interleaved_episodes_do_not_touch_each_other(spec):
    checks.interleave(spec, 2)


@each
def test_an_episode_from_a_snapshot_continues_as_the_original(spec):
    checks.snapshots_continue(spec, 3)


def test_games_give_snapshots_and_have_a_recorded_random_player():
    games = {name for name, spec in SPECS.items() if isinstance(spec.make(), Game)}
    assert games == set(RANDOM_SUCCESS) and all(checks.can_snapshot(SPECS[name]) for name in games)


@pytest.mark.parametrize("name", RANDOM_SUCCESS)
def test_a_random_player_solves_what_it_solved_when_it_was_recorded(name):
    spec, want, n = SPECS[name], RANDOM_SUCCESS[name], 400
    player, _ = checks.random_player(spec, seed=1)
    got = checks.success_frac(spec, [spec.task(i) for i in range(100_000, 100_000 + n)], player)
    assert abs(got - want) <= 3 * math.sqrt(want * (1 - want) / n)
