"""Environments by short name, and tasks by one line of text: `frozen_lake(size=5)`, `rg:chain_sum`, `shop#17`.

Short names come from `NAMES`, `PREFIXES` and the packages of `rolljax.recipes`.

A reference names an environment with its settings and, after `#`, the index of a task; together with the actions of a
trajectory it is enough to replay the trajectory.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rolljax.envs.base import EnvSpec
from rolljax.errors import ConfigError, boundary
from rolljax.types import Task

NAMES: dict[str, str] = {
    "frozen_lake": "rolljax.envs.games.frozen_lake.FrozenLake",
    "sokoban": "rolljax.envs.games.sokoban.Sokoban",
    "guess_number": "rolljax.envs.games.guess_number.GuessNumber",
    "nim": "rolljax.envs.games.nim.Nim",
    "countdown": "rolljax.envs.games.countdown.Countdown",
    "mastermind": "rolljax.envs.games.mastermind.Mastermind",
    "key_door": "rolljax.envs.games.key_door.KeyDoor",
    "house": "rolljax.envs.games.house.House",
    "calculator": "rolljax.envs.tools.calculator.CalculatorTask",
    "questions": "rolljax.envs.questions.Questions",
    "records": "rolljax.envs.records.Records",
    "mixture": "rolljax.envs.mixture.Mixture",
}
"""Short name -> class, of the core's environments."""

PREFIXES: dict[str, tuple[str, str]] = {
    "rg": ("rolljax.envs.adapters.reasoning_gym.ReasoningGym", "family"),
    "gymnasium": ("rolljax.envs.adapters.gymnasium.Gymnasium", "id"),
    "textarena": ("rolljax.envs.adapters.textarena.TextArena", "id"),
    "gem": ("rolljax.envs.adapters.gem.Gem", "id"),
    "openenv": ("rolljax.envs.adapters.openenv.OpenEnv", "url"),
    "rock": ("rolljax.envs.adapters.rock.Rock", "url"),
    "trl": ("rolljax.envs.adapters.trl.TrlEnvironment", "factory"),
    "verifiers": ("rolljax.envs.adapters.verifiers.Verifiers", "id"),
    "taubench": ("rolljax.envs.adapters.taubench.TauBench", "path"),
    "code": ("rolljax.envs.code_problems.CodeProblems", "path"),
}
"""Prefix of a reference -> class, and its setting that receives the text after the colon."""


@functools.cache
def names() -> Mapping[str, str]:
    """Return short name -> class, of the core's environments and those of all recipes."""
    return NAMES | {name: path for recipe in _recipes() for name, path in getattr(recipe, "ENVIRONMENTS", {}).items()}


@functools.cache
def prefixes() -> Mapping[str, tuple[str, str]]:
    """Return prefix -> class and setting, of the core's environments and those of all recipes."""
    return PREFIXES | {name: to for recipe in _recipes() for name, to in getattr(recipe, "PREFIXES", {}).items()}


def _recipes() -> Iterator[ModuleType]:
    """Import the package of every recipe: its names, and none of its modules."""
    package = importlib.import_module("rolljax.recipes")
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(info.name)


_REF = re.compile(r"(?P<name>[\w.]+)(:(?P<rest>[^()#]+))?(\((?P<settings>.*)\))?(#(?P<index>\d+))?", re.DOTALL)


def make_spec(ref: str) -> EnvSpec:
    """Make the environment that `ref` names: a short name, `prefix:name`, or `module.Class`, with settings as Python
    literals in parentheses. An index after `#` is ignored.

    Raises:
      ConfigError: there is no such environment or setting.
    """
    found = _REF.fullmatch(ref.strip())
    if not found:
        raise ConfigError(
            "is not an environment", setting="environment", value=ref, remedy="like frozen_lake(size=5) or rg:chain_sum"
        )
    name, rest = found["name"], found["rest"]
    settings = _literals(found["settings"] or "", ref)
    if rest is not None:
        path, setting = prefixes().get(name) or _unknown(f"{name}:", [f"{p}:" for p in prefixes()])
        settings = {setting: rest, **settings}
    else:
        path = names().get(name) or (
            name if "." in name else _unknown(name, [*names(), *(f"{p}:" for p in prefixes())])
        )
    cls = _load(path, ref)
    fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in settings:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            raise ConfigError(
                f"{cls.__name__} has no setting {key!r}",
                setting="environment",
                value=ref,
                remedy=f"did you mean {near[0]}?" if near else f"one of {', '.join(fields)}",
            )
    with boundary(ConfigError, f"{ref} cannot be made"):
        return cls(**{key: _function(value, cls, key, ref) for key, value in settings.items()})


