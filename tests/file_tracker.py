"""A tracker that writes what it is given to a file, and one that does what trackers should not; opened in a process."""

import dataclasses
import json
import os
import signal
from pathlib import Path

from rolljax.trackers import TrackerConfig


@dataclasses.dataclass(frozen=True)
class FileTracker(TrackerConfig):
    """at: the step at which it goes wrong, in the way of `fault`; once: only the first process does."""

    fault: str = ""
    at: int = 3
    once: bool = True

    def open(self, run):
        return FileRun(self, run)


class FileRun:
    def __init__(self, cfg, run):
        self.cfg, self.path = cfg, Path(run.folder, "given.jsonl")
        self.is_first = not self.path.exists()
        self.path.touch()
        self.write("open", run.name, run.id, run.done)
        if cfg.fault == "open" and (self.is_first or not cfg.once):
            raise OSError("no server there")

    def write(self, *what):
        with open(self.path, "a") as f:
            f.write(json.dumps(what) + "\n")

    def last_step(self):
        return max((what[1] for what in given(self.path) if what[0] == "log"), default=0)

    def log(self, step, row):
        if step == self.cfg.at and (self.is_first or not self.cfg.once):
            match self.cfg.fault:
                case "raise":
                    raise ValueError("I do not want\nthis row")
                case "break":  # as a package whose own server is gone
                    self.cfg = dataclasses.replace(self.cfg, at=step + 1)
                    raise ConnectionError("gone")
                case "die":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    signal.pause()
        self.write("log", step, row)

    def text(self, step, name, text):
        self.write("text", step, name, text)

    def figure(self, step, name, png):
        self.write("figure", step, name, len(png))

    def close(self, outcome):
        self.write("close", outcome)
        if self.cfg.fault == "close":
            signal.pause()


def given(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
