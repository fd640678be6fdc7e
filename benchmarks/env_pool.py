"""Measures the overhead of the host pool, as a markdown table.

    python benchmarks/env_pool.py            # one to two minutes

Steps per second include all of asyncio (an episode is an open, 100 steps and a close). Concurrency is the ideal time of
1,000 environments that wait 0.1 to 1 s in each of 10 steps, all at once, divided by their measured time. Faults: 10 %
of the episodes fail by an exception, exit, abort, NaN or hang; other episodes that failed in the same worker restart.
The benchmark compares wall seconds for the same number of complete episodes. The policy takes 0.05 s for an action, and
the limit of a step is 0.5 s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import EnvError, InfraError
from rolljax.types import Message, Task

STEPS = 100
FAULTS = ("raise", "exit", "abort", "nan", "hang")
FAULTY_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Toy(EnvSpec):
    """Says its number of steps.

    wait_s: a step takes between these two. fault_frac: share of the tasks that fail at some step.
    """

    steps: int = STEPS
    wait_s: tuple[float, float] = (0.0, 0.0)
    fault_frac: float = 0.0

    @property
    def name(self) -> str:
        return "toy"

    def task(self, index: int) -> Task:
        return Task(self.name, index, str(index))

    def make(self) -> Env:
        return ToyEnv(self)


@dataclasses.dataclass(frozen=True)
class ToyProcess(Toy):
    runs = "process"


@dataclasses.dataclass(frozen=True)
class ToyServer(Toy):
    runs = "thread"


class ToyEnv(Env):
    def __init__(self, spec: Toy) -> None:
        self._spec = spec

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._random = random.Random(task.index)
        self._n, self._fault = 0, ""
        every = round(1 / self._spec.fault_frac) if self._spec.fault_frac else 0
        if every and task.index % every == 0:
            self._fault = FAULTS[task.index // every % len(FAULTS)]
            self._at = self._random.randint(1, self._spec.steps - 1)
        return (Message("user", "0"),)

    def step(self, action: str) -> StepResult:
        self._n += 1
        if self._spec.wait_s[1]:
            time.sleep(self._random.uniform(*self._spec.wait_s))
        reward = 1.0
        if self._fault and self._n == self._at:
            match self._fault:
                case "raise":
                    raise KeyError("hole")
                case "exit":
                    os._exit(1)
                case "abort":
                    os.abort()
                case "hang":
                    time.sleep(1000)
                case "nan":
                    reward = float("nan")
        return StepResult((Message("user", str(self._n)),), reward, self._n == self._spec.steps)

    def reference_answer(self) -> str:
        return "go"


async def play(pool: EnvPool, index: int, think_s: float = 0.0) -> bool:
    """Play a whole episode, restarted after each fault of the infrastructure; return whether it came to its end."""
    while True:
        try:
            episode = await pool.open(pool.spec.task(index))
            try:
                while not (await episode.step("go")).terminated:
                    if think_s:
                        await asyncio.sleep(think_s)
            finally:
                await episode.close()
            return True
        except InfraError:
            pass
        except EnvError:
            return False


def timed(spec: Toy, cfg: PoolConfig, episodes: int, at_once: int, think_s: float = 0.0) -> float:
    """Return the seconds of `episodes` episodes, after a warm-up."""
    pool = EnvPool(cfg, spec)

    async def go() -> float:
        room = asyncio.Semaphore(at_once)

        async def one(index: int) -> bool:
            async with room:
                return await play(pool, index, think_s)

        if not spec.wait_s[1]:
            await asyncio.gather(*(play(pool, 1) for _ in range(8)))
        begin = time.perf_counter()
        ended = await asyncio.gather(*(one(i) for i in range(episodes)))
        seconds = time.perf_counter() - begin
        assert sum(ended) == episodes - len(range(0, episodes, round(1 / spec.fault_frac)) if spec.fault_frac else ())
        return seconds

    try:
        return asyncio.run(go())
    finally:
        pool.close()


def steps_per_s(spec: Toy, cfg: PoolConfig, rounds: int = 3) -> list[float]:
    return [300 * STEPS / timed(spec, cfg, 300, 64) for _ in range(rounds)]


def concurrency() -> list[float]:
    spec, cfg = ToyServer(steps=10, wait_s=(0.1, 1.0)), PoolConfig()
    waits = []
    for i in range(1000):
        rng = random.Random(i)
        waits.append(sum(rng.uniform(0.1, 1.0) for _ in range(10)))
    # all start together, and the slowest ends last: the ideal is its time
    return [max(waits) / timed(spec, cfg, 1000, 1000) for _ in range(2)]


def fault_cost(workers: int, per_worker: int) -> float:
    """Compare the best of three runs with faults to the best of three without."""
    cfg = PoolConfig(workers=workers, episodes_per_worker=per_worker, step_s=0.5, max_fault_frac=1.0)
    healthy, faulty = ToyProcess(steps=FAULTY_STEPS), ToyProcess(steps=FAULTY_STEPS, fault_frac=0.1)
    without, with_faults = [], []
    for _ in range(3):
        without.append(timed(healthy, cfg, 288, 32, 0.05))
        with_faults.append(timed(faulty, cfg, 320, 32, 0.05))
    return min(with_faults) / min(without) - 1


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median (best)\n")
    print("| what | goal | measured |\n|---|---|---|")
    inline, process = steps_per_s(Toy(), PoolConfig()), steps_per_s(ToyProcess(), PoolConfig(workers=2))
    print(f"| inline, steps/s | 10,000 | {statistics.median(inline):,.0f} ({max(inline):,.0f}) |")
    print(f"| 2 worker processes, steps/s | 5,000 | {statistics.median(process):,.0f} ({max(process):,.0f}) |")
    ideal = concurrency()
    print(f"| 1,000 waiting environments, of ideal concurrency | 90 % | {min(ideal):.1%} ({max(ideal):.1%}) |")
    for workers, per_worker in ((32, 1), (8, 4)):
        what = f"10 % faults, {workers} workers of {per_worker} episodes, wall clock"
        print(f"| {what} | +15 % | {fault_cost(workers, per_worker):+.1%} |")


if __name__ == "__main__":
    importlib.import_module("env_pool").main()  # under a name that worker processes can import
