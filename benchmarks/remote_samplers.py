"""Samplers in other processes: what the way over TCP costs.

    python benchmarks/remote_samplers.py speed              # one remote sampler next to one of this process, in turn
    python benchmarks/remote_samplers.py stall              # what fetching weights takes from decoding
    python benchmarks/remote_samplers.py controller         # 64 samplers without a model: CPU time of the controller

`speed` prints the ratio of tokens/s, of equal requests after a warm-up, and the seconds from start to ready of both.
`stall` pushes the weights of a larger model again and again to a remote sampler that decodes all the time. It prints by
how much gaps between tokens exceed the longest one without pushes, as a share of the time from push to swap (unless
`SamplerConfig.on_publish` is 'keep', a gap has the prefill of all running requests); and the tokens/s with pushes as a
share of those without, which on one machine also pay for writing and reading the store.
`controller` sends requests through the group, the router and real connections. A helper process answers for all
samplers with recorded tokens, as fast as it can; only CPU time of the controller's process counts, of which the last
lines name the largest parts (a second, slower pass under a profiler).
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import cProfile
import dataclasses
import itertools
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rolljax.cluster.group import SamplerGroup, sampler_name
from rolljax.cluster.messages import SamplerJob, pack_sampled, software, unpack_requests
from rolljax.cluster.placement import Remote
from rolljax.cluster.wire import Channel, Frame, Port, connect
from rolljax.concurrency.waits import Watchdog
from rolljax.sampler.client import SamplerClient, SamplerLimits
from rolljax.sampler.prompt_queue import SamplerLoad, SamplerStats
from rolljax.types import Completion, Sampled, SamplingParams

KEY = b"benchmark"
ANSWER_TOK, SLOTS, PROMPT_TOK, SIBLINGS = 512, 16, 128, 8
VOCAB = 50_000
SMALL_RUN = (
    "MeshSpec.data = 1",
    "Recipe.max_answer_tok = 64",
    "SamplerConfig.slots = 16",
    "SamplerConfig.max_context = 256",
)
STALL_RUN = (
    *(f"Qwen3Config.{size}" for size in ("vocab_size = 65536", "hidden_size = 512", "num_layers = 8")),
    *(f"Qwen3Config.{size}" for size in ("num_heads = 8", "ffn_size = 2048")),
    "SamplerConfig.steps_per_dispatch = 2",
    "SamplerConfig.prefill_chunk = 256",
)
"""Of `stall`: 61 million weights."""


def recorded() -> Sampled:
    """Return the answer that every request gets."""
    rng = np.random.default_rng(0)
    logp = -rng.random(ANSWER_TOK, np.float32)
    none = np.zeros((ANSWER_TOK, 0), np.float32)
    tokens, versions = rng.integers(0, VOCAB, ANSWER_TOK, np.int32), np.zeros(ANSWER_TOK, np.int32)
    return Sampled(
        tokens, logp, logp, versions, none.astype(np.int32), none, none, np.zeros((ANSWER_TOK, 0, 0), np.uint8)
    )


# ---- samplers without a model ---------------------------------------------------------------------------------------


class Answering:
    """A sampler that answers with recorded tokens, `dispatch_tok` at a time for all requests together."""

    def __init__(self, port: int, name: str, parts: list[Sampled], wake: threading.Event) -> None:
        self.name, self._parts, self._wake = name, parts, wake
        self._open: dict[int, int] = {}
        self._lock, self.over = threading.Lock(), threading.Event()
        self._frames: dict[tuple[int, ...], Any] = {}
        stats, load = dataclasses.astuple(SamplerStats()), dataclasses.astuple(SamplerLoad(0, 0, SLOTS, 0, 0, 0, 0))
        self._numbers = {"stats": stats, "load": load}
        self.channel = Channel(connect(("127.0.0.1", port), KEY), "the controller", self._take, lambda _: self._end())
        self.channel.start()
        self.channel.send("hello", {**software(), "name": name, "process": name, "host": "", "kind": "cpu"})

    def _end(self) -> None:
        self.over.set()
        self._wake.set()

    def _take(self, frame: Frame) -> None:
        if frame.kind == "job":
            self.channel.send("ready", {"version": 0, **self._numbers})
        elif frame.kind == "submit":
            with self._lock:
                self._open |= dict.fromkeys((r.number for r in unpack_requests(frame.fields, frame.arrays)), 0)
            self._wake.set()
        elif frame.kind == "end":
            self.channel.finish()

    def dispatch(self) -> bool:
        """Send the tokens of one dispatch; return whether there were any."""
        with self._lock:
            at = dict(self._open)
            for number, part in at.items():
                self._open[number] = part + 1
            ended = [number for number, part in at.items() if part + 1 == len(self._parts)]
            for number in ended:
                del self._open[number]
        if not at:
            return False
        key = tuple(at.values())
        if key not in self._frames:
            if len(self._frames) > 64:
                self._frames.clear()
            self._frames[key] = pack_sampled([self._parts[i] for i in key])
        sizes, columns = self._frames[key]
        ends = [[number, "length", 0.0, 1.0, 0] for number in ended]
        fields = {"numbers": [*at], "sizes": sizes, "ended": ends, "failed": []}
        self.channel.send("tokens", {**fields, **self._numbers}, columns)
        return True


def answer(port: int, samplers: int, dispatch_tok: int) -> None:
    """Be all samplers until the controller ends them."""
    whole, wake = recorded(), threading.Event()
    parts = [whole[i : i + dispatch_tok] for i in range(0, ANSWER_TOK, dispatch_tok)]
    found = [Answering(port, sampler_name(i), parts, wake) for i in range(samplers)]
    while not all(s.over.is_set() for s in found):
        wake.clear()
        if not sum(s.dispatch() for s in found):
            wake.wait(1.0)


# ---- the controller -------------------------------------------------------------------------------------------------


async def play(sampler: SamplerClient, total: int, at_once: int, start: int) -> list[Completion]:
    """Sample `total` answers, `at_once` at a time, each group with a prompt of its own; return the last ones."""
    rng, numbers = np.random.default_rng(start), iter(range(start, start + total))
    params = SamplingParams(1.0, ANSWER_TOK)
    prompts = [rng.integers(0, VOCAB, PROMPT_TOK, np.int32) for _ in range(64)]

    async def worker() -> Completion | None:
        done = None
        for number in numbers:
            group, sibling = divmod(number, SIBLINGS)
            address = (1, 0, group, sibling, 0)
            done = await sampler.submit(prompts[group % len(prompts)], params, address).completion
        return done

    return [c for c in await asyncio.gather(*(worker() for _ in range(at_once))) if c is not None]


def controller(args: argparse.Namespace, dispatch_tok: int, *, profile: bool = False) -> dict[str, Any]:
    """Play `args.completions` answers through `args.samplers`; return figures of the controller's CPU time."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: Any) -> None:
        profiles.append(cProfile.Profile(time.thread_time))
        profiles[-1].enable()  # of this thread, in place of this function

    if profile:
        threading.setprofile(begin)
    settings = Remote(samplers=args.samplers)
    job = SamplerJob("benchmark", 1, {}, None, False, settings.heartbeat_s, settings.lost_s)
    group = SamplerGroup(settings, job, SamplerLimits(4096, SLOTS, VOCAB), say=print)
    port = Port(("127.0.0.1", 0), KEY, group.welcome)
    group._port = port
    helper = [sys.executable, __file__, "answer", "--port", str(port.number), "--samplers", str(args.samplers)]
    child = subprocess.Popen([*helper, "--dispatch_tok", str(dispatch_tok)])
    group.wait_ready(120)
    group.swap(0)
    at_once, whole = args.samplers * SLOTS, recorded()
    own = cProfile.Profile(time.thread_time)

    async def run() -> tuple[float, float, list[Completion]]:
        await play(group, at_once, at_once, 0)  # warm-up
        before = time.process_time(), time.perf_counter()
        if profile:
            own.enable()
        last = await play(group, args.completions, at_once, at_once)
        own.disable()
        return time.process_time() - before[0], time.perf_counter() - before[1], last

    cpu_s, wall_s, last = asyncio.run(run())
    threading.setprofile(None)  # type: ignore[arg-type]
    assert last and all(np.array_equal(c.tokens, whole.tokens) for c in last), "not what was recorded"
    group.close()
    child.wait(60)
    figures: dict[str, Any] = {
        "dispatch_tok": dispatch_tok,
        "completions per CPU s": args.completions / cpu_s,
        "completions per s": args.completions / wall_s,
        "us of CPU a completion": cpu_s / args.completions * 1e6,
    }
    if profile:
        stats = pstats.Stats(own)
        for each in profiles:
            each.create_stats()
            if each.stats:  # type: ignore[attr-defined]
                stats.add(each)
        rows = stats.stats.items()  # type: ignore[attr-defined]
        total = sum(own_s for _, (_, _, own_s, _, _) in rows)
        largest = sorted(((own_s, where) for where, (_, _, own_s, _, _) in rows), reverse=True)[:12]
        figures["largest parts"] = {
            f"{Path(f).name}:{line} {name}": own_s / total for own_s, (f, line, name) in largest
        }
    return figures


