"""Code blocks of the docs, and how each kind is run.

bash     commands, in the page's scratch folder. Verbs of rolljax run in this process, and `train` with `--dry_run`, except on
         pages of `LITERAL`, where everything runs as it stands. What cannot run here is in `NOT_RUN`, with the reason.
python   one namespace for all blocks of a page; a block that begins with `# name.py` is also a file of that name.
gin      a whole file, or bindings over the quickstart; both must load. `# name.gin` as in Python.
json     one object, or one for each line. console: `$ command` and what it prints, `...` for what may be left out.
text     nothing to run.
"""

import ast
import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import rolljax
from rolljax.config import loader
from rolljax.data.pipeline import Pipeline
from rolljax.recipe import Recipe

from .conftest import free_port

ROOT = Path(__file__).parents[2]
KINDS = {"bash", "python", "gin", "json", "console", "text"}
LITERAL = {"my_model.md"}
NOT_RUN = {
    r"^(pip|apt-get|git clone|make|source|hf download) ?": "installs or downloads, or is what started this test",
    r"rolljax\.plan": "the TPU compiler takes minutes: tests/e2e/test_plan.py",
    r"qwen3_32b_async": "minutes: tests/unit/simulation/test_simulation.py has smaller ones",
    r"^python benchmarks/": "figures, not promises",
    r"think_j_offline": "needs pairs that a trained judge wrote: tests/recipes/test_think_j.py",
    r"agent_program": "tests/e2e/test_agent.py",
    r"envs\.tools\.serve": "speaks over its own input and output: tests/e2e/test_mcp.py",
    r"jetstream\.compat|load_params\(\)": "tests/e2e/test_jetstream.py",
    r"^ray start|@Ray\(\)": "a Ray cluster: tests/e2e/test_ray_samplers.py",
    r"rolljax\.sampler_host": "waits for a run: tests/e2e/test_join.py",
    r"--adapter": "needs a run with adapters: tests/e2e/test_lora.py",
}
SERVERS = re.compile(r"rolljax\.serve|rolljax\.view (?!.*--export)|openenv_server|gem_server")


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page):
    """Yield the fenced blocks of a page, in order."""
    text = page.read_text()
    for m in re.finditer(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2$", text, re.S | re.M):
        yield Block(page, text.count("\n", 0, m.start()) + 1, m[3], m[4])


def commands(text):
    """Yield the commands of a bash block: without comments, continued lines joined, here-documents whole."""
    lines = iter(text.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line = line[:-1] + next(lines).strip()
        if m := re.search(r"<<'(\w+)'", line):
            for more in lines:
                line += "\n" + more
                if more == m[1]:
                    break
        while line.count('"') % 2:
            line += "\n" + next(lines)
        if "\n" not in line:
            line = re.sub(r"(^|\s{2,})#( .*)?$", "", line)
        if line.strip():
            yield line.strip()


def reason_not_to_run(command):
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


class Runner:
    """Runs the blocks of one page in the working directory."""

    def __init__(self, page):
        self.literal = page.name in LITERAL
        self.names = {"__name__": "__main__"}
        self.ports = {}
        self.servers = []
        self.ran = 0

    def run(self, block):
        text = re.sub(r"(?<![\w.])/models/", "models/", block.text)  # a user's folder; here in the working directory
        getattr(self, f"_{block.kind}")(self._with_free_ports(text))

    def close(self):
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(timeout=120)

    def _with_free_ports(self, text):
        """Replace every port in a text by a free one."""

        def replace(m):
            return m[1] + str(self.ports.setdefault(m[2], free_port()))

        return re.sub(r"((?:--port |port=|localhost:|127\.0\.0\.1:))(\d{4,5})\b", replace, text)

    def _text(self, text):
        pass

    def _json(self, text):
        try:
            json.loads(text)
        except json.JSONDecodeError:
            for line in text.splitlines():
                json.loads(line)

    def _gin(self, text):
        named = re.match(r"# (\S+\.gin)\n", text)
        path = Path(named[1] if named else "block.gin")
        if "dynamic_registration" not in text:
            first = "" if "include" in text else "include 'quickstart.gin'\n"
            text = "from __gin__ import dynamic_registration\n" + imports(text) + first + text
        path.write_text(text)
        loader.load([str(path)], root=Pipeline if "pipeline.Pipeline" in text else Recipe)

    def _python(self, text):
        if reason_not_to_run(text):
            return
        if m := re.match(r"# (\S+\.py)\n", text):
            Path(m[1]).write_text(text)
        code = compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, self.names)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def _console(self, text):
        command, expected = text.split("\n", 1)
        code, out = verb(shlex.split(command.removeprefix("$ ")))
        pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
        assert re.search(pattern, out, re.S), f"{command}\nprinted\n{out}\nnot\n{expected}"

    def _bash(self, text):
        for command in commands(text):
            if reason_not_to_run(command):
                continue
            if SERVERS.search(command):
                self._serve(command)
            elif (words := shlex.split(command))[:2] == ["python", "-m"] and "\n" not in command:
                self._verb(words)
            else:
                self._shell(command)
            self.ran += 1

    def _verb(self, words):
        if words[2] == "rolljax.train" and not self.literal and "--dry_run" not in words:
            words = [*words, "--dry_run"]
        code, out = verb(words)
        assert code == 0, f"{shlex.join(words)}: exit code {code}\n{out}"

    def _shell(self, command):
        if "rolljax.train" in command and not self.literal:
            command += " --dry_run"
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=600, env=environment())
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"

    def _serve(self, command):
        port = int((re.search(r"--port (\d+)", command) or [0, 0])[1])
        if not port:
            port = self.ports.setdefault("8000", free_port())
            command += f" --port {port}"
        log = open(f"server_{port}.log", "w+")  # noqa: SIM115  # closed with the process
        self.servers.append(
            subprocess.Popen(["bash", "-ec", f"exec env {command}"], stdout=log, stderr=log, env=environment())
        )
        end = time.monotonic() + 300
        while time.monotonic() < end:
            assert self.servers[-1].poll() is None, f"{command}: {Path(log.name).read_text()}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                return
            time.sleep(0.1)
        raise AssertionError(f"{command} does not listen: {Path(log.name).read_text()}")


