"""The side of the pool on which environments run: in a thread, a worker process or a Ray actor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.pool import wire
from rolljax.envs.pool.checks import Verb, check_answer, check_opening, check_result, describe
from rolljax.envs.text import bounded
from rolljax.errors import EnvError, RolljaxError


class Play:
    """One episode's environment, from `reset` to `close`. What it says is checked; what it throws has an owner."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._env: Env | None = None

    def call(self, verb: Verb, argument: Any) -> Any:
        """Opening messages of `reset`, `StepResult` of `step`, text of `gold` and `rejected`, None of `close`.

        Raises:
          EnvError: the environment threw something, or broke the rules; `stage` is the verb.
          RolljaxError: the environment raised it.
        """
        try:
            return self._call(verb, argument)
        except EnvError as e:
            e.stage = e.stage or verb
            raise
        except RolljaxError:
            raise
        except BaseException as e:  # border: whatever an environment throws, `sys.exit` too, is that one's failure
            raise EnvError(f"{verb} of {self._spec.name}: {describe(e)}", stage=verb) from e

    def _call(self, verb: Verb, argument: Any) -> Any:
        if verb == "reset":
            self._env = self._spec.make()
            try:
                return check_opening(self._env.reset(argument), self._max_bytes)
            except BaseException:
                self.close()
                raise
        if verb == "close":
            env, self._env = self._env, None
            return env.close() if env is not None else None
        if self._env is None:
            raise EnvError(f"{verb} before reset, or after close")
        if verb == "step":
            return check_result(self._env.step(bounded(argument)), self._max_bytes)
        return check_answer(self._env.gold() if verb == "gold" else self._env.rejected(), self._max_bytes)

    def close(self) -> None:
        """Close without a word: the episode is over, or failed already."""
        try:
            self.call("close", None)
        except RolljaxError:
            pass

    @property
    def closes(self) -> bool:
        """Whether there is something to close."""
        return self._env is not None and type(self._env).close is not Env.close


class Host:
    """The episodes of one worker process or actor, by number. Calls are answered one after the other, in their order:
    the first call without an answer is the one that runs."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._plays: dict[int, Play] = {}

    def answer(self, call: wire.Request) -> bytes:
        """The reply to one request, whatever happens in it."""
        number, episode, verb, argument = call
        try:
            if verb == "reset":
                self._plays[episode] = Play(self._spec, self._max_bytes)
            elif episode not in self._plays:
                if verb == "close":
                    return wire.reply(number, verb, None)
                raise EnvError(f"{verb} of an episode that is not open here", stage=verb)
            play = self._plays.pop(episode) if verb == "close" else self._plays[episode]
            return wire.reply(number, verb, play.call(verb, argument))
        except RolljaxError as e:
            return wire.failure(number, e)

    def close(self) -> None:
        """Close every episode that is still open."""
        plays: Iterable[Play] = list(self._plays.values())
        self._plays.clear()
        for play in plays:
            play.close()
