"""The part of a Dockerfile that can be done without an image: folders, files, variables and commands.

    FROM python:3.11-slim          any one image; the sandbox's own system takes its place
    WORKDIR /app                   ENV KEY=value          ARG KEY=value
    COPY data.csv scripts/ ./      (ADD of local files is the same)
    RUN mkdir -p out && chmod 700 out

Whatever needs another system is not guessed at but listed in `BuildPlan.unsupported`, in the words of the file.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping

from rolljax.errors import DataError

IGNORED = {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "USER"}
"""Instructions that do not matter here: the sandbox has one user, and starts no service of the image."""

PROVIDED = {
    "asciinema", "bash", "bsdmainutils", "coreutils", "diffutils", "findutils", "gawk", "grep", "gzip", "procps",
    "pytest", "python3", "python3-minimal", "python3-pip", "python3-venv", "sed", "tar", "tmux", "uv", "util-linux",
}  # fmt: skip
"""Packages that are not installed: every Linux with Python has the parts that tasks need, or only other harnesses use
them."""

MAX_VALUE_CHARS = 65_536
"""Maximum number of characters of a path or variable; each can contain several copies of the previous one."""

_BASE = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "HOME": "/root"}
_INSTALL = re.compile(r"(?:sudo )?(?:apt-get|apt|apk|pip3?|python3? -m pip|uv pip|yum|dnf)\b")
_CLEANUP = re.compile(r"rm -rf? /var/(lib/apt/lists|cache/apt)\S*|apt-get (clean|autoremove)\b.*")
_PYTHON_LINK = re.compile(r"ln -sf? /usr/bin/python3(?:\.\d+)? /usr/bin/python(?!\S)")  # /usr/bin cannot be written
_NETWORK = re.compile(r"(?:^|[\s;&|(])(curl|wget|git clone|npm|cargo|go get|gem install)\b")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^$}]*))?\})")


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Write a regular file, and the folders above it."""

    path: str
    data: bytes
    mode: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunCommand:
    """Run a command with bash in a folder, with these variables."""

    command: str
    workdir: str
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class BuildPlan:
    """The steps of a build in order, the folder and variables of commands that run afterwards, the packages to install
    in addition to `PROVIDED`, and the unsupported instructions."""

    steps: tuple[Put | RunCommand, ...]
    workdir: str
    env: Mapping[str, str]
    packages: tuple[str, ...]
    unsupported: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """A file of the build context."""

    data: bytes
    mode: int


def read_dockerfile(text: str, context: Mapping[str, File]) -> BuildPlan:
    """Read a Dockerfile. context: files next to it, by path relative to it."""
    reader = _DockerfileReader(context)
    for word, rest, heredoc in _instructions(text):
        reader.do(word, rest, heredoc)
    packages = tuple(dict.fromkeys(reader.packages))
    return BuildPlan(tuple(reader.steps), reader.workdir, dict(reader.env), packages, tuple(reader.unsupported))


