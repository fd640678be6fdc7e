"""Check the weights, algorithms and rewards of a run on shapes, before anything is allocated or compiled.

Weights: the headers of their files. Algorithms: credit on made-up episodes; objective and gradient as JAX traces them,
for shapes only. (The environment is asked by `run.preflight`.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rolljax
from rolljax.errors import ConfigError
from rolljax.model import hf
from rolljax.recipe import Phase
from rolljax.rewards.base import RewardContext
from rolljax.rollout import domain_rewards
from rolljax.run import reference_policies, tracking
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.reward_models import TrainedRewardModels
from rolljax.run.trainer import make_trainer
from rolljax.trainer import masked
from rolljax.trainer.algorithms.base import Algorithm, Needs, PolicyOutputs, TokenLoss
from rolljax.trainer.batch import Packed, PackShape, Sample, TokenBatch, pack
from rolljax.trainer.credit.emptiness import could_teach
from rolljax.trainer.credit.episodes import Credit, Episodes, apply_credit
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.update import clean_batch
from rolljax.types import FinishReason, Key, Status, Task, Trajectory, Turn

PROMPT_TOK, TURN_TOK, MAX_TURNS, MAX_GROUPS, MAX_SIBLINGS = 8, 8, 3, 4, 8
"""Largest sizes of made-up episodes."""
OWN_CODE = str(Path(rolljax.__file__).parent)


def check(resolved: ResolvedRecipe) -> list[str]:
    """Rehearse a run; returns a line for each thing that is in order.

    Raises:
      CheckpointError: a folder whose weights could not be loaded.
      ConfigError: a frozen policy does not exist; an algorithm fails, or returns an unusable value; a tracker is not
        installed.
    """
    recipe = resolved.recipe
    reference_policies.check(resolved)
    tracking.check(recipe.trackers)
    around = RewardContext(recipe.env, recipe.seed, trained=TrainedRewardModels(resolved))
    domain_rewards.check_rewards(recipe.reward, recipe.domains, around)
    folders = [recipe.model] if isinstance(recipe.model, str) else []
    folders += [s for p in recipe.phases for s in p.algorithm.needs().references if s not in reference_policies.OWN]
    said = [_weights(resolved, folder) for folder in dict.fromkeys(folders)]
    done: set[Any] = set()
    for index, phase in enumerate(recipe.phases):
        like = (phase.algorithm, phase.optimizer, phase.group_size)
        if like not in done:
            rehearse(resolved, index)
            done.add(like)
    names = dict.fromkeys(type(p.algorithm).__name__ for p in recipe.phases)
    trackers = [f"trackers {', '.join(type(t).__name__ for t in recipe.trackers)}"]
    return [*said, f"credit and objective of {', '.join(names)}", *(trackers if recipe.trackers else [])]


def _weights(resolved: ResolvedRecipe, folder: str) -> str:
    model = resolved.model.plain
    if folder != resolved.recipe.model:
        model = dataclasses.replace(model, cfg=hf.read_config(folder))
    count, nbytes = hf.check(folder, model)
    return f"{count} tensors of {folder}, {nbytes / 2**20:,.0f} MiB"


def rehearse(resolved: ResolvedRecipe, index: int) -> None:
    """Credit and objective of a phase.

    Raises:
      ConfigError: one of them fails.
    """
    phase, rng = resolved.recipe.phases[index], np.random.default_rng(resolved.recipe.seed)
    algorithm, trainer = phase.algorithm, make_trainer(resolved, index, {})
    with _blamed(phase, "the optimizer's state cannot be made"):
        trainer.states.abstract()
    kept: list[list[Sample]] = []
    algorithm_state: Any = {}
    for alike in (False, True):  # a second step, whose rewards are all the same
        groups = made_up(resolved, phase, rng, alike=alike)
        samples = [[Sample.of(t) for t in group] for group in groups]
        episodes = answered(Episodes.of(groups, limit_tok=trainer.limit_tok), algorithm.needs(), rng)
        with _blamed(phase, "credit fails on made-up episodes"):
            algorithm.has_signal(episodes)
            result = algorithm.credit(episodes, algorithm_state)
            _check_credit(result, episodes)
            kept = kept or apply_credit(algorithm.needs(), samples, episodes, result)
            lost = not kept and not could_teach(algorithm, episodes, algorithm_state)
            algorithm_state = result.algorithm_state
        if lost:
            raise ConfigError(
                f"{type(algorithm).__name__} keeps nothing to train on, whatever the rewards of its trajectories are: "
                "every step would be empty",
                setting="Phase.algorithm",
                value=phase.name,
                remedy="look at its filters, at what its teachers teach, and at Phase.group_size",
            )
    if not kept:  # it has no use for these rewards: the objective is tried all the same
        everyone = dataclasses.replace(result, keep=None, mask=None)
        kept = apply_credit(algorithm.needs(), samples, episodes, everyone)
    with _blamed(phase, "the objective cannot be traced"):
        trace(algorithm, _packed(trainer, kept).batch)


@contextlib.contextmanager
def _blamed(phase: Phase, what: str) -> Iterator[None]:
    """Attribute all exceptions inside this context to the algorithm."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:  # border: an algorithm may be anybody's code
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename != __file__]
        own = [f for f in frames if "site-packages" not in f.filename]
        theirs = [f for f in own if not f.filename.startswith(OWN_CODE)] or own
        at = f" ({theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name})" if theirs else ""
        raise ConfigError(
            f"{type(phase.algorithm).__name__}: {what}: {type(e).__name__}: {str(e)[:1000]}{at}",
            setting="Phase.algorithm",
            value=phase.name,
            remedy="mend the algorithm; what it is given: rolljax/trainer/credit/episodes.py and batch.py",
        ) from e


