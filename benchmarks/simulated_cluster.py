"""Simulate a large cluster with and without losses: `python benchmarks/simulated_cluster.py [--samplers 2000]`.

Answers of up to 16k tokens, of the lengths of `timings/qwen3_32b_v5p_256_v5e_512`, five for each of a sampler's four
slots in a step, up to a step and a half ahead (if only one, more groups wait for slow samplers: faulty steps take 1.06x
instead of 1.04x). Each sampler is lost every eight hours and takes 180 s to come back; one of twenty takes twice the
time. Prints seconds of a step, losses, seconds of one core, and the microseconds of a decision of the
router, from all of its calls, which are repeated by themselves.
"""

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

from rolljax import simulate
from rolljax.cluster.router import Router
from rolljax.envs.catalog import make_spec
from rolljax.envs.pool import PoolConfig
from rolljax.recipe import Phase, Recipe
from rolljax.sampler.settings import SamplerConfig
from rolljax.simulation import fleet, report
from rolljax.simulation.timings import ClusterTimings, EngineTimings, Timings, TrainerTimings, from_json
from rolljax.trainer.algorithms.grpo import Grpo

SLOTS = 4
FAULTY = ClusterTimings(mtbf_s=8 * 3600.0, rejoin_s=180.0, slow_frac=0.05, slow_factor=2.0)


CALLS = ("join", "ready", "push", "swapped", "lost", "place", "take", "done")


class LoggedRouter(Router):
    """A router that keeps its calls, to repeat them by themselves."""

    calls: list[tuple[str, tuple[Any, ...]]] = []


def logged(name: str) -> Callable[..., Any]:
    """Return a method of the router that keeps its calls."""
    method = getattr(Router, name)

    def call(self: LoggedRouter, *args: Any) -> Any:
        self.calls.append((name, args))
        return method(self, *args)

    return call


for each in CALLS:
    setattr(LoggedRouter, each, logged(each))


def decision_us(settings: ClusterTimings) -> tuple[int, float]:
    """Repeat the logged calls; return the number of placed requests, and the microseconds of all calls for each."""
    router = Router(siblings_together=settings.siblings_together)
    gc.collect()
    gc.freeze()  # the simulation's objects are not searched for garbage
    start_s = time.process_time()
    for name, args in LoggedRouter.calls:
        getattr(router, name)(*args)
    spent_s = time.process_time() - start_s
    placed = sum(member.counts.placed for member in router.members.values())
    return placed, 1e6 * spent_s / placed


def recipe(samplers: int, steps: int, async_ratio: float) -> Recipe:
    """Return a recipe whose step has five answers for each slot."""
    return Recipe(
        make_spec("frozen_lake"),
        (Phase("rl", Grpo(), steps, 5 * samplers * SLOTS // 16, 16, async_ratio=async_ratio),),
        max_answer_tok=16384,
        sampler=SamplerConfig(slots=samplers * SLOTS, max_context=17408, steps_per_dispatch=8),
        pool=PoolConfig(where="process", reset_s=1e6, step_s=1e6, episode_s=1e7),
    )


def timings(samplers: int, cluster: ClusterTimings) -> Timings:
    """Return the lengths of the example, and seconds of a replica of 16 chips of v5e."""
    read = simulate.read_timings("timings/qwen3_32b_v5p_256_v5e_512")
    lengths = from_json({name: read[name] for name in ("answer_tok", "prompt_tok", "env")}, Timings)
    engine = EngineTimings(replicas=samplers, step_s=0.012, sequence_s=1e-4, context_s=2e-8, prefill_s=1e-4)
    trainer = TrainerTimings(step_s=150.0, publish_s=5.0)
    return dataclasses.replace(lengths, engine=engine, cluster=cluster, trainer=trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samplers", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--async_ratio", type=float, default=1.5)
    args = parser.parse_args()
    fleet.Router = LoggedRouter  # type: ignore[misc]
    found = []
    for name, cluster in (("fault-free", ClusterTimings()), ("faulty", FAULTY)):
        LoggedRouter.calls.clear()
        start_s = time.process_time()
        played = simulate.simulate(recipe(args.samplers, args.steps, args.async_ratio), timings(args.samplers, cluster))
        spent_s = time.process_time() - start_s
        found.append(report.summarize(*played).numbers["step_s"])
        decisions, us = decision_us(cluster)
        print(
            f"{name}: {found[-1]:.1f} s a step ({found[-1] / found[0]:.3f}x), "
            f"{played[0].sampler.fleet.losses} lost, {played[0].sampler.rerouted} answers continued elsewhere; "
            f"{spent_s:.0f} s of CPU, {decisions} decisions of {us:.1f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
