"""CPU microseconds of the host for an episode, a turn, a request and a token, with an engine that costs nothing.

    python benchmarks/host_path.py                # three tables' rows as JSON lines, about half a minute
    python benchmarks/host_path.py --profile      # and the functions that take most time, of every thread

The engine returns tokens that were made before, so all that is measured is Python: the scheduler, the rollouts, the
environments, the tokenizer. Time is CPU time of each thread, so other processes of the machine matter little.

`requests`: one-turn requests through `Sampler`. `tokens`: all slots busy with long answers. `episodes`: groups through
`Rollouts` and `EnvPool`, with environments inside the process.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import cProfile
import dataclasses
import json
import os
import pstats
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np

from rolljax.envs.base import EnvSpec, PureEnv, Runs, StepResult
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.model.vocabulary import Vocabulary
from rolljax.rollout.episodes import Rollouts, SamplerPolicy
from rolljax.sampler.arrays import Inserts, PrefillChunks, ResultTokens
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine, EngineWorker
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.types import Message, SamplingParams, Task

# ---- an engine that costs nothing -----------------------------------------------------------------------------------


class FreeWorker(EngineWorker):
    """Gives tokens that were made before, in place of an engine. A request ends with its `max_tokens`th token; where
    `end_id` is not negative, this is that id."""

    def __init__(self, engine: Engine, end_id: int) -> None:
        super().__init__(engine)
        self._params, self._end = {}, end_id
        self._left = np.zeros(engine.cfg.slots, np.int32)  # tokens of each slot until its answer ends

    def init(self) -> None:
        self._left[:] = 0

    def prefill(self, chunks: PrefillChunks, *, read: int) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def insert(self, ticket: int, inserts: Inserts, *, truncate: bool = False, top: bool = False) -> ResultTokens:
        new = np.asarray(inserts.row) >= 0
        self._left[new] = np.asarray(inserts.max_tokens)[new]
        return self._tokens(np.where(new, np.arange(len(new)), -1), 1)

    def release(self, tickets: Any) -> None:
        pass

    def generate(
        self,
        table_SW: np.ndarray,
        slot_S: np.ndarray,
        shared_NW: np.ndarray | None = None,
        *,
        truncate: bool = False,
        top: bool = False,
    ) -> ResultTokens:
        return self._tokens(slot_S, self.engine.cfg.steps_per_dispatch)

    def wait(self) -> None:
        pass

    def wait_prefills(self) -> None:
        pass

    def _tokens(self, slot_S: np.ndarray, steps: int) -> ResultTokens:
        """Take up to `steps` tokens for some slots; -1: no slot."""
        left = np.where(slot_S >= 0, self._left[slot_S], 0)
        valid = np.minimum(left, steps)
        left -= valid
        self._left[slot_S[slot_S >= 0]] = left[slot_S >= 0]
        ids = np.full((len(slot_S), steps), ord("a"), np.int32)
        if self._end >= 0:
            ended = (left == 0) & (valid > 0)
            ids[ended, valid[ended] - 1] = self._end
        logp, none = np.zeros(ids.shape, np.float32), np.zeros((*ids.shape, 0), np.float32)
        experts = np.zeros((*ids.shape, 0, 0), np.int8)
        return ResultTokens(ids, logp, logp, none.astype(np.int32), none, none, experts, valid, left == 0)  # type: ignore[arg-type]


def free_sampler(slots: int, max_context: int, end_id: int = -1, vocabulary: Vocabulary | None = None) -> Sampler:
    """Return a sampler whose engine costs nothing; the model is as small as can be."""
    model = Model(Qwen3Config(num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16, ffn_size=16))
    cfg = SamplerConfig(slots=slots, max_context=max_context, prefill_chunk=4096, steps_per_dispatch=16)
    engine = Engine(model, cfg, MeshSpec().build(jax.devices()[:1]), BATCH_AXES)
    worker = FreeWorker(engine, end_id)
    return Sampler(engine, None, 0, longest_prompt=0, worker=worker, vocabulary=vocabulary)


# ---- the time of each thread ----------------------------------------------------------------------------------------


def cpu_s() -> dict[str, float]:
    """Return the CPU seconds of all threads so far, by name; threads of one name together."""
    found: collections.Counter[str] = collections.Counter()
    for thread in threading.enumerate():
        if thread.ident is not None:
            found[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return dict(found)


def measured(work: Callable[[], Awaitable[object]], per: dict[str, int]) -> dict[str, Any]:
    """Run `work` twice; return of the second time its seconds, and CPU microseconds of each thread per unit.

    per: units of work, by name.
    """

    async def both() -> tuple[float, dict[str, float]]:
        await work()
        start, before = time.perf_counter(), cpu_s()
        await work()
        return time.perf_counter() - start, {k: v - before.get(k, 0.0) for k, v in cpu_s().items()}

    seconds, spent = asyncio.run(both())
    us = {name: {k: round(1e6 * v / n, 2) for k, v in spent.items() if v > 1e-4} for name, n in per.items()}
    total = {f"us_per_{name}": round(1e6 * sum(spent.values()) / n, 2) for name, n in per.items()}
    return {"wall_s": round(seconds, 3), **total, "by_thread": us}


# ---- what is measured -----------------------------------------------------------------------------------------------


def requests(num: int, slots: int) -> dict[str, Any]:
    """Measure `num` requests of 32 + 8 tokens, 8 of each prompt."""
    sampler, how = free_sampler(slots, 64), SamplingParams(1.0, 8)
    prompts = np.random.default_rng(0).integers(0, 255, (num // 8, 32), np.int32)

    async def work() -> None:
        release = sampler.hold()
        asked = [sampler.generate(p, how, (0, 0, i, s, 0)) for i, p in enumerate(prompts) for s in range(8)]
        asyncio.get_running_loop().call_soon(release)
        await asyncio.gather(*asked)

    try:
        return {"what": "requests", "slots": slots} | measured(work, {"request": num, "token": 8 * num})
    finally:
        sampler.close()


def tokens(slots: int, answer: int) -> dict[str, Any]:
    """Measure one answer of `answer` tokens in every slot."""
    sampler, how = free_sampler(slots, 64 + answer), SamplingParams(1.0, answer)
    prompts = np.random.default_rng(0).integers(0, 255, (slots, 16), np.int32)

    async def work() -> None:
        await asyncio.gather(*(sampler.generate(p, how, (0, 0, i, 0, 0)) for i, p in enumerate(prompts)))

    try:
        row = {"what": "tokens", "slots": slots, "answer": answer} | measured(work, {"token": slots * answer})
        return row | {"tok_s": round(slots * answer / row["wall_s"])}
    finally:
        sampler.close()


@dataclasses.dataclass(frozen=True)
class Echo(EnvSpec):
    """Answers anything with the same sentence, until `max_turns` are over."""

    runs: ClassVar[Runs] = "inline"
    name = "echo"

    max_turns: int = 1

    def task(self, index: int) -> Task:
        return Task(self.name, index, f"Say something about number {index}.")

    def make(self) -> EchoEnv:
        return EchoEnv(self)


class EchoEnv(PureEnv):
    def __init__(self, spec: Echo) -> None:
        self._spec, self._turn = spec, 0

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._turn = 0
        return (Message("user", task.content),)

    def step(self, action: str) -> StepResult:
        self._turn += 1
        over = self._turn >= self._spec.max_turns
        return StepResult(() if over else (Message("user", "Go on."),), 1.0, terminated=over, success=over)

    def reference_answer(self) -> str:
        return "a"


def episodes(groups: int, turns: int, slots: int) -> dict[str, Any]:
    """Measure `groups` groups of 8 episodes of `turns` answers of 6 tokens."""
    chat, spec = Chat(byte_tokenizer()), Echo(max_turns=turns)
    end = int(chat.answer_ids("")[-1])
    sampler = free_sampler(slots, 96 + 32 * turns, end)
    pool = EnvPool(PoolConfig(), spec)
    how = SamplingParams(1.0, 6, stop_ids=(end,))
    rollouts = Rollouts(pool, chat, SamplerPolicy(sampler, how, 0), turns, 96 + 32 * turns, 6)

    async def work() -> None:
        played = [rollouts.group(spec.task(i), stream=0, prompt_index=i, group_size=8) for i in range(groups)]
        for group in await asyncio.gather(*played):
            assert all(t.status == "ok" and len(t.turns) == turns for t in group.trajectories), group

    try:
        num = groups * 8
        return {"what": "episodes", "turns": turns, "slots": slots} | measured(
            work, {"episode": num, "turn": num * turns}
        )
    finally:
        pool.close()
        sampler.close()


def profile(call: Callable[[], object]) -> None:
    """Print the functions of every thread in which `call` spends most CPU time."""
    profiles: dict[str, cProfile.Profile] = {}

    def begin(*_: Any) -> None:  # in each new thread
        name = threading.current_thread().name
        profiles[name] = cProfile.Profile(time.thread_time)
        profiles[name].enable()

    threading.setprofile(begin)
    begin()
    call()
    threading.setprofile(None)
    profiles[threading.current_thread().name].disable()
    for name, found in profiles.items():
        print(f"---- {name}")
        pstats.Stats(found).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("requests", "tokens", "episodes", "turns"), help="default: all")
    parser.add_argument("--profile", action="store_true", help="print the functions that take most time")
    args = parser.parse_args()
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "requests": lambda: requests(4096, 512),
        "tokens": lambda: tokens(4096, 256),
        "episodes": lambda: episodes(256, 1, 512),
        "turns": lambda: episodes(64, 8, 512),
    }
    for name in args.only or calls:
        if args.profile:
            profile(calls[name])
        else:
            print(json.dumps(calls[name]()), flush=True)


if __name__ == "__main__":
    main()
