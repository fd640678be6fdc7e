"""A class as TRL's documentation writes them for `environment_factory`, run unchanged."""

import random

import pytest

from rolljax.envs import checks
from rolljax.envs.adapters.trl import TrlEnvironment
from rolljax.envs.tools import ToolEnv
from rolljax.errors import ConfigError, DataError, EnvError

HERE = "tests.unit.envs.test_trl"
ROWS = [
    {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Reach the number. "}], "low": 1},
    {"prompt": "Reach it. ", "low": 5},
]


class CountingEnv:
    """A counter that is to be brought to a hidden number."""

    def reset(self, low: int, **kwargs) -> str:
        self.count, self.goal = 0, random.randint(low, low + 100)
        return f"The number is {self.goal}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The value to add.

        Returns:
            The new count.
        """
        self.count += step
        if step < 0:
            raise ValueError("only up")
        return self.count

    def _hidden(self):
        return 0

    def get_reward(self) -> float:
        return float(self.count == self.goal)


class DrawsEarly(CountingEnv):
    def __init__(self):
        self.drawn = random.random()

    def reset(self, low: int, **kwargs) -> str:
        return f"{super().reset(low)} {self.drawn}"


class Waiting(CountingEnv):
    async def look(self) -> str:
        """Look."""
        return ""


class WithoutReward:
    def reset(self, **kwargs):
        return None


def spec(name="CountingEnv", **settings):
    return TrlEnvironment(f"{HERE}.{name}", **{"records": ROWS} | settings)


def call(step):
    return f'<tool_call>{{"name": "increment", "arguments": {{"step": {step}}}}}</tool_call>'


def test_methods_are_tools_and_get_reward_ends_the_episode():
    env = ToolEnv(spec(), style="lines").make()
    told, asked = env.reset(spec().task(0))
    assert told.content.startswith("Count.\n\nThese tools can be called:\nincrement(step: integer): Increment the")
    goal = int(asked.content.removeprefix("Reach the number. The number is ").removesuffix("."))
    assert 1 <= goal <= 101 and "reset(" not in told.content and "get_reward" not in told.content
    assert env.step(call(goal - 1)).messages[0].content == str(goal - 1)
    assert "only up" in env.step(call(-1)).messages[0].content and env.step(call(2)).messages[0].content == str(goal)
    done = env.step("It is there.")
    assert (done.reward, done.terminated, done.success) == (1.0, True, True)
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("again")


@pytest.mark.parametrize("name", ["CountingEnv", "DrawsEarly"])
def test_siblings_have_one_hidden_state_and_tasks_another(name):
    def opening(index):
        return [m.content for m in spec(name).make().reset(spec(name).task(index))]

    state = random.getstate()
    assert opening(1) == opening(1) != opening(3)
    assert opening(1)[0].startswith("Reach it. The number is ")
    assert random.getstate() == state and spec().num_tasks == 2
    assert spec(name, seed=1).make().reset(spec(name, seed=1).task(1))[0].content != opening(1)[0]


def test_tasks_are_their_index():
    checks.tasks_are_their_index(spec(), 4)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithoutReward", "has no method get_reward"),
        ("Waiting", "coroutines, which are not supported: look"),
        ("Nothing", "cannot be imported"),
    ],
)
def test_classes_that_cannot_work_are_refused(name, said):
    with pytest.raises(ConfigError, match=rf"TrlEnvironment\.factory.*{said}|{said}"):
        spec(name).make().reset(spec(name).task(0))


def test_rows_without_a_prompt_leave_it_to_reset_and_bad_ones_are_named():
    env = spec(records=[{"low": 3}])
    assert env.make().reset(env.task(0))[0].content.startswith("The number is ")
    with pytest.raises(DataError, match="prompt is a number"):
        spec(records=[{"prompt": 3}]).task(0)
