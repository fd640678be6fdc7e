"""How long the viewer takes: `python benchmarks/view.py [--gb 1]`, on a run of that size with steps of 512.

Makes the run in a temporary folder (or in `--folder`, which is kept), starts `python -m rolljax.view` on it, and asks
as the page does, over HTTP, with no file of the run read before but by the system. Five times; milliseconds.
"""

import argparse
import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

from rolljax.run.folder import RunFolder
from rolljax.storage.layout import RESOLVED, rollouts_file
from rolljax.types import Key, Task, Trajectory, Turn

GROUPS, SIBLINGS, TURNS, TURN_TOK = 64, 8, 4, 256
TIMES = 5
WORDS = ("north ", "the door ", "south ", "look ", "I see a wall. ", "go on\n")


def trajectory(rng: np.random.Generator, draw: int, sibling: int, advantages: bool) -> Trajectory:
    """Return a trajectory of four turns, with 1,024 sampled tokens and as many prompt tokens."""
    text = "".join(rng.choice(WORDS, 40))[:TURN_TOK]
    ids = rng.integers(0, 256, (TURNS, 2, TURN_TOK), dtype=np.int32)
    logp = -rng.exponential(0.7, (TURNS, TURN_TOK)).astype(np.float32)
    version = np.full(TURN_TOK, 12, np.int32)
    turns = tuple(Turn(told, said, logp[i], version, "stop", 0.0, text) for i, (told, said) in enumerate(ids))
    reward = float(rng.integers(0, 2))
    trained = {"advantages": reward - 0.5, "trainer_logp": logp.ravel().round(6).tolist()} if advantages else None
    task = Task("house", draw, f"Find the key of house {draw}")
    key = Key(0, draw, sibling)
    return Trajectory(key, task, turns, reward, {"score": reward}, reward > 0, "ok", trained=trained)


def make(path: Path, size: float) -> int:
    """Write a run of `size` bytes; return its number of steps. Steps are alike but for their draws."""
    rng, folder = np.random.default_rng(0), RunFolder(path)
    (path / "rollouts").mkdir(parents=True)
    (path / RESOLVED).write_text(json.dumps({"phases[0].name": "rl", "phases[0].steps": 100}))
    step, written = 0, 0
    while written < size:
        step += 1
        if step == 1:
            every = [trajectory(rng, g, s, True) for g in range(GROUPS) for s in range(SIBLINGS)]
            folder.write_rollouts(step, every)
            first = rollouts_file(path, step).read_bytes()
        else:
            data = first.replace(b'"prompt_index":', b'"prompt_index":%d' % step).replace(
                b"Find the key", b"Find the %d. key" % step
            )
            rollouts_file(path, step).write_bytes(data)
        written += rollouts_file(path, step).stat().st_size
        row = {"step": step, "phase": "rl", "version": step, "phase_step": step, "reward/mean": 0.5, "time/step_s": 9.0}
        folder.write_row(row | {f"env/number_{i}": rng.normal() for i in range(60)})
    return step


@dataclasses.dataclass
class Seconds:
    """Wall seconds, and seconds of the viewer's processor time."""

    clock: float = 0.0
    processor: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.clock + other.clock, self.processor + other.processor)


class Viewer:
    """The verb in a process of its own."""

    def __init__(self, path: Path) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        began = time.perf_counter()
        command = [sys.executable, "-m", "rolljax.view", str(path), "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.url = f"http://127.0.0.1:{port}"
        while True:
            try:
                self.get("/")
                break
            except OSError:
                time.sleep(0.005)
        self.start_s = Seconds(time.perf_counter() - began, self.processor_s())

    def get(self, path: str) -> tuple[Seconds, bytes]:
        """Request a path; return the time and the answer."""
        began, busy = time.perf_counter(), self.processor_s()
        with urllib.request.urlopen(self.url + path) as answer:
            data = answer.read()
        return Seconds(time.perf_counter() - began, self.processor_s() - busy), data

    def processor_s(self) -> float:
        """Return the CPU seconds of the viewer's threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(path: Path, steps: int) -> dict[str, list[Seconds]]:
    """Time the requests that users wait for, by kind."""
    found: dict[str, list[Seconds]] = {}
    for i in range(TIMES):
        viewer, name = Viewer(path), path.name
        try:
            opened = [viewer.get(p)[0] for p in ("/api/runs", f"/api/runs/{name}/rows")]
            cold = f"/api/runs/{name}/steps/{steps - i}"
            times = {
                "start, until the page is there": viewer.start_s,
                "the run: overview and all rows": opened[0] + opened[1],
                "a step of 512, not seen before": viewer.get(cold)[0],
                "the same step again": viewer.get(cold)[0],
                "a trajectory of 1,024 sampled tokens": viewer.get(f"{cold}/7")[0],
                "a step filtered by reward and text": viewer.get(f"{cold}?q=reward%3E0%20door")[0],
                "a search, until its first hits": viewer.get(f"/api/runs/{name}/search?q=key%20reward%3E0")[0],
            }
            newest, all_steps = steps, Seconds()
            while newest:
                seconds, data = viewer.get(f"/api/runs/{name}/search?q=nowhere&from={newest}")
                newest, all_steps = json.loads(data)["next"] or 0, all_steps + seconds
            times["a text that is nowhere, in all steps"] = all_steps
        finally:
            viewer.close()
        for what, seconds in times.items():
            found.setdefault(what, []).append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="make the run here, or take the one that is here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = args.folder or Path(temporary) / "run"
        steps = len(list((path / "rollouts").glob("*"))) if path.exists() else make(path, args.gb * 1e9)
        size = sum(f.stat().st_size for f in (path / "rollouts").iterdir())
        print(f"{size / 1e9:.2f} GB, {steps} steps of {GROUPS * SIBLINGS} trajectories\n")
        print("| what | median ms | least ms | processor ms, median |\n|---|---|---|---|")
        for what, seconds in measure(path, steps).items():
            clock = [s.clock for s in seconds]
            told = (statistics.median(clock), min(clock), statistics.median(s.processor for s in seconds))
            print(f"| {what} | {' | '.join(f'{s * 1e3:.0f}' for s in told)} |")


if __name__ == "__main__":
    main()
