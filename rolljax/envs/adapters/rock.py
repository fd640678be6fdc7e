"""Environments of a ROCK server, over its four GEM endpoints: make, reset, step and close, JSON over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Annotated, Any, ClassVar

from rolljax.envs.adapters.border import MAX_ACTION_CHARS
from rolljax.envs.adapters.gem import framed, step_result
from rolljax.envs.adapters.openenv import bearer, check_url, refused
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.http_body import ACCEPTED, read_body, read_error
from rolljax.errors import EnvError, InfraError, Range, boundary, check_fields, needed
from rolljax.types import Message, Task

PATH = "/apis/v1/envs/gem/"
MAX_ANSWER_BYTES = 2**22
"""Maximum size of a server's answer; a longer one is a failure of the server."""


@dataclasses.dataclass(frozen=True)
class Rock(EnvSpec):
    """An environment of a ROCK server (https://github.com/alibaba/ROCK), or of `rolljax.envs.adapters.gem_server`.

    Task i is the server's reset with seed + i.
    """

    runs: ClassVar[Runs] = "thread"

    url: str = "http://127.0.0.1:8080"
    """`http://host:port` of the server."""
    env_id: str = "game:GuessTheNumber-v0-easy"
    """Id of the environment on the server."""
    success_reward: float = 1.0
    """Last reward from which on an episode counts as solved, if the server's `info` has no `success`."""
    max_turns: Annotated[int, Range(low=1)] = 30
    """Actions before the episode is cut."""
    seed: int = 0
    """Seed of the first task."""
    token_env: str = "ROLLJAX_ENV_TOKEN"
    """Environment variable that holds a bearer token, if it is set."""
    timeout_s: float = 60.0
    """Time limit in seconds for each call, from the connection to the last byte."""

    def __post_init__(self) -> None:
        check_url(self.url, "Rock.url")
        check_fields(self)

    @property
    def name(self) -> str:
        return self.env_id

    def task(self, index: int) -> Task:
        """Return a task without asking the server: the seed identifies it."""
        return Task(self.name, index, f"{self.env_id} with seed {self.reset_seed(index)}")

    def make(self) -> Env:
        return RockEnv(self)

    def reset_seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % 2**31


class RockEnv(Env):
    """One episode. It has its own sandbox on the server."""

    def __init__(self, spec: Rock) -> None:
        self._spec = spec
        self._sandbox = ""
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.env_id} with this seed")
        self.close()
        self._sandbox = str(self._call("make", {"env_id": self._spec.env_id}).get("sandbox_id", ""))
        if not self._sandbox:
            raise InfraError(f"{self._spec.url} made no {self._spec.env_id}")
        data = self._call("reset", {"sandbox_id": self._sandbox, "seed": self._spec.reset_seed(task.index)})
        self._turns, self._over = 0, False
        return (Message("user", framed(data.get("observation"), data.get("info"))),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        text = (action if len(action) <= MAX_ACTION_CHARS else "").encode("utf-8", "replace").decode()
        data = self._call("step", {"sandbox_id": self._sandbox, "action": text})
        with boundary(InfraError, f"answer of {self._spec.url}"):
            values = [data[key] for key in ("observation", "reward", "terminated", "truncated", "info")]
        result = step_result(values, self._turns == self._spec.max_turns, self._spec.success_reward)
        self._over = result.terminated or result.truncated
        return result

    def reference_answer(self) -> str:
        raise EnvError("a ROCK server gives no reference actions")

    def close(self) -> None:
        sandbox, self._sandbox, self._over = self._sandbox, "", True
        if sandbox:
            self._call("close", {"sandbox_id": sandbox})

    def _call(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call one of the endpoints.

        Raises:
          InfraError: the server is unreachable, has no room, or failed.
          EnvError: the server refused the call (a status from 400 to 499), with its reason.
          ConfigError: the server rejects the token.
        """
        with boundary(InfraError, f"{verb} at {self._spec.url}"):
            status, answer = asyncio.run(self._post(verb, body))
            if status == 200:
                data = json.loads(answer)
                if not isinstance(data, dict):
                    raise InfraError(f"{verb} at {self._spec.url}: the answer is no JSON object")
                return data
        refused(status, self._spec.url, "Rock", self._spec.token_env)
        why = f"{verb} at {self._spec.url}: status {status}: {answer}"
        raise (EnvError if 400 <= status < 500 and status != 429 else InfraError)(why)

    async def _post(self, verb: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return the status and the body of an answer; for an error only the beginning of the body."""
        with needed("httpx2", "Rock.url"):
            import httpx2

        spec, url = self._spec, self._spec.url.rstrip("/") + PATH + verb
        headers = ACCEPTED | bearer(spec.token_env)
        async with (
            asyncio.timeout(spec.timeout_s),
            httpx2.AsyncClient(headers=headers, timeout=spec.timeout_s, trust_env=False) as http,
            http.stream("POST", url, json=body) as response,
        ):
            if response.status_code != 200:
                return response.status_code, await read_error(response)
            return 200, (await read_body(response, MAX_ANSWER_BYTES)).decode()
