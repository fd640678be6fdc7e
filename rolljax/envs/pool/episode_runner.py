"""Run one episode of an environment, and check everything that the environment returns.

`EpisodeRunner` does it in a thread, a worker process or a Ray actor alike. A valid value is returned unchanged. Numbers
of other types (NumPy's) become floats, text that has no UTF-8 gets U+FFFD for what is not a character, overlong
observations are cut, and everything else is an `EnvError`: a wrong value that was taken for 0 or False would be a score
of the policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rolljax.envs.base import Action, Env, EnvSpec, ProgramLaunch, StepResult
from rolljax.envs.text import bounded, clean
from rolljax.errors import EnvError, RolljaxError
from rolljax.types import Message, Task

MAX_NAMES = 256


def number(value: Any, name: str = "reward") -> float:
    """Return a finite number of any numeric type (NumPy's and tensors without axes too) as a float."""
    if not isinstance(value, numbers.Real) and not hasattr(type(value), "__float__"):
        raise EnvError(f"{name} is a {kind(value)}, not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except (TypeError, ValueError) as e:  # an array of several
        raise EnvError(f"{name} is a {kind(value)}, not a number: {e}") from None
    if not math.isfinite(found):
        raise EnvError(f"{name} is {found}: not a finite number")
    return found


def flag(value: Any, name: str) -> bool:
    """Return a bool; NumPy's is accepted too."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise EnvError(f"{name} is a {kind(value)}, not a bool")


def table(values: Any, name: str) -> dict[str, float]:
    """Return numbers by name."""
    if not isinstance(values, Mapping):
        raise EnvError(f"{name} is a {kind(values)}, not a mapping")
    if len(values) > MAX_NAMES:
        raise EnvError(f"{name} has {len(values)} names, at most {MAX_NAMES} are allowed")
    for key in values:
        if not isinstance(key, str) or len(key) > 200:
            raise EnvError(f"a name in {name} is a {kind(key)}, or longer than 200 characters")
    return {key: number(value, f"{name}[{key!r}]") for key, value in values.items()}


def kind(value: Any) -> str:
    """Return the name of a value's class."""
    return type(value).__name__


Verb = Literal["reset", "step", "play", "reference_answer", "rejected", "close"]
Argument = Task | Action | ProgramLaunch | None
"""The argument of a verb: a task for reset, an action for step, a program for play, otherwise None."""

MAX_MESSAGES = 1000
MAX_ERROR_CHARS = 2000
NOTE_BYTES = 40


def check_messages(messages: Any, max_bytes: int) -> tuple[Message, ...]:
    """Check an observation: a sequence of messages with texts."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise EnvError(f"an observation is a sequence of messages, this is a {kind(messages)}")
    if len(messages) > MAX_MESSAGES:
        raise EnvError(f"an observation of {len(messages)} messages, at most {MAX_MESSAGES} are allowed")
    num_bytes = 0
    for m in messages:
        if type(m) is not Message:
            raise EnvError(f"an observation is a sequence of messages, this one holds a {kind(m)}")
        if not isinstance(m.role, str) or not isinstance(m.content, str):
            raise EnvError(f"a message is text, this one is ({kind(m.role)}, {kind(m.content)})")
        if not m.role or len(m.role) > 64:
            raise EnvError("a message's role is empty or longer than 64 characters")
        num_bytes += len(m.content) if m.content.isascii() and m.role.isascii() else 2 * max_bytes
    if num_bytes <= max_bytes:
        return tuple(messages)
    return _shortened([Message(clean(m.role), clean(m.content)) for m in messages], max_bytes)


def check_opening(messages: Any, max_bytes: int) -> tuple[Message, ...]:
    """Check the first observation of an episode, which must not be empty."""
    messages = check_messages(messages, max_bytes)
    if not messages:
        raise EnvError("the opening conversation is empty")
    return messages


def check_result(result: Any, max_bytes: int) -> StepResult:
    """Check the result of an action."""
    if not isinstance(result, StepResult):
        raise EnvError(f"a step returns a StepResult, not a {kind(result)}")
    for name in ("terminated", "truncated", "success"):
        if not isinstance(getattr(result, name), bool):
            as_bool: dict[str, Any] = {name: flag(getattr(result, name), name)}
            result = dataclasses.replace(result, **as_bool)
    if result.terminated and result.truncated:
        raise EnvError("a step says both terminated and truncated")
    changes: dict[str, Any] = {}
    messages = check_messages(result.messages, max_bytes)
    if messages is not result.messages:
        changes["messages"] = messages
    if not messages and not result.terminated and not result.truncated:
        raise EnvError("a step says nothing, and the episode is not over")
    for name in ("reward", "weight"):
        value = getattr(result, name)
        if type(value) is not float or not math.isfinite(value):
            changes[name] = number(value, name)
    if result.weight < 0:
        raise EnvError(f"a weight of {result.weight:g} is negative")
    for name in ("reward_parts", "metrics"):
        values = getattr(result, name)
        if type(values) is not dict or values:
            changes[name] = {clean(key): value for key, value in table(values, name).items()}
    return dataclasses.replace(result, **changes) if changes else result


def check_answer(text: Any, max_bytes: int) -> str:
    """Check a reference answer or a rejected one."""
    if not isinstance(text, str):
        raise EnvError(f"an action is text, not a {kind(text)}")
    text = clean(text)
    if len(text) > max_bytes:
        raise EnvError(f"an action of {len(text)} characters, at most {max_bytes} are allowed")
    return text


def describe(error: BaseException) -> str:
    """Return type and text of an exception, shortened; works even if the exception cannot be formatted."""
    try:
        text = str(error)
    except Exception:  # border: an exception of an environment is its code
        text = "(its text cannot be shown)"
    return clean(f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARS])


def _shortened(messages: list[Message], max_bytes: int) -> tuple[Message, ...]:
    data = [m.content.encode() for m in messages]
    if sum(map(len, data)) <= max_bytes:
        return tuple(messages)
    room = max_bytes // len(messages)
    return tuple(Message(m.role, _cut(d, room)) for m, d in zip(messages, data, strict=True))


def _cut(data: bytes, room: int) -> str:
    """Return both ends of a text with a note between them, in `room` bytes; empty if the note does not fit."""
    if len(data) <= room:
        return data.decode()
    keep = (room - NOTE_BYTES) // 2
    if keep <= 0:
        return ""
    note = f"\n[{len(data) - 2 * keep} bytes left out]\n"
    return data[:keep].decode(errors="ignore") + note + data[-keep:].decode(errors="ignore")


class EpisodeRunner:
    """Runs one episode's environment, from `reset` to `close`. Checks its output and attributes its exceptions."""

    def __init__(self, spec: EnvSpec, max_bytes: int) -> None:
        self._spec = spec
        self._max_bytes = max_bytes
        self._env: Env | None = None

    def call(self, verb: Verb, argument: Any) -> Any:
        """Return the first messages of `reset`, the `StepResult` of `step` and `play`, the text of `reference_answer`
        and `rejected`, None of `close`.

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
        if verb == "play":
            return check_result(self._env.play(argument), self._max_bytes)
        return check_answer(
            self._env.reference_answer() if verb == "reference_answer" else self._env.rejected(), self._max_bytes
        )

    def close(self) -> None:
        """Close the environment and ignore its errors: the episode is over, or failed already."""
        try:
            self.call("close", None)
        except RolljaxError:
            pass

    @property
    def closes(self) -> bool:
        """Return whether an environment is open that defines `close`."""
        return self._env is not None and type(self._env).close is not Env.close
