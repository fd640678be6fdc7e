"""What is no number or no flag is the environment's failure at every border, never a score of the policy."""

import asyncio
import dataclasses
import sys
import types

import numpy as np
import pytest

from rolljax.envs.adapters.gem import Gem
from rolljax.envs.adapters.gymnasium import Gymnasium
from rolljax.envs.adapters.openenv import OpenEnv
from rolljax.envs.adapters.rock import Rock
from rolljax.envs.adapters.taubench import TauBench, TauBenchEnv
from rolljax.envs.adapters.textarena import TextArena
from rolljax.envs.base import StepResult
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.pool.episode_runner import check_result, flag, number, table
from rolljax.errors import EnvError

NO_NUMBERS = ["1", "", "nan", float("nan"), float("inf"), -float("inf"), 10**400, 1j, object(), [1.0], {"a": 1}, np.array([1.0, 2.0]), np.float32("nan")]  # fmt: skip
NO_FLAGS = ["false", "yes", 1, 0, 1.0, [], object(), np.array([True, False])]


def kind_of(value):
    return f"{type(value).__name__} {str(value)[:10]}" if type(value) is not object else "object"


@pytest.mark.parametrize("value", NO_NUMBERS, ids=kind_of)
def test_what_is_no_number(value):
    with pytest.raises(EnvError, match="reward is"):
        number(value)
    with pytest.raises(EnvError, match="metrics"):
        table({"a": 1, "b": value}, "metrics")


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)], ids=kind_of
)
def test_what_is_one(value):
    assert number(value) == 1.0 and type(number(value)) is float


def test_flags():
    for value in NO_FLAGS:
        with pytest.raises(EnvError, match="done is"):
            flag(value, "done")
    assert flag(np.True_, "done") is True and flag(False, "done") is False


@dataclasses.dataclass
class Answering:
    """An object with GEM's calls whose step answers what was set."""

    answer: tuple = ()

    def reset(self, seed):
        return "Your move.", {}

    def step(self, action):
        return self.answer


REPLY: dict = {}
"""What the environment behind the adapter answers."""


def make_object(id):
    r = REPLY
    return Answering(("text", r["reward"], r["terminated"], r["truncated"], {"success": r["success"]}))


def gem(monkeypatch):
    return Gem("any", maker=f"{__name__}.make_object", max_turns=5)


def rock(monkeypatch):
    def call(self, verb, body):
        return {
            "sandbox_id": "1",
            "observation": "text",
            "info": {"success": REPLY["success"]},
            **{k: REPLY[k] for k in ("reward", "terminated", "truncated")},
        }

    monkeypatch.setattr("rolljax.envs.adapters.rock.RockEnv._call", call)
    return Rock(max_turns=5)


def openenv(monkeypatch):
    def ask(self, message):
        about = {k: REPLY[k] for k in ("success", "truncated", "reward_parts", "metrics")}
        step = (
            {"reward": REPLY["reward"], "done": REPLY["terminated"], "metadata": about}
            if message["type"] == "step"
            else {}
        )
        return {"observation": {"text": "text"}, **step}

    monkeypatch.setattr("rolljax.envs.adapters.openenv.OpenEnvEnv._ask", ask)
    client = types.SimpleNamespace(connect=lambda *a, **k: __import__("contextlib").nullcontext())
    monkeypatch.setitem(sys.modules, "websockets.sync.client", client)
    return OpenEnv(max_turns=5)


def gymnasium(monkeypatch):
    class Wrapped:
        render_mode = "ansi"

        def __init__(self, env):
            self.env = env

        def step(self, action):
            return 0, REPLY["reward"], REPLY["terminated"], REPLY["truncated"], {}

        def __getattr__(self, name):
            return getattr(self.env, name)

    from rolljax.envs.adapters import gymnasium as adapter

    make = adapter._make
    monkeypatch.setattr(adapter, "_make", lambda *a: Wrapped(make(*a)))
    adapter._shape.cache_clear()
    return Gymnasium("FrozenLake-v1", {"is_slippery": False}, max_turns=5)


def textarena(monkeypatch):
    class Game:
        def reset(self, num_players, seed): ...

        def step(self, action):
            return REPLY["terminated"], {}

        def close(self):
            return {0: REPLY["reward"]}, {0: {}}

        def get_observation(self):
            return 0, []

    monkeypatch.setitem(sys.modules, "textarena", types.SimpleNamespace(make=lambda id: Game()))
    return TextArena(max_turns=5)


