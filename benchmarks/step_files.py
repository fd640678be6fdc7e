"""The files of `rolljax/` that one GRPO step of the quickstart enters, and the moves between them.

    python benchmarks/step_files.py               # counts; --pairs lists every move

A step is one call of `loop.train_step`: a plain one of the `rl` phase, with no evaluation and no checkpoint, after two
steps that have compiled all programs. All threads of the process are traced while the call lasts.

A *file* counts if a function of it runs. A *move* is a distinct pair (caller's file, callee's file) of two different
files. The caller of a function is the nearest function of `rolljax/` that waits for it in its thread; library code
between the two (a context manager, a generated `__init__`) does not hide a caller. What asyncio or a thread starts has
no caller. Calls into another file are counted as well; each resumption of a coroutine or generator is one.
Functions that JAX has compiled run on the device and are not seen. About one minute.
"""

from __future__ import annotations

import argparse
import asyncio.events
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import rolljax.loop
from rolljax.commands.train import main as train

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "rolljax") + os.sep
STARTERS = {
    asyncio.events.__file__,
    threading.__file__,
    str(Path(threading.__file__).parent / "concurrent/futures/thread.py"),
}
"""Library files that start work of their own: no function of ours waits for it."""
STEP = 3
"""The step of the `rl` phase that is traced."""
SETTINGS = {
    "Recipe.save_every": "1000",
    "Evaluation.tasks": "4",
    "warm_start/Phase.steps": "60",
    "warm_start/Phase.stop_at_reward": "None",
    "warm_start/Phase.eval_every": "0",
    "rl/Phase.steps": str(STEP),
    "rl/Phase.eval_every": "0",
}


class Tracer:
    """Counts the calls between files of the package, in all threads, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()
        self.calls: Counter[tuple[str, str]] = Counter()

    def install(self) -> None:
        """Trace this thread, and every thread that starts from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Receive an event of `sys.setprofile`."""
        if not self.is_on or event != "call":
            return
        callee = frame.f_code.co_filename
        if not callee.startswith(PACKAGE):
            return
        self.files.add(callee)
        caller = caller_file(frame)
        if caller is not None and caller != callee:
            self.calls[caller, callee] += 1


def caller_file(frame: FrameType) -> str | None:
    """Return the file of the package whose function waits for this one; None: a loop or a thread started it."""
    above = frame.f_back
    while above is not None:
        name = above.f_code.co_filename
        if name.startswith(PACKAGE):
            return name
        if name in STARTERS:
            return None
        above = above.f_back
    return None


def traced(step: Callable[..., Awaitable[None]], tracer: Tracer) -> Callable[..., Awaitable[None]]:
    """Return `loop.train_step` with the tracer on during step `STEP` of the phase `rl`."""

    async def train_step(recipe: Any, phase: Any, *parts: Any) -> None:
        progress = parts[-1].progress
        tracer.is_on = phase.name == "rl" and progress.step == STEP - 1
        await step(recipe, phase, *parts)
        tracer.is_on = False

    return train_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="list every move, and its calls")
    arguments, tracer = parser.parse_args(), Tracer()
    rolljax.loop.train_step = traced(rolljax.loop.train_step, tracer)
    with tempfile.TemporaryDirectory() as folder:
        command = ["--gin", str(ROOT / "configs" / "quickstart.gin"), "--run_dir", folder + "/run"]
        for name, value in SETTINGS.items():
            command += ["--set", f"{name} = {value}"]
        tracer.install()
        code = train(command)
        sys.setprofile(None)
        if code:
            sys.exit(code)
        rows = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    if not json.loads(rows[-1])["optim/updates_n"]:
        sys.exit("the traced step made no update: no group had a signal")
    entered = Counter(callee for _, callee in tracer.calls)
    calls = Counter[str]()
    for (_, callee), count in tracer.calls.items():
        calls[callee] += count
    print("calls  callers  file")
    for file in sorted(tracer.files, key=lambda file: (-calls[file], file)):
        print(f"{calls[file]:5}  {entered[file]:7}  {file.removeprefix(PACKAGE)}")
    if arguments.pairs:
        print("calls  move")
        for (caller, callee), count in sorted(tracer.calls.items(), key=lambda item: (-item[1], item[0])):
            print(f"{count:5}  {caller.removeprefix(PACKAGE)} -> {callee.removeprefix(PACKAGE)}")
    print(f"{len(tracer.files)} files, {len(tracer.calls)} moves, {tracer.calls.total()} calls between files")


if __name__ == "__main__":
    main()