def _instructions(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield each instruction, its arguments on one line, and the text of its heredoc."""
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = [line.rstrip()]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            after = next(lines, "")
            while after.lstrip().startswith("#"):
                after = next(lines, "")
            parts.append(after.strip())
        word, _, rest = " ".join(parts).strip().partition(" ")
        heredoc, mark = None, _HEREDOC.search(rest)
        if word.upper() in ("RUN", "COPY") and mark:
            body = []
            for inner in lines:
                if inner.strip() == mark[2]:
                    break
                body.append(inner)
            heredoc = "".join(f"{inner}\n" for inner in body)
        yield word.upper(), rest.strip(), heredoc


class _DockerfileReader:
    """The state of a build: its current folder, its variables, and its steps so far."""

    def __init__(self, context: Mapping[str, File]) -> None:
        self.context = context
        self.steps: list[Put | RunCommand] = []
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.packages: list[str] = []
        self.unsupported: list[str] = []
        self._args: dict[str, str] = {}
        self._images = 0

    def do(self, word: str, rest: str, heredoc: str | None) -> None:
        match word:
            case "FROM":
                self._images += 1
                if self._images == 2:
                    self.unsupported.append("a build in several stages (second FROM)")
            case "WORKDIR":
                self.workdir = self._absolute(rest)
                self.steps.append(RunCommand(f"mkdir -p {shlex.quote(self.workdir)}", "/", {}))
            case "ENV":
                self._set(self.env, rest)
            case "ARG":
                self._set(self._args, rest if "=" in rest else f"{rest}=")
            case "COPY" | "ADD":
                self._copy(word, rest, heredoc)
            case "RUN":
                self._run(rest, heredoc)
            case "SHELL" if "bash" in rest or '"/bin/sh"' in rest:
                pass
            case _ if word not in IGNORED:
                self.unsupported.append(f"{word} {rest}"[:200])

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir, self._fill(path)))

    def _fill(self, text: str) -> str:
        values = {**_BASE, **self._args, **self.env}
        filled = _VARIABLE.sub(lambda m: values.get(m[1] or m[2]) or m[3] or "", text)
        if len(filled) > MAX_VALUE_CHARS:
            raise DataError(
                f"a Dockerfile makes a text of {len(filled)} characters, at most {MAX_VALUE_CHARS} are taken"
            )
        return filled

    def _set(self, where: dict[str, str], rest: str) -> None:
        words = _words(rest)
        if words and "=" not in words[0]:  # the old form: ENV KEY the whole rest
            where[words[0]] = self._fill(rest.split(None, 1)[1] if len(words) > 1 else "")
            return
        for word in words:
            key, _, value = word.partition("=")
            where[key] = self._fill(value)

    def _copy(self, word: str, rest: str, heredoc: str | None) -> None:
        try:
            words = json.loads(rest) if rest.startswith("[") else _words(rest)
        except ValueError:
            words = []
        flags = [w for w in words if w.startswith("--")]
        paths = [self._fill(w) for w in words if not w.startswith("--")]
        bad = any(f.startswith("--from") for f in flags) or any(re.match(r"\w+://|git@", p) for p in paths)
        if bad or len(paths) < 2:
            self.unsupported.append(f"{word} {rest}"[:200])
            return
        mode = next((int(f.partition("=")[2], 8) for f in flags if re.fullmatch(r"--chmod=0?[0-7]{3}", f)), None)
        *sources, target = paths
        if heredoc is not None:
            self.steps.append(Put(self._absolute(target), heredoc.encode(), mode or 0o644))
            return
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1
        for source in sources:
            found = list(self._found(source))
            if not found:
                self.unsupported.append(f"{word} {source}: there is no such file next to the Dockerfile")
            for name, file, is_tree in found:
                path = self._absolute(posixpath.join(target, name) if into or is_tree else target)
                self.steps.append(Put(path, file.data, mode or file.mode))

    def _found(self, source: str) -> Iterator[tuple[str, File, bool]]:
        """Name under the target, file, and whether it came as part of a folder."""
        clean = posixpath.normpath(source.lstrip("/") or ".")
        for path, file in self.context.items():
            if clean == "." or path.startswith(clean + "/"):
                yield (path if clean == "." else path[len(clean) + 1 :]), file, True
            elif path == clean or (path.count("/") == clean.count("/") and fnmatch.fnmatchcase(path, clean)):
                yield posixpath.basename(path), file, False

    def _run(self, rest: str, heredoc: str | None) -> None:
        rest = re.sub(r"^(--\S+\s+)+", "", rest)
        if heredoc is not None and _HEREDOC.fullmatch(rest):
            command = heredoc
        elif rest.startswith("["):
            try:
                command = shlex.join(json.loads(rest))
            except (ValueError, TypeError):
                command = rest
        elif heredoc is not None:
            mark = _HEREDOC.search(rest)
            assert mark is not None
            command = f"{rest}\n{heredoc}{mark[2]}\n"
        else:
            command = _PYTHON_LINK.sub("ln -sf /usr/bin/python3 /usr/local/bin/python", self._without_installs(rest))
        network = _NETWORK.search(command)
        if network:
            self.unsupported.append(f"RUN with {network[1]}, which needs a network: {command}"[:200])
        elif command.strip():
            self.steps.append(RunCommand(command, self.workdir, {**self._args, **self.env}))

    def _without_installs(self, command: str) -> str:
        """Return a command without the parts that install packages; add those not `PROVIDED` to `packages`."""
        parts = [p.strip() for p in command.split("&&")]
        if not any(_INSTALL.match(p) for p in parts):
            return command
        kept = []
        for part in parts:
            if _CLEANUP.fullmatch(part) or re.fullmatch(r"\S+( -\S+)* (update|upgrade|clean)( -\S+)*", part):
                continue
            if not _INSTALL.match(part):
                kept.append(part)
                continue
            asked = [w for w in _words(part) if not w.startswith("-")]
            asked = asked[asked.index("install") + 1 :] if "install" in asked else asked
            names = [re.split(r"[=<>~!\[]", word)[0] for word in asked]
            self.packages += [name for name in names if name not in PROVIDED]
        return " && ".join(kept)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
