"""Algorithms that must be the same thing, where theory says that they are: gradients in every log-prob, to 1e-6.

Both sides run the code that trains: credit, packing, objective (`tests/synthetic.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo, PairDpo
from rolljax.trainer.algorithms.dr_grpo import DrGrpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.algorithms.kimi import Kimi
from rolljax.trainer.algorithms.lite_ppo import LitePpo
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.raft import RaftPP
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.reinforce_pp import ReinforcePP
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.rloo import Rloo
from rolljax.trainer.algorithms.segment_reward import SegmentReward
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.credit import segments
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.trainer.critic import Critic
from tests.synthetic import LIMIT_TOK, episodes_of, groups_of, trained

GRPO = Grpo(aggregation="token-mean")
MEANS: dict[str, Any] = {"aggregation": "seq-mean-token-mean"}
NO_CLIP: dict[str, Any] = {"clip_low": None, "clip_high": None}
GROUP: dict[str, Any] = {"mean": "group", "std": "group"}
SUMS: dict[str, Any] = {"aggregation": "seq-mean-token-sum"}


# ---- batches --------------------------------------------------------------------------------------------------------


def with_rewards(*rewards, **layout):
    """Return a function that makes groups with these rewards."""
    return lambda rng: groups_of(rng, num_groups=4, group_size=len(rewards), rewards=[rewards] * 4, **layout)


def one_turn(rng):
    return groups_of(rng, max_turns=1)


def one_token(rng):
    return groups_of(rng, max_turns=1, max_said=2)


def one_group(rng):
    return groups_of(rng, num_groups=1, group_size=6)


def dense(rng):
    """Return groups with rewards in every turn."""
    out = []
    for group in groups_of(rng):
        members = []
        for t in group:
            rewards = [*rng.normal(0, 1, len(t.turns) - 1), t.turns[-1].reward]
            turns = tuple(dataclasses.replace(u, reward=float(r)) for u, r in zip(t.turns, rewards, strict=True))
            members.append(dataclasses.replace(t, turns=turns, reward=float(sum(rewards))))
        out.append(members)
    return out


def as_they_are(e):
    return e


def proximal_is_behaviour(e):
    return e if e.trainer_logp is None else dataclasses.replace(e, trainer_logp=e.sampler_logp)


def worthless(e):
    return e if e.values is None else dataclasses.replace(e, values=e.values * 0)


def alike(e):
    """Give all critics the values of the first."""
    return dataclasses.replace(e, values=np.broadcast_to(e.values[:1], e.values.shape))


def tokens_per_sequence_of(groups):
    every = [t.num_sampled_tok for group in groups for t in group]
    return sum(every) / (len(every) * LIMIT_TOK)


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Same:
    """`left` has `factor` times the gradient of `right`.

    moved: the policy is no longer the one that sampled. exact: equal to the last bit, the loss too.
    """

    left: Algorithm
    right: Algorithm
    moved: bool = False
    exact: bool = False
    factor: float | Callable[..., float] = 1.0
    groups: Callable[..., Any] = groups_of
    episodes: Callable[..., Any] = as_they_are


ON_POLICY = {
    "GRPO without a clip is REINFORCE": Same(Grpo(**NO_CLIP), Reinforce(**GROUP, **MEANS)),
    "GRPO inside its clip is REINFORCE": Same(GRPO, Reinforce(**GROUP)),
    "TIS is REINFORCE": Same(Tis(), Reinforce(**GROUP)),
    "TOPR is REINFORCE": Same(Topr(**GROUP), Reinforce(**GROUP, **SUMS)),
    "CISPO is REINFORCE": Same(Cispo(), Reinforce(**GROUP)),
    "Kimi is REINFORCE with the group's mean": Same(Kimi(), Reinforce(mean="group", **SUMS)),
    "GSPO is GRPO": Same(Gspo(), Grpo()),
    "RAFT++ on good answers is REINFORCE": Same(
        RaftPP(clip_high=None), Reinforce(**MEANS), groups=with_rewards(1.0, 0.5, 1.0, 2.0)
    ),
    "PPO without values is REINFORCE with the reward to go": Same(
        Ppo(gamma=1.0, lam=1.0, whiten=False, **NO_CLIP), TurnReinforce(gamma=1.0), groups=dense, episodes=worthless
    ),
    "PPO without values is REINFORCE": Same(
        Ppo(gamma=1.0, lam=1.0, whiten=False), Reinforce(), groups=one_turn, episodes=worthless
    ),
}
ALWAYS = {
    "DAPO with an even clip is GRPO": Same(
        Dapo(clip_high=0.2, shaping=None), dataclasses.replace(GRPO, filter=GroupFilter()), exact=True
    ),
    "OPD of weight 0 is RL": Same(
        Opd(teachers=(Teacher("run_start", 0.0),), reward_coef=1.0), Reinforce(**GROUP), exact=True
    ),
    **{
        f"{rhythm} rhythm of amplitude 1 is GRPO": Same(AttentionRhythm(rhythm=rhythm, amplify=1.0), Grpo(), exact=True)  # type: ignore[arg-type]
        for rhythm in ("local", "global", "coupled")
    },
    "segment rewards that must keep all is GRPO": Same(SegmentReward(min_keep=1.0), Grpo(), exact=True),
    "TOPR of good answers is vanilla": Same(
        Topr(), Reinforce(**SUMS), exact=True, groups=with_rewards(1.0, 0.5, 1.0, 2.0)
    ),
    "TOPR of single tokens is ROLL's": Same(Topr(), Topr(level="token"), groups=one_token),
    "Kimi's square of one token is its own": Same(Kimi(), Kimi(square="token"), groups=one_token),
    "turns divide as sequences where there is one": Same(
        ReBn(), ReBn(aggregation="seq-sum-norm"), exact=True, groups=one_turn
    ),
    "GSPO of single tokens is PPO's clip": Same(
        Gspo(clip_low=0.2, clip_high=0.2, aggregation="token-mean"), GRPO, groups=one_token
    ),
    "IPA of one chunk is TOPR of sequences": Same(
        Ipa(failure=-1.0, correction=None, anchor="behaviour"),
        SequenceTopr(aggregation="token-mean"),
        groups=with_rewards(1.0, -1.0, 0.5, -1.0, max_turns=1),
    ),
    "Dr. GRPO is GRPO without its divisors": Same(
        DrGrpo(), dataclasses.replace(GRPO, std="none"), factor=tokens_per_sequence_of
    ),
    "RLOO is the group's mean times G/(G-1)": Same(Rloo(), Reinforce(mean="group", **SUMS), factor=4 / 3),
    "decoupled PPO with one old policy is PPO's clip": Same(DecoupledPpo(), GRPO, episodes=proximal_is_behaviour),
    "CISPO without clips is TIS without a cap": Same(Cispo(**NO_CLIP), Tis(cap=1e9), exact=True),
    "PPO without clips weighs by the ratio": Same(Grpo(**NO_CLIP, aggregation="token-mean"), Tis(cap=1e9)),
    "Lite PPO of one group is GRPO": Same(LitePpo(), GRPO, exact=True, groups=one_group),
    "REINFORCE++ of one group, rewards first, is GRPO": Same(
        ReinforcePP(mean="batch", std="batch", whiten=False), GRPO, exact=True, groups=one_group
    ),
    "GiGPO without turns is GRPO": Same(GiGpo(turn_weight=0.0), GRPO, exact=True),
    "AsyPPO without masks is PPO": Same(
        AsyPpo(mask_frac=0.0, entropy_mask_frac=0.0),
        Ppo(critic=Critic(num=2), entropy_coef=0.01, whiten=False, aggregation="seq-mean-token-mean"),
    ),
    "two critics that agree are one": Same(Ppo(critic=Critic(num=2)), Ppo(), episodes=alike),
    "REINFORCE of turns is REINFORCE, if there is one": Same(TurnReinforce(), Reinforce(), exact=True, groups=one_turn),
    "turns of one length are equal": Same(
        TurnReinforce(equal_turns=True), TurnReinforce(), groups=lambda rng: groups_of(rng, max_said=2)
    ),
    "a correction without weights or filters is none": Same(
        Reinforce(correction=Correction(weight_cap=None)), Reinforce(), exact=True
    ),
    "recorded pairs are sampled pairs": Same(PairDpo(), Dpo(), exact=True, groups=with_rewards(1.0, -1.0)),
    "SFT is RFT on reference answers": Same(Sft(), Rft(), exact=True, groups=with_rewards(1.0)),
    "distillation has SFT in it": Same(
        Distill(teacher="run_start", cross_entropy=0.7), Sft(), factor=0.7, groups=with_rewards(1.0)
    ),
}
TABLE = ON_POLICY | {name: dataclasses.replace(same, moved=True) for name, same in ALWAYS.items()}


def policy(groups, seed, moved):
    """Return log-probs of every trajectory's tokens."""
    rng = np.random.default_rng(seed)
    told = [np.concatenate([turn.sampler_logp for turn in t.turns]) for group in groups for t in group]
    return [np.minimum(x + moved * rng.normal(0, 0.3, len(x)), -1e-3).astype(np.float32) for x in told]


