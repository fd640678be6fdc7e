"""IPA against its paper (arXiv 2512.24873) and its authors' code (github.com/alibaba/ROLL), in addition to our float64 reference.

ROLL knows chunks as runs of ones in the mask of sampled tokens; rolljax as turns. The functions here go by the runs:

- returns: `compute_agentic_reinforce_return` in roll/pipeline/agentic/utils.py. From the last run to the first, a run's
  return is the reward on its last token plus gamma times the return of the run behind it; all of its tokens have it.
- ratios: `compute_segment_masked_mean` in the same file. The mean of the log ratio over a run; its exponential is the
  geometric mean of the paper's eq. 8.
- the filter: `train_infer_correction` of examples/agentic_demo/openreward_endless_terminals_IPA_qwen35_2b.yaml, a
  contributor's, in the history at 53fce5a: a run takes part up to a ratio of 5. The paper's H has no number.
- the loss: `pg_variant: topr` of roll/pipeline/agentic/agentic_actor_pg_worker.py is eq. 9 without a filter: no ratio
  where the outcome is positive, the ratio cut at 1 where it is not. (That file asks for an `ipa_chunk`, which ROLL does
  not have.)
"""

import dataclasses

import numpy as np
import pytest

from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import Expert, Key, Task, Trajectory, Turn
from tests.reference import algorithms as ref
from tests.synthetic import trained

GAMMA, LIMIT = 0.95, 5.0
"""step_reward_gamma and ratio_high of that file."""


def runs(sampled):
    """Return the first and last token of every run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sampled.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2] - 1, strict=True))


def run_returns(rewards, sampled, gamma):
    out, behind = np.zeros(len(sampled)), 0.0
    for first, last in reversed(runs(sampled)):
        behind = rewards[last] + gamma * behind
        out[first : last + 1] = behind
    return out


def run_means(values, sampled):
    out = np.zeros(len(sampled))
    for first, last in runs(sampled):
        out[first : last + 1] = values[first : last + 1].mean()
    return out


def episodes_of_runs(rng, outcomes):
    """Return one trajectory per outcome: turns of 1 to 4 tokens with an observation of 1 to 3 before each."""
    trajectories = []
    for n, outcome in enumerate(outcomes):
        turns = []
        for _ in range(rng.integers(2, 5)):
            said, seen = rng.integers(1, 5), rng.integers(1, 4)
            tokens = [rng.integers(0, 99, k).astype(np.int32) for k in (seen, said)]
            logp = (-rng.exponential(1.0, said) - 0.1).astype(np.float32)
            turns.append(Turn(tokens[0], tokens[1], logp, np.zeros(said, np.int32), "stop", 0.0, ""))
        turns[-1] = dataclasses.replace(turns[-1], reward=float(outcome))
        key = Key(0, 0, n)
        trajectories.append(Trajectory(key, Task("toy", 0, ""), tuple(turns), float(outcome), {}, outcome > 0, "ok"))
    return trajectories


@pytest.mark.parametrize("failure", [0.0, -1.0])
def test_the_gradient_is_that_of_eq_9_over_runs(failure):
    rng = np.random.default_rng(5)
    every = episodes_of_runs(rng, [1, 0, 1, 0, 0])
    groups = [[t] for t in every]
    e = Episodes.of(groups, limit_tok=4)
    gap = np.where(rng.random(e.mask.shape) < 0.3, 2.5, 0.0) + rng.normal(0, 0.3, e.mask.shape)
    trainer = (e.sampler_logp + gap).astype(np.float32).astype(float)
    e = dataclasses.replace(e, trainer_logp=trainer)
    now = [(trainer[n, : t.num_sampled_tok] + rng.normal(0, 0.4, t.num_sampled_tok)) for n, t in enumerate(every)]
    now = [x.astype(np.float32) for x in now]
    _, grads = trained(Ipa(failure=failure), groups, e, now)

    tokens, left_out, tapered = e.mask.sum(), 0, 0
    for n, t in enumerate(every):
        _, sampled, behaviour = t.stream()
        old, new, reward = np.zeros(len(sampled)), np.zeros(len(sampled)), np.zeros(len(sampled))
        old[sampled], new[sampled] = trainer[n, : sampled.sum()], now[n]
        reward[np.flatnonzero(sampled)[-1]] = t.reward if t.reward > 0 else failure
        weight = np.exp(run_means(new - old, sampled)) if t.reward <= 0 else np.ones(len(sampled))
        takes_part = np.exp(run_means(old - behaviour, sampled)) <= LIMIT
        c = np.minimum(weight, 1) * takes_part * run_returns(reward, sampled, GAMMA)
        left_out, tapered = left_out + (~takes_part[sampled]).sum(), tapered + (weight[sampled] < 1).sum()
        np.testing.assert_allclose(grads[n][0], -c[sampled] / tokens, rtol=1e-5, atol=1e-8)
    assert left_out and tapered


def test_returns_over_runs_are_those_of_the_twin():
    """Eq. 7, with the paper's Delta the chunks from k to the last one."""
    sampled = np.array([1, 1, 0, 1, 1, 1, 0, 0, 1], bool)
    reward = np.eye(9)[8]
    want = ref.discounted_outcomes(1.0, 3, GAMMA)
    np.testing.assert_allclose(run_returns(reward, sampled, GAMMA)[sampled], np.repeat(want, [2, 3, 1]), rtol=1e-12)


def test_the_defaults_are_those_that_were_published():
    """Failures teach nothing (ipa_failure_reward is empty; the paper's R only gives positive feedback), H and gamma."""
    ipa = Ipa()
    assert (ipa.failure, ipa.gamma, ipa.correction.level, ipa.correction.ratio_band) == (
        0,
        GAMMA,
        "turn",
        (0, LIMIT),
    )
    assert ipa.correction.weight_cap is None and not ipa.whiten and ipa.kl is None and not ipa.entropy_coef
    for name, stated in Ipa.paper.items():
        assert (getattr(ipa, name) == stated.value) == (not stated.why), name


# ---- eq. 10: the expert's chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [3, 5, 8])
def test_an_experts_chunks_are_discounted_to_the_experts_end(own):
    """K* = 5: c*_1 and c*_2 have gamma^4 and gamma^3, in an episode that ends sooner or later than the expert's too."""
    (t,) = episodes_of_runs(np.random.default_rng(0), [0])
    replayed = [dataclasses.replace(turn, versions=turn.versions - 1) for turn in t.turns[:2]]
    fresh = [dataclasses.replace(t.turns[0], reward=0.0)] * (own - 2)
    t = dataclasses.replace(t, turns=(*replayed, *fresh), expert=Expert("e", 5))
    e = Episodes.of([[t]], limit_tok=4)
    found = Ipa().advantages(e, e.rewards, {})
    for k, want in enumerate((GAMMA**4, GAMMA**3)):
        np.testing.assert_allclose(found[0][e.turns[0] == k], want, rtol=1e-12)
    assert (found[0][e.turns[0] >= 2] == 0).all()
