"""What every environment must do. Each EnvSpec found in rolljax/envs must stand in the table below at least once."""

import dataclasses
import importlib
import inspect
import json
import math
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rolljax
from rolljax import envs
from rolljax.envs.base import EnvSpec
from rolljax.envs.frozen_lake import FrozenLake
from rolljax.envs.reasoning import ReasoningGym
from rolljax.envs.records import Records

DATA = Path(__file__).parents[1] / "data"
SPECS = {
    "lake": FrozenLake(),
    "lake_5x5": FrozenLake(size=5, max_turns=12, frozen_prob=0.7, seed=3),
    "chain_sum": ReasoningGym("chain_sum"),
    "spell_backward": ReasoningGym("spell_backward", {"min_word_len": 2, "max_word_len": 4}),
    "spell_backward_partial": ReasoningGym("spell_backward", partial_credit=True),
    "letter_counting": ReasoningGym("letter_counting", seed=9, prompt="{question} Number only."),
    "prime_factorization": ReasoningGym("prime_factorization"),
    "word_sorting": ReasoningGym("word_sorting"),
    "recorded_answers": Records(str(DATA / "answers.jsonl"), prompt_key="question"),
    "recorded_pairs": Records(str(DATA / "pairs.jsonl")),
    "recorded_conversations": Records(str(DATA / "conversations.jsonl")),
}
NUM_TASKS = 20
each = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def found():
    for info in pkgutil.iter_modules(envs.__path__):
        module = importlib.import_module(f"{envs.__name__}.{info.name}")
        for c in vars(module).values():
            own = inspect.isclass(c) and issubclass(c, EnvSpec) and c.__module__ == module.__name__
            if own and not inspect.isabstract(c):
                yield c


def test_every_environment_stands_in_the_table():
    assert set(found()) == {type(spec) for spec in SPECS.values()}


def play(env, task, act):
    """All step results of an episode, with what was shown before each; at most 100 steps."""
    seen, results = [env.reset(task)], []
    while True:
        results.append(env.step(act(env)))
        if results[-1].terminated or results[-1].truncated or len(results) == 100:
            return seen, results
        seen.append(results[-1].messages)


@each
def test_gold_answers_succeed(spec):
    for index in range(NUM_TASKS):
        env = spec.make()
        _, results = play(env, spec.task(index), lambda env: env.gold())
        env.close()
        assert results[-1].success and results[-1].terminated and len(results) <= spec.max_turns, spec.task(index)
        assert sum(r.reward for r in results) == pytest.approx(1), spec.task(index)


@each
def test_bad_actions_never_succeed_and_never_raise(spec):
    for index in range(NUM_TASKS):
        for action in spec.bad_actions():
            _, results = play(spec.make(), spec.task(index), lambda env, action=action: action)
            assert not any(r.success for r in results) and sum(r.reward for r in results) < 1
            assert len(results) <= spec.max_turns


@each
def test_results_are_well_formed(spec):
    for index in range(5):
        for act in (lambda env: env.gold(), lambda env: "nonsense"):
            seen, results = play(spec.make(), spec.task(index), act)
            for messages in seen:
                assert messages[-1].role != "assistant" and all(isinstance(m.content, str) for m in messages)
            for r in results:
                assert math.isfinite(r.reward) and all(math.isfinite(v) for v in r.reward_parts.values())
                assert not (r.terminated and r.truncated)
            assert not results[-1].messages


@each
def test_tasks_are_their_index(spec):
    fresh = dataclasses.replace(spec)
    assert fresh is not spec and fresh == spec
    tasks = [spec.task(i) for i in range(NUM_TASKS)]
    assert [fresh.task(i) for i in reversed(range(NUM_TASKS))] == tasks[::-1]
    assert [t.index for t in tasks] == list(range(NUM_TASKS))
    assert all(t.env == spec.name for t in tasks)
    assert len({t.id for t in tasks}) > 1 and fresh.task(10**6) == spec.task(10**6)
    assert spec.make().reset(tasks[3]) == fresh.make().reset(tasks[3])


def test_tasks_are_the_same_in_every_process():
    """Another hash seed must not change them: resume and the held-out split depend on it."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_envs as t;"
        "print(json.dumps({n: [s.task(i).id for i in range(5)] for n, s in t.SPECS.items()}))"
    )
    here = {n: [s.task(i).id for i in range(5)] for n, s in SPECS.items()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        cwd=Path(rolljax.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == here


@each
def test_interleaved_episodes_do_not_touch_each_other(spec):
    def acts(wrong_first):
        """Gold, or one wrong answer and then gold."""
        return lambda env, turn: "nonsense" if wrong_first and turn == 0 else env.gold()

    def solo(task, act):
        env, turn = spec.make(), iter(range(100))
        return play(env, task, lambda env: act(env, next(turn)))

    pairs = [(spec.task(0), acts(False)), (spec.task(1), acts(True))]
    want = [solo(task, act) for task, act in pairs]
    playing = [(spec.make(), act) for _, act in pairs]
    got = [([env.reset(task)], []) for (env, _), (task, _) in zip(playing, pairs, strict=True)]
    for turn in range(100):
        for (env, act), (seen, results) in zip(playing, got, strict=True):
            if results and (results[-1].terminated or results[-1].truncated):
                continue
            if results:
                seen.append(results[-1].messages)
            results.append(env.step(act(env, turn)))
    assert got == want