def gradients(algorithm, groups, seed, change, logps, **options):
    e = change(episodes_of(np.random.default_rng(seed), groups, algorithm.needs()))
    return trained(algorithm, groups, e, logps, **options)


def close(left, right, factor=1.0, rel=1e-6):
    """Compare gradients in log-prob, relative to the largest."""
    largest = max(np.abs(g[0]).max() for g in right) * factor
    assert largest > 0
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a[0], factor * b[0], rtol=0, atol=rel * largest)


@pytest.mark.parametrize("name", TABLE)
def test_same(name):
    same = TABLE[name]
    for seed in range(3):
        groups = same.groups(np.random.default_rng(seed))
        logps = policy(groups, seed, same.moved)
        left = gradients(same.left, groups, seed, same.episodes, logps)
        change = as_they_are if same.episodes is alike else same.episodes
        right = gradients(same.right, groups, seed, change, logps)
        factor = same.factor(groups) if callable(same.factor) else same.factor
        close(left[1], right[1], factor)
        if same.exact:
            assert left[0] == right[0]
            for a, b in zip(left[1], right[1], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (GRPO, Reinforce(**GROUP)),
        (Dapo(shaping=None), dataclasses.replace(GRPO, filter=GroupFilter())),
        (GRPO, Grpo()),
        (Gspo(), GRPO),
        (Tis(), Cispo()),
        (AttentionRhythm(), Grpo()),
        (Ppo(), AsyPpo(entropy_coef=0.0, entropy_mask_frac=0.0)),
    ],
    ids=lambda a: type(a).__name__,
)
def test_different(left, right):
    """The comparison can tell algorithms apart: once the policy has moved, or with other settings, these differ."""
    groups = groups_of(np.random.default_rng(0))
    logps = policy(groups, 0, True)
    found = [gradients(a, groups, 0, as_they_are, logps)[1] for a in (left, right)]
    with pytest.raises(AssertionError):
        close(*found, rel=1e-3)


