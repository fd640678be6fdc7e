"""What a run works with while it goes on: sampler, environments, agent programs, and the event loop they share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import cast

import numpy as np

from rolljax.cluster.lockstep import ALONE, Alone, Leader
from rolljax.envs.pool import EnvPool
from rolljax.errors import HangError
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Params
from rolljax.recipe import Phase
from rolljax.rollout.episodes import Rollouts, Tally
from rolljax.rollout.policies import GoldPolicy, Policy, SamplerPolicy
from rolljax.run.preflight import Preflight
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.lockstep import LockstepEngine
from rolljax.sampler.worker import EngineWorker
from rolljax.threads.event_loop import EventLoop
from rolljax.threads.watchdog import Watchdog
from rolljax.trainer.publish import make_publish
from rolljax.types import EVAL_STREAM, SamplingParams, Trajectory


class Runtime:
    """Sampler, environments and the event loop they share. Use as a context manager.

    Args:
      params: what `Model.bind` takes: the weights that the sampler starts with, as policy version `version`.
      should_stop: asked while waiting; True ends the wait with `Stopped`. team: the processes of the run.
      watchdog: looks after them while they are open, and reports what hung.
    """

    def __init__(
        self,
        plan: Preflight,
        params: Params,
        version: int,
        should_stop: Callable[[], bool] = lambda: False,
        team: Alone | Leader = ALONE,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.recipe, self.team = plan, plan.recipe, team
        self.watchdog, self._tally = watchdog or Watchdog(), Tally()
        self._write = make_publish(plan.mesh, plan.model, plan.sampler_mesh)
        self.sampler = Sampler(
            Engine(plan.model.plain, plan.recipe.sampler, plan.sampler_mesh, SLOT_AXES),
            self._weights(params),
            version,
            longest_prompt=plan.longest_prompt_tok,
            vocabulary=plan.chat.vocabulary,
            multi_turn=plan.recipe.max_turns > 1,
            lockstep=self._lockstep,
        )
        self.pool = EnvPool(plan.recipe.pool, plan.recipe.env)
        self.background = EventLoop(should_stop, self.watchdog)
        self.agents = None
        if plan.recipe.agent:
            from rolljax.rollout.agents.host import AgentHost  # which needs the packages of a server

            self.agents = AgentHost(plan.recipe.agent, self.sampler, plan.chat, plan.recipe.sampler.max_context)

    def __enter__(self) -> Runtime:
        self.watchdog.state = self._state
        self.watchdog.watch(self.sampler.inbox, *self.pool.inboxes)
        self.watchdog.start()
        # what is loaded and compiled by now stays: full collections need not look at it again (0.3 s each, measured)
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, HangError):
            self.watchdog.hung(error)
        self.watchdog.close()
        gc.unfreeze()
        if self.agents:
            ending = self.background.start(self.agents.close())
            self.background.wait(ending, "the agent programs to end", 60.0, interruptible=False)
        self.background.close()
        self.sampler.close()
        self.pool.close()

    def publish(self, params: Params, version: int) -> None:
        """Give the sampler new weights, of what `Model.bind` takes."""
        if version != self.sampler.version:
            with self.watchdog.waiting_for("the sampler to take new weights"):
                self.sampler.publish(lambda old: self._weights(params, old), version)

    def _lockstep(self, worker: EngineWorker) -> EngineWorker:
        if not self.plan.mesh.is_multi_process:
            return worker
        return cast(EngineWorker, LockstepEngine(worker, self.team.turn))

    def _weights(self, params: Params, over: Params | None = None) -> Params:
        """The sampler's weights (`trainer.publish`)."""
        with self.team.turn("publish"):
            return self._write(params, over)

    def policy(self, temperature: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Policy:
        """The model as a policy."""
        limit, stop = self.recipe.max_answer_tok, self.plan.chat.stop_ids
        params = SamplingParams(temperature, limit, stop, top_k=top_k, top_p=top_p, min_p=min_p)
        return SamplerPolicy(self.sampler, params, self.recipe.seed)

    def actor(self, phase: Phase) -> Policy:
        """Whoever acts in a phase: the model, or the environments' own answers."""
        source = phase.algorithm.source
        if source == "sampler":
            return self.policy(phase.temperature, top_k=phase.top_k, top_p=phase.top_p, min_p=phase.min_p)
        return GoldPolicy(self.plan.chat, self.recipe.max_answer_tok, pairs=source == "pairs")

    def rollouts(self, policy: Policy, *, listen: bool = False) -> Rollouts:
        r = self.recipe
        limits = (r.env.max_turns, r.sampler.max_context, r.max_answer_tok)
        if self.agents and isinstance(policy, SamplerPolicy):
            from rolljax.rollout.agents.host import AgentRollouts

            return AgentRollouts(
                self.pool, self.plan.chat, policy, *limits, r.rollout, listen, self._tally, host=self.agents
            )
        return Rollouts(self.pool, self.plan.chat, policy, *limits, r.rollout, listen, self._tally)

    def evaluate(self, step: int, *, interruptible: bool = True) -> list[Trajectory]:
        """One trajectory for each held-out task, with the weights that are published now.

        interruptible: let a stop of the run end the wait (`Stopped`).
        """
        rollouts = self.rollouts(self.policy(self.recipe.evaluation.temperature))

        async def all_tasks() -> list[Trajectory]:
            groups = [
                rollouts.group(task, stream=EVAL_STREAM, step=step, index=i, group_size=1)
                for i, task in enumerate(self.plan.heldout)
            ]
            return [t for group in await asyncio.gather(*groups) for t in group.trajectories]

        return self.background.wait(
            self.background.start(all_tasks()),
            "the held-out evaluation",
            self.recipe.wait_s,
            interruptible=interruptible,
        )

    def _state(self) -> str:
        """Where the work stands: episodes by step, the sampler, the environments."""
        load, did, stats = self.sampler.load(), self.sampler.stats, self.pool.stats
        sampler = f"{load.running} running, {load.waiting} waiting" if load.running or load.waiting else "idle"
        calls = ", ".join(f"{count} {verb}" for verb, count in sorted(stats.under_way.items())) or "none"
        parts = (
            str(self._tally),
            f"sampler {sampler}, {did.dispatches + did.prefills} dispatches done",
            f"calls of environments under way: {calls}, {stats.steps} steps done, {stats.open} episodes open",
        )
        return "; ".join(filter(None, parts))


def mean_reward(trajectories: list[Trajectory]) -> float:
    """Mean reward of those that did not fail; NaN when none is left."""
    rewards = [t.reward for t in trajectories if t.status != "failed"]
    return float(np.mean(rewards)) if rewards else float("nan")
