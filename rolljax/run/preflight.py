"""Checks of a run before anything is allocated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rolljax.cluster.placement import Remote
from rolljax.concurrency.event_loop import EventLoop
from rolljax.envs.base import StepResult
from rolljax.envs.pool import Episode, Pool, open_pool
from rolljax.envs.tasks import held_out
from rolljax.errors import CheckpointError, ConfigError, EnvError
from rolljax.model import hf, training_templates
from rolljax.model.decoder import DecoderConfig, Model
from rolljax.model.folder import folder_remedy
from rolljax.model.implementations import implementation
from rolljax.model.prefixes import read_prefixes
from rolljax.model.tokenizer import Chat, byte_tokenizer, load_tokenizer
from rolljax.recipe import Phase, Recipe
from rolljax.rewards.base import RewardContext
from rolljax.rewards.scoring import STAGE, Scoring
from rolljax.rollout import domain_rewards
from rolljax.rollout.agents.worker import check_machine
from rolljax.run import reference_answers
from rolljax.run.reference_answers import ReferenceAnswer
from rolljax.storage.layout import TEMPLATE
from rolljax.storage.run_reader import RunReader
from rolljax.trainer.critic import Critic
from rolljax.trainer.mesh import Colocated, available_devices, num_batch_shards, num_slot_shards, param_shardings
from rolljax.trainer.publish import share_devices
from rolljax.types import Key, Message, Task, Trajectory, Turn

PROBED_TASKS = 64
"""Training tasks whose prompts are measured before a run starts."""
PROBED_AT_ONCE = 32
TEMPLATE_DAY = "2024-07-26"
"""The date in prompts of runs; the default of Llama 3's templates."""
CPU_MICRO_TOK, DEVICE_MICRO_TOK = 1024, 16_384
"""Default tokens of a micro-batch: for all CPU devices together; at most for each device of another kind."""
ACTIVATIONS_FRAC = 0.25
SMALL_MEMORY = 16 << 30
"""Bytes assumed for a device that does not report its memory."""


@dataclasses.dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe checked against its model's shape and the devices."""

    recipe: Recipe
    mesh: Mesh
    """Device mesh of the trainer: the same devices as the sampler's, or separate ones (`Recipe.placement`)."""
    sampler_mesh: Mesh | None
    """Device mesh of the sampler: the same devices as the trainer's, or separate ones; None: the samplers are processes
    of their own (`Recipe.placement`)."""
    model: Model

    def sampler_sleeps(self, phase: Phase) -> bool:
        """Return whether the sampler frees its weights and KV pages while the trainer updates (`Sampler.sleep`).

        It does so if both share devices and nothing is sampled meanwhile, unless pages must outlive an update.
        """
        is_shared = self.sampler_mesh is not None and share_devices(self.mesh, self.sampler_mesh)
        return is_shared and not phase.async_ratio and not self.recipe.sampler.reuse_stale


@dataclasses.dataclass(frozen=True)
class Preflight(ResolvedRecipe):
    """A recipe that is checked against its model, the devices, its tokenizer and its tasks; nothing is allocated."""

    chat: Chat
    heldout: list[Task]
    first_prompt: tuple[Message, ...]
    longest_prompt_tok: int
    warnings: Sequence[str] = ()

    @property
    def compiled_requests(self) -> tuple[int | None, bool]:
        """Return `longest_prompt` and `multi_turn` of the requests for which a sampler compiles its programs in advance
        (`sampler.client.Sampler`)."""
        longest = None if self.recomputes else self.longest_prompt_tok
        return longest, self.recipe.max_turns > 1 or self.recomputes

    @property
    def recomputes(self) -> bool:
        """Whether weights are published while answers are under way, whose keys and values are made again then."""
        ahead = any(phase.samples and phase.async_ratio > 0 for phase in self.recipe.phases)
        return ahead and self.recipe.sampler.on_publish == "recompute"


