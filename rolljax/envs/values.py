"""Numbers and flags that an environment reports, at whatever border they come in.

What is none is the environment's failure (`EnvError`): taken for 0 or False it would be a score of the policy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from rolljax.errors import EnvError

MAX_NAMES = 256


def number(value: Any, name: str = "reward") -> float:
    """A finite number of any type that is one (NumPy's and tensors without axes too) as a float."""
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
    """A bool, NumPy's too."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise EnvError(f"{name} is a {kind(value)}, not a bool")


def table(values: Any, name: str) -> dict[str, float]:
    """Numbers by name."""
    if not isinstance(values, Mapping):
        raise EnvError(f"{name} is a {kind(values)}, not a mapping")
    if len(values) > MAX_NAMES:
        raise EnvError(f"{name} has {len(values)} names, at most {MAX_NAMES} are allowed")
    for key in values:
        if not isinstance(key, str) or len(key) > 200:
            raise EnvError(f"a name in {name} is a {kind(key)}, or longer than 200 characters")
    return {key: number(value, f"{name}[{key!r}]") for key, value in values.items()}


def kind(value: Any) -> str:
    """The name of a value's class."""
    return type(value).__name__
