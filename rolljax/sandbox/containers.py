"""Sandboxes in containers of Docker or Podman: the system inside is an image, and its programs run as the image's user.

    Sandbox --unix socket in a mounted folder--> agent.py, process 1 of the container

The agent runs with this machine's Python and loader, which are mounted read-only, so an image needs neither Python nor
bash. It ends, and with it the container, when this process is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from rolljax.errors import ConfigError, DataError, InfraError
from rolljax.sandbox import command_line
from rolljax.sandbox.host import AGENT_FILES, settings
from rolljax.sandbox.profile import Profile, SandboxConfig
from rolljax.sandbox.provider import CONTAINERS, END_S, START_S, AgentChannel, Result, SandboxProvider, shared
from rolljax.sandbox.session import Sandbox

Engine = Literal["docker", "podman"]
COMMAND_S = 120.0
"""Longest time in seconds of a command of the engine; builds have their own limit."""
MAX_USER_PROCESSES = 32_768
"""Processes of one user in all containers and on the machine. Podman asks for more than it may have if none is set."""
OURS = "/run/rolljax-host"
"""Folder inside for this machine's Python, bash and libraries."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""What root may do inside: install packages, change owners, become another user. No devices, no raw sockets."""
_INSTALL = {
    "docker": "install Docker and start its service; your user must be in the group docker",
    "podman": "apt-get install podman (or your distribution's package of that name)",
}


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """This machine's Python and bash as they are mounted in every container."""

    mounts: tuple[tuple[str, str], ...]
    """Paths here and inside."""
    python: tuple[str, ...]
    """The command inside of Python without site packages."""
    bash: tuple[str, ...]


def _printed(*line: str) -> str:
    """Return what a program prints."""
    return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S).stdout


@functools.cache
def interpreter() -> Interpreter:
    """Find this machine's Python and bash, and the libraries that they load. They run in any image, because they are
    started through their own loader.

    Raises:
      ConfigError: they cannot be used elsewhere.
    """
    python, bash = os.path.realpath(command_line.python()), os.path.realpath(shutil.which("bash") or "/bin/bash")
    probe = "import os, sys; print(os.path.dirname(os.__file__), sys.platlibdir, *sys.version_info[:2], sep='\\n')"
    library, lib, *version = _printed(python, "-I", "-S", "-c", probe).split("\n")[:4]
    paths = [word for word in _printed("ldd", python, bash).split() if word.startswith("/")]
    loaders = [path for path in paths if os.path.basename(path).startswith("ld-") and not path.endswith(":")]
    if not loaders:
        raise ConfigError("is not linked dynamically: it cannot run in a container", setting="python3", value=python)
    folders = dict.fromkeys(os.path.dirname(os.path.realpath(path)) for path in paths if not path.endswith(":"))
    inside = {folder: f"{OURS}/libraries-{i}" for i, folder in enumerate(folders)}
    loader = os.path.realpath(loaders[0])
    start = (
        f"{inside[os.path.dirname(loader)]}/{os.path.basename(loader)}",
        "--library-path",
        ":".join(inside.values()),
    )
    name = f"python{'.'.join(version)}"
    mounts = {python: f"{OURS}/bin/{name}", library: f"{OURS}/{lib}/{name}", bash: f"{OURS}/bin/bash", **inside}
    options = command_line.isolated_python()[1:]
    return Interpreter(tuple(mounts.items()), (*start, f"{OURS}/bin/{name}", *options), (*start, f"{OURS}/bin/bash"))


