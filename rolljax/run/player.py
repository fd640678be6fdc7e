"""Plays episodes of a run: environments, policies, rewards and agent programs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolljax.concurrency.event_loop import EventLoop
from rolljax.envs.pool import Pool
from rolljax.recipe import Phase
from rolljax.rewards.scoring import Scoring
from rolljax.rollout.episodes import EpisodeCounts, Policy, Rollouts, SamplerPolicy, ScriptedPolicy
from rolljax.rollout.guidance import Guide
from rolljax.rollout.start_states import StartCurriculum
from rolljax.run.preflight import Preflight
from rolljax.run.progress import RunProgress
from rolljax.sampler.client import SamplerClient
from rolljax.types import EVAL_STREAM, Group, SamplingParams, Trajectory

if TYPE_CHECKING:
    from rolljax.rollout.agents.host import AgentHost


class EpisodePlayer:
    """Plays the episodes of a run with its sampler and its pool of environments.

    Args:
      scoring: the recipe's own rewards; None: the environment's. agents: the server of agent programs; None: none.
    """

    def __init__(
        self,
        preflight: Preflight,
        sampler: SamplerClient,
        pool: Pool,
        clock: EventLoop,
        scoring: Scoring | None,
        agents: AgentHost | None,
    ) -> None:
        self.pool, self.agents, self._preflight, self._recipe = pool, agents, preflight, preflight.recipe
        self._sampler, self._clock, self._scoring = sampler, clock, scoring
        self._counts = EpisodeCounts()
        self._may_train = asyncio.Event()
        self._may_train.set()

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
        """Return the model as a policy. may_ask: see `SamplerPolicy`. in_training: use the domains' own sampling
        settings."""
        limit, stop = self._recipe.max_answer_tok, self._preflight.chat.stop_ids
        shown = self._recipe.sampler.record_alternatives
        params = SamplingParams(temperature, limit, stop, top_k=top_k, top_p=top_p, min_p=min_p, top_logprobs=shown)
        own = {name: d.sampling(params, in_training=in_training) for name, d in self._recipe.domains.items()}
        return SamplerPolicy(self._sampler, params, self._recipe.seed, may_ask, own)

    def actor(self, phase: Phase) -> Policy:
        """Return the policy of a phase: the model, or the environments' own answers."""
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
        return ScriptedPolicy(self._preflight.chat, self._recipe.max_answer_tok, pairs=source == "pairs")

    def rollouts(self, policy: Policy, *, hash_observations: bool = False) -> Rollouts:
        r = self._recipe
        limits = (r.env.max_turns, r.sampler.max_context, r.max_answer_tok)
        # reference answers are imitated as they are
        scoring = self._scoring if isinstance(policy, SamplerPolicy) else None
        if self.agents and isinstance(policy, SamplerPolicy):
            from rolljax.rollout.agents.host import AgentRollouts

            return AgentRollouts(
                self.pool,
                self._preflight.chat,
                policy,
                *limits,
                r.rollout,
                hash_observations,
                self._counts,
                scoring,
                host=self.agents,
            )
        return Rollouts(
            self.pool, self._preflight.chat, policy, *limits, r.rollout, hash_observations, self._counts, scoring
        )

    def guide(self, phase: Phase) -> Guide | None:
        """Return the latent prefixes of a phase's trajectories; None: it has none."""
        model = self._preflight.model
        if not phase.guidance or model.prefixes is None:
            return None
        sizes = (phase.group_size, phase.prompts_per_step, phase.steps)
        return Guide(phase.guidance, model.prefixes, model.cfg.vocab_size, *sizes, self._recipe.seed)

    def reward_row(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of a step's rewards, if the recipe has its own rewards."""
        return self._scoring.row(groups) if self._scoring else {}

    def start_curriculum(self, phase: Phase, progress: RunProgress) -> StartCurriculum | None:
        """Return the start states of a phase's episodes, with the progress so far."""
        if phase.start_states is None:
            return None
        start_states = StartCurriculum(
            phase.start_states, self.pool, self._preflight.chat, self._recipe.seed, self._recipe.env.max_turns
        )
        if progress.start_states:
            start_states.restore(progress.start_states)
        return start_states

    async def evaluate(self, step: int, *, interruptible: bool = True) -> list[Trajectory]:
        """Play one trajectory for each held-out task, with the currently published weights.

        Args:
          step: of the run; each has its own randomness. interruptible: a stop of the run ends the wait (`Stopped`).
        """
        rollouts, tasks = self.rollouts(self.policy(self._recipe.evaluation.temperature)), self._preflight.heldout
        groups = asyncio.gather(
            *(
                rollouts.group(task, stream=EVAL_STREAM, prompt_index=step * len(tasks) + i, group_size=1)
                for i, task in enumerate(tasks)
            )
        )
        wait_s = self._recipe.wait_s
        if self._recipe.evaluation.pauses_rollouts:
            self._may_train.clear()
        try:
            done = await self._clock.within(groups, "the held-out evaluation", wait_s, interruptible=interruptible)
        finally:
            self._may_train.set()
        return [t for group in done for t in group.trajectories]

    def state(self) -> str:
        """Describe the current work: episodes by step, the sampler, the environments."""
        load, did, stats = self._sampler.load(), self._sampler.stats, self.pool.stats
        idle = "asleep" if self._sampler.asleep else "idle"
        sampler = f"{load.running} running, {load.waiting} waiting" if load.running or load.waiting else idle
        calls = ", ".join(f"{count} {verb}" for verb, count in sorted(stats.under_way.items())) or "none"
        parts = (
            str(self._counts),
            f"sampler {sampler}, {did.dispatches + did.prefills} dispatches done",
            *self._sampler.faults(),
            f"calls of environments under way: {calls}, {stats.steps} steps done, {stats.open} episodes open",
        )
        return "; ".join(filter(None, parts))