def resolve(recipe: Recipe, devices: Sequence[jax.Device] | None = None) -> ResolvedRecipe:
    """Check everything in a recipe that can be checked without weights, tokenizer and environment.

    Args:
      devices: None: all devices.

    Raises:
      ConfigError: the mesh does not divide the devices or leaves a process out, or the context is longer than the
        model's.
      CheckpointError: `config.json` is unreadable.
    """
    mesh, sampler_mesh = meshes(recipe, devices)
    if devices is None and jax.process_count() > 1 and mesh.size < jax.device_count():
        raise ConfigError(
            f"takes {mesh.size} of {jax.device_count()} devices, but {jax.process_count()} processes share all of them",
            setting="Recipe.mesh",
            value=recipe.mesh,
            remedy="let one axis be -1, or the product of the axes the number of devices",
        )
    recipe.check_mesh(mesh)
    if sampler_mesh is not None:
        recipe.sampler.check_shards(num_slot_shards(sampler_mesh))
    cfg = recipe.model if isinstance(recipe.model, DecoderConfig) else _folder_config(recipe.model)
    recipe.sampler.check_model(cfg)
    if recipe.router_aux_coef is not None:
        cfg = _rebalanced(cfg, recipe)
    prefixes = read_prefixes(recipe.prefixes, cfg.hidden_size) if recipe.prefixes else None
    int8 = recipe.sampler.quantization == "int8"
    model = Model(cfg, recipe.dtype, recipe.remat, recipe.attention, recipe.lora, prefixes, int8)
    for each in (model.plain, model):
        param_shardings(mesh, each.axes(), each.abstract())
    if sampler_mesh is not None:
        owner = "MeshSpec" if sampler_mesh is mesh else "SamplerConfig"
        param_shardings(sampler_mesh, model.plain.axes(), model.plain.abstract(), fsdp=False, owner=owner)
    recipe = recipe.sized(mesh, micro_tok(mesh, model))
    for phase in recipe.phases:
        implementation(recipe.attention, mesh, _queries(phase, cfg), recipe.dtype)
    if recipe.sampler.max_context > cfg.max_position:
        raise ConfigError(
            f"is more than the model's {cfg.max_position} positions",
            setting="SamplerConfig.max_context",
            value=recipe.sampler.max_context,
            remedy=f"at most {cfg.max_position}",
        )
    for phase in recipe.phases:
        critic = phase.algorithm.needs().critics
        if phase.algorithm.mini_critics and critic is not None:
            _check_mini(critic, model)
        _check_prefixes(phase, model)
    return ResolvedRecipe(recipe, mesh, sampler_mesh, model)


def meshes(recipe: Recipe, devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, Mesh | None]:
    """Return the trainer's mesh and the sampler's: over the same devices, or over its share; None: the samplers are
    processes of their own.

    Args:
      devices: default: all.

    Raises:
      ConfigError: a mesh or a share does not divide the devices, or a run of several processes is split.
    """
    placement = recipe.placement
    if isinstance(placement, Colocated):
        mesh = recipe.mesh.build(devices)
        return mesh, recipe.sampler.mesh(mesh)
    if isinstance(placement, Remote):
        return recipe.mesh.build(devices), None
    if devices is None and jax.process_count() > 1:
        raise ConfigError(
            f"is not possible in a run of {jax.process_count()} processes: each would need devices of both",
            setting="Recipe.placement",
            value=placement,
            remedy="start one process, choose Remote, or leave the setting out",
        )
    first, second = placement.shares(available_devices() if devices is None else devices)
    mesh = recipe.mesh.build(first)
    if mesh.size < len(first):
        raise ConfigError(
            f"takes {mesh.size} of the trainer's {len(first)} devices",
            setting="Recipe.mesh",
            value=recipe.mesh,
            remedy=f"let one axis be -1, or set Split.trainer = {mesh.size}",
        )
    return mesh, recipe.sampler.mesh(mesh, second)


def _check_mini(critic: Critic, policy: Model) -> None:
    """Check that mini-critics (`Algorithm.mini_critics`) with their own shape are smaller than the policy."""
    if not isinstance(critic.model, DecoderConfig):
        return
    size, limit = Model(critic.model).num_params(), policy.num_params()
    if size >= limit:
        raise ConfigError(
            f"is no smaller than the policy: a critic has {size:,} parameters, the policy {limit:,}",
            setting="Critic.model",
            remedy="give a smaller shape, or choose Ppo, whose one critic may have any",
        )


def _check_prefixes(phase: Phase, model: Model) -> None:
    """Check that the models of a phase can read its latent prefixes."""
    if not phase.guidance:
        return
    if model.prefixes and phase.guidance.length > model.prefixes.length:
        raise ConfigError(
            f"is more than the {model.prefixes.length} vectors of each latent in Recipe.prefixes",
            setting="Guidance.length",
            value=phase.guidance.length,
            remedy=f"at most {model.prefixes.length}, or make a file with longer ones",
        )
    critic = phase.algorithm.needs().critics
    if critic is not None and isinstance(critic.model, DecoderConfig):
        raise ConfigError(
            "has its own embedding, for which the latent prefixes of Phase.guidance were not made",
            setting="Critic.model",
            value=critic.model,
            remedy="leave it out, or leave out Phase.guidance",
        )


