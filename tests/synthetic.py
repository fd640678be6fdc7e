"""Random but plausible trajectories, everything an algorithm may ask for about them, and the way from there to a loss and
its gradient. No model."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil

import jax
import numpy as np

from rolljax.trainer import algorithms, masked
from rolljax.trainer.algorithms.base import Algorithm, PolicyOutputs
from rolljax.trainer.batch import PackShape, Sample, pack
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.shaping import RewardShaping
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.update import clean_batch
from rolljax.types import Key, Task, Trajectory, Turn

VOCAB = 264
LIMIT_TOK = 16
SHAPE = PackShape(6, 4, 96)
SHARED = ("base", "checks", "policy_gradient")
"""Files of the folder that hold what algorithms are made of."""
MODULES = {
    m.name: importlib.import_module(f"{algorithms.__name__}.{m.name}")
    for m in pkgutil.iter_modules(algorithms.__path__)
    if m.name not in SHARED
}
CLASSES = [
    c
    for module in MODULES.values()
    for c in vars(module).values()
    if inspect.isclass(c) and issubclass(c, Algorithm) and c.__module__ == module.__name__ and not inspect.isabstract(c)
]


@dataclasses.dataclass(frozen=True)
class Raised(RewardShaping):
    """Rewards from 0 on: the lowest of those made here is -1."""

    def shaped(self, rewards_N, e):
        return super().shaped(rewards_N, e) + 1


def trajectory(rng, group, sibling, prompt, turns, *, reward, gap=0.3):
    """Return a trajectory. turns: (observation tokens, sampled tokens) of each turn after the prompt."""
    made = []
    for k, (seen, said) in enumerate(turns):
        ids = prompt if k == 0 else rng.integers(0, VOCAB, seen)
        logp = -rng.exponential(2.0, said).astype(np.float32) - 0.05
        part = reward if k == len(turns) - 1 else 0.0
        tokens, versions = rng.integers(0, VOCAB, said).astype(np.int32), np.zeros(said, np.int32)
        made.append(Turn(ids.astype(np.int32), tokens, logp, versions, "stop", part, f"{group}.{sibling}.{k}"))
    task = Task("toy", group, f"task {group}")
    key = Key(0, group, sibling)
    return Trajectory(key, task, tuple(made), reward, {}, reward > 0, "ok")


def groups_of(rng, num_groups=4, group_size=4, max_turns=3, max_said=9, rewards=None):
    """Return groups of trajectories with one to `max_turns` turns; every group has different rewards in it."""
    groups = []
    for g in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 12))
        given = rewards[g] if rewards is not None else rng.permutation(np.linspace(-1, 1, group_size)).round(2)
        siblings = []
        for s in range(group_size):
            layout = [(rng.integers(1, 5), rng.integers(1, max_said)) for _ in range(rng.integers(1, max_turns + 1))]
            siblings.append(trajectory(rng, g, s, prompt, layout, reward=float(given[s])))
        groups.append(siblings)
    return groups


def episodes_of(rng, groups, needs, *, limit_tok=LIMIT_TOK, noise=0.3, step=0):
    """Return episodes with random values for all arrays that `needs` asks for."""
    e = Episodes.of(groups, limit_tok=limit_tok, step=step)

    def near(scale=noise):
        return np.where(e.mask, np.minimum(e.sampler_logp + rng.normal(0, scale, e.mask.shape), -1e-3), 0)

    asked = {}
    if needs.trainer_logp:
        asked["entropy"] = np.where(e.mask, 1.5, 0.0)
        asked["trainer_logp"] = near(noise / 3)
    if needs.ref:
        asked["ref_logp"] = near()
    if needs.scorer:
        asked["scorer_logp"] = near()
    if needs.teachers:
        asked["teacher_logp"] = np.stack([near() for _ in needs.teachers])
    if needs.context:
        asked["context_logp"] = near()
        if needs.ref:
            asked["context_ref_logp"] = near()
    if needs.critics:
        asked["values"] = np.stack(
            [np.where(e.mask, rng.normal(0, 0.5, e.mask.shape), 0) for _ in range(needs.critics.num)]
        )
    if needs.attention:
        asked |= {n: np.where(e.mask, rng.exponential(1, e.mask.shape), 0) for n in ("waad", "fai")}
    return dataclasses.replace(e, **asked)


def samples_of(groups):
    return [[Sample.of(t) for t in group] for group in groups]


def trainer(algorithm):
    """Return a trainer of which only the credit is used: it has no mesh, model or optimizer."""
    return PhaseTrainer(None, None, algorithm, None, SHAPE, steps=1, groups_per_step=4, limit_tok=LIMIT_TOK)


def credited(algorithm, groups, seed=0):
    """Return the groups that take part, with their columns."""
    rng = np.random.default_rng(seed)
    e = episodes_of(rng, groups, algorithm.needs())
    return apply_credit(algorithm.needs(), samples_of(groups), e, algorithm.credit(e, {}))


class Objective:
    """Loss and gradient of an algorithm as functions of the tokens' log-probs, on packed rows."""

    def __init__(self, algorithm, kl_coef=None):
        self.algorithm = algorithm
        self.kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef

        def loss(logp, entropy, divergence, batch):
            policy = PolicyOutputs(logp, entropy, divergence)
            policy = jax.tree.map(lambda x: masked.clean(x, batch.scale), policy)
            clean = clean_batch(batch, policy.logp)
            if not algorithm.trains_policy:
                values = masked.clean(logp, batch.scale)
                token_loss, stats = algorithm.critic_loss(values, clean.returns, clean.returns * 0, clean)
                return masked.total(token_loss, batch.scale), stats
            out = algorithm.objective(policy, clean)
            return masked.total(out.loss, batch.scale), {**out.mean, **out.largest}

        self.program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    def rows(self, groups, shape=SHAPE, kl_coef=None):
        algorithm = self.algorithm
        return pack(
            groups,
            shape,
            1.0,
            aggregation=algorithm.aggregation,
            limit_tok=LIMIT_TOK,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
            unsplit_groups=algorithm.unsplit_groups,
        )

    def __call__(self, packed, logps, put=lambda x: x):
        """Return the total loss over the micro-batches, and d loss / d logp per sample, in the order of
        `packed.indices`."""
        batch = packed.batch
        logp = np.zeros(batch.tokens.shape, np.float32)
        flat = [at for group in packed.indices for at in group]
        for at, values in zip(flat, logps, strict=True):
            logp.reshape(-1)[at] = values
        # entropy and divergence are functions of the token too, so that they follow it through any packing
        entropy, divergence = np.abs(np.sin(3 * logp)), np.abs(np.cos(2 * logp))
        total, grads, stats = 0.0, np.zeros((3, *logp.shape)), []
        for m in range(batch.tokens.shape[0]):
            micro = dataclasses.replace(batch, **{n: a[m] for n, a in batch.arrays().items()})
            arrays = put((logp[m], entropy[m], divergence[m], micro))
            (value, found), grad = self.program(*arrays)
            total += float(value)
            grads[:, m] = np.asarray(grad)
            stats.append(found)
        return total, [packed.unpack(g) for g in grads], stats


def trained(algorithm, groups, e, logps, shape=SHAPE, *, algorithm_state=None, mask=None):
    """Return the loss, and its gradients in log-prob, entropy and divergence, `[3, T]` of each trajectory; 0 without a
    part.

    algorithm_state: from the previous step. mask: fewer tokens `[N, T]` than credit counts.
    """
    algorithm_state = algorithm_state or {}
    samples = samples_of(groups)
    place = {id(s.tokens): n for n, s in enumerate(s for group in samples for s in group)}
    credit = algorithm.credit(e, algorithm_state)
    if mask is not None:
        credit = dataclasses.replace(credit, mask=mask if credit.mask is None else mask & credit.mask)
    kept = apply_credit(algorithm.needs(), samples, e, credit)
    grads = [np.zeros((3, len(x))) for x in logps]
    if not kept:
        return 0.0, grads
    which = [place[id(s.tokens)] for group in kept for s in group]
    objective = _objective(algorithm)
    loss, found, _ = objective(objective.rows(kept, shape, algorithm_state.get("kl_coef")), [logps[n] for n in which])
    for n, *three in zip(which, *found, strict=True):
        grads[n] = np.stack(three)
    return loss, grads


_objective = functools.lru_cache(maxsize=None)(Objective)
