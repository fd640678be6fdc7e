"""Many live sandboxes by id, with the verbs of ROCK's sandbox interface. Arguments and results are JSON values, so that
a server can pass them through."""

from __future__ import annotations

import base64
import contextlib
import itertools
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from rolljax.errors import EnvError, Range
from rolljax.sandbox.host import shared_host
from rolljax.sandbox.profile import TERMINAL, Profile
from rolljax.sandbox.provider import SandboxProvider
from rolljax.sandbox.session import CommandResult, Sandbox

DEFAULT_SESSION = "default"
POLL_S = 0.2


class SandboxGroup:
    """`size` live sandboxes of one profile, at most `start_concurrency` starting at the same time. Thread-safe.

    Unknown ids are an `EnvError`; so are sessions that were not created.
    """

    def __init__(
        self, size: int, start_concurrency: int = 4, profile: Profile = TERMINAL, host: SandboxProvider | None = None
    ) -> None:
        self.size, self.start_concurrency, self.profile = size, start_concurrency, profile
        Range(low=0).check(self, "size")
        Range(low=1).check(self, "start_concurrency")
        self._host = host or shared_host()
        self._starting = threading.BoundedSemaphore(start_concurrency)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._jobs = itertools.count()
        self._boxes: dict[str, Sandbox] = {}

    def start(self) -> list[str]:
        """Start the sandboxes; return their ids. When one fails, all are stopped and the error is raised."""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            with ThreadPoolExecutor(self.start_concurrency) as pool:
                ids = list(pool.map(lambda _: self.add(), range(self.size)))
            on_failure.pop_all()
        return ids

    def stop(self) -> None:
        """Stop every sandbox."""
        with self._lock:
            boxes, self._boxes = list(self._boxes.values()), {}
        if boxes:
            with ThreadPoolExecutor(min(8, len(boxes))) as pool:
                list(pool.map(Sandbox.close, boxes))

    def add(self) -> str:
        """Start one more sandbox; return its id."""
        with self._starting:
            box = Sandbox.open(self.profile, host=self._host)
        with self._lock:
            name = f"sandbox-{next(self._numbers)}"
            self._boxes[name] = box
        return name

    def remove(self, sandbox_id: str) -> None:
        """Stop one sandbox and forget it."""
        box = self._box(sandbox_id)
        with self._lock:
            self._boxes.pop(sandbox_id, None)
        box.close()

    @property
    def ids(self) -> list[str]:
        with self._lock:
            return list(self._boxes)

    def create_session(self, sandbox_id: str, session: str = DEFAULT_SESSION) -> dict[str, Any]:
        """Open a shell."""
        self._box(sandbox_id).open_shell(session)
        return {"output": ""}

    def close_session(self, sandbox_id: str, session: str = DEFAULT_SESSION) -> dict[str, Any]:
        """Close a shell and kill its processes."""
        self._box(sandbox_id).close_shell(session)
        return {}

    def run_in_session(
        self,
        sandbox_id: str,
        command: str,
        session: str = DEFAULT_SESSION,
        timeout_s: float = 300.0,
        mode: Literal["normal", "nohup"] = "normal",
        max_output_bytes: int | None = None,
        ignore_output: bool = False,
    ) -> dict[str, Any]:
        """Run a command in a shell.

        mode nohup: in the background, so that the shell and later commands never wait for it; the call waits up to
        `timeout_s` and returns the output until then. ignore_output: instead of the output, return path and size of the
        file that holds it.
        """
        box = self._box(sandbox_id)
        cap = max_output_bytes or self.profile.output_bytes
        if mode == "normal":
            return _told(box.run(command, timeout_s, session), cap)
        path = f"/tmp/nohup-{next(self._jobs)}"
        # the exit code appears under its own name only when it is complete
        script = f"({command}\n) >{path}.out 2>&1; printf %s $? >{path}.part; mv {path}.part {path}.code"
        begun = box.run(f"nohup bash -c {shlex.quote(script)} >/dev/null 2>&1 &", 30.0, session)
        if begun.returncode or begun.killed_by:
            return _told(begun, cap)
        turns = max(1, int(timeout_s / POLL_S))
        waited = (
            f"for ((i = 0; i < {turns}; i++)); do [ -e {path}.code ] && break; sleep {POLL_S}; done; cat {path}.code"
        )
        said = box.execute(["bash", "-c", waited], timeout_s=timeout_s + 30.0)
        if said.killed_by and not box.alive:
            return {"output": "", "exit_code": 137, "failure_reason": f"killed by {said.killed_by}"}
        code = int(said.text) if said.text.isdigit() else None
        size = box.execute(["stat", "-c", "%s", f"{path}.out"]).text.strip()
        told: dict[str, Any] = {"exit_code": code, "failure_reason": "" if code is not None else "still running"}
        if ignore_output:
            return {**told, "output": "", "path": f"{path}.out", "size": int(size or 0)}
        output = box.execute(["head", "-c", str(cap), f"{path}.out"]).text
        return {**told, "output": output, "truncated": int(size or 0) > cap}

    def execute(self, sandbox_id: str, command: str | Sequence[str], timeout_s: float = 300.0) -> dict[str, Any]:
        """Run a program (a string goes through a shell) without any session."""
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        result = self._box(sandbox_id).execute(argv, timeout_s=timeout_s)
        return {
            "stdout": result.text,
            "stderr": result.stderr.decode(errors="replace"),
            "exit_code": result.returncode,
            "failure_reason": f"killed by {result.killed_by}" if result.killed_by else "",
        }

    def upload(self, sandbox_id: str, path: str, content: str) -> dict[str, Any]:
        """Write a file; `content` is base64."""
        try:
            data = base64.b64decode(content, validate=True)
        except ValueError as e:
            raise EnvError(f"{path}: content is not base64") from e
        self._box(sandbox_id).put(path, data)
        return {"path": path, "size": len(data)}

    def read_file(self, sandbox_id: str, path: str, max_bytes: int = 1 << 20) -> dict[str, Any]:
        """Read a regular file; its content in base64."""
        data = self._box(sandbox_id).get(path, max_bytes)
        return {"path": path, "size": len(data), "content": base64.b64encode(data).decode()}

    def commit(self, sandbox_id: str, image: str) -> dict[str, Any]:
        """Save the files of a sandbox as an image, for further sandboxes (`Profile.image`). Containers only."""
        return {"image": self._box(sandbox_id).commit(image)}

    def is_alive(self, sandbox_id: str) -> dict[str, Any]:
        with self._lock:
            box = self._boxes.get(sandbox_id)
        return {"is_alive": box is not None and box.alive}

    def statistics(self, sandbox_id: str) -> dict[str, Any]:
        """Return memory, processes, age, slot."""
        return self._box(sandbox_id).stats()

    def _box(self, sandbox_id: str) -> Sandbox:
        with self._lock:
            if sandbox_id not in self._boxes:
                raise EnvError(f"there is no sandbox {sandbox_id!r}")
            return self._boxes[sandbox_id]

    def __enter__(self) -> SandboxGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _told(result: CommandResult, cap: int) -> dict[str, Any]:
    reason = f"killed by {result.killed_by}" if result.killed_by else "timeout" if result.timed_out else ""
    output = result.output if len(result.output) <= cap else result.output[: cap // 2] + result.output[-(cap // 2) :]
    return {
        "output": output,
        "exit_code": result.returncode,
        "failure_reason": reason,
        "truncated": result.truncated or len(result.output) > cap,
        "restarted": result.restarted,
    }