# ---- preferences ----------------------------------------------------------------------------------------------------


def test_a_segment_mask_of_ones_is_plain_dpo():
    algorithm = Dpo()
    groups = groups_of(np.random.default_rng(0))
    logps = policy(groups, 0, True)
    e = episodes_of(np.random.default_rng(0), groups, algorithm.needs())
    q = 0.1 * np.random.default_rng(1).normal(0, 1, e.mask.shape)
    signs = np.sign(e.rewards)
    whole = segments.agreement_mask(q, e.mask, signs, min_keep=1.0)
    part = segments.agreement_mask(q, e.mask, signs, min_keep=0.0)
    assert (whole == e.mask).all() and (part != e.mask).any()
    plain = trained(algorithm, groups, e, logps)
    masked = trained(algorithm, groups, e, logps, mask=whole)
    assert plain[0] == masked[0]
    for a, b in zip(masked[1], plain[1], strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(AssertionError):
        close(trained(algorithm, groups, e, logps, mask=part)[1], plain[1], rel=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_conservative_dpo_mixes_in_the_opposite_label(share):
    made = []
    for rewards in ((1.0, -1.0), (-1.0, 1.0)):
        groups = with_rewards(*rewards)(np.random.default_rng(0))
        logps = policy(groups, 0, True)
        made.append(groups)
    said, swapped = (gradients(Dpo(), groups, 0, as_they_are, logps) for groups in made)
    mixed = gradients(Dpo(label_smoothing=share), made[0], 0, as_they_are, logps)
    want = [(1 - share) * a + share * b for a, b in zip(said[1], swapped[1], strict=True)]
    close(mixed[1], want)
    assert mixed[0] == pytest.approx((1 - share) * said[0] + share * swapped[0], rel=1e-6)


def test_distillation_is_linear_in_its_coefficient():
    """In the divergence, `coef` times what cross-entropy has in the log-prob."""
    groups = with_rewards(1.0)(np.random.default_rng(0))
    logps = policy(groups, 0, True)
    _, plain = gradients(Sft(), groups, 0, as_they_are, logps)
    for coef in (0.5, 2.0):
        _, both = gradients(Distill(teacher="run_start", coef=coef), groups, 0, as_they_are, logps)
        for a, b in zip(both, plain, strict=True):
            np.testing.assert_allclose(a[2], -coef * b[0], rtol=1e-6)


def test_the_entropy_bonus_is_the_same_for_both_ppos():
    groups = groups_of(np.random.default_rng(0))
    logps = policy(groups, 0, True)
    two = Critic(num=2)
    _, left = gradients(AsyPpo(mask_frac=0.0, entropy_mask_frac=0.0, critic=two), groups, 0, as_they_are, logps)
    ppo = Ppo(critic=two, entropy_coef=0.01, aggregation="seq-mean-token-mean")
    _, right = gradients(ppo, groups, 0, as_they_are, logps)
    for a, b in zip(left, right, strict=True):
        assert (a[1] < 0).all()
        np.testing.assert_array_equal(a[1], b[1])
