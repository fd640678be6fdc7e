"""What the verbs share: finding configs, ending with the right exit code, quiet libraries."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax.errors import EXIT_INTERRUPTED, RolljaxError

if TYPE_CHECKING:
    from rolljax.config import Loaded
    from rolljax.recipe import Recipe


def quiet() -> None:
    """Keep libraries from printing what no user can act on, and JAX from waiting for a TPU that is not there.

    With `jax[tpu]` installed on a machine without a TPU, JAX spends seconds looking for one and says so at length; if
    no TPU device node exists and the user chose no platform, CPU is chosen here.
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


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """`--gin FILE` and `--set 'name = value'`, both repeatable."""
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


def find_config(name: str) -> str:
    """A gin file as the user named it: a path, or the name of one that comes with rolljax (`quickstart`,
    `algorithms/tis`)."""
    if os.path.exists(name):
        return name
    inside = Path(name.removeprefix("configs/").removesuffix(".gin") + ".gin")
    here = Path(__file__).parent
    for folder in (here / "configs", here.parent / "configs"):
        if not inside.is_absolute() and ".." not in inside.parts and (folder / inside).is_file():
            return str(folder / inside)
    return name


def load_recipe(files: list[str], settings: list[str]) -> Loaded[Recipe]:
    """Read and check a recipe."""
    from rolljax import config
    from rolljax.recipe import Recipe

    return config.load([find_config(f) for f in files], settings, root=Recipe)


def run_verb(main: Callable[[], int], loaded: Callable[[], Loaded[Recipe] | None] = lambda: None) -> int:
    """Run a verb and turn deliberate errors into their exit code and a message without traceback.

    Args:
      loaded: the config, once there is one: it knows the file and line of a setting.
    """
    from rolljax.errors import ConfigError

    try:
        return main()
    except ConfigError as e:
        config = loaded()
        error: RolljaxError = config.locate(e) if config is not None else e
    except RolljaxError as e:
        error = e
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(f"{error.owner} error: {error}", file=sys.stderr)
    return error.exit_code
