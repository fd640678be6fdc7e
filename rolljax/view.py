"""Look at runs in a browser: `python -m rolljax.view RUN...`, a page on 127.0.0.1; `docs/runs.md` shows it.

RUN is a run folder, or a folder with run folders in it. Runs may be in progress: the page follows them. Nothing is
written to them. `--export FILE.html` makes one page of a step or a trajectory instead, which needs no server.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rolljax import cli
from rolljax.errors import ConfigError, needed

if TYPE_CHECKING:
    import socket

    from rolljax.viewer.runs import Runs

TOKEN = "ROLLJAX_VIEW_TOKEN"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.view", description="Look at runs in a browser.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or a folder with run folders in it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8600, help="0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--token",
        help=f"what a browser must bring along (default: ${TOKEN}; made up where others can reach the address)",
    )
    export = parser.add_argument_group("export", "one page that needs no server")
    export.add_argument("--export", metavar="FILE.html", help="write it, and do not serve")
    export.add_argument("--step", type=int, metavar="N", help="of the only RUN (default: the last with rollouts)")
    export.add_argument("--trajectory", type=int, metavar="I", help="one of the step: its line in the file, from 0")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)

    def run() -> int:
        from rolljax.viewer.runs import Runs

        check_arguments(args)
        runs = Runs(args.runs)
        if args.export:
            write_page(runs, args)
        else:
            serve(runs, args)
        return 0

    return cli.run_verb(run)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that cannot be used."""
    if not 0 <= args.port <= 65535:
        raise ConfigError("must be 0 to 65535", setting="--port", value=args.port)
    if args.token == "":
        raise ConfigError("is empty", setting="--token", remedy="leave it out, or give a token")
    if not given_token(args).isprintable():
        raise ConfigError(
            "holds characters that no address can hold", setting=f"--token or ${TOKEN}", remedy="letters and digits"
        )
    for name in ("step", "trajectory"):
        if getattr(args, name) is not None and not args.export:
            raise ConfigError(
                "only applies together with --export", setting=f"--{name}", remedy="add --export FILE.html"
            )


def write_page(runs: Runs, args: argparse.Namespace) -> None:
    """Write the page of a step or a trajectory."""
    from rolljax.console.terminal import visible
    from rolljax.viewer.export import page_of
    from rolljax.viewer.runs import NotThere

    found = runs.all()
    if len(found) != 1:
        raise ConfigError("is made of one run", setting="--export", value=len(found), remedy="name one run folder")
    steps = found[0].steps()
    if not steps:
        raise ConfigError("has no rollouts", setting="RUN", value=str(found[0].path))
    step = steps[-1] if args.step is None else args.step
    try:
        page = page_of(found[0], step, args.trajectory)
    except NotThere as e:
        remedy = f"there are rollouts of steps {steps[0]} to {steps[-1]}"
        raise ConfigError(str(e), setting="--step, --trajectory", value=(step, args.trajectory), remedy=remedy) from e
    try:
        Path(args.export).write_bytes(page)
    except OSError as e:
        raise ConfigError(f"cannot be written: {e.strerror}", setting="--export", value=args.export) from e
    print(f"{visible(args.export, lines=False)}: {len(page) / 1e6:.1f} MB, needs no server and no internet", flush=True)


def serve(runs: Runs, args: argparse.Namespace) -> None:
    """Show the runs until Ctrl-C or SIGTERM."""
    from rolljax.console.terminal import visible
    from rolljax.serve import listen, url

    with needed("uvicorn", "the viewer in a browser", otherwise="use python -m rolljax.show"):
        from rolljax.viewer.app import make_server

    with listen(args.host, args.port) as listener, contextlib.suppress(KeyboardInterrupt):
        token = given_token(args) or (None if is_loopback(listener) else secrets.token_urlsafe(24))
        names = ", ".join(visible(run.name, lines=False) for run in runs.all())
        query = f"?{urlencode({'token': token})}" if token else ""
        server = make_server(runs, token)
        listener.listen(server.config.backlog)  # whoever reads the address may open it at once
        print(f"{names} at {url(listener)}/{query}", flush=True)
        server.run(sockets=[listener])


def given_token(args: argparse.Namespace) -> str:
    """Return the token of the command line, else that of the environment; empty if there is none."""
    return args.token or os.environ.get(TOKEN, "")


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can reach a listener."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


if __name__ == "__main__":
    sys.exit(main())