class ContainerHandle:
    """A running container. exit: as of `provider.Handle`."""

    def __init__(self, host: ContainerHost, name: str, life_s: float, on_exit: Callable[[], None]) -> None:
        self.name = name
        self.exit: dict[str, Any] = {}
        self._host, self._on_exit = host, on_exit
        self._deadline = time.monotonic() + life_s
        self._lock = threading.Lock()
        self._removal: subprocess.Popen[bytes] | None = None
        self._why = ""

    @property
    def over(self) -> bool:
        if not self.exit and time.monotonic() > self._deadline:
            self.kill("wall")
        return self._removal is not None

    def kill(self, why: str = "host") -> None:
        with self._lock:
            if self._removal is None:
                self._why = why
                line = self._host.command("rm", "--force", "--volumes", self.name)
                self._removal = subprocess.Popen(
                    line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a killed container; return whether it ended within the time."""
        if not self.over:
            return False
        assert self._removal is not None
        try:
            self._removal.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if not self.exit:
            self.exit = {"code": 137, "started": True, "killed_by": self._why, "error": ""}
            self._on_exit()
        return True

    def end(self) -> None:
        """Remove the container."""
        self.kill()
        self.wait(END_S)


class ContainerHost(SandboxProvider):
    """Makes sandboxes from images, with Docker or Podman on this machine. Thread-safe; methods block.

    Of a `Profile`, memory, processes, open files, processor time and file size of a process, and the lifetimes hold.
    Past `memory_bytes` the kernel kills a process inside. The size of all written files and the processor time of all
    processes are not limited.

    Raises:
      ConfigError: the engine is not there, with the cure.
    """

    def __init__(self, engine: Engine, config: SandboxConfig | None = None) -> None:
        super().__init__(config or SandboxConfig())
        self.engine = engine
        self._handles: set[ContainerHandle] = set()
        self._images: dict[str, threading.Lock] = {}
        if reason := engine_available(engine):
            raise ConfigError(f"cannot be used: {reason}", setting="engine", value=engine)

    def command(self, *words: str) -> list[str]:
        """Return a command line of the engine."""
        return [self.engine, *words]

    def ask(self, *words: str, timeout_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine.

        Raises:
          InfraError: it took longer than `timeout_s`.
        """
        line = self.command(*words)
        cwd = tempfile.gettempdir()  # Podman leaves a file `oom` where it was started
        try:
            return subprocess.run(
                line, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, cwd=cwd
            )
        except subprocess.TimeoutExpired as e:
            raise InfraError(f"`{' '.join(line[:2])}` took longer than {timeout_s:g} s") from e

    def start_agent(self, profile: Profile) -> AgentChannel:
        if not profile.image:
            raise ConfigError(
                "is empty, and a container is made from an image", setting="Profile.image", remedy="name one"
            )
        if self._closed or os.getpid() != self._pid:
            raise InfraError("this container host is closed, or belongs to another process")
        name = f"rolljax-{secrets.token_hex(8)}"
        handle = ContainerHandle(self, name, profile.session_s, free := self.take_slot())
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(free)
            # other users of this machine cannot enter the outer folder; the inner one is mounted
            outer = tempfile.mkdtemp(prefix="rolljax-")
            try:
                connected = self._started(handle, profile, os.path.join(outer, "inside"))
            finally:
                shutil.rmtree(outer, ignore_errors=True)
            on_failure.pop_all()
        with self._lock:
            self._handles = {h for h in self._handles if not h.exit} | {handle}
        weakref.finalize(connected, handle.end)  # of a sandbox that nobody closed
        return AgentChannel(handle, connected, io.BytesIO())

    def _started(self, handle: ContainerHandle, profile: Profile, folder: str) -> socket.socket:
        """Start the container and return the connection of its agent."""
        os.mkdir(folder, 0o755)
        for name in AGENT_FILES:
            Path(folder, name).write_bytes(command_line.inside(name))
            os.chmod(Path(folder, name), 0o644)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.join(folder, "channel"))
            os.chmod(os.path.join(folder, "channel"), 0o666)
            listener.listen(1)
            listener.settimeout(START_S)
            said = self.ask("run", "--detach", "--rm", *self._options(handle.name, profile, folder))
            if said.returncode:
                handle.kill()
                raise self._not_started(profile.image, said.stderr.strip())
            try:
                connected, _ = listener.accept()
            except OSError as e:
                handle.kill()
                raise InfraError(
                    f"a container of {profile.image} started, but its agent did not answer: {self._says(profile.image)}"
                ) from e
            return connected

    def _not_started(self, image: str, said: str) -> ConfigError | InfraError:
        """Return the error for a container that the engine did not start."""
        if not self.workdir(image):
            return ConfigError(
                "is no image on this machine",
                setting="Profile.image",
                value=image,
                remedy=f"{self.engine} pull {image}, or build it",
            )
        return InfraError(f"{self.engine} did not start a container of {image}: {said[-500:]}")

    def _says(self, image: str) -> str:
        """Return what this machine's Python says in a container of an image."""
        python = interpreter().python
        line = ["--rm", "--network", "none", "--pull", "never", *_mounts()]
        line += ["--entrypoint", python[0], image, *python[1:]]
        said = self.ask("run", *line, "--version")
        return (said.stdout + said.stderr).strip()[-500:]

    def _options(self, name: str, profile: Profile, folder: str) -> list[str]:
        """Return the options and the command of `run`."""
        ours = interpreter()
        line = ["--name", name, "--hostname", "sandbox", "--network", "none", "--pull", "never", "--log-driver", "none"]
        line += ["--cap-drop", "ALL", *(w for c in CAPABILITIES for w in ("--cap-add", c))]
        line += ["--security-opt", "no-new-privileges"]
        line += ["--memory", str(profile.memory_bytes), "--memory-swap", str(profile.memory_bytes)]
        line += ["--pids-limit", str(profile.nproc)]
        line += [word for limit in _limits(profile) for word in ("--ulimit", limit)]
        line += _mounts((folder, command_line.INSIDE), *((path, path) for path in profile.readable))
        line += ["--entrypoint", ours.python[0], profile.image, *ours.python[1:]]
        return [*line, f"{command_line.INSIDE}/agent.py", f"{command_line.INSIDE}/channel", *ours.bash]

    def _run(self, argv: Sequence[str], stdin: bytes, files: Mapping[str, bytes], profile: Profile) -> Result:
        with Sandbox.open(profile, files=files, host=self) as box:
            return box.execute(argv, stdin, timeout_s=profile.wall_s)

    def usage(self, box: Sandbox) -> dict[str, int]:
        return {"processes": box.num_processes()}

    def changes(self, box: Sandbox) -> list[tuple[str, str]]:
        said = self.ask("diff", _name(box))
        if said.returncode:
            raise InfraError(f"{self.engine} diff: {said.stderr.strip()[-500:]}")
        return [(line[0], line[2:]) for line in said.stdout.splitlines() if line[1:2] == " "]

    def commit(self, box: Sandbox, image: str) -> str:
        shell = ["--change", "ENTRYPOINT []", "--change", 'CMD ["/bin/sh"]']
        said = self.ask("commit", *shell, _name(box), image)
        if said.returncode:
            raise InfraError(f"{self.engine} commit: {said.stderr.strip()[-500:]}")
        return image

    def workdir(self, image: str) -> str:
        """Return the folder in which an image's programs start; empty if the image is not on this machine."""
        said = self.ask("image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
        return "" if said.returncode else said.stdout.strip() or "/"

    def provide(self, image: str, folder: Path | None, timeout_s: float) -> str:
        """Build an image from a folder with a Dockerfile, or pull it, unless it is on this machine; return its
        `workdir`. Other threads that want the same image wait.

        Raises:
          DataError: it cannot be built or pulled, with the engine's last words.
        """
        with self._lock:
            turn = self._images.setdefault(image, threading.Lock())
        with turn:
            if workdir := self.workdir(image):
                return workdir
            words = ["build", "--quiet", "--tag", image, str(folder)] if folder else ["pull", "--quiet", image]
            said = self.ask(*words, timeout_s=timeout_s)
            if said.returncode:
                raise DataError(
                    f"{self.engine} {words[0]} of {image} failed: {(said.stdout + said.stderr).strip()[-1000:]}"
                )
            return self.workdir(image)

    def close(self) -> None:
        """Remove every container of this host."""
        super().close()
        if os.getpid() == self._pid:
            with self._lock:
                handles, self._handles = self._handles, set()
            for handle in handles:
                handle.kill()
            for handle in handles:
                handle.end()


def _limits(profile: Profile) -> list[str]:
    """Return the resource limits of a process, soft and hard."""
    own = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    own = min(own, MAX_USER_PROCESSES) if own > 0 else MAX_USER_PROCESSES
    found = {"nofile": profile.nofile, "fsize": profile.tmpfs_bytes, "nproc": own, "core": 0}
    return [f"cpu={profile.cpu_s}:{profile.cpu_s + 1}", *(f"{name}={most}:{most}" for name, most in found.items())]


def _name(box: Sandbox) -> str:
    """Return the name of a live sandbox's container."""
    handle = box.handle
    if not isinstance(handle, ContainerHandle):
        raise ConfigError("is no container", setting="sandbox", remedy=CONTAINERS)
    return handle.name


def _mounts(*more: tuple[str, str]) -> list[str]:
    """Return the options that mount this machine's Python and `more`, all read-only."""
    pairs = (*interpreter().mounts, *more)
    return [word for here, inside in pairs for word in ("--volume", f"{here}:{inside}:ro")]


def engine_available(engine: Engine) -> str:
    """Return why containers cannot be made here, as one sentence; empty if they can."""
    if engine not in get_args(Engine):
        return f"engines are {', '.join(get_args(Engine))}"
    if sys.platform != "linux":
        return "sandboxes need Linux"
    if not shutil.which(engine):
        return f"it is not installed: {_INSTALL[engine]}"
    try:
        said = subprocess.run([engine, "info"], capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        return f"`{engine} info` does not answer"
    last = (said.stderr.strip() or "no reason given").splitlines()[-1]
    return "" if said.returncode == 0 else f"`{engine} info` failed: {last[-300:]}; {_INSTALL[engine]}"


def container_host(engine: Engine) -> ContainerHost:
    """Return this process's host of containers with the settings of `configure`; made on first use, closed when the
    process exits."""
    return shared(ContainerHost, engine, settings())
