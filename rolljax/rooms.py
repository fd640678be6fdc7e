"""The rooms of a run, opened: mesh, model, tokenizer, environments, sampler. Used by every verb."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rolljax.agents.worker import check_machine
from rolljax.buffer import Background
from rolljax.cluster import ALONE, Alone, Leader
from rolljax.envs.pool import EnvPool, Episode
from rolljax.envs.tasks import held_out
from rolljax.errors import CheckpointError, ConfigError, EnvError, HangError
from rolljax.model import hf
from rolljax.model.attention import implementation
from rolljax.model.axes import SLOT_AXES
from rolljax.model.decoder import DecoderConfig, Model, Params
from rolljax.model.folder import folder_remedy
from rolljax.model.lora import Base
from rolljax.model.tokenizer import Chat, byte_tokenizer, load_tokenizer
from rolljax.policies import GoldPolicy, Policy, SamplerPolicy
from rolljax.recipe import Phase, Recipe
from rolljax.rollout import Rollouts, Tally
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.led import LeadingEngine
from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.critic import Critic
from rolljax.trainer.mesh import num_batch_shards, num_slot_shards, param_shardings
from rolljax.trainer.publish import make_publish
from rolljax.types import EVAL_STREAM, Message, SamplingParams, Task, Trajectory
from rolljax.watchdog import Watchdog

PROBED_TASKS = 64
"""Training tasks whose prompts are measured before a run starts."""
PROBED_AT_ONCE = 32
CPU_MICRO_TOK, DEVICE_MICRO_TOK = 1024, 16_384
"""Tokens of a micro-batch where the recipe does not say: of all CPU devices together; of each other device, at most."""
ACTIVATIONS_FRAC = 0.25
SMALL_MEMORY = 16 << 30
"""Bytes of a device that does not say how much it has."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A recipe checked against its model's shape and the devices."""

    recipe: Recipe
    mesh: Mesh
    model: Model

    @property
    def sampler_mesh(self) -> Mesh:
        """Of the sampler, over the same devices."""
        return self.recipe.sampler.mesh(self.mesh)


@dataclasses.dataclass(frozen=True)
class Plan(Geometry):
    """And against its tokenizer and its tasks; nothing is allocated yet."""

    chat: Chat
    heldout: list[Task]
    first_prompt: tuple[Message, ...]
    longest_prompt_tok: int


def geometry(recipe: Recipe, devices: Sequence[jax.Device] | None = None) -> Geometry:
    """Check what needs no weights, no tokenizer and no environment.

    Args:
      devices: default: all there are.

    Raises:
      ConfigError: a mesh that does not divide or leaves a process out, a context that the model does not have.
      CheckpointError: an unreadable `config.json`.
    """
    mesh = recipe.mesh.build(devices)
    if devices is None and jax.process_count() > 1 and mesh.size < jax.device_count():
        raise ConfigError(
            f"takes {mesh.size} of {jax.device_count()} devices, but {jax.process_count()} processes share all of them",
            setting="Recipe.mesh",
            value=recipe.mesh,
            remedy="let one axis be -1, or the product of the axes the number of devices",
        )
    recipe.check_mesh(mesh)
    sampler_mesh = recipe.sampler.mesh(mesh)
    recipe.sampler.check_shards(num_slot_shards(sampler_mesh))
    cfg = recipe.model if isinstance(recipe.model, DecoderConfig) else _folder_config(recipe.model)
    recipe.sampler.check_experts(cfg)
    if recipe.router_aux_coef is not None:
        cfg = _rebalanced(cfg, recipe)
    model = Model(cfg, recipe.dtype, recipe.remat, recipe.attention, recipe.lora)
    for each in (model.plain, model):
        param_shardings(mesh, each.axes(), each.abstract())
    owner = "MeshSpec" if sampler_mesh is mesh else "SamplerConfig"
    param_shardings(sampler_mesh, model.plain.axes(), model.plain.abstract(), fsdp=False, owner=owner)
    recipe = recipe.sized(mesh, micro_tok(mesh, model))
    for phase in recipe.phases:
        rows = (phase.micro_rows, phase.row_len, cfg.num_heads, cfg.head_dim)
        implementation(recipe.attention, mesh, rows, jnp.dtype(recipe.dtype))
    if recipe.sampler.max_context > cfg.max_position:
        raise ConfigError(
            f"is more than the model's {cfg.max_position} positions",
            setting="SamplerConfig.max_context",
            value=recipe.sampler.max_context,
            remedy=f"at most {cfg.max_position}",
        )
    for phase in recipe.phases:
        if isinstance(phase.algorithm, AsyPpo):
            _check_mini(phase.algorithm.critic, model)
    return Geometry(recipe, mesh, model)


