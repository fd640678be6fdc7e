"""Records a run's software, devices and command: env.json."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "gin-config",
    "transformers",
    "reasoning-gym",
)


def environment() -> dict[str, Any]:
    """Return versions, devices and the command, as a JSON value."""
    import jax

    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
        "platform": jax.default_backend(),
        "devices": jax.device_count(),
        "command": _command(sys.argv),
    }


def command_line(words: Sequence[str]) -> str:
    """Return a recorded command as a shell line."""
    if words and words[0].endswith(".py"):
        words = ["python", "-m", f"rolljax.{words[0].removesuffix('.py')}", *words[1:]]
    return shlex.join(words)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _command(argv: Sequence[str]) -> list[str]:
    """Return a verb with its arguments, or the program that called it."""
    program = Path(argv[0])
    return [program.name, *argv[1:]] if program.parent.name == "rolljax" else ["python", program.name]