def ref_of(spec: EnvSpec, index: int | None = None) -> str:
    """Return the reference that makes this environment again, with task `index` if given."""
    cls = type(spec)
    path = f"{cls.__module__}.{cls.__qualname__}"
    settings = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}  # type: ignore[arg-type]
    name = next((n for n, p in names().items() if p == path), path)
    for prefix, (p, setting) in prefixes().items():
        if p == path:
            name = f"{prefix}:{settings.pop(setting)}"
    for f in dataclasses.fields(spec):  # type: ignore[arg-type]
        if settings.get(f.name) == _default(f):
            settings.pop(f.name, None)
    inner = ", ".join(f"{k}={_literal(v)}" for k, v in settings.items())
    return name + (f"({inner})" if inner else "") + ("" if index is None else f"#{index}")


def task_of(ref: str) -> tuple[EnvSpec, Task]:
    """Return the environment and the task of a reference with an index."""
    spec = make_spec(ref)
    _, mark, index = ref.strip().rpartition("#")
    if not mark or not index.isdigit():
        raise ConfigError("names no task", setting="environment", value=ref, remedy="add its index: " + ref + "#0")
    return spec, spec.task(int(index))


def _literals(text: str, ref: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args and all(k.arg for k in call.keywords)
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as e:
        raise ConfigError(
            "has settings that are not name=literal", setting="environment", value=ref, remedy="like (size=5, seed=1)"
        ) from e


def _load(path: str, ref: str) -> type[EnvSpec]:
    module, _, name = path.rpartition(".")
    try:
        with boundary(ConfigError, f"{ref} cannot be imported (python -c 'import {module}' shows where)"):
            cls = getattr(importlib.import_module(module), name)
    except ConfigError as e:
        if not isinstance(e.__cause__, (ModuleNotFoundError, AttributeError)):
            raise
        raise ConfigError(
            f"cannot be imported: {e.__cause__}",
            setting="environment",
            value=ref,
            remedy="check the spelling, and that its folder is the current one or in PYTHONPATH",
        ) from e.__cause__
    if not (isinstance(cls, type) and issubclass(cls, EnvSpec)):
        raise ConfigError(
            "is not an EnvSpec",
            setting="environment",
            value=ref,
            remedy=f"derive {name} from rolljax.envs.base.EnvSpec (docs/environments.md)",
        )
    return cls


def _function(value: Any, cls: type[EnvSpec], key: str, ref: str) -> Any:
    """Return a setting's value; for a function setting, import the function whose path the text gives."""
    if not (isinstance(value, str) and _takes_function(cls, key)):
        return value
    module, _, name = value.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{key} = {value!r} cannot be imported: {e}",
            setting="environment",
            value=ref,
            remedy="write module.function, with its folder in PYTHONPATH",
        ) from e


def _takes_function(cls: type[EnvSpec], key: str) -> bool:
    try:
        hint = typing.get_type_hints(cls)[key]
    except NameError:  # an annotation that only type checkers can resolve
        return False
    return any(typing.get_origin(arm) is Callable for arm in (hint, *typing.get_args(hint)))


def _unknown(name: str, known: list[str]) -> Any:
    near = difflib.get_close_matches(name, known, 3)
    raise ConfigError(
        "is not an environment",
        setting="environment",
        value=name,
        remedy=f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(known)}, or module.Class",
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _literal(value: Any) -> str:
    if inspect.isfunction(value):
        return repr(f"{value.__module__}.{value.__qualname__}")
    if hasattr(value, "keys"):
        return repr({key: ref_of(of.env) if hasattr(of, "env") else of for key, of in value.items()})
    return repr(value)