def micro_tok(mesh: Mesh, model: Model) -> int:
    """Return the tokens of a micro-batch that suit the mesh, on all batch shards together.

    On CPU few, whose activations stay in its caches; elsewhere enough to keep a device busy, if the activations kept
    for the backward pass take no more than `ACTIVATIONS_FRAC` of its memory.
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


def check(recipe: Recipe) -> Preflight:
    """Check everything that can be checked without allocating anything.

    Raises:
      ConfigError: a vocabulary smaller than the tokenizer's, prompts that do not fit, a mesh that does not divide, a
        folder's weights without a learning rate. DataError: too few held-out tasks. CheckpointError: an unreadable
        model folder.
    """
    found = resolve(recipe)
    recipe, model = found.recipe, found.model
    recipe.check_rates()
    chat = load_chat(found)
    if recipe.agent:
        check_machine(recipe.agent.for_env(recipe.env))
    if recipe.max_turns > 1:
        chat.delta_ids((Message("user", "x"),), closed=True)  # raises for a template whose streams cannot grow
    around = RewardContext(recipe.env, recipe.seed)
    domain_rewards.check_rewards(recipe.reward, recipe.domains, around)
    heldout = held_out(recipe.env, recipe.evaluation.tasks, recipe.evaluation.held_out_frac)
    with contextlib.closing(EventLoop(lambda: False)) as beside:  # this thread may be in an event loop of its own
        probed = beside.run(probe(recipe, [*map(recipe.env.task, range(PROBED_TASKS)), *heldout]))
    openings = probed.openings
    for reply in probed.replies if recipe.env.max_turns > 1 else ():
        _check_reply(chat, reply)
    prompts = [chat.prompt_ids(messages) for messages in openings]
    longest = max(map(len, prompts)) + max(phase.prefix_tok for phase in recipe.phases)
    highest = max(int(ids.max(initial=0)) for ids in prompts)
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
    warnings = reference_answers.check(recipe.env, probed.references, chat, recipe.max_answer_tok)
    return Preflight(recipe, found.mesh, found.sampler_mesh, model, chat, heldout, openings[0], longest, warnings)


def _queries(phase: Phase, cfg: DecoderConfig) -> tuple[int, int, int, int]:
    """Return the shape of the queries of a micro-batch."""
    return (phase.micro_rows, phase.row_len, cfg.num_heads, cfg.head_dim)


def _check_reply(chat: Chat, reply: Sequence[Message]) -> None:
    """Raise `ConfigError` if the chat template cannot render the messages with which an environment answers."""
    try:
        chat.delta_ids(reply, closed=True)
    except ConfigError as e:
        roles = ", ".join(m.role for m in reply)
        raise ConfigError(
            f"does not take the messages that the environment answers with (roles: {roles}): {e}",
            setting="chat template",
            remedy=f"write one that does, and set Recipe.chat_template to its path ({training_templates.DOCS})",
        ) from e


def recipe_chat(recipe: Recipe, run: str | Path | None = None) -> Chat:
    """Return the tokenizer of a recipe's model with the chat template that its episodes are rendered with.

    Templates that write the date write `TEMPLATE_DAY`: samples must not depend on the day on which a run is resumed.

    Args:
      run: a run folder of the recipe, which stores the template of its first step. That template is used unless
        `Recipe.chat_template` differs from the run's setting.

    Raises:
      ConfigError: there is no template, or none in the file that `Recipe.chat_template` names.
    """
    tokenizer = load_tokenizer(recipe.model) if isinstance(recipe.model, str) else byte_tokenizer()
    if run is not None and (kept := Path(run) / TEMPLATE).is_file() and _is_setting_of(recipe, run):
        return dataclasses.replace(Chat.of(tokenizer, str(kept)), day=TEMPLATE_DAY)
    chat = dataclasses.replace(Chat.of(tokenizer, recipe.chat_template), day=TEMPLATE_DAY)
    return chat.for_streams() if recipe.max_turns > 1 else chat


def _is_setting_of(recipe: Recipe, run: str | Path) -> bool:
    """Return whether a recipe has the `Recipe.chat_template` that its run was made with."""
    return RunReader(run).resolved().get("chat_template", "") == recipe.chat_template


def load_chat(resolved: ResolvedRecipe, run: str | Path | None = None) -> Chat:
    """Return `recipe_chat`, checked against the model.

    Raises:
      ConfigError: as `recipe_chat`; the model's vocabulary is smaller than the byte tokenizer's.
    """
    recipe, model = resolved.recipe, resolved.model
    chat = recipe_chat(recipe, run)
    if not isinstance(recipe.model, str) and model.cfg.vocab_size < len(chat.tokenizer):
        raise ConfigError(
            f"is smaller than the byte tokenizer's {len(chat.tokenizer)} tokens",
            setting=f"{type(model.cfg).__name__}.vocab_size",
            value=model.cfg.vocab_size,
            remedy=f"at least {len(chat.tokenizer)}; 264 divides well",
        )
    return chat


@dataclasses.dataclass(frozen=True)
class Probed:
    """The findings about tasks."""

    openings: list[tuple[Message, ...]]
    """The messages that each begins with."""
    replies: list[tuple[Message, ...]]
    """Messages with which some of the tasks reply to a first action."""
    references: list[ReferenceAnswer]
    """The reference answers that a phase would imitate; empty if no phase does."""


async def probe(recipe: Recipe, tasks: list[Task]) -> Probed:
    """Start `tasks` and return the findings; a task that does not start is left out.

    The tasks are played through a pool of the recipe's kind. An environment that runs in worker processes thus cannot
    harm this process when it starts.

    Raises:
      EnvError: no task starts. ConfigError: a phase needs pairs, and the environment has none.
    """
    pool, scoring = open_pool(recipe.pool, recipe.env), None
    firsts = {task.env: task for task in reversed(tasks)}
    pairs = any(p.algorithm.source == "pairs" for p in recipe.phases)
    replies: list[tuple[Message, ...]] = []
    learns_reference = any(p.algorithm.source != "sampler" for p in recipe.phases)
    played = set(map(id, tasks[1 : 1 + reference_answers.PLAYED]))
    references: list[ReferenceAnswer] = []

    async def opened(task: Task) -> tuple[Message, ...] | EnvError:
        try:
            episode = await pool.open(task)
        except EnvError as e:
            return e
        if task is firsts[task.env]:
            if pairs:
                await check_pairs(episode, task.env)
            replies.extend(await check_rewards(pool, episode, task, required=learns_reference, scoring=scoring))
        elif learns_reference:
            turns = recipe.env.turns_of(task)
            if reference := await reference_answers.read(episode, task, turns, play=id(task) in played):
                references.append(reference)
        await episode.close()
        return episode.initial_messages

    try:
        around = RewardContext(recipe.env, recipe.seed)
        scoring = domain_rewards.open_rewards(recipe.reward, recipe.domains, around, recipe.wait_s, only_free=True)
        found: list[tuple[Message, ...] | EnvError] = []
        for first in range(0, len(tasks), PROBED_AT_ONCE):
            found += await asyncio.gather(*map(opened, tasks[first : first + PROBED_AT_ONCE]))
    finally:
        pool.close()
        if scoring:
            await scoring.close()
    openings = [x for x in found if not isinstance(x, EnvError)]
    if not openings:
        assert isinstance(found[-1], EnvError)
        raise found[-1]
    return Probed(openings, replies, references)


async def check_rewards(
    pool: Pool, first: Episode, task: Task, *, required: bool, scoring: Scoring | None = None
) -> list[tuple[Message, ...]]:
    """Give the reference answer in `first`, an open episode of `task`, and an empty one in another.

    required: whether a phase learns from reference answers, so that there must be one. scoring: a reward to try on
      both.

    Returns:
      The messages of those steps that do not end their episodes.

    Raises:
      EnvError: the environment fails, or its reward is not a finite number.
    """
    empty, replies = await pool.open(task), list[tuple[Message, ...]]()
    for episode, kind in ((first, "the reference answer"), (empty, "an empty answer")):
        try:
            text = await episode.reference_answer() if episode is first else ""
        except EnvError as e:
            if required:
                raise EnvError(
                    f"{task.env}, task {task.index}: no reference answer: {e}", stage="reference_answer"
                ) from e
            continue
        try:
            result = await episode.step(text)
        except EnvError as e:
            raise EnvError(
                f"{task.env}, task {task.index}, {kind}: {e}; try it alone: python -m rolljax.validate",
                stage="step",
            ) from e
        if not (result.terminated or result.truncated):
            replies.append(tuple(result.messages))
        reward = result.reward
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EnvError(
                f"{task.env}, task {task.index}, {kind}: the reward is {reward!r}, not a finite number",
                stage="step",
            )
        if scoring:
            scored = await scoring.score(_said(task, text, result))
            if scored.status == "failed":
                raise EnvError(f"Recipe.reward, task {task.index}, {kind}: {scored.fault}", stage=STAGE)
    await empty.close()
    return replies


def _said(task: Task, text: str, result: StepResult) -> Trajectory:
    """Return an episode of one answer, without its tokens."""
    none = np.zeros(0, np.int32)
    turn = Turn(none, none, none.astype(np.float32), none, "stop", result.reward, text)
    return Trajectory(Key(0, 0, 0), task, (turn,), result.reward, result.reward_parts, result.success, "ok")


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
