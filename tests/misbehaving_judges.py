"""Judges of every form in front of the server of `tests.misbehaving`, and how long they keep the event loop from other work."""

import asyncio
import contextlib
import dataclasses
import time

from rolljax.chat_models.client import EndpointConfig
from rolljax.envs.questions import Questions
from rolljax.judging.calls import CallLimits
from rolljax.recipes.think_j.critique import Critique
from rolljax.rewards.base import RewardContext
from rolljax.rewards.judge import Comparison, Judge
from rolljax.rewards.scoring import Scoring
from tests.misbehaving import BEHAVIOURS
from tests.synthetic_rewards import episode

SPEC = Questions(records=[{"question": "1+1?", "solution": "it is 2", "answer": "2"}])
AROUND = RewardContext(SPEC, seed=7)
LIMITS = CallLimits(deadline_s=300.0, retries=0, down_after=10**6)
DEADLINE_S = 0.5
"""Of behaviours that never end; the others have as long as a slow machine takes."""
JUDGES = {
    "score": (lambda model: Judge(model, "{answer}", limits=LIMITS), 0.3),
    "labels": (
        lambda model: Judge(model, "{answer}", labels={"good": 1.0, "fair": 0.25, "bad": 0.0}, limits=LIMITS),
        0.25,
    ),
    "veto": (lambda model: Judge(model, "{answer}", veto="made_up", limits=LIMITS), 0.3),
    "comparison": (lambda model: Comparison(model, "{a} {b}", orders="random", limits=LIMITS), 0.5),
    "critique": (lambda model: Critique(model, "scores", orders="random", limits=LIMITS), 0.0),
}
"""Forms of judges, and the reward of the right verdict."""
FATAL = ("status_401", "status_403", "status_404")
"""Behaviours after which an endpoint asks no more."""


@dataclasses.dataclass
class Stalls:
    """The longest time that the event loop did nothing else: by the clock, and CPU time of its thread, which no other load
    on the machine changes."""

    clock_s: float = 0.0
    cpu_s: float = 0.0

    async def watch(self):
        """Look at the clock again and again, until cancelled."""
        while True:
            clock, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.clock_s = max(self.clock_s, time.perf_counter() - clock)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)


def names_of(form, *, slow=False, heavy=False):
    names = [n for n, b in BEHAVIOURS.items() if (b.slow, b.heavy) == (slow, heavy) and n not in FATAL]
    return [n for n in names if (form, n) != ("critique", "verdict_twice")]  # whose verdict is a sentence at the end


def rewards(form, address, names, timeout_s=300.0, stalls=None):
    """Return the reward under each behaviour, None without one, and the counts of faults."""
    judge, _ = JUDGES[form]

    async def run():
        scoring = Scoring(judge(EndpointConfig(f"{address}/v1", "m", timeout_s, 0, 0.0, concurrency=16)).open(AROUND))
        watch = asyncio.ensure_future((stalls or Stalls()).watch())
        texts = [dataclasses.replace(episode(0.0, texts=[f"do {n}"], env=SPEC.name), task=SPEC.task(0)) for n in names]
        try:
            done = await asyncio.gather(*map(scoring.score, texts))
            faults = {t.fault.kind for t in done if t.fault}
            assert faults <= {"infra"}, [t.fault for t in done if t.fault and t.fault.kind != "infra"]
            return {
                n: t.reward if t.status == "ok" else None for n, t in zip(names, done, strict=True)
            }, scoring._counts()
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            await scoring.close()

    return asyncio.run(run())


def expected(form, names):
    return {n: JUDGES[form][1] if BEHAVIOURS[n].ends == "answer" else None for n in names}
