"""The open parts of a run: sampler, environments, agent programs, and the event loop that they share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from rolljax.cluster.lockstep import SINGLE_PROCESS, Follower, Leader, SingleProcess
from rolljax.envs.pool import open_pool
from rolljax.errors import HangError, needed
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Params
from rolljax.recipe import Phase
from rolljax.rewards.base import RewardContext, TrainedModels
from rolljax.rollout.barrier import EpisodeCounts
from rolljax.rollout.domain_rewards import open_rewards
from rolljax.rollout.episodes import Rollouts
from rolljax.rollout.policies import GoldPolicy, Policy, SamplerPolicy
from rolljax.rollout.starts import StartCurriculum
from rolljax.run import weight_channel
from rolljax.run.preflight import Preflight, ResolvedRecipe
from rolljax.run.progress import RunProgress
from rolljax.run.step_metrics import timed
from rolljax.run.weight_channel import WeightChannel, open_channel
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.worker import LOCKSTEP_CALLS, EngineWorker
from rolljax.threads.event_loop import EventLoop, Stopped
from rolljax.threads.watchdog import Watchdog
from rolljax.types import EVAL_STREAM, Group, SamplingParams, Trajectory

T = TypeVar("T")
P = ParamSpec("P")


def share_sampler(
    resolved: ResolvedRecipe, source: Callable[[], Params], team: SingleProcess | Leader | Follower
) -> tuple[EngineWorker, WeightChannel]:
    """This process's part of the sampler, shared with the other processes of the mesh. source: see `open_channel`."""
    worker = EngineWorker(Engine(resolved.model.plain, resolved.recipe.sampler, resolved.sampler_mesh, SLOT_AXES))
    channel = team.share("weights", open_channel(resolved, source, worker), weight_channel.LOCKSTEP_CALLS)
    return team.share("engine", worker, LOCKSTEP_CALLS), channel