# ---- episodes -------------------------------------------------------------------------------------------------------


def made_up(resolved: ResolvedRecipe, phase: Phase, rng: np.random.Generator, *, alike: bool) -> list[list[Trajectory]]:
    """Make small groups of trajectories as in the phase. alike: all have one reward, and their answers are cut."""
    recipe = resolved.recipe
    size, vocab = min(phase.group_size, MAX_SIBLINGS), resolved.model.cfg.vocab_size
    turns, said = min(recipe.max_turns, MAX_TURNS), min(recipe.max_answer_tok, TURN_TOK)
    groups, names = [], list(recipe.env.specs)
    for g in range(min(phase.prompts_per_step, MAX_GROUPS)):
        prompt = rng.integers(0, vocab, rng.integers(2, PROMPT_TOK + 1))
        rewards = np.zeros(size) if alike else rng.permutation(np.linspace(0, 1, size)) if size > 1 else np.ones(1)
        members = []
        for s, reward in enumerate(rewards):
            made: list[Turn] = []
            for k in range(int(rng.integers(1, turns + 1))):
                seen = prompt if not k else rng.integers(0, vocab, 2)
                made.append(_turn(phase, rng, seen, rng.integers(0, vocab, rng.integers(1, said + 1)), alike))
            made[-1] = dataclasses.replace(made[-1], reward=float(reward))
            status: Status = "truncated" if alike else "ok"
            task = Task(names[g % len(names)], g, f"made up {g}")
            key = Key(0, g, s)
            members.append(Trajectory(key, task, tuple(made), float(reward), {}, reward > 0.5, status))
        groups.append(members)
    return groups


def _turn(phase: Phase, rng: np.random.Generator, seen: np.ndarray, said: np.ndarray, is_cut: bool) -> Turn:
    sampled = phase.algorithm.source == "sampler"
    logp = -rng.exponential(1.0, len(said)) - 0.05 if sampled else np.zeros(len(said))
    versions = np.full(len(said), 0 if sampled else -1, np.int32)
    end: FinishReason = "length" if is_cut else "stop"
    return Turn(seen.astype(np.int32), said.astype(np.int32), logp.astype(np.float32), versions, end, 0.0, "made up")


