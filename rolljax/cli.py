"""Shared parts of the verbs: finding configs, ending with the right exit code, quiet libraries."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax.concurrency import signals
from rolljax.console import terminal
from rolljax.errors import EXIT_INTERRUPTED, RolljaxError

if TYPE_CHECKING:
    from rolljax.config.loader import Loaded
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Step


COMPILED_GIB = 4
"""Largest size of the cache of compiled programs; the least recently used programs are evicted first."""


def quiet() -> None:
    """Silence library messages that a user cannot act on, and keep JAX from waiting for a TPU that the machine lacks.

    With `jax[tpu]` installed on a machine without a TPU, JAX spends seconds looking for one and then logs a long
    message. If the machine has no device node of a TPU or GPU and the user chose no platform, this function chooses
    CPU.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    has_tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    has_gpu = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
    if not has_tpu and not has_gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in ("absl", "jax._src.xla_bridge", "orbax", "grain"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="orbax")
    warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, in notebooks without its widgets
    keep_compiled()


def keep_compiled() -> None:
    """Keep JAX's compiled programs for the next process, in the user's cache folder: up to `COMPILED_GIB`.

    JAX's own settings take precedence: `JAX_COMPILATION_CACHE_DIR` moves the folder, `JAX_COMPILATION_CACHE_MAX_SIZE`
    (bytes) bounds it, `JAX_ENABLE_COMPILATION_CACHE=false` switches it off. Without a writable folder nothing is kept.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = cache / "rolljax" / "compiled" / _machine()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            return
        if not os.access(folder, os.W_OK):
            return
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(COMPILED_GIB << 30))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _machine() -> str:
    """Return a name for this kind of processor: machine code for one may be illegal on another that shares the
    folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def add_config_arguments(parser: argparse._ActionsContainer, *, required: bool) -> None:
    """Add `--gin FILE` and `--set 'name = value'`, both repeatable."""
    parser.add_argument(
        "--gin",
        action="append",
        default=[],
        metavar="FILE",
        required=required,
        help="gin file; repeat to layer several",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="'NAME = VALUE'", help="one setting over the files; repeatable"
    )


TEMPLATE_HELP = "chat template of a base model: a file, or 'plain' for the texts as they are (default: the folder's)"


def read_step(text: str | None) -> Step | None:
    """Parse `--step` into an argument of `Checkpoints.find`.

    Raises:
      ConfigError: the text is neither a number nor `best`.
    """
    from rolljax.errors import ConfigError

    if text is None or text == "best":
        return None if text is None else "best"
    if not text.isdigit():
        raise ConfigError(
            "is neither a step nor 'best'", setting="--step", value=text, remedy="--step 100, for instance"
        )
    return int(text)


def load_recipe(files: list[str], settings: list[str]) -> Loaded[Recipe]:
    """Read and check a recipe."""
    from rolljax.config import loader
    from rolljax.recipe import Recipe

    return loader.load(files, settings, root=Recipe)


class Terminated(BaseException):
    """SIGTERM arrived where nothing else handles it."""


def run_verb(
    main: Callable[[], int],
    loaded: Callable[[], Loaded[Any] | None] = lambda: None,
    *,
    at_sigterm: tuple[int, str] | None = None,
) -> int:
    """Run a verb and turn deliberate errors into their exit code and a message without traceback.

    A console that cannot be written is ignored. Results that cannot be written are an error, but for a pipe whose
    reader has ended: that is code 1 without a message.

    Args:
      loaded: the config, once there is one: it knows the file and line of a setting.
      at_sigterm: exit code and message after a SIGTERM that `main` does not handle itself; None: the process ends as by
        default.
    """
    from rolljax.console.terminal import visible
    from rolljax.errors import ConfigError

    with terminal.safe():
        try:
            with signals.raised(Terminated) if at_sigterm else contextlib.nullcontext():
                code = main()
            sys.stdout.flush()
            return code
        except ConfigError as e:
            config = loaded()
            error: RolljaxError = config.locate(e) if config is not None else e
        except RolljaxError as e:
            error = e
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        except Terminated:
            assert at_sigterm is not None
            print(at_sigterm[1], file=sys.stderr)
            return at_sigterm[0]
        except terminal.ReaderGone:
            return 1
        print(visible(f"{error.owner} error: {error}"), file=sys.stderr)
        return error.exit_code
