"""Requests per second and time to the first token of every API that the server speaks, compared with completions.

    python benchmarks/serving_apis.py                # a table, about two minutes

The engine costs nothing (`host_path.FreeWorker`), so that what is measured is the server: HTTP, reading a request, the
chat template, tokens to text, writing an answer. The client is a process of its own. All APIs are asked in turn,
several times; each figure is the median, and ratios are to `/v1/completions` of the same run. At the end 500 streams of
each API are open at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

TOKENS, CONTEXT, SLOTS = 32, 256, 512
WARM_UPS = 8
"""Requests that the client sends before it begins to measure."""
ASKED = "Say something about the number 12."
CHAT = {"messages": [{"role": "user", "content": ASKED}], "max_tokens": TOKENS}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": ASKED, "max_tokens": TOKENS},
    "/v1/chat/completions": {"model": "tiny", **CHAT},
    "/v1/responses": {"model": "tiny", "input": CHAT["messages"], "max_output_tokens": TOKENS},
    "/v1/messages": {"model": "tiny", **CHAT},
    "/inference/v1/generate": {"token_ids": list(range(65, 99)), "sampling_params": {"max_tokens": TOKENS}},
}
"""An equal request of each API, by path."""
FIRST = re.compile(r'"(text|content|delta)": ?"[^"]|"token_ids": ?\[[0-9]')
"""What the first event of a stream with a token contains; some APIs begin with an event without one."""


async def ask(url: str, path: str, num: int, at_once: int, stream: bool) -> dict[str, float]:
    """Send `num` requests, `at_once` at the same time; return seconds of all, and the median to the first token."""
    import httpx2

    room, firsts = asyncio.Semaphore(at_once), []
    limits = httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once)

    async def one(client: httpx2.AsyncClient) -> None:
        async with room:
            start, first = time.perf_counter(), 0.0
            async with client.stream("POST", path, json={**BODIES[path], "stream": stream}) as reply:
                async for line in reply.aiter_lines():
                    if not first and FIRST.search(line):
                        first = time.perf_counter() - start
            assert reply.status_code == 200 and first, (path, reply.status_code)
            firsts.append(first)

    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(WARM_UPS)))
        firsts.clear()
        start = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(num)))
        return {"seconds": time.perf_counter() - start, "first_s": statistics.median(firsts)}


def measured(running: Any, path: str, num: int, at_once: int, stream: bool) -> dict[str, float]:
    """Run the client in a process of its own; add CPU microseconds of the server per request."""
    from host_path import cpu_s

    before = cpu_s()
    work = json.dumps([running.url, path, num, at_once, stream])
    found = json.loads(
        subprocess.run([sys.executable, __file__, "--client", work], capture_output=True, check=True).stdout
    )
    spent = sum(v - before.get(k, 0.0) for k, v in cpu_s().items())
    return {**found, "cpu_us": 1e6 * spent / (num + WARM_UPS)}


def main() -> None:
    """Measure all APIs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(ask(*json.loads(args.client)))))
        return
    from host_path import free_sampler

    from rolljax import serve
    from rolljax.model.tokenizer import Chat, byte_tokenizer
    from rolljax.serving.schema import ServedModel
    from rolljax.serving.server import ServerLimits
    from tests.e2e.serving import Running

    serve.allow_open_files(4096)
    chat = Chat(byte_tokenizer())
    sampler = free_sampler(SLOTS, CONTEXT, int(chat.answer_ids("")[-1]), chat.vocabulary)
    served = ServedModel("tiny", chat.tokenizer, chat, sampler.engine.model.cfg.vocab_size, CONTEXT)
    running = Running(sampler, served, ServerLimits())
    try:
        kinds = {"whole": (args.requests, 32, False), "stream": (args.requests, 32, True), "alone": (32, 1, True)}
        found: dict[tuple[str, str], list[dict[str, float]]] = {}
        for _ in range(args.rounds):
            for kind, (num, at_once, stream) in kinds.items():
                for path in BODIES:
                    found.setdefault((path, kind), []).append(measured(running, path, num, at_once, stream))
        many = {path: measured(running, path, 500, 500, True)["seconds"] for path in BODIES}
        median = lambda path, kind, name: statistics.median(row[name] for row in found[path, kind])  # noqa: E731
        print("| API | requests/s | streams/s | server, us | stream, us | first token, ms | 500 streams at once, s |")
        print("|---|---|---|---|---|---|---|")
        rates = {p: [args.requests / median(p, kind, "seconds") for kind in ("whole", "stream")] for p in BODIES}
        for path in BODIES:
            pairs = zip(rates[path], rates["/v1/completions"], strict=True)
            shown = [f"{rate:.0f} ({rate / plain:.2f}x)" for rate, plain in pairs]
            cpu = [f"{median(path, kind, 'cpu_us'):.0f}" for kind in ("whole", "stream")]
            first = 1e3 * median(path, "alone", "first_s")
            print(f"| `{path}` | {' | '.join(shown)} | {' | '.join(cpu)} | {first:.1f} | {many[path]:.2f} |")
    finally:
        running.close()
        sampler.close()


if __name__ == "__main__":
    main()