ADAPTERS = {
    gem: ("reward", "terminated", "truncated", "success"),
    rock: ("reward", "terminated", "truncated", "success"),
    openenv: ("reward", "terminated", "truncated", "success", "reward_parts", "metrics"),
    gymnasium: ("reward", "terminated", "truncated"),
    textarena: ("reward", "terminated"),
}
GOOD = {
    "reward": 1.0,
    "terminated": True,
    "truncated": False,
    "success": True,
    "reward_parts": {"a": 1},
    "metrics": {"b_n": 2},
}
BAD = {
    "reward": ["1", float("nan"), float("inf"), [1.0]],
    "terminated": ["false", 1],
    "truncated": ["false", 1],
    "success": ["yes", 1],
    "reward_parts": [{"a": "1"}, {"a": float("nan")}, [1]],
    "metrics": [{"a": None}, {"a": float("inf")}, "x"],
}
CASES = [(make, name, value) for make, names in ADAPTERS.items() for name in names for value in BAD[name]]


async def one_step(spec):
    pool = EnvPool(PoolConfig(where="thread"), spec)
    try:
        episode = await pool.open(spec.task(0))
        try:
            return await episode.step("left"), pool
        finally:
            await episode.close()
    finally:
        pool.close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    REPLY.clear()
    REPLY.update(GOOD)
    yield
    monkeypatch.undo()
    from rolljax.envs.adapters import gymnasium as adapter

    adapter._shape.cache_clear()


@pytest.mark.parametrize("make", ADAPTERS, ids=lambda m: m.__name__)
def test_a_good_answer_is_taken(make, monkeypatch):
    result, _ = asyncio.run(one_step(make(monkeypatch)))
    assert result.reward == 1 and result.success and result.terminated


@pytest.mark.parametrize("make, name, value", CASES, ids=[f"{m.__name__} {n}={v!r}" for m, n, v in CASES])
def test_a_bad_one_is_a_fault_of_the_environment(make, name, value, monkeypatch):
    REPLY[name] = value
    with pytest.raises(EnvError) as e:
        asyncio.run(one_step(make(monkeypatch)))
    assert type(e.value) is EnvError and e.value.stage == "step"


def test_tau_bench(monkeypatch):
    env = TauBenchEnv.__new__(TauBenchEnv)
    env._spec, env._over, env._turns, env._next = types.SimpleNamespace(name="tau", max_turns=5), False, 0, 0
    answer = types.SimpleNamespace(observation="ok", reward="1", done=True)
    env._world = types.SimpleNamespace(step=lambda action: answer, task=types.SimpleNamespace(actions=[]))
    monkeypatch.setitem(sys.modules, "tau_bench.types", types.SimpleNamespace(Action=dict))
    with pytest.raises(EnvError, match="reward is a str"):
        env.step("hello")
    answer.reward, answer.done, env._over = 1.0, "yes", False
    with pytest.raises(EnvError, match="done is a str"):
        env.step("hello")
    assert TauBench.runs == "process"


def test_an_illegal_end_of_a_text_game_is_no_way_out(monkeypatch):
    """Three games put the reason of an illegal move into the reward's place: that is the policy's doing."""
    spec = textarena(monkeypatch)
    REPLY["reward"] = "you cannot do that"
    game = sys.modules["textarena"].make("x")
    close = lambda: ({0: REPLY["reward"]}, {0: {"invalid_move": True}})  # noqa: E731
    monkeypatch.setattr(type(game), "close", lambda self: close())
    result, _ = asyncio.run(one_step(spec))
    assert result.reward == 0 and not result.success and result.terminated


def test_results_of_any_environment():
    good = StepResult((), 1.0, terminated=True, success=True)
    for value in NO_NUMBERS:
        for name, bad in (
            ("reward", value),
            ("weight", value),
            ("reward_parts", {"a": value}),
            ("metrics", {"a": value}),
        ):
            with pytest.raises(EnvError):
                check_result(dataclasses.replace(good, **{name: bad}), 1000)
    for name in ("terminated", "truncated", "success"):
        for value in NO_FLAGS:
            with pytest.raises(EnvError):
                check_result(dataclasses.replace(good, **{name: value}), 1000)
    with pytest.raises(EnvError, match="both"):
        check_result(dataclasses.replace(good, truncated=True), 1000)