def environment():
    """Return the environment of commands, in which `python` is this interpreter."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()}


def verb(words):
    """Run `python -m rolljax...` in this process; returns its exit code and what it printed."""
    assert words[:2] == ["python", "-m"], words
    out = io.StringIO()
    before = sys.stdin, sys.argv
    sys.stdin, sys.argv = io.StringIO(""), [words[2], *words[3:]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                verb = words[2].removeprefix("rolljax.")
                module = importlib.import_module(
                    f"rolljax.commands.{verb}" if verb in ("train", "export") else words[2]
                )
                main = getattr(module, "main", None) or importlib.import_module(f"{words[2]}.__main__").main
                code = main(words[3:])
            except SystemExit as e:
                code = e.code
    finally:
        sys.stdin, sys.argv = before
    return code or 0, out.getvalue()


@functools.cache
def modules():
    """Return every module of rolljax by the last part of its name, if that is unique."""
    names = [m.name for m in pkgutil.walk_packages(rolljax.__path__, "rolljax.") if "__main__" not in m.name]
    last = {}
    for name in names:
        last.setdefault(name.rpartition(".")[2], []).append(name)
    return {short: found[0] for short, found in last.items() if len(found) == 1} | {"recipe": "rolljax.recipe"}


def imports(text):
    """Return gin's import lines for the modules that bindings name without importing them."""
    named = dict.fromkeys(re.findall(r"(?:^|[@/\s])(\w+)\.\w+", text, re.M))
    return "".join(
        f"from {modules()[n].rpartition('.')[0]} import {n}\n"
        for n in named
        if n in modules() and f"import {n}" not in text
    )
