"""python -m rolljax.sandbox            check the isolation on this machine, with remedies
python -m rolljax.sandbox run -- CMD    run a command in a sandbox; its streams are this command's
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rolljax.errors import RolljaxError
from rolljax.sandbox.host import SandboxHost
from rolljax.sandbox.profile import PROFILES


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rolljax.sandbox", description="Check and use sandboxes.")
    verbs = parser.add_subparsers(dest="verb")
    verbs.add_parser("doctor", help="try what isolates (the default)")
    run = verbs.add_parser("run", help="run a command in a sandbox, standard streams passed through")
    run.add_argument("--profile", choices=PROFILES, default="mcp")
    run.add_argument(
        "--file", action="append", default=[], metavar="SRC[:DEST]", help="copy a file in, by default to /work"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command")
    args = parser.parse_args(argv)
    try:
        if args.verb == "run":
            command = args.command[1:] if args.command[:1] == ["--"] else args.command
            return passed_through(command, args.profile, args.file)
        from rolljax.sandbox import doctor

        return doctor.main()
    except RolljaxError as e:
        sys.stderr.write(f"{e}\n")
        return e.exit_code


def passed_through(command: list[str], profile: str, sources: list[str]) -> int:
    """Run `command` on this process's own standard streams; return its exit code."""
    files = {}
    for source in sources:
        path, _, target = source.partition(":")
        files[target or os.path.basename(path)] = Path(path).read_bytes()
    with SandboxHost() as host:
        limits = PROFILES[profile]
        handle = host.start(command, [0, 1, 2], files, {}, limits, limits.wall_s)
        try:
            handle.wait()
        finally:
            handle.kill()
            handle.wait(10.0)
        return int(handle.exit["code"])


if __name__ == "__main__":
    sys.exit(main())
