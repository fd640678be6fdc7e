"""Samples after another prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.sdpo import Sdpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape, Sample
from rolljax.trainer.contexts import in_context, solved_siblings
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.types import Key, Task, Trajectory, Turn
from tests.synthetic import groups_of


def test_the_first_other_solved_sibling():
    success = np.array([True, False, True, False, False, True, False])
    groups = np.array([0, 0, 0, 1, 1, 2, 2])
    assert solved_siblings(success, groups).tolist() == [2, 0, 0, -1, -1, -1, 5]


@pytest.mark.parametrize("context", ["solved_sibling", "next_prompt"])
def test_sampled_tokens_stay_and_the_prompt_changes(context):
    groups = groups_of(np.random.default_rng(0), 3, 2, rewards=[[1, 0], [0, 1], [0, 0]])
    flat = [t for group in groups for t in group]
    samples = [[Sample.of(t) for t in group] for group in groups]
    before = [s for group in samples for s in group]
    success, of_group = np.array([t.success for t in flat]), np.repeat(np.arange(3), 2)
    for n, (old, new) in enumerate(zip(before, in_context(samples, success, of_group, context), strict=True)):
        np.testing.assert_array_equal(new.tokens[new.indices], old.tokens[old.indices])
        own, rest = np.split(old.tokens, old.indices[:1])
        if context == "next_prompt":
            want = [flat[(n // 2 * 2 + 2) % 6].turns[0].prompt_ids, rest]
        else:
            shown = {1: before[0], 2: before[3]}.get(n)
            want = [*([shown.tokens] if shown else []), own, rest]
        np.testing.assert_array_equal(new.tokens, np.concatenate(want))


# ---- a policy that can copy, and does not know what is right --------------------------------------------------------

QUESTIONS, SYMBOLS, SIBLINGS = np.arange(65, 73), np.arange(97, 105), 8


def episode(group, sibling, answers, success, logp=0.0):
    """Return a trajectory that answers one question, once for each of `answers`."""
    prompt = np.array([QUESTIONS[group % 8], ord("?")], np.int32)
    none, sampled = np.zeros(1, np.int32), np.full(1, logp, np.float32)
    turns = tuple(Turn(prompt, SYMBOLS[[a]].astype(np.int32), sampled, none, "stop", 0.0, "") for a in answers)
    task = Task("toy", group, str(group))
    return Trajectory(Key(0, group, sibling), task, turns, float(success), {}, bool(success), "ok")


def phase(model, algorithm, lr, shape, groups, steps):
    mesh = MeshSpec().build(jax.devices()[:1])
    return PhaseTrainer(mesh, model, algorithm, AdamW(lr=lr), shape, steps, groups_per_step=groups)


@pytest.fixture(scope="module")
def copier(model, params):
    """Return weights that answer a question by any symbol, and a repeated one by the same symbol."""
    rng = np.random.default_rng(0)
    trainer = phase(model, Sft(), 2e-3, PackShape(4, 8, 16), groups=64, steps=150)
    state = trainer.states.init(jax.tree.map(jnp.copy, params))
    for step in range(150):
        groups = [[episode(q, 0, [a, a], True)] for q, a in enumerate(rng.integers(0, 8, 64))]
        state, _ = trainer.step(state, groups, {}, step)
    return state.params


def learned(trainer, reader, params, seed, *, shuffled, steps):
    """Return the probability of the right answers after each step. shuffled: any sibling counts as the solved one."""
    rng = np.random.default_rng(seed)
    right, state = rng.permutation(8), trainer.states.init(jax.tree.map(jnp.copy, params))
    every = [[episode(q, a, [a], False) for a in range(8)] for q in range(8)]
    samples, e = [[Sample.of(t) for t in group] for group in every], Episodes.of(every, limit_tok=1)
    found = []
    for step in range(steps + 1):
        logp = reader.compute_credit_inputs(state, reader.pack_samples(samples), e).trainer_logp.reshape(8, 8)
        found.append(float(np.exp(logp[np.arange(8), right]).mean()))
        groups = []
        for q in range(8):
            p = np.exp(logp[q])
            said = rng.choice(8, SIBLINGS, p=p / p.sum())
            solved = said == right[q]
            shown = rng.permutation(solved) if shuffled else solved
            groups.append([episode(q, s, [a], shown[s], logp[q, a]) for s, a in enumerate(said)])
        state, _ = trainer.step(state, groups, {}, step)
    return found


@pytest.mark.sweep
def test_a_policy_that_can_copy_teaches_itself(model, copier):
    """Three seeds. The control, with the same steps, marks as many siblings of each group as solved, but any."""
    trainer = phase(model, Sdpo(), 1e-3, PackShape(1, 8, 16), groups=8, steps=40)
    reader = dataclasses.replace(trainer, algorithm=Grpo(anchor="proximal"))
    for seed in range(3):
        taught, control = (
            learned(trainer, reader, copier, seed, shuffled=shuffled, steps=40) for shuffled in (False, True)
        )
        assert taught[0] < 0.15 and taught[-1] > 0.28 and control[-1] < 0.17