def answered(e: Episodes, needs: Needs, rng: np.random.Generator) -> Episodes:
    """Return the episodes with made-up values for all arrays that an algorithm needs."""
    near = lambda: np.where(e.mask, np.minimum(e.sampler_logp + rng.normal(0, 0.1, e.mask.shape), -1e-3), 0)  # noqa: E731
    names = {"trainer_logp": needs.trainer_logp, "ref_logp": needs.ref, "scorer_logp": needs.scorer}
    found: dict[str, Any] = {name: near() for name, asked in names.items() if asked}
    if needs.trainer_logp:
        found["entropy"] = np.where(e.mask, 1.0, 0.0)
    if needs.teachers:
        found["teacher_logp"] = np.stack([near() for _ in needs.teachers])
    if needs.context:
        found |= {name: near() for name in ("context_logp", *(["context_ref_logp"] if needs.ref else []))}
    if needs.critics:
        found["values"] = np.stack([near() for _ in range(needs.critics.num)])
    if needs.attention:
        found |= {name: np.where(e.mask, rng.exponential(1, e.mask.shape), 0) for name in ("waad", "fai")}
    return dataclasses.replace(e, **found)


def _check_credit(result: Credit, e: Episodes) -> None:
    if not isinstance(result, Credit):
        raise TypeError(f"it returns a {type(result).__name__}, not a Credit")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("advantages", "returns", "mask"), e.mask.shape)
    shapes |= dict.fromkeys(("entropy_weights", "rewards", "reference_points"), e.mask.shape) | {"keep": (e.num,)}
    if np.ndim(result.weights):
        shapes["weights"] = e.mask.shape
    for name, shape in shapes.items():
        array = getattr(result, name)
        if array is None:
            continue
        if np.shape(array) != shape:
            raise ValueError(f"{name} has shape {list(np.shape(array))}, not {list(shape)}")
        if name in ("mask", "keep") and np.asarray(array).dtype != bool:
            raise TypeError(f"{name} is {np.asarray(array).dtype}, not bool")
        if shape == e.mask.shape and not np.isfinite(np.asarray(array, np.float64)[e.mask]).all():
            raise ValueError(f"{name} is not finite on made-up episodes")


# ---- objective ------------------------------------------------------------------------------------------------------


def _packed(trainer: PhaseTrainer, kept: list[list[Sample]]) -> Packed:
    length = max(sum(len(s.tokens) for s in group) for group in kept)
    settings = {"aggregation": trainer.algorithm.aggregation, "unsplit_groups": trainer.algorithm.unsplit_groups}
    shape = PackShape(1, len(kept), length)
    return pack(kept, shape, trainer.temperature, limit_tok=trainer.limit_tok, **settings)  # type: ignore[arg-type]


def trace(algorithm: Algorithm, batch: TokenBatch) -> None:
    """Trace the losses of one micro-batch and their gradients; nothing is computed or compiled."""
    needs = algorithm.needs()
    micro = batch.micro_batch(0)
    each = jax.ShapeDtypeStruct(micro.tokens.shape, np.float32)

    def policy_loss(logp: jax.Array, entropy: jax.Array, divergence: jax.Array, b: TokenBatch) -> Any:
        out = algorithm.objective(
            PolicyOutputs(logp, entropy, divergence if needs.divergence else None), clean_batch(b, logp)
        )
        if not isinstance(out, TokenLoss):
            raise TypeError(f"it returns a {type(out).__name__}, not a TokenLoss")
        return _total(out.loss, b), (dict(out.mean), dict(out.largest))

    def critic_loss(values: jax.Array, old: jax.Array, b: TokenBatch) -> Any:
        loss, stats = algorithm.critic_loss(values, b.required("returns"), old, b)
        return _total(loss, b), stats

    if algorithm.trains_policy:
        jax.eval_shape(jax.grad(policy_loss, argnums=(0, 1, 2), has_aux=True), each, each, each, micro)
    if needs.critics:
        jax.eval_shape(jax.grad(critic_loss, has_aux=True), each, each, micro)


def _total(loss: jax.Array, b: TokenBatch) -> jax.Array:
    if loss.shape != b.scale.shape:
        raise ValueError(f"the loss has shape {list(loss.shape)}, not that of the tokens, {list(b.scale.shape)}")
    return masked.total(loss, b.scale)
