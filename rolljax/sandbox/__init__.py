"""Running untrusted code: isolated programs, live shells, streams and graders. Linux with bubblewrap; from images with
Docker or Podman.

`profile.py` settings; `provider.py` what all makers of sandboxes share; `host.py` bubblewrap: one-shot programs and
streams; `containers.py` Docker and Podman; `session.py` live sandboxes; `served.py` programs that can reach one server;
`egress.py` a proxy to named servers; `grade.py` graders; `group.py` many live sandboxes by id.
Below them: `command_line.py` (the bubblewrap command), `seccomp.py` (its filter), `launcher.py` and `supervisor/` (the
process that starts and reaps), `inside/` (what runs in a sandbox).
`doctor.py` is `python -m rolljax.sandbox`.
"""

from rolljax.sandbox.containers import ContainerHost, container_host, engine_available
from rolljax.sandbox.egress import Egress, check_egress
from rolljax.sandbox.grade import GradeResult, grade, grade_mbpp, grade_python
from rolljax.sandbox.group import SandboxGroup
from rolljax.sandbox.host import (
    ProgramStream,
    SandboxHost,
    available,
    configure,
    popen,
    run,
    settings,
    shared_host,
)
from rolljax.sandbox.profile import CODE, MCP, PROFILES, SCORE, TERMINAL, Profile, SandboxConfig
from rolljax.sandbox.provider import Result, SandboxGone, SandboxProvider
from rolljax.sandbox.served import run_served
from rolljax.sandbox.session import CommandResult, Sandbox, collect

__all__ = [
    "CODE",
    "MCP",
    "PROFILES",
    "SCORE",
    "TERMINAL",
    "CommandResult",
    "ContainerHost",
    "Egress",
    "Profile",
    "Result",
    "Sandbox",
    "SandboxConfig",
    "SandboxGone",
    "SandboxGroup",
    "SandboxHost",
    "SandboxProvider",
    "ProgramStream",
    "GradeResult",
    "available",
    "check_egress",
    "collect",
    "configure",
    "container_host",
    "engine_available",
    "grade",
    "grade_mbpp",
    "grade_python",
    "popen",
    "run",
    "run_served",
    "settings",
    "shared_host",
]