def _check_mini(critic: Critic, policy: Model) -> None:
    """Mini-critics are smaller than the policy (of ones that share its shape, `AsyPpo.check` warns)."""
    if not isinstance(critic.model, DecoderConfig):
        return
    size, limit = Model(critic.model).num_params(), policy.num_params()
    if size >= limit:
        raise ConfigError(
            f"is no smaller than the policy: a critic has {size:,} parameters, the policy {limit:,}",
            setting="Critic.model",
            remedy="give a smaller shape, or choose Ppo, whose one critic may have any",
        )


def micro_tok(mesh: Mesh, model: Model) -> int:
    """Tokens of a micro-batch that the mesh does well with, on all batch shards together.

    On CPU few, whose activations stay in its caches; elsewhere enough to keep a device busy, if what the backward
    pass keeps of them takes no more than `ACTIVATIONS_FRAC` of its memory.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return CPU_MICRO_TOK
    try:
        memory = device.memory_stats()["bytes_limit"]
    except (jax.errors.JaxRuntimeError, NotImplementedError, KeyError, TypeError):  # a device that is not there
        memory = SMALL_MEMORY
    parts = mesh.shape["context"] * mesh.shape["tensor"]
    fit = int(ACTIVATIONS_FRAC * memory * parts / model.saved_bytes)
    return num_batch_shards(mesh) * min(fit, DEVICE_MICRO_TOK)


def _rebalanced(cfg: DecoderConfig, recipe: Recipe) -> DecoderConfig:
    problem = None
    if not cfg.routing:
        problem = (f"can have no effect: {type(cfg).__name__} has no experts", "leave it out")
    elif not isinstance(recipe.model, str):
        problem = ("is for the model of a folder", f"set {type(cfg).__name__}.router_aux_coef")
    if problem:
        message, remedy = problem
        raise ConfigError(message, setting="Recipe.router_aux_coef", value=recipe.router_aux_coef, remedy=remedy)
    changes: dict[str, Any] = {"router_aux_coef": recipe.router_aux_coef}
    return dataclasses.replace(cfg, **changes)


def _folder_config(folder: str) -> DecoderConfig:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            "is not a Hugging Face model folder: it has no config.json",
            setting="Recipe.model",
            value=folder,
            remedy=folder_remedy(folder),
        )
    return hf.read_config(folder)


def plan(recipe: Recipe) -> Plan:
    """Check everything that can be checked without allocating anything.

    Raises:
      ConfigError: a vocabulary smaller than the tokenizer's, prompts that do not fit, a mesh that does not divide.
      DataError: too few held-out tasks. CheckpointError: an unreadable model folder.
    """
    found = geometry(recipe)
    recipe, mesh, model = found.recipe, found.mesh, found.model
    if isinstance(recipe.model, DecoderConfig):
        chat = Chat(byte_tokenizer())
        if model.cfg.vocab_size < len(chat.tokenizer):
            raise ConfigError(
                f"is smaller than the byte tokenizer's {len(chat.tokenizer)} tokens",
                setting=f"{type(model.cfg).__name__}.vocab_size",
                value=model.cfg.vocab_size,
                remedy=f"at least {len(chat.tokenizer)}; 264 divides well",
            )
    else:
        chat = Chat(load_tokenizer(recipe.model))
    if recipe.agent:
        check_machine(recipe.agent)
    if recipe.env.max_turns > 1:
        chat.delta_ids((Message("user", "x"),), closed=True)  # raises for a template whose streams cannot grow
    heldout = held_out(recipe.env, recipe.evaluation.tasks, recipe.evaluation.held_out_frac)
    openings = asyncio.run(probe(recipe, [*map(recipe.env.task, range(PROBED_TASKS)), *heldout]))
    prompts = [chat.prompt_ids(messages) for messages in openings]
    longest, highest = max(map(len, prompts)), max(int(ids.max(initial=0)) for ids in prompts)
    if max(highest, *chat.stop_ids) >= model.cfg.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {recipe.model} makes token {max(highest, *chat.stop_ids)} of a prompt; the model has "
            f"{model.cfg.vocab_size}: the folder's tokenizer is another model's"
        )
    if longest + recipe.max_answer_tok > recipe.sampler.max_context:
        raise ConfigError(
            f"is too short: prompts of {recipe.env.name} take {longest} tokens, an answer {recipe.max_answer_tok}",
            setting="SamplerConfig.max_context",
            value=recipe.sampler.max_context,
            remedy=f"set it to {longest + recipe.max_answer_tok} or more",
        )
    return Plan(recipe, mesh, model, chat, heldout, openings[0], longest)


async def probe(recipe: Recipe, tasks: list[Task]) -> list[tuple[Message, ...]]:
    """The opening messages of those `tasks` that start, through a pool of the recipe's own kind: whatever an
    environment does when it starts, it does not do it to this process.

    Raises:
      EnvError: none of them starts. ConfigError: pairs are asked of an environment that has none.
    """
    pool = EnvPool(recipe.pool, recipe.env)
    pairs = any(p.algorithm.source == "pairs" for p in recipe.phases)

    async def opening(task: Task) -> tuple[Message, ...] | EnvError:
        try:
            episode = await pool.open(task)
        except EnvError as e:
            return e
        if task is tasks[0]:
            if pairs:
                await check_pairs(episode, recipe.env.name)
            await check_rewards(pool, episode, task, gold=any(p.algorithm.source != "sampler" for p in recipe.phases))
        await episode.close()
        return episode.opening

    try:
        found: list[tuple[Message, ...] | EnvError] = []
        for first in range(0, len(tasks), PROBED_AT_ONCE):
            found += await asyncio.gather(*map(opening, tasks[first : first + PROBED_AT_ONCE]))
    finally:
        pool.close()
    openings = [x for x in found if not isinstance(x, EnvError)]
    if not openings:
        assert isinstance(found[-1], EnvError)
        raise found[-1]
    return openings


async def check_rewards(pool: EnvPool, first: Episode, task: Task, *, gold: bool) -> None:
    """Give the gold answer in `first`, an open episode of `task`, and an empty one in another.

    gold: a phase learns from gold answers, so that there must be one.

    Raises:
      EnvError: the environment fails, or its reward is not a finite number.
    """
    empty = await pool.open(task)
    for episode, kind in ((first, "the gold answer"), (empty, "an empty answer")):
        try:
            text = await episode.gold() if episode is first else ""
        except EnvError as e:
            if gold:
                raise EnvError(f"{pool.spec.name}, task {task.index}: no gold answer: {e}", stage="gold") from e
            continue
        try:
            reward = (await episode.step(text)).reward
        except EnvError as e:
            raise EnvError(
                f"{pool.spec.name}, task {task.index}, {kind}: {e}; try it alone: python -m rolljax.validate",
                stage="step",
            ) from e
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EnvError(
                f"{pool.spec.name}, task {task.index}, {kind}: the reward is {reward!r}, not a finite number",
                stage="step",
            )
    await empty.close()


async def check_pairs(episode: Episode, name: str) -> None:
    """Raise `ConfigError` if the environment cannot be a source of pairs."""
    try:
        await episode.rejected()
    except EnvError as e:
        raise ConfigError(
            f"learns from pairs: {e}",
            setting="Phase.algorithm",
            value=name,
            remedy="an environment with rejected answers (envs.records.Records), or Dpo / RewardModel on sampled ones",
        ) from e


def start_params(plan: Geometry) -> Params:
    """What a run trains, as it starts: weights, random or the folder's, or fresh adapters; placed on the mesh."""
    model, seed = plan.model, plan.recipe.seed
    shardings = param_shardings(plan.mesh, model.axes(), model.abstract())
    if isinstance(plan.recipe.model, str) and not model.lora:
        return hf.load(plan.recipe.model, model, shardings)
    return jax.jit(lambda: model.init(seed), out_shardings=shardings)()


