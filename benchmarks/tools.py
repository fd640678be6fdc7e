"""Measures the cost of a tool call, by the place of the tool: `python benchmarks/tools.py`."""

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rolljax.envs.tools import PARSERS, McpTools, PythonTools, SandboxTools, Tools
from rolljax.envs.tools.calculator import TOOLS
from rolljax.envs.tools.parsers import MAX_TEXT

SERVER = ("-m", "rolljax.envs.tools.calculator_server")
PLACES: dict[str, Tools] = {
    "function": TOOLS,
    "function in a thread": PythonTools(("rolljax.envs.tools.calculator.calc",), waits=True),
    "MCP in memory": McpTools(server="rolljax.envs.tools.calculator_server.server"),
    "MCP over stdio": McpTools(command=(sys.executable, *SERVER), where="process"),
    "python in a sandbox": SandboxTools(verbs=("python",)),
}


def main() -> None:
    print("| tool | first use s | call ms, least | call ms, median | calls/s, 8 threads |\n|---|---|---|---|---|")
    for place, tools in PLACES.items():
        start = time.perf_counter()
        opened = tools.open()
        (spec,) = opened.list()
        name, arguments = spec.name, {"code": "print(1)"} if spec.name == "python" else {"expression": "4817*93"}
        assert not opened.call(name, arguments).is_error
        first = time.perf_counter() - start
        times = []
        for _ in range(200):
            start = time.perf_counter()
            opened.call(name, arguments)
            times.append(time.perf_counter() - start)
        with ThreadPoolExecutor(8) as threads:
            start = time.perf_counter()
            list(threads.map(lambda _, call=opened.call, n=name, a=arguments: call(n, a), range(400)))
            rate = 400 / (time.perf_counter() - start)
        least, median = min(times) * 1000, statistics.median(times) * 1000
        print(f"| {place} | {first:.2f} | {least:.3f} | {median:.3f} | {rate:.0f} |", flush=True)
        opened.close()
    specs = TOOLS.open().list()
    for parser, block in (
        ("hermes", "<tool_call>{"),
        ("fenced", "```calc\n"),
        ("tags", "<calc>"),
        ("compact", "calc(\n"),
    ):
        start = time.perf_counter()
        calls = sum(1 for _ in PARSERS[parser].parse(block * (MAX_TEXT // len(block)), specs))
        print(f"{parser}: 1 MiB of {block!r}, {calls} calls, {time.perf_counter() - start:.3f} s")


if __name__ == "__main__":
    main()
