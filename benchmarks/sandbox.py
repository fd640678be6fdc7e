"""Measures the overhead of a sandbox here, as a markdown table.

    python benchmarks/sandbox.py                # half a minute; needs bubblewrap

Times are wall clock in this process, p50 and p95 of `--repeats`; memory is the proportional set size of all processes
of a live sandbox (process 1, the agent, one shell), mean of `--sessions` that are alive together. `--many` live
sandboxes are then started by 16 threads, as the episodes of a step are.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rolljax.sandbox import CODE, TERMINAL, Sandbox, SandboxConfig, SandboxHost, command_line, grade_python


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


def starts(host: SandboxHost, repeats: int) -> tuple[list[float], list[float]]:
    """Time opening and closing a live sandbox."""
    opened, closed = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        box = Sandbox.open(host=host)
        opened.append((time.perf_counter() - start) * 1e3)
        closed += timed(box.close, 1)
    return opened, closed


def many(num: int) -> list[float]:
    """Return the percentiles 1 to 99 of the milliseconds in which each of `num` sandboxes starts, all alive at once."""

    def opened(host: SandboxHost) -> tuple[Sandbox, float]:
        start = time.perf_counter()
        return Sandbox.open(TERMINAL, host=host), (time.perf_counter() - start) * 1e3

    with SandboxHost(SandboxConfig(slots=num)) as host, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: opened(host), range(num)))
        list(pool.map(lambda pair: pair[0].close(), found))
    return statistics.quantiles([ms for _, ms in found], n=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--many", type=int, default=200)
    args = parser.parse_args()
    python = [*command_line.isolated_python(), "-c", "pass"]
    test = "def check(candidate):\n    for i in range(20):\n        assert candidate(i) == i + 1"
    with SandboxHost(SandboxConfig(slots=args.sessions + 8)) as host, contextlib.ExitStack() as stack:
        host.run(python)
        lines = [
            row("one-shot `true`", timed(lambda: host.run(["true"]), args.repeats)),
            row("one-shot Python", timed(lambda: host.run(python), args.repeats), "20 ms"),
        ]
        opened, closed = starts(host, args.repeats // 2)
        lines += [row("start of a live sandbox", opened, "40 ms"), row("its end", closed)]
        box = stack.enter_context(Sandbox.open(host=host))
        lines.append(row("command in a live sandbox", timed(lambda: box.run("echo hi"), 10 * args.repeats), "3 ms"))
        data = bytes(1 << 20)
        lines.append(row("put 1 MiB", timed(lambda: box.put("x", data), args.repeats)))
        lines.append(row("get 1 MiB", timed(lambda: box.get("x"), args.repeats)))
        grade = lambda: grade_python("def f(x): return x + 1", "f", test, host=host)  # noqa: E731
        lines.append(row("grade a program, 20 calls", timed(grade, args.repeats // 2)))
        with ThreadPoolExecutor(8) as pool:
            boxes = list(pool.map(lambda _: Sandbox.open(TERMINAL, host=host), range(args.sessions)))
            used = [box.stats()["pss_bytes"] / 2**20 for box in boxes]
            start = time.perf_counter()
            list(pool.map(lambda b: [b.run("echo hi") for _ in range(20)], boxes))
            rate = 20 * len(boxes) / (time.perf_counter() - start)
            list(pool.map(Sandbox.close, boxes))
            start = time.perf_counter()
            list(pool.map(lambda _: host.run(python, profile=CODE), range(2 * args.repeats)))
            programs = 2 * args.repeats / (time.perf_counter() - start)
    each = many(args.many)
    print("| | p50 | p95 | goal |\n|---|---|---|---|")
    print("\n".join(lines))
    print(f"| memory of each of {args.sessions} live sandboxes | {statistics.mean(used):.1f} MiB | | 10 MiB |")
    print(
        f"| start of each of {args.many}, 16 threads | {each[49]:.0f} ms | {each[94]:.0f} ms; p99 {each[98]:.0f} ms | |"
    )
    print(f"| commands, {args.sessions} live sandboxes, 8 threads | {rate:.0f} per second | | |")
    print(f"| one-shot Python, 8 threads | {programs:.0f} per second | | |")
    load = os.getloadavg()[0]
    print(f"\n{os.cpu_count()} cores, load {load:.1f} from everything on the machine.")


if __name__ == "__main__":
    main()
