"""The environment of an OpenEnv server, over its WebSocket."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from rolljax.envs.adapters.border import MAX_ACTION_CHARS, library
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool.episode_runner import flag, number, table
from rolljax.envs.text import read_json
from rolljax.errors import ConfigError, EnvError, InfraError, Range, boundary, check_fields
from rolljax.types import Message, Task

MAX_FRAME_BYTES = 2**22
"""Maximum size of a server's message; a longer one is a failure of the server."""


@dataclasses.dataclass(frozen=True)
class OpenEnv(EnvSpec):
    """The environment of an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), by the wire format of 0.10.

    Task i is the server's reset with seed + i. A server that ignores seeds gives other tasks each time.
    """

    runs: ClassVar[Runs] = "thread"

    url: str = "http://127.0.0.1:8000"
    """`http://host:port` of the server; it serves one environment."""
    action_key: str = "message"
    """The field of the server's action that takes the policy's text (its `/schema` tells); empty: the text is the whole
    action, as a JSON object."""
    text_key: str = ""
    """The field of the observation that is shown; empty: `messages` where it has such a list, else its first text among
    `message`, `text`, `prompt`, `observation`, `result`, `output`, else all of it as JSON."""
    success_reward: float = 1.0
    """Last reward from which on an episode counts as solved, if the server's metadata have no `success`."""
    max_turns: Annotated[int, Range(low=1)] = 16
    """Actions before the episode is cut."""
    seed: int = 0
    """Seed of the first task."""
    token_env: str = "ROLLJAX_ENV_TOKEN"
    """Environment variable that holds a bearer token, if it is set."""
    timeout_s: float = 60.0
    """Time limit in seconds for connecting, and for each answer."""

    def __post_init__(self) -> None:
        check_url(self.url, "OpenEnv.url")
        check_fields(self)

    @property
    def name(self) -> str:
        return f"openenv {urlsplit(self.url).netloc}"

    def task(self, index: int) -> Task:
        """Return a task without asking the server: the seed identifies it."""
        return Task(self.name, index, f"{self.url} with seed {self.reset_seed(index)}")

    def make(self) -> Env:
        return OpenEnvEnv(self)

    def reset_seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % 2**31


class OpenEnvEnv(Env):
    """One episode. It has its own connection, from `reset` to `close`."""

    def __init__(self, spec: OpenEnv) -> None:
        self._spec = spec
        self._socket: Any = None
        self._open = contextlib.ExitStack()
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.name} with this seed")
        self.close()
        client = library("websockets.sync.client", "websockets")
        url = self._spec.url.replace("http", "ws", 1).rstrip("/") + "/ws"
        with boundary(InfraError, f"connecting to {url}"):
            try:
                connection = client.connect(
                    url,
                    open_timeout=self._spec.timeout_s,
                    additional_headers=bearer(self._spec.token_env),
                    max_size=MAX_FRAME_BYTES,
                    proxy=None,
                )
                self._socket = self._open.enter_context(connection)
            except library("websockets.exceptions", "websockets").InvalidStatus as e:
                refused(e.response.status_code, self._spec.url, "OpenEnv", self._spec.token_env)
                raise
        data = self._ask({"type": "reset", "data": {"seed": self._spec.reset_seed(task.index)}})
        if data.get("done"):
            raise EnvError(f"task {task.index} of {self._spec.name} is over before it begins")
        self._turns, self._over = 0, False
        return self._seen(data)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        data = self._ask({"type": "step", "data": self._action(action)})
        about = data.get("metadata") or (data.get("observation") or {}).get("metadata")
        about = about if isinstance(about, Mapping) else {}
        done, cut = _flag(data, "done"), _flag(about, "truncated")
        reward = 0.0 if data.get("reward") is None else number(data["reward"])  # a step may go without one
        truncated = cut if done else self._turns == self._spec.max_turns
        self._over = done or truncated
        said = about.get("success")
        success = done and reward >= self._spec.success_reward if said is None else flag(said, "success")
        return StepResult(
            () if self._over else self._seen(data),
            reward,
            terminated=done and not truncated,
            truncated=truncated,
            success=self._over and success,
            reward_parts=table(about.get("reward_parts") or {"env": reward}, "reward_parts"),
            metrics=table(about.get("metrics") or {}, "metrics"),
        )

    def reference_answer(self) -> str:
        raise EnvError("an OpenEnv server gives no reference actions")

    def close(self) -> None:
        self._socket, self._over = None, True
        self._open.close()

    def _action(self, text: str) -> dict[str, Any]:
        text = (text if len(text) <= MAX_ACTION_CHARS else "").encode("utf-8", "replace").decode()
        if self._spec.action_key:
            return {self._spec.action_key: text}
        try:
            action = read_json(text)
        except ValueError:
            action = None
        return action if isinstance(action, dict) else {}

    def _seen(self, data: Mapping[str, Any]) -> tuple[Message, ...]:
        return shown(data.get("observation"), self._spec.text_key)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of the observation that answers it.

        Raises:
          InfraError: no answer, none that can be read, or the server has no room or lost its worker.
          EnvError: the environment failed.
        """
        with boundary(InfraError, f"{message['type']} of {self._spec.name}"):
            with contextlib.suppress(library("websockets.exceptions", "websockets").ConnectionClosed):
                self._socket.send(json.dumps(message))  # of a server that hung up, the last word is read below
            answer = json.loads(self._socket.recv(timeout=self._spec.timeout_s))
            kind, data = answer["type"], answer["data"]
            if kind == "observation" and isinstance(data, dict):
                return data
            code, why = data.get("code"), str(data.get("message"))[:500]
        if code in ("EXECUTION_ERROR", "VALIDATION_ERROR") and data.get("owner") != "infra":
            raise EnvError(f"{self._spec.name}: {why} ({code})")
        raise InfraError(f"{self._spec.name}: {why} ({code})")


TEXT_KEYS = ("message", "text", "prompt", "observation", "result", "output")


def shown(observation: Any, text_key: str) -> tuple[Message, ...]:
    """Return an observation as messages."""
    if not isinstance(observation, Mapping):
        return (Message("user", str(observation)),)
    if text_key:
        return (Message("user", str(observation.get(text_key, ""))),)
    listed = observation.get("messages")
    if isinstance(listed, list) and listed and all(isinstance(m, Mapping) for m in listed):
        return tuple(Message(str(m.get("role", "user")), str(m.get("content", ""))) for m in listed)
    for key in TEXT_KEYS:
        if isinstance(observation.get(key), str) and observation[key]:
            return (Message("user", observation[key]),)
    return (Message("user", json.dumps({k: v for k, v in observation.items() if k != "metadata"})),)


def _flag(data: Mapping[str, Any], name: str) -> bool:
    """Return the value of an optional flag; False if it is missing or null."""
    return data.get(name) is not None and flag(data[name], name)


def bearer(token_env: str) -> dict[str, str]:
    """Return the authorization header for a server; empty without a token."""
    token = os.environ.get(token_env, "") if token_env else ""
    return {"Authorization": f"Bearer {token}"} if token else {}


def refused(status: int, url: str, setting: str, token_env: str) -> None:
    """Raise `ConfigError` if the server's HTTP status means that the token is missing or wrong."""
    if status in (401, 403):
        raise ConfigError(
            f"does not open {url} (status {status})",
            setting=f"{setting}.token_env",
            value=token_env,
            remedy="put the server's token into that environment variable",
        )


def check_url(url: str, setting: str) -> None:
    """Raise `ConfigError` if the text is no address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("is no address of a server", setting=setting, value=url, remedy="like http://127.0.0.1:8000")