def base_shapes(plan: Geometry) -> Base | None:
    """Shapes, dtypes and shardings of the weights that adapters stand beside; None where everything is trained."""
    model, lora = plan.model, plan.model.lora
    if lora is None:
        return None
    shapes = jax.eval_shape(model.base, model.plain.abstract())
    shardings = param_shardings(plan.mesh, lora.base_axes(model.plain.axes()), shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def frozen_base(plan: Geometry) -> Base | None:
    """The weights that adapters stand beside, on the mesh; None where everything is trained."""
    model = plan.model
    placed = base_shapes(plan)
    if placed is None:
        return None
    plain, shardings = model.plain, jax.tree.map(lambda x: x.sharding, placed)
    if isinstance(plan.recipe.model, str):
        where = param_shardings(plan.mesh, plain.axes(), plain.abstract())
        weights = hf.load(plan.recipe.model, plain, where, computed=True)
        return jax.jit(model.base, out_shardings=shardings, donate_argnums=0)(weights)
    seed = plan.recipe.seed
    return jax.jit(lambda: model.base(plain.init(seed)), out_shardings=shardings)()


def plain_params(plan: Geometry, whole: Params) -> Params:
    """All weights in float32, adapters added, of what `Model.bind` takes."""
    model = plan.model
    if model.lora is None:
        return whole
    shardings = param_shardings(plan.mesh, model.plain.axes(), model.plain.abstract())
    to_float32 = lambda p: jax.tree.map(lambda x: x.astype(jnp.float32), model.merged(p))  # noqa: E731
    return jax.jit(to_float32, out_shardings=shardings)(whole)


class Rooms:
    """Sampler, environments and the event loop they share. Use as a context manager.

    Args:
      params: what `Model.bind` takes: the weights that the sampler starts with, as policy version `version`.
      should_stop: asked while waiting; True ends the wait with `Stopped`. team: the processes of the run.
      watchdog: looks after them while they are open, and reports what hung.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        version: int,
        should_stop: Callable[[], bool] = lambda: False,
        team: Alone | Leader = ALONE,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.recipe, self.team = plan, plan.recipe, team
        self.watchdog, self._tally = watchdog or Watchdog(), Tally()
        self._write = make_publish(plan.mesh, plan.model, plan.sampler_mesh)
        make = functools.partial(LeadingEngine, turn=team.turn) if plan.mesh.is_multi_process else Engine
        self.sampler = Sampler(
            make(plan.model.plain, plan.recipe.sampler, plan.sampler_mesh, SLOT_AXES),
            self._weights(params),
            version,
            longest_prompt=plan.longest_prompt_tok,
            vocabulary=plan.chat.vocabulary,
            multi_turn=plan.recipe.max_turns > 1,
        )
        self.pool = EnvPool(plan.recipe.pool, plan.recipe.env)
        self.background = Background(should_stop, self.watchdog)
        self.agents = None
        if plan.recipe.agent:
            from rolljax.agents.host import AgentHost  # which needs the packages of a server

            self.agents = AgentHost(plan.recipe.agent, self.sampler, plan.chat, plan.recipe.sampler.max_context)

    def __enter__(self) -> Rooms:
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
            from rolljax.agents.host import AgentRollouts

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