class Runtime:
    """Sampler, environments and the event loop they share. Use as a context manager.

    Args:
      weights: the policy's weights now, as `Model.bind` takes them; the sampler starts with them, as version `version`.
      should_stop: asked while waiting; True ends the wait with `Stopped`. team: the processes of the run.
      watchdog: looks after them while they are open, and reports what hung.
      verdicts: a folder in which rewards may store verdicts; empty: none. trained: reward models of runs.
    """

    def __init__(
        self,
        preflight: Preflight,
        weights: Callable[[], Params],
        version: int,
        should_stop: Callable[[], bool] = lambda: False,
        team: SingleProcess | Leader = SINGLE_PROCESS,
        watchdog: Watchdog | None = None,
        verdicts: str = "",
        trained: TrainedModels | None = None,
    ) -> None:
        self.preflight, self.recipe = preflight, preflight.recipe
        self.pool = open_pool(preflight.recipe.pool, preflight.recipe.env)  # first: its settings name a Ray cluster
        around = RewardContext(self.recipe.env, self.recipe.seed, verdicts, preflight.chat, trained)
        self.scoring = open_rewards(self.recipe.reward, self.recipe.domains, around, self.recipe.wait_s)
        self.watchdog, self._tally, self._should_stop = watchdog or Watchdog(), EpisodeCounts(), should_stop
        worker, self._channel = share_sampler(preflight, weights, team)
        self._channel.push(version)
        self.sampler = Sampler(
            worker.engine,
            self._channel.pull(version),
            version,
            worker=worker,
            longest_prompt=None if preflight.recomputes else preflight.longest_prompt_tok,
            vocabulary=preflight.chat.vocabulary,
            multi_turn=preflight.recipe.max_turns > 1 or preflight.recomputes,
        )
        self._may_train = asyncio.Event()
        self._may_train.set()
        self.event_loop = EventLoop(should_stop, self.watchdog)
        self.agents = None
        if preflight.recipe.agent:
            with needed("uvicorn", "Recipe.agent"):
                from rolljax.rollout.agents.host import AgentHost

            self.agents = AgentHost(
                preflight.recipe.agent, self.sampler, preflight.chat, preflight.recipe.sampler.max_context
            )

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
            ending = self.event_loop.within(self.agents.close(), "the agent programs to end", 60.0, interruptible=False)
            self.event_loop.run(ending)
        if self.scoring:
            ending = self.event_loop.within(self.scoring.close(), "the rewards to close", 60.0, interruptible=False)
            self.event_loop.run(ending)
        self.event_loop.close()
        self.sampler.close()
        self.pool.close()

    async def call(self, blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function in the trainer thread, so that rollouts keep running; return its result."""
        return await self.event_loop.call(blocking, *args, **kwargs)

    def check_stop(self) -> None:
        """Raise `Stopped` if the run is to stop."""
        if self._should_stop():
            raise Stopped

    def publish(self, version: int) -> dict[str, float]:
        """Give the sampler the trainer's weights, as policy version `version`; a sampler that is asleep wakes up.

        Returns:
          Metrics: the seconds of its parts.
        """
        seconds: dict[str, float] = {}
        if version != self.sampler.version or self.sampler.asleep:
            with self.watchdog.waiting_for("the sampler to take new weights"):
                with timed(seconds, "time/push_s"):
                    self._channel.push(version)
                with timed(seconds, "time/swap_s"):
                    self.sampler.publish(lambda _: self._channel.pull(version), version)
        return seconds

    def sleep(self, phase: Phase) -> None:
        """Free the memory of the sampler until the next `publish`, where a step of `phase` is trained without it."""
        if self.preflight.sampler_sleeps(phase):
            with self.watchdog.waiting_for("the sampler to free its memory"):
                self.sampler.sleep()

    def policy(
        self,
        temperature: float,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        may_ask: asyncio.Event | None = None,
        in_training: bool = False,
    ) -> Policy:
        """The model as a policy. may_ask: see `SamplerPolicy`. in_training: domains are sampled as their settings
        say."""
        limit, stop = self.recipe.max_answer_tok, self.preflight.chat.stop_ids
        shown = self.recipe.sampler.record_alternatives
        params = SamplingParams(temperature, limit, stop, top_k=top_k, top_p=top_p, min_p=min_p, top_logprobs=shown)
        own = {name: d.sampling(params, in_training=in_training) for name, d in self.recipe.domains.items()}
        return SamplerPolicy(self.sampler, params, self.recipe.seed, may_ask, own)

    def actor(self, phase: Phase) -> Policy:
        """Whoever acts in a phase: the model, or the environments' own answers."""
        source = phase.algorithm.source
        if source == "sampler":
            return self.policy(
                phase.temperature,
                top_k=phase.top_k,
                top_p=phase.top_p,
                min_p=phase.min_p,
                may_ask=self._may_train,
                in_training=True,
            )
        return GoldPolicy(self.preflight.chat, self.recipe.max_answer_tok, pairs=source == "pairs")

    def rollouts(self, policy: Policy, *, hash_observations: bool = False) -> Rollouts:
        r = self.recipe
        limits = (r.env.max_turns, r.sampler.max_context, r.max_answer_tok)
        scoring = self.scoring if isinstance(policy, SamplerPolicy) else None  # gold answers are imitated as they are
        if self.agents and isinstance(policy, SamplerPolicy):
            from rolljax.rollout.agents.host import AgentRollouts

            return AgentRollouts(
                self.pool,
                self.preflight.chat,
                policy,
                *limits,
                r.rollout,
                hash_observations,
                self._tally,
                scoring,
                host=self.agents,
            )
        return Rollouts(
            self.pool, self.preflight.chat, policy, *limits, r.rollout, hash_observations, self._tally, scoring
        )

    def reward_row(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of a step's rewards, where the recipe has one of its own."""
        return self.scoring.row(groups) if self.scoring else {}

    def start_curriculum(self, phase: Phase, progress: RunProgress) -> StartCurriculum | None:
        """Where a phase's episodes start, as far as that was learned already."""
        if phase.starts is None:
            return None
        starts = StartCurriculum(
            phase.starts, self.pool, self.preflight.chat, self.recipe.seed, self.recipe.env.max_turns
        )
        if progress.starts:
            starts.restore(progress.starts)
        return starts

    async def evaluate(self, step: int, *, interruptible: bool = True) -> list[Trajectory]:
        """One trajectory for each held-out task, with the weights that are published now.

        Args:
          step: of the run; each has randomness of its own. interruptible: a stop of the run ends the wait (`Stopped`).
        """
        rollouts, tasks = self.rollouts(self.policy(self.recipe.evaluation.temperature)), self.preflight.heldout
        groups = asyncio.gather(
            *(
                rollouts.group(task, stream=EVAL_STREAM, draw=step * len(tasks) + i, group_size=1)
                for i, task in enumerate(tasks)
            )
        )
        wait_s = self.recipe.wait_s
        if self.recipe.evaluation.pauses_rollouts:
            self._may_train.clear()
        try:
            done = await self.event_loop.within(groups, "the held-out evaluation", wait_s, interruptible=interruptible)
        finally:
            self._may_train.set()
        return [t for group in done for t in group.trajectories]

    def _state(self) -> str:
        """Where the work stands: episodes by step, the sampler, the environments."""
        load, did, stats = self.sampler.load(), self.sampler.stats, self.pool.stats
        idle = "asleep" if self.sampler.asleep else "idle"
        sampler = f"{load.running} running, {load.waiting} waiting" if load.running or load.waiting else idle
        calls = ", ".join(f"{count} {verb}" for verb, count in sorted(stats.under_way.items())) or "none"
        parts = (
            str(self._tally),
            f"sampler {sampler}, {did.dispatches + did.prefills} dispatches done",
            f"calls of environments under way: {calls}, {stats.steps} steps done, {stats.open} episodes open",
        )
        return "; ".join(filter(None, parts))


def mean_reward(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean reward of the trajectories that did not fail; NaN if all failed."""
    rewards = [t.reward for t in trajectories if t.status != "failed"]
    return float(np.mean(rewards)) if rewards else float("nan")
