"""Samplers that join and leave all the time: the run trains the tokens of a run in one process, and waits for nobody."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from rolljax import loop
from rolljax.concurrency.event_loop import Stopped

from .conftest import ROOT, StopAt, rows
from .test_placement import prepared
from .test_remote_run import REMOTE, assert_ended, sampled

JOIN = [*REMOTE, "Remote.launcher = @Join()", "Join.host = '127.0.0.1'", "Join.port = 0", "Remote.rejoin_s = 10.0"]
ENDLESS = ["Phase.steps = 100000", "Recipe.save_every = 100"]


class Churn(StopAt):
    """Starts a sampler and kills the oldest ready one, every N seconds; stops the run at the end."""

    def __init__(self, folder, every_s, all_s):
        super().__init__(-1)
        self.folder, self.every_s, self.all_s = folder, every_s, all_s
        self.processes, self.left, self.over = {}, [], threading.Event()
        self.thread = threading.Thread(target=self._change, daemon=True)

    def say(self, text):
        super().say(text)
        command = text.partition("waiting for samplers: python ")[2].split()
        if command:
            self.command = [sys.executable, *command]
            self._start()
            self._start()
            self.thread.start()

    def _start(self):
        name = f"s{len(self.processes)}"
        env = {k: v for k, v in os.environ.items() if k != "ROLLJAX_SAMPLER_KEY"} | {"PYTHONPATH": str(ROOT)}
        with (self.folder.parent / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen([*self.command, "--name", name], env=env, stdout=log, stderr=log)

    def _ready(self):
        logs = {name: (self.folder.parent / f"{name}.log").read_text() for name in self.processes}
        return [name for name, log in logs.items() if "ready" in log and name not in self.left]

    def _change(self):
        while len(self._ready()) < 2 or not rows(self.folder):
            time.sleep(0.1)
        end_s = time.monotonic() + self.all_s
        while not self.over.wait(self.every_s) and time.monotonic() < end_s:
            self._start()
            if len(ready := self._ready()) > 1:
                self.processes[ready[0]].kill()
                self.left.append(ready[0])
        self.stopped = True

    def step(self, row):
        """Continue until the end, unlike `StopAt`."""

    def end(self):
        self.over.set()
        self.thread.join()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@pytest.mark.sweep
@pytest.mark.parametrize(("every_s", "all_s"), [(10, 180)])
def test_tokens_stay_the_same_while_samplers_join_and_leave(tmp_path, every_s, all_s):
    folder = tmp_path / "run" / "run"
    churn = Churn(folder, every_s, all_s)
    checked, out = prepared(folder, *JOIN, *ENDLESS)
    try:
        with pytest.raises(Stopped):
            loop.train(checked, out, churn, lambda: churn.stopped)
    finally:
        churn.end()
    assert_ended(folder)
    written = rows(folder)
    checked, out = prepared(tmp_path / "alone" / "run", "MeshSpec.data = 1", *ENDLESS)
    alone = StopAt(len(written))
    with pytest.raises(Stopped):
        loop.train(checked, out, alone, lambda: alone.stopped)
    found, expected = sampled(folder), sampled(tmp_path / "alone" / "run")
    tokens = sum(len(turn) for step in found.values() for turns in step.values() for turn in turns)
    waits = sorted(row["time/publish_s"] for row in written)
    steps = sorted(row["time/step_s"] for row in written)
    figures = (
        f"{len(churn.processes)} joined, {len(churn.left)} left, {len(written)} steps, {tokens} tokens; a step takes "
        f"{steps[len(steps) // 2]:.3f} s, at most {steps[-1]:.1f}; of it publishing {waits[len(waits) // 2]:.4f} s, "
        f"at most {waits[-1]:.3f}"
    )
    (tmp_path / "figures").write_text(figures)
    assert len(churn.left) >= all_s / every_s / 2, figures
    assert len(found) == len(written) and found == expected, figures
