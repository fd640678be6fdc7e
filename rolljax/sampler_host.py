"""Sample for a run in another process: `python -m rolljax.sampler_host --join HOST:PORT`.

The run, with `Recipe.placement = @placement.Remote()`, says what to build, and sends requests; weights are fetched from
its store. The key is in the file `samplers/key` of the run folder, or in the variable ROLLJAX_SAMPLER_KEY.
A sampler on several hosts is started on each of them. docs/cluster.md says more.
Exit codes: 0 the run is over, 2 refused, 3 no run at that address or a lost process, 4 the sampler failed.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax import cli
from rolljax.cluster.launchers import KEY
from rolljax.errors import ConfigError

if TYPE_CHECKING:
    from rolljax.concurrency.lockstep import Follower, Leader, SingleProcess


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.sampler_host", description="Sample for a run.")
    parser.add_argument("--join", metavar="HOST:PORT", required=True, help="address of the run")
    parser.add_argument("--key_file", metavar="FILE", help=f"key of the run (default: the variable {KEY})")
    parser.add_argument("--name", help="name of this sampler in the run (default: host and process id)")
    parser.add_argument(
        "--rejoin_s", type=float, default=60.0, help="end after this many seconds without a run (default: %(default)g)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code."""
    args = parse(argv)
    cli.quiet()

    joined: list[SingleProcess | Leader | Follower] = []

    def run() -> int:
        from rolljax.concurrency import distributed, lockstep
        from rolljax.run import sampler_host

        team = lockstep.join(distributed.start(), at_once=True)
        joined.append(team)
        with team.guard():
            if isinstance(team, lockstep.Follower):
                return sampler_host.follow(team)
            name = args.name or f"{socket.gethostname()}-{os.getpid()}"
            host, secret = address(args.join), key(args.key_file)
            sampler_host.SamplerHost(host, secret, name, args.rejoin_s, say, team).run()
        return 0

    code = 1
    try:
        code = cli.run_verb(run)
    finally:
        for team in joined:
            team.end(code)
    return code


def address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("is not HOST:PORT", setting="--join", value=text)
    return host, int(port)


def key(file: str | None) -> bytes:
    """Return the key, from a file or the environment."""
    try:
        return bytes.fromhex(Path(file).read_text() if file else os.environ[KEY])
    except KeyError:
        raise ConfigError("is needed", setting="--key_file", remedy="name the file samplers/key of the run") from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot be used: {e}", setting="--key_file", value=file) from None


def say(text: str) -> None:
    """Write a line to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
