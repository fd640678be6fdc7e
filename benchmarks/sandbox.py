"""Measures the overhead of a sandbox here, as a markdown table.

    python benchmarks/sandbox.py                # half a minute; needs bubblewrap
    python benchmarks/sandbox.py --engine docker --image debian:12       # live sandboxes alone, from an image

Times are wall clock in this process, p50 and p95 of `--repeats`; memory is the proportional set size of all processes
of a live sandbox (process 1, the agent, one shell), mean of `--sessions` that are alive together. `--many` live
sandboxes are then started by 16 threads, as the episodes of a step are.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rolljax.sandbox import (
    CODE,
    TERMINAL,
    ContainerHost,
    Profile,
    Sandbox,
    SandboxConfig,
    SandboxHost,
    SandboxProvider,
    command_line,
    grade_python,
)


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the milliseconds of each call."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def row(name: str, found: list[float], goal: str = "") -> str:
    cuts = statistics.quantiles(found, n=20)
    return f"| {name} | {statistics.median(found):.1f} ms | {cuts[18]:.1f} ms | {goal} |"


def starts(host: SandboxProvider, profile: Profile, repeats: int) -> tuple[list[float], list[float]]:
    """Time opening and closing a live sandbox."""
    opened, closed = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        box = Sandbox.open(profile, host=host)
        opened.append((time.perf_counter() - start) * 1e3)
        closed += timed(box.close, 1)
    return opened, closed


def live(host: SandboxProvider, profile: Profile, repeats: int) -> list[str]:
    """Measure one live sandbox."""
    opened, closed = starts(host, profile, repeats // 2)
    lines = [row("start of a live sandbox", opened, "40 ms"), row("its end", closed)]
    with Sandbox.open(profile, host=host) as box:
        lines.append(row("command in a live sandbox", timed(lambda: box.run("echo hi"), 10 * repeats), "3 ms"))
        data = bytes(1 << 20)
        lines.append(row("put 1 MiB", timed(lambda: box.put("x", data), repeats)))
        lines.append(row("get 1 MiB", timed(lambda: box.get("x"), repeats)))
    return lines


def many(host: SandboxProvider, profile: Profile, num: int) -> str:
    """Measure in how much time each of `num` sandboxes starts, all alive at once, and all of them."""

    def opened(_: int) -> tuple[Sandbox, float]:
        start = time.perf_counter()
        return Sandbox.open(profile, host=host), (time.perf_counter() - start) * 1e3

    start = time.perf_counter()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(opened, range(num)))
        in_all = time.perf_counter() - start
        list(pool.map(lambda pair: pair[0].close(), found))
    each = statistics.quantiles([ms for _, ms in found], n=100)
    times = f"{each[49]:.0f} ms | {each[94]:.0f} ms; p99 {each[98]:.0f} ms"
    return f"| start of each of {num}, 16 threads | {times} | all: {in_all:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--many", type=int, default=200)
    parser.add_argument("--engine", choices=("docker", "podman"))
    parser.add_argument("--image")
    args = parser.parse_args()
    print("| | p50 | p95 | goal |\n|---|---|---|---|")
    if args.engine:
        profile = dataclasses.replace(TERMINAL, image=args.image)
        with ContainerHost(args.engine, SandboxConfig(slots=args.many + 1)) as containers:
            print("\n".join([*live(containers, profile, args.repeats), many(containers, profile, args.many)]))
    else:
        bubblewrap(args.repeats, args.sessions, args.many)
    load = os.getloadavg()[0]
    print(f"\n{os.cpu_count()} cores, load {load:.1f} from everything on the machine.")


def bubblewrap(repeats: int, sessions: int, num: int) -> None:
    """Measure everything that bubblewrap's sandboxes do."""
    python = [*command_line.isolated_python(), "-c", "pass"]
    test = "def check(candidate):\n    for i in range(20):\n        assert candidate(i) == i + 1"
    with SandboxHost(SandboxConfig(slots=max(sessions + 8, num))) as host:
        host.run(python)
        lines = [
            row("one-shot `true`", timed(lambda: host.run(["true"]), repeats)),
            row("one-shot Python", timed(lambda: host.run(python), repeats), "20 ms"),
            *live(host, TERMINAL, repeats),
        ]
        grade = lambda: grade_python("def f(x): return x + 1", "f", test, host=host)  # noqa: E731
        lines.append(row("grade a program, 20 calls", timed(grade, repeats // 2)))
        with ThreadPoolExecutor(8) as pool:
            boxes = list(pool.map(lambda _: Sandbox.open(TERMINAL, host=host), range(sessions)))
            used = [box.stats()["pss_bytes"] / 2**20 for box in boxes]
            start = time.perf_counter()
            list(pool.map(lambda b: [b.run("echo hi") for _ in range(20)], boxes))
            rate = 20 * len(boxes) / (time.perf_counter() - start)
            list(pool.map(Sandbox.close, boxes))
            start = time.perf_counter()
            list(pool.map(lambda _: host.run(python, profile=CODE), range(2 * repeats)))
            programs = 2 * repeats / (time.perf_counter() - start)
        print("\n".join([*lines, many(host, TERMINAL, num)]))
    print(f"| memory of each of {sessions} live sandboxes | {statistics.mean(used):.1f} MiB | | 10 MiB |")
    print(f"| commands, {sessions} live sandboxes, 8 threads | {rate:.0f} per second | | |")
    print(f"| one-shot Python, 8 threads | {programs:.0f} per second | | |")


if __name__ == "__main__":
    main()
