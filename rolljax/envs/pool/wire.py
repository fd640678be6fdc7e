"""The protocol between the pool and a worker, and the worker's answers to it.

Both send lines. Towards the worker a line is a pickled list of requests in base64: the worker trusts the pool. Back
comes one line per request, a JSON list `[number, outcome, value]`, which is never trusted: it is parsed, held to its
schema, and checked like the result of any environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rolljax import errors
from rolljax.envs.base import EnvSpec, StepResult
from rolljax.envs.pool.episode_runner import (
    MAX_ERROR_CHARS,
    EpisodeRunner,
    Verb,
    check_answer,
    check_opening,
    check_result,
)
from rolljax.envs.text import clean
from rolljax.errors import EnvError, RolljaxError
from rolljax.types import Message

Request = tuple[int, int, Verb, Any]
"""Number of the request, number of the episode, the verb, its argument."""

HELLO = b'[0,"ready",null]'
"""The first line of a worker that can take requests."""

_ERRORS = ("EnvError", "InfraError", "DataError", "ConfigError")


class ProtocolError(Exception):
    """A line from a worker that is no reply."""


def max_reply_bytes(max_observation_bytes: int) -> int:
    """Return a bound on the length of honest replies: JSON writes a byte as at most 6; notes, names and numbers add to
    it."""
    return 6 * max_observation_bytes + 1_000_000


def reply(number: int, verb: Verb, value: Any) -> bytes:
    """Return a reply with the result of `EpisodeRunner.call`."""
    plain: Any = value
    if verb == "reset":
        plain = [[m.role, m.content] for m in value]
    elif verb in ("step", "play"):
        plain = [
            [[m.role, m.content] for m in value.messages],
            value.reward,
            value.terminated,
            value.truncated,
            value.success,
            dict(value.reward_parts),
            value.weight,
            dict(value.metrics),
        ]
    elif verb == "close":
        plain = None
    return json.dumps([number, "ok", plain], ensure_ascii=False, separators=(",", ":")).encode()


def failure(number: int, error: RolljaxError) -> bytes:
    """Return a reply with an error."""
    cls = type(error).__name__
    value = [cls if cls in _ERRORS else "EnvError", clean(str(error)[:MAX_ERROR_CHARS]), getattr(error, "stage", "")]
    return json.dumps([number, "error", value]).encode()


def parse(payload: bytes) -> tuple[int, str, Any]:
    """Return number, outcome and plain value of a reply.

    Raises:
      ProtocolError: the reply is not a JSON list of these three.
    """
    try:
        answer = json.loads(payload.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"a reply that is not JSON ({type(e).__name__})") from e
    if type(answer) is not list or len(answer) != 3 or type(answer[0]) is not int or type(answer[1]) is not str:
        raise ProtocolError("a reply that is not [number, outcome, value]")
    return answer[0], answer[1], answer[2]


def value_of(verb: Verb, outcome: str, value: Any, max_bytes: int) -> Any | RolljaxError:
    """Return the result or error of `EpisodeRunner.call` from the plain value of a reply to `verb`.

    Raises:
      ProtocolError: the value does not fit the verb's schema, or breaks the rules for observations.
    """
    try:
        if outcome == "error":
            name, text, stage = _typed(value, [str, str, str])
            cls = getattr(errors, name if name in _ERRORS else "EnvError")
            return cls(text[:MAX_ERROR_CHARS], stage=stage[:64]) if issubclass(cls, EnvError) else cls(text)
        if outcome != "ok":
            raise ProtocolError(f"an outcome that is neither ok nor error: {outcome[:64]!r}")
        if verb == "reset":
            return check_opening(_messages(value), max_bytes)
        if verb in ("step", "play"):
            kinds = [list, (int, float), bool, bool, bool, dict, (int, float), dict]
            messages, reward, terminated, truncated, success, parts, weight, metrics = _typed(value, kinds)
            result = StepResult(_messages(messages), reward, terminated, truncated, success, parts, weight, metrics)
            return check_result(result, max_bytes)
        if verb == "close":
            return None
        return check_answer(value, max_bytes)
    except EnvError as e:
        raise ProtocolError(str(e)) from e


def _messages(value: Any) -> tuple[Message, ...]:
    if type(value) is not list:
        raise ProtocolError("messages that are not a list")
    return tuple(Message(*_typed(m, [str, str])) for m in value)


def _typed(value: Any, kinds: Sequence[Any]) -> list[Any]:
    if type(value) is not list or len(value) != len(kinds):
        raise ProtocolError("a value of another schema")
    for item, kind in zip(value, kinds, strict=True):
        if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
            raise ProtocolError("a value of another schema")
    return value


class WorkerEpisodes:
    """The episodes of one worker process or actor, by number. Calls are answered one after the other, in their order:
    the first call without an answer is the one that runs."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._runners: dict[int, EpisodeRunner] = {}

    def answer(self, call: Request) -> bytes:
        """Return the reply to a request; never raises."""
        number, episode, verb, argument = call
        try:
            if verb == "reset":
                self._runners[episode] = EpisodeRunner(self._spec, self._max_bytes)
            elif episode not in self._runners:
                if verb == "close":
                    return reply(number, verb, None)
                raise EnvError(f"{verb} of an episode that is not open here", stage=verb)
            runner = self._runners.pop(episode) if verb == "close" else self._runners[episode]
            return reply(number, verb, runner.call(verb, argument))
        except RolljaxError as e:
            return failure(number, e)

    def close(self) -> None:
        """Close every episode that is still open."""
        runners = list(self._runners.values())
        self._runners.clear()
        for runner in runners:
            runner.close()