# ---- one sampler, here and in another process -----------------------------------------------------------------------


def requests(n: int, vocab: int, max_tok: int) -> Iterator[tuple[np.ndarray, SamplingParams, tuple[int, ...]]]:
    rng = np.random.default_rng(0)
    for group in range(n // SIBLINGS):
        prompt = rng.integers(0, vocab, int(rng.integers(8, 24)), np.int32)
        for sibling in range(SIBLINGS):
            yield prompt, SamplingParams(1.0, max_tok), (1, 0, group, sibling, 0)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Sample equal requests by a sampler of this process and by one of another, in turn."""
    import jax

    from rolljax import cli
    from rolljax.concurrency.lockstep import SINGLE_PROCESS
    from rolljax.run import preflight
    from rolljax.run.remote_samplers import RemoteRun, open_samplers
    from rolljax.run.runtime import share_sampler
    from rolljax.sampler.client import Sampler

    def checked(*settings: str) -> Any:
        return preflight.check(cli.load_recipe([args.gin], [*SMALL_RUN, *args.set, *settings]).value)

    here, away = checked(), checked("Recipe.placement = @Remote()")
    params = jax.jit(lambda: here.model.full_params(here.model.init(0), None))()
    start = time.perf_counter()
    worker, source, sink = share_sampler(here, lambda: params, SINGLE_PROCESS)
    sink.prepare(source.push(0))
    sink.swap(0)
    longest, multi_turn = here.compiled_requests
    local = Sampler(worker.engine, None, 0, worker=worker, sink=sink, longest_prompt=longest, multi_turn=multi_turn)
    work = list(requests(args.requests, here.model.cfg.vocab_size, args.max_tok))

    async def sampled(sampler: SamplerClient) -> tuple[float, list[Completion]]:
        begun = time.perf_counter()
        release = sampler.hold()
        waiting = [asyncio.ensure_future(sampler.generate(*request)) for request in work]
        await asyncio.sleep(0)
        release()
        done = await asyncio.gather(*waiting)
        return sum(len(c.tokens) for c in done) / (time.perf_counter() - begun), done

    async def first(sampler: SamplerClient) -> None:
        await sampler.generate(*work[0])

    asyncio.run(first(local))
    local_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = RemoteRun(Path(folder), 1, lambda text: print(text, file=sys.stderr))
        group, _ = open_samplers(away, lambda: params, run, Watchdog(lambda text: None), lambda: False, 0)
        asyncio.run(first(group))
        remote_s = time.perf_counter() - start
        asyncio.run(sampled(local))
        asyncio.run(sampled(group))
        rates: dict[str, list[float]] = {"local": [], "remote": []}
        for _, (name, sampler) in itertools.product(range(args.rounds), (("local", local), ("remote", group))):
            rate, done = asyncio.run(sampled(sampler))
            rates[name].append(rate)
            tokens = [c.tokens.tolist() for c in done]
            if name == "local":
                expected = tokens
            assert tokens == expected, "other tokens than the local sampler's"
        group.close()
    local.close()
    ratios = [b / a for a, b in zip(rates["local"], rates["remote"], strict=True)]
    return {
        "local tokens/s": statistics.median(rates["local"]),
        "remote tokens/s": statistics.median(rates["remote"]),
        "remote / local, median of the rounds": statistics.median(ratios),
        "remote / local, by round": ratios,
        "local start s": local_s,
        "remote start s": remote_s,
    }


def stall(args: argparse.Namespace) -> dict[str, Any]:
    """Push weights to a sampler that decodes, and measure what that takes from decoding."""
    import jax

    from rolljax import cli
    from rolljax.run import preflight
    from rolljax.run.remote_samplers import RemoteRun, open_samplers

    settings = [*SMALL_RUN, *STALL_RUN, "Recipe.placement = @Remote()", *args.set]
    found = preflight.check(cli.load_recipe([args.gin], settings).value)
    params = jax.jit(lambda: found.model.full_params(found.model.init(0), None))()
    work = list(requests(SLOTS, found.model.cfg.vocab_size, args.max_tok))

    async def decode(group: SamplerGroup, over: threading.Event) -> list[tuple[float, int]]:
        """Sample the requests again and again; return when tokens came, and how many."""
        came: list[tuple[float, int]] = []

        async def again_and_again(request: Any) -> None:
            while not over.is_set():
                await group.generate(
                    *request, on_tokens=lambda part: came.append((time.perf_counter(), len(part.tokens)))
                )

        await asyncio.gather(*map(again_and_again, work))
        return came

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run = RemoteRun(Path(folder), 1, lambda text: print(text, file=sys.stderr))
        group, channel = open_samplers(found, lambda: params, run, Watchdog(lambda text: None), lambda: False, 0)
        push_s: list[float] = []

        def pushes() -> None:
            for _ in range(args.rounds):
                start = time.perf_counter()
                channel.publish(version := group.version + 1)
                while group._router.members["sampler-0"].version < version:
                    time.sleep(0.002)
                push_s.append(time.perf_counter() - start)

        def during(work: Callable[[], None]) -> tuple[float, np.ndarray]:
            """Return the tokens/s, and the seconds between two arrivals of tokens."""
            over = threading.Event()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                decoding = pool.submit(lambda: asyncio.run(decode(group, over)))
                time.sleep(1.0)
                start = time.perf_counter()
                work()
                end = time.perf_counter()
                over.set()
                came = [(at, number) for at, number in decoding.result() if start <= at <= end]
            return sum(number for _, number in came) / (end - start), np.diff([at for at, _ in came])

        during(pushes)
        push_s.clear()
        with_pushes, gaps = during(pushes)
        without, usual = during(lambda: time.sleep(sum(push_s)))
        group.close()
        channel.close()
    longest = float(np.max(usual))
    stopped_s = float(np.sum(np.maximum(gaps - longest, 0)))
    return {
        "weights MiB": sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20,
        "push to swap s, median": statistics.median(push_s),
        "longest gap between tokens without pushes s": longest,
        "decoding stopped: by how much gaps with pushes exceed it, share of the time": stopped_s / sum(push_s),
        "tokens/s without pushes": without,
        "tokens/s with pushes, share": with_pushes / without,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speed", "stall", "controller", "answer"])
    parser.add_argument("--samplers", type=int, default=64)
    parser.add_argument("--completions", type=int, default=20_000)
    parser.add_argument("--dispatch_tok", type=int, nargs="+", default=[64, 32, 8])
    parser.add_argument("--gin", default="quickstart", help="of `speed` and `stall`")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--max_tok", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where `stall` makes the store; default: a temporary folder")
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.what == "answer":
        answer(args.port, args.samplers, args.dispatch_tok[0])
    elif args.what in ("speed", "stall"):
        print(json.dumps({"speed": speed, "stall": stall}[args.what](args), indent=1))
    else:
        for dispatch_tok in args.dispatch_tok:
            print(json.dumps(controller(args, dispatch_tok), indent=1), flush=True)
        print(json.dumps(controller(args, args.dispatch_tok[-1], profile=True), indent=1))


if __name__ == "__main__":
    main()
