"""Interfaces of an environment. GEM / Gymnasium meaning, in text.

An `EnvSpec` holds settings: a frozen dataclass that makes tasks and environments. An `Env` is the state of one episode;
it is used for one trajectory and then discarded.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rolljax.errors import EnvError, InfraError
from rolljax.types import Key, Message, Task

if TYPE_CHECKING:
    from rolljax.envs.run_limits import RunLimits

Runs = Literal["inline", "thread", "process"]
SERVER_S = 10.0
"""Longest time in seconds that the server of the policy may take to tell how long it has worked."""
NUM_INDICES = 1_000_000
"""Number of indices in one pass of the training stream; further passes repeat them in another order."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The result of an action."""

    messages: tuple[Message, ...]
    """The next messages to the policy (empty when the episode is over)."""
    reward: float
    """Reward of this step."""
    terminated: bool
    """Whether the episode reached its end."""
    truncated: bool = False
    """Whether a limit of the environment cut the episode. Never set together with `terminated`."""
    success: bool = False
    """Whether the task is solved; separate from the reward."""
    reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Scores of this step by name, which are recorded but not trained on."""
    weight: float = 1.0
    """Weight of the action just taken in a supervised loss (0: part of a recorded conversation, but not a training
    example)."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other numbers, summed over the episode (tool calls, illegal moves); each name ends with its unit
    (`tool_calls_n`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """The policy's text on its way to an environment."""

    text: str
    run_limit_s: float | None = None
    """Longest time in seconds that the program in this action may run; None: the environment's own setting (see
    `Env.run_limit_s`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramLaunch:
    """An agent program on its way into the sandbox of an episode."""

    argv: tuple[str, ...]
    """The command line."""
    task: Mapping[str, Any]
    """The name and the messages of its task."""
    address: tuple[str, int]
    """Host and port of the server of the policy, for the process that runs the episode."""
    api_key: str
    """The key of this episode at that server."""
    env: Mapping[str, str]
    """Further environment variables."""
    deadline_s: float
    """Longest time in seconds, without the time in which the policy answers."""

    def sampler_s(self) -> float:
        """Ask the server for the seconds that the policy has needed for its answers so far.

        Raises:
          InfraError: the server is gone.
        """
        import urllib.request

        url = "http://{}:{}/session".format(*self.address)
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.api_key}"})
        try:
            with urllib.request.urlopen(asked, timeout=SERVER_S) as answer:
                return float(json.load(answer)["busy_s"])
        except (OSError, ValueError) as e:
            raise InfraError(f"the server of the policy is gone: {e}", stage="play") from e

    def variables(self, url: str) -> dict[str, str]:
        """Return the program's environment variables. url: of the server as the program sees it, without a path."""
        return api_variables(url, self.api_key) | dict(self.env)

    def sent(self, url: str) -> dict[str, Any]:
        """Return the task with the server's address and the key. url: as in `variables`."""
        return dict(self.task) | {"base_url": f"{url}/v1", "api_key": self.api_key}

    def stdin(self, url: str) -> bytes:
        """Return the program's standard input: `sent` as a line of JSON."""
        return json.dumps(self.sent(url)).encode() + b"\n"


def api_variables(url: str, api_key: str) -> dict[str, str]:
    """Return the variables by which clients of OpenAI's and Anthropic's APIs find a server. url: without a path."""
    found = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": api_key}
    return found | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": api_key}


class Env(abc.ABC):
    """One episode. Methods may block: the pool calls them from worker threads or processes, under deadlines.

    All randomness comes from the task: two episodes of one task with the same actions return the same results.
    """

    run_limit_s: float | None = None
    """Longest time in seconds that the program in the next action may run; None: the time-out of the settings. Set
    before `step`, for environments with `EnvSpec.run_limits`."""

    @abc.abstractmethod
    def reset(self, task: Task) -> tuple[Message, ...]:
        """Start the task; return the opening conversation, which ends with a message to the policy."""

    @abc.abstractmethod
    def step(self, action: str) -> StepResult:
        """Execute the policy's action and return the result. After the episode's end: `EnvError`."""

    def play(self, program: ProgramLaunch) -> StepResult:
        """Run an agent program in the episode's sandbox until it ends, and return the result of the whole episode.
        Environments with `EnvSpec.has_sandbox` define it. A program out of time is killed, and its work is scored
        (`truncated`)."""
        raise EnvError("this environment has no sandbox for agent programs")

    @abc.abstractmethod
    def reference_answer(self) -> str:
        """Return the next action of a perfect policy."""

    def rejected(self) -> str:
        """Return a worse action than `reference_answer`, for training on pairs."""
        raise EnvError("this environment has no rejected answers: it cannot be a source of pairs")

    def snapshot(self) -> bytes:
        """Return the episode's state, for `restore` in another environment of the same settings."""
        raise EnvError("this environment cannot be copied in the middle of an episode; replay its actions instead")

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot."""
        raise EnvError("this environment cannot be copied in the middle of an episode; replay its actions instead")

    def close(self) -> None:  # noqa: B027  # most episodes hold nothing
        """Free the episode's resources."""


class PureEnv(Env):
    """An episode whose state is plain Python values in its attributes: it can be copied at any point."""

    def snapshot(self) -> bytes:
        return pickle.dumps({k: v for k, v in vars(self).items() if k != "_spec"})

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot that `snapshot` of this class made (it is unpickled: trust where it comes from)."""
        vars(self).update(pickle.loads(state))


class EnvSpec(abc.ABC):
    """Settings of an environment family. Subclasses are frozen dataclasses."""

    runs: ClassVar[Runs] = "process"
    """Place where the pool runs the episodes. `process`: in a worker process that can be killed, so that no answer can
    keep the trainer waiting. `inline`: in threads of the trainer, for calls that take microseconds for any answer,
    because answers have a maximum length and are read in linear time. `thread`: in threads of the trainer too, for
    calls that wait for another process or machine (a server, a sandbox)."""

    has_sandbox: ClassVar[bool] = False
    """Whether each episode has a sandbox in which an agent program can play it (`Env.play`)."""

    @property
    def program(self) -> tuple[str, ...]:
        """The command line of the agent program that must play the episodes (`Recipe.agent`): its answers are results,
        not a policy's. Empty, the default: the policy's answers are actions."""
        return ()

    @property
    def needs_worker(self) -> str:
        """The reason why calls must run in worker processes, even if the pool's settings ask for threads; empty:
        threads are allowed."""
        return ""

    @property
    def max_turns(self) -> int:
        """Maximum number of turns of an episode. Multi-turn environments have a field of this name."""
        return 1

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short name, also the domain in metrics."""

    @property
    def specs(self) -> Mapping[str, EnvSpec]:
        """The environment of each domain, by the domain's name (`Task.env`). An environment that is no mixture is its
        own only domain."""
        return {self.name: self}

    @property
    def num_tasks(self) -> int | None:
        """Number of indices after which the tasks repeat in the same order; None: they never repeat, or the number is
        not known."""
        return None

    def turns_of(self, task: Task) -> int:
        """Return the most turns of an episode of `task`."""
        return self.max_turns

    @abc.abstractmethod
    def task(self, index: int) -> Task:
        """Return the task at `index`, 0 to `NUM_INDICES - 1`; equal indices give equal tasks, in any process."""

    @abc.abstractmethod
    def make(self) -> Env:
        """Make a new environment."""

    def warm(self) -> None:  # noqa: B027  # most need nothing
        """Import and load everything that all episodes share. Called once, in the process that workers are forked
        from."""

    def run_limits(self) -> RunLimits | None:
        """Return new time limits by task, for environments that run programs and use them (`Env.run_limit_s`). Default:
        None."""
        return None

    def warnings(self) -> Sequence[str]:
        """Return sentences that a user should read before a run, such as which of their data is skipped."""
        return ()

    def columns_taken(self) -> str:
        """Return a sentence that names the data column of each part of a task; empty if the environment reads no
        columns."""
        return ""

    def location(self, index: int) -> str:
        """Return the file and line that a task is read from; empty: it is made up."""
        return ""

    def final_answer(self, task: Task, text: str) -> str | None:
        """Return the final answer in a policy's last message, normalised so that equal answers are equal texts.

        An evaluation counts these as votes (maj@k). Must read the text in linear time.

        Returns:
          None: the text holds no answer, or answers to these tasks cannot be counted (the default).
        """
        return None

    def category(self, task: Task) -> str:
        """Return the category of a task within this environment, for tables of an evaluation; empty: none (the
        default)."""
        return ""

    def reference(self, task: Task) -> str | None:
        """Return the answer that is recorded for a task, for people to look at next to a policy's answer. Rollouts call
        this once per episode, in the trainer's process: look into a table, or compute something cheap.

        Returns:
          None: no answer is recorded, or the task takes several (the default).
        """
        return None

    def variants(self, task: Task) -> Sequence[Task]:
        """Return every form of the task that an evaluation asks, all with the same content. Default: only the task
        itself. An environment that trains judges returns a pair of answers in both orders."""
        return (task,)

    def form(self, task: Task, key: Key) -> Task:
        """Return the form of the task that the trajectory at `key` plays; its record keeps the task itself. Default:
        the task. An environment with experiences shows one to half of a group. Called in the trainer's process; equal
        arguments must give equal forms."""
        return task

    def bad_actions(self) -> Sequence[str]:
        """Return actions that must not solve a task, for the contract tests."""
        return ("", "\x00", "nonsense " * 50)
