"""Opens the parts of a run: sampler, environments, agent programs, and the event loop that they share."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from rolljax.cluster.placement import Remote
from rolljax.concurrency.event_loop import EventLoop
from rolljax.concurrency.lockstep import SINGLE_PROCESS, Follower, Leader, SingleProcess
from rolljax.concurrency.waits import Sleeper, Watchdog
from rolljax.envs.pool import open_pool
from rolljax.errors import HangError, needed
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import Params
from rolljax.model.vocabulary import Vocabulary
from rolljax.rewards.base import RewardContext, TrainedModels
from rolljax.rollout.domain_rewards import open_rewards
from rolljax.run import weight_channel
from rolljax.run.player import EpisodePlayer
from rolljax.run.preflight import Preflight, ResolvedRecipe
from rolljax.run.remote_samplers import RemoteRun, open_samplers, store_source
from rolljax.run.weight_channel import STORE_CALLS, Publisher, StorePublisher, WeightSource, open_channel
from rolljax.sampler.client import Sampler, SamplerClient
from rolljax.sampler.engine import LOCKSTEP_CALLS, Engine, EngineWorker
from rolljax.sampler.weights import WeightSink


def share_sampler(
    resolved: ResolvedRecipe, weights: Callable[[], Params], team: SingleProcess | Leader | Follower
) -> tuple[EngineWorker, WeightSource, WeightSink]:
    """Open this process's part of the sampler, shared with the other processes of the mesh.

    Args:
      weights: see `open_channel`.
    """
    assert resolved.sampler_mesh is not None
    worker = EngineWorker(Engine(resolved.model.plain, resolved.recipe.sampler, resolved.sampler_mesh, SLOT_AXES))
    source, sink = open_channel(resolved, weights, worker)
    sink = team.share("weights", sink, weight_channel.LOCKSTEP_CALLS)
    return team.share("engine", worker, LOCKSTEP_CALLS), source, sink


def follow_sampler(resolved: ResolvedRecipe, weights: Callable[[], Params], folder: Path, team: Follower) -> None:
    """Do this process's part of sampling, or of writing weights for samplers of other processes, led by the first one.

    Args:
      weights: see `open_channel`. folder: the run folder.
    """
    if isinstance(resolved.recipe.placement, Remote):
        source = store_source(resolved, weights, folder)
        source.on_failure = team.fail
        team.share("weights", source, STORE_CALLS)
    else:
        share_sampler(resolved, weights, team)


def open_sampler(
    resolved: ResolvedRecipe,
    weights: Callable[[], Params],
    version: int,
    vocabulary: Vocabulary,
    longest_prompt: int | None,
    multi_turn: bool = True,
    team: SingleProcess | Leader = SINGLE_PROCESS,
) -> tuple[Sampler, WeightSource]:
    """Open the sampler of this process with the weights of now, and the source of its next ones.

    Args:
      weights, team: see `share_sampler`. version: policy version of the weights.
      longest_prompt, multi_turn: see `sampler.client.Sampler`.
    """
    worker, source, sink = share_sampler(resolved, weights, team)
    sink.prepare(source.push(version))
    sink.swap(version)
    sampler = Sampler(
        worker.engine,
        None,
        version,
        vocabulary=vocabulary,
        longest_prompt=longest_prompt,
        multi_turn=multi_turn,
        worker=worker,
        sink=sink,
    )
    return sampler, source


class Runtime:
    """Opens the parts of a run that the loop works with, and closes them. Use as a context manager.

    sampler, pool: of requests, of environments. player: plays episodes with both. channel: gives the sampler new
    weights. clock: the event loop that they share.

    Args:
      weights: the policy's weights now, as `Model.bind` takes them; the sampler starts with them, as version `version`.
      should_stop: polled while waiting; True ends the wait with `Stopped`. team: the processes of the run.
      watchdog: supervises the parts while they are open, and reports a hang.
      verdicts: a folder in which rewards may store verdicts; empty: none. trained: reward models of runs.
      remote: what samplers of other processes need to know of the run (`Remote`).
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
        remote: RemoteRun | None = None,
    ) -> None:
        recipe, chat = preflight.recipe, preflight.chat
        self.pool = open_pool(recipe.pool, recipe.env)  # first: its settings name a Ray cluster
        around = RewardContext(recipe.env, recipe.seed, verdicts, chat, trained)
        self._scoring = open_rewards(recipe.reward, recipe.domains, around, recipe.wait_s)
        self._watchdog = watchdog or Watchdog()
        self.sampler: SamplerClient
        self.channel: Publisher | StorePublisher
        self._sleepers: list[Sleeper] = []
        if isinstance(recipe.placement, Remote):
            assert remote is not None
            group, publisher = open_samplers(preflight, weights, remote, self._watchdog, should_stop, version, team)
            self.sampler, self.channel, should_stop = group, publisher, publisher.should_stop(should_stop)
        else:
            longest, multi_turn = preflight.compiled_requests
            sampler, source = open_sampler(preflight, weights, version, chat.vocabulary, longest, multi_turn, team)
            sleeping = {phase.name for phase in recipe.phases if preflight.sampler_sleeps(phase)}
            self.sampler, self.channel = sampler, Publisher(source, sampler, self._watchdog, sleeping)
            self._sleepers.append(sampler.inbox)
        self.clock = EventLoop(should_stop, self._watchdog)
        self._agents = None
        if recipe.agent:
            with needed("uvicorn", "Recipe.agent"):
                from rolljax.rollout.agents.host import AgentHost

            self._agents = AgentHost(recipe.agent.for_env(recipe.env), self.sampler, chat, recipe.sampler.max_context)
        self.player = EpisodePlayer(preflight, self.sampler, self.pool, self.clock, self._scoring, self._agents)

    def __enter__(self) -> Runtime:
        self._watchdog.state = self.player.state
        self._watchdog.watch(*self._sleepers, *self.pool.inboxes)
        self._watchdog.start()
        # exclude everything loaded and compiled so far from full garbage collections (0.3 s each, measured)
        gc.collect()
        gc.freeze()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, HangError):
            self._watchdog.hung(error)
        self._watchdog.close()
        gc.unfreeze()
        if self._agents:
            ending = self.clock.within(self._agents.close(), "the agent programs to end", 60.0, interruptible=False)
            self.clock.run(ending)
        if self._scoring:
            ending = self.clock.within(self._scoring.close(), "the rewards to close", 60.0, interruptible=False)
            self.clock.run(ending)
        self.clock.close()
        self.sampler.close()
        self.channel.close()
        self.pool.close()
