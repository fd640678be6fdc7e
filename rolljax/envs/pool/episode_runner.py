"""Runs environments for the pool: in a thread, a worker process or a Ray actor."""

from __future__ import annotations

import contextlib
from typing import Any

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.pool import wire
from rolljax.envs.pool.checks import Verb, check_answer, check_opening, check_result, describe
from rolljax.envs.text import bounded
from rolljax.errors import EnvError, RolljaxError


class EpisodeRunner:
    """Runs one episode's environment, from `reset` to `close`. Checks its output and attributes its exceptions."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._env: Env | None = None

    def call(self, verb: Verb, argument: Any) -> Any:
        """Opening messages of `reset`, `StepResult` of `step`, text of `reference_answer` and `rejected`, None of
        `close`.

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
        except BaseException as e:  # border: whatever an environment throws, `sys.exit` too, is its failure
            raise EnvError(f"{verb} of {self._spec.name}: {describe(e)}", stage=verb) from e

    def _call(self, verb: Verb, argument: Any) -> Any:
        if verb == "reset":
            self._env = self._spec.make()
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self.close)
                initial_messages = check_opening(self._env.reset(argument), self._max_bytes)
                on_failure.pop_all()
            return initial_messages
        if verb == "close":
            env, self._env = self._env, None
            return env.close() if env is not None else None
        if self._env is None:
            raise EnvError(f"{verb} before reset, or after close")
        if verb == "step":
            if argument.run_limit_s is not None:
                self._env.run_limit_s = argument.run_limit_s
            return check_result(self._env.step(bounded(argument.text)), self._max_bytes)
        return check_answer(
            self._env.reference_answer() if verb == "reference_answer" else self._env.rejected(), self._max_bytes
        )

    def close(self) -> None:
        """Close, whatever the environment says to it: the episode is over, or failed already."""
        try:
            self.call("close", None)
        except RolljaxError:
            pass

    @property
    def closes(self) -> bool:
        """Whether there is something to close."""
        return self._env is not None and type(self._env).close is not Env.close


class WorkerEpisodes:
    """The episodes of one worker process or actor, by number. Calls are answered one after the other, in their order:
    the first call without an answer is the one that runs."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._runners: dict[int, EpisodeRunner] = {}

    def answer(self, call: wire.Request) -> bytes:
        """Return the reply to a request; never raises."""
        number, episode, verb, argument = call
        try:
            if verb == "reset":
                self._runners[episode] = EpisodeRunner(self._spec, self._max_bytes)
            elif episode not in self._runners:
                if verb == "close":
                    return wire.reply(number, verb, None)
                raise EnvError(f"{verb} of an episode that is not open here", stage=verb)
            runner = self._runners.pop(episode) if verb == "close" else self._runners[episode]
            return wire.reply(number, verb, runner.call(verb, argument))
        except RolljaxError as e:
            return wire.failure(number, e)

    def close(self) -> None:
        """Close every episode that is still open."""
        runners = list(self._runners.values())
        self._runners.clear()
        for runner in runners:
            runner.close()
