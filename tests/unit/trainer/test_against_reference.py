"""Every algorithm against the independent reference (`tests/reference`), on random batches.

Here: trajectories -> credit -> packed rows -> objective -> loss and its gradient in every log-prob, in float32, by the
code that trains. There: the formulas, in float64, one sequence at a time. Where a formula can be read in more than one
way, the options given to the reference say which one is meant.
"""

import dataclasses
import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rolljax.model.decoder import Out
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo, PairDpo
from rolljax.trainer.algorithms.dppo import Dppo
from rolljax.trainer.algorithms.dr_grpo import DrGrpo
from rolljax.trainer.algorithms.gdpo import Gdpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.algorithms.kimi import Kimi
from rolljax.trainer.algorithms.kto import Kto, PairKto
from rolljax.trainer.algorithms.lite_ppo import LitePpo
from rolljax.trainer.algorithms.maxrl import MaxRl
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.raft import RaftPP
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rolljax.trainer.algorithms.reward_model import PairRewardModel, RewardModel
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.rloo import Rloo
from rolljax.trainer.algorithms.sdpo import Sdpo
from rolljax.trainer.algorithms.segment_reward import SegmentDpo, SegmentPairDpo, SegmentPpo, SegmentReward, SegmentRft
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.algorithms.spiral import Spiral
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.batch import PackShape
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.critic import Critic
from rolljax.trainer.kl import AdaptiveKl, KlLoss, KlReward
from rolljax.trainer.update import critic_loss, policy_loss
from rolljax.types import Expert, Key, Task, Trajectory, Turn
from tests.reference import algorithms as ref
from tests.synthetic import CLASSES, LIMIT_TOK, Objective, Raised, samples_of, trained

ROWS = PackShape(2, 4, 96)
REWARDS = {
    "binary": (0.0, 1.0),
    "signed": (-1.0, 1.0),
    "graded": (-0.5, 0.25, 0.75, 1.5, 2.0),
    "equal": (0.75,),
}  # sums are exact, so that what is equal is equal on both sides
WORDS = ("the", "answer", "is", "forty", "two", "so")


# ---- random batches -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """The shape of a random batch: upper bounds of all sizes; the seed draws the rest."""

    seed: int
    num_groups: int
    siblings: int
    turns: int
    said: int
    rewards: str

    def rng(self):
        return np.random.default_rng(self.seed)

    def groups(self, size=None, replay=False):
        """Return trajectories with ties in rewards, truncated ones, equal observations, near-equal texts, turns of
        weight 0.

        size: siblings of every group. replay: some trajectories start with replayed turns.
        """
        rng = self.rng()
        seen = [rng.integers(0, 99, n).astype(np.int32) for n in (1, 2, 2)]
        groups = []
        for g in range(self.num_groups):
            prompt = rng.integers(0, 99, rng.integers(1, 6)).astype(np.int32)
            num = size or rng.integers(1, self.siblings + 1)
            groups.append([self._trajectory(rng, g, s, prompt, seen, replay) for s in range(num)])
        return groups

    def _trajectory(self, rng, group, sibling, prompt, seen, replay):
        reward = float(rng.choice(REWARDS[self.rewards]))
        num = int(rng.integers(1, self.turns + 1))
        replayed = int(rng.integers(0, num + 1)) if replay else 0
        cut = rng.random() < 0.3
        parts = [float(x) for x in rng.choice([0.0, 0.0, 0.25, -0.1], num - 1)]
        turns = []
        for k, part in enumerate([*parts, reward - sum(parts)]):
            said = int(rng.integers(1, self.said + 1))
            turns.append(
                Turn(
                    prompt_ids=prompt if k == 0 else seen[rng.integers(len(seen))],
                    tokens=rng.integers(0, 99, said).astype(np.int32),
                    sampler_logp=(-rng.exponential(1.5, said) - 0.01).astype(np.float32),
                    versions=np.full(said, -1 if k < replayed else 0, np.int32),
                    finish_reason="length" if cut and k == 0 else "stop",
                    reward=part,
                    text=" ".join(rng.choice(WORDS, 3)),
                    weight=float(rng.choice([1.0, 1.0, 0.5, 0.0])),
                )
            )
        key, task = Key(0, group, sibling), Task(str(rng.choice(["toy", "other"])), group, f"task {group}")
        expert = Expert("e", replayed + int(rng.integers(0, 4))) if replay else None
        named = {"right": float(reward > 0), "form": float(rng.choice([0.0, 0.5, 1.0]))}
        status = "truncated" if cut else "ok"
        return Trajectory(key, task, tuple(turns), reward, named, reward > 0, status, expert=expert)

    def near(self, logp, scale, salt):
        """Return log-probs of another policy, as float32 numbers so that both sides get the same."""
        rng = np.random.default_rng([self.seed, salt])
        return np.minimum(logp + rng.normal(0, scale, logp.shape), -1e-3).astype(np.float32).astype(np.float64)

    def episodes(self, groups, needs):
        """Return episodes with all arrays that the algorithm needs."""
        e = Episodes.of(groups, limit_tok=LIMIT_TOK)
        rng = np.random.default_rng([self.seed, 1])
        asked = {}
        if needs.trainer_logp:
            asked["trainer_logp"] = self.near(e.sampler_logp, 0.2, 2)
        if needs.ref:
            asked["ref_logp"] = self.near(e.sampler_logp, 0.4, 3)
        if needs.scorer:
            asked["scorer_logp"] = self.near(e.sampler_logp, 0.8, 4)
        if needs.teachers:
            asked["teacher_logp"] = np.stack(
                [self.near(e.sampler_logp, 0.8, 5 + i) for i in range(len(needs.teachers))]
            )
        if needs.context:
            asked["context_logp"] = self.near(e.sampler_logp, 0.6, 11)
            if needs.ref:
                asked["context_ref_logp"] = self.near(e.sampler_logp, 0.9, 12)
        if needs.critics:
            asked["values"] = rng.normal(0, 0.5, (needs.critics.num, *e.mask.shape)).astype(np.float32).astype(float)
        if needs.attention:  # rounded: ties
            asked |= {n: rng.exponential(1, e.mask.shape).round(1) for n in ("waad", "fai")}
        return dataclasses.replace(e, **asked)


worlds = st.builds(
    World,
    seed=st.integers(0, 2**31),
    num_groups=st.integers(1, 4),
    siblings=st.integers(2, 4),
    turns=st.integers(1, 3),
    said=st.integers(1, 6),
    rewards=st.sampled_from(sorted(REWARDS)),
)
RICH = [World(seed, 4, 4, 3, 6, rewards) for seed, rewards in enumerate(("graded", "binary", "signed", "graded"))]


def on_worlds(compare, num):
    """Call `compare(world)` for the batches of `RICH`, and for `num` that hypothesis generates."""
    for world in RICH:
        compare = example(world=world)(compare)
    settings(max_examples=num)(given(world=worlds)(compare))()


TOKENS = (
    "sampler_logp",
    "trainer_logp",
    "ref_logp",
    "scorer_logp",
    "context_logp",
    "context_ref_logp",
    "waad",
    "fai",
)


def told(groups, e, logps, algorithm):
    """Convert the batch to the reference's format."""
    flat = [t for group in groups for t in group]
    teachers = getattr(algorithm, "teachers", ())
    out = []
    for n, t in enumerate(flat):
        start, turns = 0, []
        for turn in t.turns:
            part = slice(start, start + len(turn.tokens))
            start = part.stop
            made = {"logp": logps[n][part].tolist(), "reward": turn.reward, "weight": turn.weight}
            made["state"] = tuple(turn.prompt_ids.tolist())
            made |= {name: getattr(e, name)[n, part].tolist() for name in TOKENS if getattr(e, name) is not None}
            for name in ("values", "teacher_logp"):
                if getattr(e, name) is not None:
                    made[name] = [row[n, part].tolist() for row in getattr(e, name)]
            turns.append(made)
        out.append(
            {
                "group": int(e.groups[n]),
                "reward": t.reward,
                "parts": t.reward_parts,
                "domain": t.task.env,
                "turns": turns,
                "truncated": any(turn.finish_reason != "stop" for turn in t.turns),
                "success": t.success,
                "text": "\n".join(turn.text for turn in t.turns),
                "teachers": [not x.domains or t.task.env in x.domains for x in teachers],
                "expert_turns": sum(int(turn.versions[0] < 0) for turn in t.turns),
                **({"expert_length": t.expert.turns} if t.expert else {}),
            }
        )
    return out


def moved(world, groups, e, algorithm):
    """Return log-probs of a policy away from the anchor, `[T]` of each trajectory."""
    start = e.sampler_logp if getattr(algorithm, "anchor", "") != "proximal" else e.trainer_logp
    logps = world.near(start, 0.3, 99).astype(np.float32)
    return [logps[n, : t.num_sampled_tok] for n, t in enumerate(t for group in groups for t in group)]


def agree(loss, grad, want, rel=1e-5):
    """Compare gradients to `rel` of the largest one, losses to `rel` of the summed sizes. Return that largest
    gradient."""
    largest = max((abs(g) for row in want.grad for g in row), default=0.0)
    sizes = sum(abs(g) for row in want.grad for g in row)
    assert loss == pytest.approx(want.loss, abs=rel * (abs(want.loss) + sizes) + 1e-6)
    for n, (got, row) in enumerate(zip(grad, want.grad, strict=True)):
        np.testing.assert_allclose(got, row, rtol=0, atol=rel * largest + 1e-12, err_msg=f"trajectory {n}")
    return largest


# ---- readings of the reference --------------------------------------------------------------------------------------


def with_rewards(algorithm, change, **options):
    """Return the reference with other rewards: `change(episodes) -> list of rewards`. The last turn gets the
    difference."""

    def changed(episodes):
        out = []
        for one, reward in zip(episodes, change(episodes), strict=True):
            last = one["turns"][-1]
            turns = [*one["turns"][:-1], {**last, "reward": last["reward"] + reward - one["reward"]}]
            out.append({**one, "reward": reward, "turns": turns})
        return algorithm(out, **options)

    return changed


def split_by(name, algorithm, **options):
    """Return the reference with finer groups: members with the same value of a part of the reward."""

    def split(episodes):
        names = sorted({(one["group"], one["parts"][name]) for one in episodes})
        return algorithm(
            [{**one, "group": names.index((one["group"], one["parts"][name]))} for one in episodes], **options
        )

    return split


def without(algorithm, left_out, **options):
    """Return the reference on a part of the batch; the others have no loss."""

    def part(episodes):
        inside = [n for n, one in enumerate(episodes) if not left_out(one)]
        if not inside:
            return ref.Result(0.0, ref.like(episodes, 0.0), ref.like(episodes, 0.0))
        got = algorithm([episodes[n] for n in inside], **options)
        grad, advantages = ref.like(episodes, 0.0), ref.like(episodes, 0.0)
        for n, row, a in zip(inside, got.grad, got.advantages, strict=True):
            grad[n], advantages[n] = row, a
        return ref.Result(got.loss, grad, advantages)

    return part


def punished(episodes):
    return [one["reward"] + ref.overlong(ref.longest_answer(one), LIMIT_TOK, 8) for one in episodes]


def per_turn(algorithm, **options):
    """Return the reference of `turn-sum-norm`: divided by all turns times the longest allowed answer."""

    def constant(episodes):
        return algorithm(episodes, constant=float(sum(len(one["turns"]) for one in episodes) * LIMIT_TOK), **options)

    return constant


def without_cut_turns(algorithm):
    """Return the reference without the loss of the first turn of a truncated episode, the one that was cut
    (`World`)."""

    def part(episodes, **options):
        whole = [[float(k > 0 or not one["truncated"]) for k in ref.turn_ids(one)] for one in episodes]
        return algorithm(episodes, multiply=whole, **options)

    return part


def short(episodes):
    """Return rewards with half of Kimi's length reward."""
    lengths = [ref.length(one) for one in episodes]
    extra = ref.length_reward(lengths, [x["success"] for x in episodes], [x["group"] for x in episodes])
    return [one["reward"] + 0.5 * x for one, x in zip(episodes, extra, strict=True)]


def raised(episodes):
    return [one["reward"] + 1 for one in episodes]


def weighed(algorithm, **options):
    """Weigh every episode by `.5 + 1.5 unsolved` times `1.5 - length`, on average 1."""

    def with_weights(episodes):
        groups = [one["group"] for one in episodes]
        solved = [float(one["success"]) for one in episodes]
        unsolved = [1 - ref.mean([x for x, h in zip(solved, groups, strict=True) if h == g]) for g in groups]
        lengths = [float(ref.length(one)) for one in episodes]
        width = max(lengths) - min(lengths) or 1.0
        scaled = [(x - min(lengths)) / width for x in lengths]
        weights = ref.sample_weights(len(episodes), unsolved, scaled)
        return algorithm([{**one, "weight": w} for one, w in zip(episodes, weights, strict=True)], **options)

    return with_weights


def too_long(one):
    """Return whether an episode is unsolved with 6 tokens or more, or solved with 9 or more."""
    return ref.length(one) >= (9 if one["success"] else 6)


def whitened_without_degenerate(episodes):
    flat = ref.degenerate([one["reward"] for one in episodes], [one["group"] for one in episodes])
    marked = [{**one, "flat": x} for one, x in zip(episodes, flat, strict=True)]
    return without(ref.grpo, lambda one: one["flat"], **TOKEN_MEAN, whitened=True)(marked)


def sampled_only(episodes):
    return [[k >= one["expert_turns"] for k in ref.turn_ids(one)] for one in episodes]


def as_if_only_sampled(algorithm, **options):
    """Return the reference on the episodes without their replayed turns, which have no loss."""

    def rest(episodes):
        got = algorithm([{**one, "turns": one["turns"][one["expert_turns"] :]} for one in episodes], **options)
        missing = [[0.0] * (ref.length(one) - len(row)) for one, row in zip(episodes, got.grad, strict=True)]
        return got._replace(grad=[gap + row for gap, row in zip(missing, got.grad, strict=True)])

    return rest


def segment_reward(episodes):
    """Compute GRPO with `A_t <- M_t A_t`."""
    base = [{**one, "turns": [{**t, "ref_logp": t["teacher_logp"][0]} for t in one["turns"]]} for one in episodes]
    scores = ref.normalise([one["reward"] for one in base], [one["group"] for one in base])
    settings = {"min_len": 3, "min_keep": 0.2, "smooth": 3, "smoother": "median", "means_of": "raw"}
    signs = [ref.sign(round(x, 9)) for x in scores]
    masks = ref.agreement([ref.token_rewards(one) for one in base], signs, **settings)
    gammas = [[float(m) for m in row] for row in masks]
    return ref.grpo(base, gammas=gammas)


def reward_model(episodes):
    """Compute the loss of pairs whose scores are the values of the two last tokens."""
    scored = [{**one, "turns": [{**t, "ref_logp": [0.0] * len(t["logp"])} for t in one["turns"]]} for one in episodes]
    last = [[t == ref.length(one) - 1 for t in range(ref.length(one))] for one in scored]
    pairs = None if "pairs" not in episodes[0] else [(n, n + 1) for n in range(0, len(episodes), 2)]
    return ref.dpo(scored, beta=1.0, masks=last, pairs=pairs)


def recorded(algorithm, **options):
    """Return the reference on pairs: first the chosen one, then the rejected one."""

    def paired(episodes):
        if algorithm is reward_model:
            return reward_model([{**one, "pairs": True} for one in episodes])
        return algorithm(episodes, pairs=[(n, n + 1) for n in range(0, len(episodes), 2)], **options)

    return paired


def unweighted(one):
    return {**one, "turns": [{**turn, "weight": 1.0} for turn in one["turns"]]}


def outcome_of_chunks(one):
    return one["reward"] if one["reward"] > 0 else -0.5


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    algorithm: object
    reference: object
    size: int | None = None
    replay: bool = False
    has_signal: int = len(RICH)
    """Batches that at least must have a gradient."""


TOKEN_MEAN = {"aggregation": "token-mean"}
GRPO = {"aggregation": "seq-mean-token-mean"}
MEANS = {"centre": "group", "scale": "group"}
ALL_FILTERS = {"weight_cap": 1.1, "ratio_band": (0.8, 1.25), "prob_band": (-0.15, 0.15)}
PROXIMAL = {"anchor": "trainer_logp"}
TEACHERS = (Teacher("run_start", 0.7), Teacher("phase_start", 0.5, ("toy",)))
FAR = (Teacher("run_start", 0.7, ("toy",)),)


def corrected(level):
    reference = partial(ref.grpo, **GRPO, **PROXIMAL, correction={"level": level, **ALL_FILTERS})
    return Case(Grpo(anchor="proximal", correction=Correction(level, **ALL_FILTERS)), reference)


CASES = {
    # REINFORCE and relatives
    "Reinforce": Case(Reinforce(), ref.reinforce),
    "Reinforce, baselines and sums": Case(
        Reinforce(mean="batch", aggregation="seq-mean-token-sum"),
        partial(ref.reinforce, baseline="batch", aggregation="seq-mean-token-sum"),
    ),
    "Reinforce, kl in the reward": Case(
        Reinforce(mean="group", kl=KlReward(0.3, estimator="k3")),
        partial(ref.reinforce, baseline="group", kl_reward=0.3, kl_reward_kind="k3"),
    ),
    "Reinforce, corrected": Case(
        Reinforce(correction=Correction("geometric", weight_cap=1.05), kl=KlReward(0.2, estimator="abs")),
        partial(
            ref.reinforce,
            correction={"level": "geometric", "weight_cap": 1.05},
            kl_reward=0.2,
            kl_reward_kind="abs",
            kl_reward_logp="trainer_logp",
        ),
    ),
    "Rloo": Case(Rloo(), ref.rloo),
    "ReinforcePP": Case(ReinforcePP(kl=KlReward(0.1)), partial(ref.reinforce_pp, kl_reward=0.1)),
    "ReinforcePP, as in ROLL": Case(
        ReinforcePP(shaping=RewardShaping(clip=0.9), kl=KlReward(0.1), mean="batch", std="batch", whiten=False),
        partial(ref.reinforce_pp, variant="rewards", kl_reward=0.1, reward_clip=0.9),
    ),
    "ReinforcePPBaseline": Case(ReinforcePPBaseline(), partial(ref.reinforce_pp, variant="baseline")),
    # GRPO and its options
    "Grpo": Case(Grpo(), partial(ref.grpo, **GRPO)),
    "Grpo, with its paper's KL term": Case(Grpo(kl=KlLoss(0.04)), partial(ref.grpo, kl_loss=0.04)),
    "Grpo, token mean of groups that teach": Case(
        Grpo(aggregation="token-mean", filter=GroupFilter()), partial(ref.grpo, **TOKEN_MEAN, drop_degenerate=True)
    ),
    "Grpo, sums": Case(
        Grpo(aggregation="seq-mean-token-sum", clip_low=None),
        partial(ref.grpo, aggregation="seq-mean-token-sum", clip_low=None),
    ),
    "Grpo, dual clip": Case(Grpo(dual_clip=1.25), partial(ref.grpo, **GRPO, dual=1.25)),
    "Grpo, clipped rewards": Case(
        Grpo(
            advantage_clip=0.8,
            mean="batch",
            std="none",
            filter=GroupFilter(drop_degenerate=False, solve_range=(-0.6, 0.8)),
            shaping=RewardShaping(clip=0.9),
        ),
        partial(
            ref.grpo, **GRPO, reward_clip=0.9, advantage_clip=0.8, centre="batch", scale="none", difficulty=(-0.6, 0.8)
        ),
    ),
    "Grpo, short answers": Case(Grpo(shaping=RewardShaping(length_reward=0.5)), with_rewards(ref.grpo, short, **GRPO)),
    "Grpo, long answers left out": Case(
        Grpo(wrong_max_tok=6, right_max_tok=9, mean="none", std="none"),
        without(ref.grpo, too_long, **GRPO, centre="none", scale="none"),
    ),
    "Grpo, weighed": Case(Grpo(difficulty_weight=True, length_weight=True), weighed(ref.grpo, **GRPO)),
    "Grpo, split groups": Case(Grpo(split_by="form"), split_by("form", ref.grpo, **GRPO)),
    "Grpo, cross-entropy of what was rewarded": Case(Grpo(sft_coef=0.3), partial(ref.grpo, **GRPO, sft=0.3)),
    "Grpo, two corrections": Case(
        Grpo(
            anchor="proximal", correction=Correction(**ALL_FILTERS, also=(Correction("trajectory", None, (0.7, 1.5)),))
        ),
        partial(
            ref.grpo,
            **GRPO,
            **PROXIMAL,
            correction={
                **ALL_FILTERS,
                "also": ({"level": "trajectory", "weight_cap": None, "ratio_band": (0.7, 1.5)},),
            },
        ),
    ),
    "Grpo, whitened": Case(
        Grpo(aggregation="token-mean", whiten=True, advantage_clip=1.0),
        partial(ref.grpo, **TOKEN_MEAN, whitened=True, advantage_clip=1.0),
    ),
    "Grpo, whitened over what is kept": Case(
        Grpo(aggregation="token-mean", whiten=True, filter=GroupFilter()), whitened_without_degenerate
    ),
    "Grpo, truncated left out": Case(
        Grpo(mask_truncated=True, kl=KlLoss(0.2, estimator="k2")),
        partial(ref.grpo, **GRPO, drop_truncated=True, kl_loss=0.2, kl_kind="k2"),
    ),
    "Grpo, replayed turns": Case(
        Grpo(aggregation="token-mean"),
        lambda episodes: ref.grpo(episodes, **TOKEN_MEAN, counted=sampled_only(episodes)),
        replay=True,
    ),
    "Grpo, replayed turns and a correction": Case(
        Grpo(aggregation="token-mean", anchor="proximal", correction=Correction("trajectory", **ALL_FILTERS)),
        as_if_only_sampled(ref.grpo, **TOKEN_MEAN, **PROXIMAL, correction={"level": "trajectory", **ALL_FILTERS}),
        replay=True,
    ),
    "Grpo, corrected by token": corrected("token"),
    "Grpo, corrected by turn": corrected("turn"),
    "Grpo, corrected by geometric mean": corrected("geometric"),
    "Grpo, corrected by trajectory": corrected("trajectory"),
    "DrGrpo": Case(DrGrpo(), partial(ref.dr_grpo, max_tokens=LIMIT_TOK)),
    "MaxRl": Case(MaxRl(shaping=Raised(clip=99.0)), with_rewards(ref.outcome, raised, scale="group_mean")),
    "Gdpo": Case(
        Gdpo(parts=("right", "form"), part_weights=(1.0, 0.3)), partial(ref.gdpo, weights={"right": 1.0, "form": 0.3})
    ),
    "Gdpo, of one reward": Case(Gdpo(), partial(ref.outcome, whitened=True)),
    "RaftPP": Case(RaftPP(), without(ref.raft_pp, lambda one: one["reward"] <= 0)),
    "Dapo": Case(Dapo(shaping=RewardShaping(overlong_cache=8)), partial(ref.dapo, limit=LIMIT_TOK, cache=8)),
    "Gspo": Case(Gspo(), ref.gspo),
    "Gspo, wide and filtered": Case(
        Gspo(clip_low=0.1, clip_high=0.1, anchor="proximal", correction=Correction("token", None, (0.8, 1.25))),
        partial(
            ref.gspo,
            **PROXIMAL,
            clip_low=0.1,
            clip_high=0.1,
            ratio_over="valid",
            correction={"level": "token", "weight_cap": None, "ratio_band": (0.8, 1.25)},
        ),
    ),
    "LitePpo": Case(LitePpo(), ref.lite_ppo),
    "LitePpo, flat batches left out": Case(LitePpo(min_std=0.8), partial(ref.lite_ppo, min_std=0.8), has_signal=2),
    # other weights of the ratio
    "Tis": Case(Tis(cap=1.1, kl=KlLoss(0.1, estimator="k2")), partial(ref.tis, cap=1.1, kl_loss=0.1, kl_kind="k2")),
    "Cispo": Case(Cispo(kl=KlLoss(0.1)), partial(ref.cispo, clip_low=None, clip_high=0.28, kl_loss=0.1)),
    "Cispo, unified mask": Case(
        Cispo(clip_low=0.1, clip_high=0.1, unified_mask=True), partial(ref.cispo, unified_mask=True)
    ),
    "Dppo": Case(Dppo(), partial(ref.dppo, max_tokens=LIMIT_TOK)),
    "Dppo, as in prime-rl": Case(
        Dppo(square_coef=0.1, cap=1.1, mask_low=None),
        partial(ref.dppo, max_tokens=LIMIT_TOK, square=0.1, cap=1.1, mask_low=math.inf),
    ),
    "Dppo, by KL divergence": Case(
        Dppo(divergence="kl", mask_low=0.02, mask_high=0.01, aggregation="token-mean"),
        partial(ref.dppo, max_tokens=1, **TOKEN_MEAN, divergence="kl", mask_low=0.02, mask_high=0.01),
    ),
    "Topr": Case(Topr(), ref.topr),
    "Topr, with a baseline": Case(Topr(mean="group", std="group"), partial(ref.topr, **MEANS)),
    "Topr, weighted, as in ROLL": Case(
        Topr(level="token", positive=0.5, negative=2.0), partial(ref.topr, level="token", positive=0.5, negative=2.0)
    ),
    "SequenceTopr": Case(SequenceTopr(), partial(ref.topr, level="geometric")),
    "DecoupledPpo": Case(DecoupledPpo(), partial(ref.decoupled_ppo, weight_cap=2.0)),
    "Kimi": Case(Kimi(), ref.kimi),
    "Kimi, as in ROLL": Case(
        Kimi(square="token", aggregation="token-mean"), partial(ref.kimi, square="token", aggregation="token-mean")
    ),
    # turns
    "TurnReinforce": Case(
        TurnReinforce(shaping=RewardShaping(overlong_cache=8)), with_rewards(ref.turn_reinforce, punished)
    ),
    "TurnReinforce, equal turns": Case(
        TurnReinforce(equal_turns=True), partial(ref.turn_reinforce, aggregation="seq-mean-token-mean")
    ),
    "TurnReinforce, equal turns without the truncated": Case(
        TurnReinforce(equal_turns=True, mask_truncated=True),
        partial(ref.turn_reinforce, aggregation="seq-mean-token-mean", drop_truncated=True),
    ),
    "Spiral": Case(Spiral(), ref.spiral),
    "Spiral, one baseline": Case(
        Spiral(by_role=False, decay=0.7), partial(ref.spiral, roles=("both", "both"), decay=0.7)
    ),
    "ReBn": Case(ReBn(), per_turn(ref.rebn)),
    "ReBn, without cut turns": Case(ReBn(mask_truncated=True), per_turn(without_cut_turns(ref.rebn))),
    "ReBn, punished": Case(
        ReBn(aggregation="token-mean", gamma=0.8, shaping=RewardShaping(overlong_cache=8)),
        with_rewards(ref.rebn, punished, **TOKEN_MEAN, gamma=0.8),
    ),
    "GiGpo": Case(GiGpo(), ref.gigpo),
    "GiGpo, weighted": Case(
        GiGpo(episode_weight=0.5, turn_weight=2.0, gamma=0.8, std="none"),
        partial(ref.gigpo, episode_weight=0.5, step_weight=2.0, gamma=0.8, divide=False),
    ),
    "Ipa": Case(
        Ipa(failure=-0.5, anchor="behaviour"),
        with_rewards(
            ref.ipa,
            lambda episodes: [outcome_of_chunks(one) for one in episodes],
            anchor="sampler_logp",
            expert_reward=1.0,
        ),
        replay=True,
    ),
    "Ipa, around the proximal policy": Case(
        Ipa(
            failure=-0.5,
            anchor="proximal",
            imitation=0.3,
            fresh=0.7,
            gamma=0.9,
            correction=Correction("turn", None, (0.0, 1.1)),
        ),
        with_rewards(
            ref.ipa,
            lambda episodes: [outcome_of_chunks(one) for one in episodes],
            lambda_il=0.3,
            lambda_rl=0.7,
            gamma=0.9,
            limit=1.1,
            expert_reward=1.0,
        ),
        replay=True,
    ),
    # critics
    "Ppo": Case(Ppo(), partial(ref.ppo, whitened=True, per_turn_rewards=True)),
    "Ppo, kl in the reward": Case(
        Ppo(whiten=False, gamma=0.97, lam=0.9, advantage_clip=0.7, critic=Critic(num=2), kl=KlReward(0.1)),
        partial(ref.ppo, per_turn_rewards=True, gamma=0.97, lam=0.9, kl_reward=0.1, advantage_clip=0.7),
    ),
    "Ppo, normalised rewards": Case(
        Ppo(whiten=False, mean="group", std="group"),
        with_rewards(
            ref.ppo, lambda episodes: ref.normalise([x["reward"] for x in episodes], [x["group"] for x in episodes])
        ),
    ),
    "AsyPpo": Case(AsyPpo(entropy_coef=0.0), partial(ref.asy_ppo, per_turn_rewards=True)),
    "AsyPpo, whitened": Case(
        AsyPpo(entropy_coef=0.0, whiten=True, aggregation="token-mean"),
        partial(ref.asy_ppo, whitened=True, per_turn_rewards=True, **TOKEN_MEAN),
    ),
    # other credit
    "AttentionRhythm": Case(AttentionRhythm(), partial(ref.attention_rhythm, **GRPO)),
    "AttentionRhythm, shared otherwise": Case(
        AttentionRhythm(share=0.25, lookback=3, top=0.5),
        partial(ref.attention_rhythm, alpha=0.25, window=3, top=0.5, **GRPO),
    ),
    "AttentionRhythm, local": Case(
        AttentionRhythm(rhythm="local", amplify=2.0, top=0.3),
        partial(ref.attention_rhythm, mode="local", amp=2.0, top=0.3, **GRPO),
    ),
    "AttentionRhythm, global": Case(
        AttentionRhythm(rhythm="global"), partial(ref.attention_rhythm, mode="global", **GRPO)
    ),
    "SegmentReward": Case(SegmentReward(), segment_reward),
    "Opd": Case(Opd(teachers=FAR), partial(ref.opd, coefs=[0.7])),
    "Opd, two teachers and rewards": Case(
        Opd(teachers=TEACHERS, reward_coef=1.0, correction=Correction("token", 1.1)),
        partial(ref.opd, coefs=[0.7, 0.5], mixed=True, student="trainer_logp", correction={"weight_cap": 1.1}),
    ),
    "Sdpo": Case(Sdpo(), ref.sdpo),
    "Sdpo, and rewards": Case(
        Sdpo(reward_coef=0.5, correction=Correction("token", 1.1)),
        partial(ref.sdpo, reward_coef=0.5, student="trainer_logp", correction={"weight_cap": 1.1}),
    ),
    # supervised
    "Sft": Case(Sft(), ref.sft, size=1),
    "Rft": Case(Rft(cap=2), lambda episodes: ref.rft([unweighted(one) for one in episodes], cap=2)),
    # preferences
    "Dpo": Case(Dpo(beta=0.3), partial(ref.dpo, beta=0.3)),
    "Dpo, smooth": Case(Dpo(label_smoothing=0.1, sft_coef=0.5), partial(ref.dpo, label_smoothing=0.1, ftx=0.5)),
    "Dpo, ipo": Case(Dpo(loss="ipo", beta=0.2), partial(ref.dpo, kind="ipo", beta=0.2)),
    "Dpo, simpo": Case(
        Dpo(loss="simpo", beta=2.0, margin=0.5, sft_coef=0.1),
        partial(ref.dpo, kind="simpo", beta=2.0, gamma=0.5, ftx=0.1),
    ),
    "PairDpo": Case(PairDpo(), recorded(ref.dpo), size=2),
    "Kto": Case(Kto(), ref.kto),
    "Kto, weighted": Case(
        Kto(beta=0.5, good_weight=0.7, bad_weight=1.5), partial(ref.kto, beta=0.5, good_weight=0.7, bad_weight=1.5)
    ),
    "PairKto": Case(
        PairKto(beta=0.3),
        lambda episodes: ref.kto(
            episodes,
            beta=0.3,
            good=[n % 2 == 0 for n in range(len(episodes))],
            policy="context_logp",
            reference="context_ref_logp",
        ),
        size=2,
    ),
    "RewardModel": Case(RewardModel(), reward_model),
    "PairRewardModel": Case(PairRewardModel(), recorded(reward_model), size=2),
}


def test_every_class_is_compared():
    segments = {SegmentPpo, SegmentDpo, SegmentPairDpo, SegmentRft}  # test_papers_critics.py
    assert {type(case.algorithm) for case in CASES.values()} | {Distill} | segments == set(CLASSES)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name):
    case = CASES[name]
    largest = []

    def compare(world):
        groups = world.groups(case.size, case.replay)
        e = world.episodes(groups, case.algorithm.needs())
        logps = moved(world, groups, e, case.algorithm)
        loss, grads = trained(case.algorithm, groups, e, logps, ROWS)
        want = case.reference(told(groups, e, logps, case.algorithm))
        largest.append(agree(loss, [g[0] for g in grads], want))

    on_worlds(compare, 8)
    assert sum(x > 1e-3 for x in largest) >= case.has_signal, "too few of the batches teach anything"


# ---- what is carried from step to step ------------------------------------------------------------------------------


def two_steps(algorithm):
    """Return groups, episodes and log-probs of two steps, and the algorithm state between them."""
    steps, algorithm_state = [], {}
    for seed in (5, 6):
        world = World(seed, 3, 4, 2, 5, "graded")
        groups = world.groups()
        e = world.episodes(groups, algorithm.needs())
        steps.append((groups, e, moved(world, groups, e, algorithm), algorithm_state))
        algorithm_state = algorithm.credit(e, algorithm_state).algorithm_state
    return steps


def test_running_statistics():
    algorithm = Reinforce(mean="running", std="running")
    steps = two_steps(algorithm)
    seen = []
    for groups, e, logps, algorithm_state in steps:
        seen += e.rewards.tolist()
        loss, grads = trained(algorithm, groups, e, logps, ROWS, algorithm_state=algorithm_state)
        want = ref.reinforce(told(groups, e, logps, algorithm), baseline=ref.mean(seen), scale=ref.std(seen))
        assert agree(loss, [g[0] for g in grads], want) > 1e-3


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_an_adaptive_kl_coefficient(where):
    adaptive = AdaptiveKl(1.0, horizon=40)
    term = KlLoss(0.2, adaptive, estimator="k2") if where == "loss" else KlReward(0.2, adaptive)
    algorithm = Reinforce(kl=term)
    beta, betas = 0.2, []
    for groups, e, logps, algorithm_state in two_steps(algorithm):
        loss, grads = trained(algorithm, groups, e, logps, ROWS, algorithm_state=algorithm_state)
        episodes = told(groups, e, logps, algorithm)
        options = {"kl_loss": beta, "kl_kind": "k2"} if where == "loss" else {"kl_reward": beta}
        assert agree(loss, [g[0] for g in grads], ref.reinforce(episodes, **options)) > 1e-3
        betas.append(beta)
        gaps = [-c for one in episodes for c in ref.kl_costs(one, 1.0, "k1", "sampler_logp")]
        beta = ref.adaptive_beta(beta, ref.mean(gaps), 1.0, 40, e.num)
    assert betas[0] != betas[1]


# ---- terms besides the surrogate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", RICH, ids=str)
def test_entropy_counts_but_where_critics_disagree_most(world):
    algorithm = AsyPpo(entropy_coef=0.3, entropy_mask_frac=0.3)
    groups = world.groups()
    e = world.episodes(groups, algorithm.needs())
    logps = moved(world, groups, e, algorithm)
    _, grads = trained(algorithm, groups, e, logps, ROWS)
    episodes = told(groups, e, logps, algorithm)
    noisy = ref.chosen_by_rank([ref.mean_and_spread(one)[1] for one in episodes], 0.3, highest=True)
    for got, row in zip(grads, noisy, strict=True):
        share = 0.3 / (len(noisy) * len(row))
        np.testing.assert_allclose(got[1], [0.0 if x else -share for x in row], rtol=1e-6)


@pytest.mark.parametrize("world", RICH, ids=str)
def test_preferences_of_some_tokens(world):
    """Pairs whose sums are over a part of the tokens, as segment rewards would choose them."""
    algorithm = Dpo(beta=0.5)
    groups = world.groups()
    e = world.episodes(groups, algorithm.needs())
    logps = moved(world, groups, e, algorithm)
    masks = np.random.default_rng(world.seed).random(e.mask.shape) < 0.6
    masks[:, 0] = True
    loss, grads = trained(algorithm, groups, e, logps, ROWS, mask=masks)
    flags = [row[: len(x)].tolist() for row, x in zip(masks, logps, strict=True)]
    want = ref.dpo(told(groups, e, logps, algorithm), beta=0.5, masks=flags)
    assert agree(loss, [g[0] for g in grads], want) > 1e-3


# ---- from the hidden states on --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Table:
    """A decoder whose hidden states are its parameters, `[B, T, D]`, and whose head is the identity: they are logits.
    As a critic's trunk: they are values."""

    hidden: jax.Array | None = None
    attention = "xla"
    cfg = Qwen3Config()

    def bind(self, params):
        return Table(params)

    def __call__(self, tokens, positions, mask, expert_ids_LBTk=None):
        return Out(self.hidden, None, None)

    @property
    def head_matrix(self):
        return jnp.eye(self.hidden.shape[-1])


class Values:
    trunk = Table()

    def head(self, params, hidden):
        return hidden[..., 0]


ONE = PackShape(1, 8, 96)
LETTERS = 8


class Rows:
    """A packed batch of one micro-batch, and a table of random numbers `[B, T, D]` behind it."""

    def __init__(self, algorithm, groups, e, width, seed):
        samples = samples_of(groups)
        place = {id(s.tokens): n for n, s in enumerate(s for group in samples for s in group)}
        kept = apply_credit(algorithm.needs(), samples, e, algorithm.credit(e, {}))
        self.which = [place[id(s.tokens)] for group in kept for s in group]
        self.packed = Objective(algorithm).rows(kept, ONE)
        batch = self.packed.batch
        arrays = {n: np.asarray(a)[0] for n, a in batch.arrays().items()}
        arrays["tokens"] %= LETTERS
        self.batch = dataclasses.replace(batch, **arrays)
        rng = np.random.default_rng(seed)
        self.tables = [rng.normal(0, 1, (*arrays["tokens"].shape, width)).astype(np.float32) for _ in range(2)]
        prev = np.arange(ONE.micro_rows)[:, None] * ONE.row_len + arrays["prev"]
        self.before = [prev.reshape(-1)[at] for group in self.packed.indices for at in group]
        self.tokens = [arrays["tokens"].reshape(-1)[at] for group in self.packed.indices for at in group]

    def seen(self, table):
        """Return the table's entries before each token of the samples that take part, `[T, D]` each."""
        return [table.reshape(-1, table.shape[-1])[at].astype(float) for at in self.before]

    def dense(self, grads):
        """Scatter gradients `[T, D]` of the samples into the shape of the table."""
        out = np.zeros_like(self.tables[0], np.float64).reshape(-1, self.tables[0].shape[-1])
        for at, g in zip(self.before, grads, strict=True):
            np.add.at(out, at, g)
        return out.reshape(self.tables[0].shape)


LAWS = {
    "forward": {},
    "forward, warm": {"tau": 1.7, "coef": 0.8, "cross_entropy": 0.3},
    "reverse": {"divergence": "reverse", "tau": 1.3},
    "js": {"divergence": "js"},
    "skewed": {"divergence": "skewed", "alpha": 0.3},
    "adaptive": {"divergence": "adaptive"},
    "bucket": {"top_k": 3, "tau": 1.7},
    "renormalised": {"top_k": 3, "remainder": "renormalise"},
}
compiled = functools.lru_cache(maxsize=None)(
    lambda algorithm, policy: jax.jit(
        jax.value_and_grad(
            lambda student, teacher, batch: policy_loss(Table(), algorithm, {policy: (Table(), teacher)})(
                student, batch
            )[0]
        )
    )
)


@pytest.mark.parametrize("name", LAWS)
def test_distillation(name):
    algorithm = Distill(teacher="run_start", **LAWS[name])

    def compare(world):
        groups = world.groups(size=1)
        groups = [[dataclasses.replace(t, turns=tuple(whole(turn) for turn in t.turns)) for t in g] for g in groups]
        e = world.episodes(groups, algorithm.needs())
        rows = Rows(algorithm, groups, e, LETTERS, world.seed)
        if not rows.which:
            return
        loss, grad = compiled(algorithm, "run_start")(*rows.tables, rows.batch)
        weights = [np.repeat([u.weight for u in t.turns], [len(u.tokens) for u in t.turns]) for g in groups for t in g]
        student, teacher = (np.concatenate(rows.seen(table)).tolist() for table in rows.tables)
        value, slopes = ref.distill(
            student,
            teacher,
            np.concatenate(rows.tokens).tolist(),
            [w == 1 for n in rows.which for w in weights[n]],
            kind=algorithm.divergence,
            lam=algorithm.coef,
            ce=algorithm.cross_entropy,
            tau=algorithm.tau,
            alpha=algorithm.alpha,
            top_k=algorithm.top_k or None,
            remainder=algorithm.remainder == "bucket" and algorithm.top_k > 0,
        )
        assert float(loss) == pytest.approx(value, rel=1e-5)
        ends = np.cumsum([len(x) for x in rows.tokens])[:-1]
        want = rows.dense(np.split(np.array(slopes), ends))
        np.testing.assert_allclose(grad, want, rtol=0, atol=1e-5 * np.abs(want).max())
        largest.append(np.abs(want).max())

    largest = []
    on_worlds(compare, 3)
    assert sum(x > 1e-3 for x in largest) >= len(RICH)


def whole(turn):
    """Round weights to 0 or 1."""
    return dataclasses.replace(turn, weight=float(turn.weight == 1))


@pytest.mark.parametrize("world", RICH, ids=str)
def test_kl_over_the_whole_vocabulary(world):
    algorithm = Reinforce(mean="group", kl=KlLoss(0.4, estimator="full"))
    groups = world.groups()
    e = world.episodes(groups, algorithm.needs())
    rows = Rows(algorithm, groups, e, LETTERS, world.seed)
    assert rows.which == list(range(e.num))
    loss, grad = compiled(algorithm, "phase_start")(*rows.tables, rows.batch)
    student, reference = (rows.seen(table) for table in rows.tables)
    laws = [[ref.softmax(z) for z in seen.tolist()] for seen in student]
    logps = [
        np.array([np.log(p[v]) for p, v in zip(law, tokens, strict=True)])
        for law, tokens in zip(laws, rows.tokens, strict=True)
    ]
    plain = ref.reinforce(told(groups, e, logps, algorithm), baseline="group")
    share, total = 0.4 / e.mask.sum(), plain.loss
    slopes = []
    for n, law in enumerate(laws):
        by_logp = [
            g * ((np.arange(LETTERS) == v) - np.array(p))
            for g, p, v in zip(plain.grad[n], law, rows.tokens[n], strict=True)
        ]
        for t, (z, y) in enumerate(zip(student[n].tolist(), reference[n].tolist(), strict=True)):
            value, slope = ref.distill_token(z, y, 0, kind="reverse", lam=1.0, ce=0.0)
            total += share * value
            by_logp[t] = by_logp[t] + share * np.array(slope)
        slopes.append(np.array(by_logp))
    assert float(loss) == pytest.approx(total, rel=1e-5, abs=1e-5)
    want = rows.dense(slopes)
    np.testing.assert_allclose(grad, want, rtol=0, atol=1e-5 * np.abs(want).max())


CRITICS = {
    "one": Ppo(),
    "clipped": Ppo(critic=Critic(clip=0.1)),
    "by response": AsyPpo(critic=Critic(num=2)),
    "by prompt": AsyPpo(critic=Critic(num=2, shard="prompt")),
    "all": Ppo(critic=Critic(num=2, shard="all"), gamma=0.9, lam=0.8),
    "fitted to longer returns": Ppo(gamma=0.9, lam=0.8, value_lam=0.95, aggregation="seq-mean-token-mean"),
}


@pytest.mark.parametrize("name", CRITICS)
def test_critics(name):
    algorithm = CRITICS[name]
    loss_fn = critic_loss(Values(), algorithm)
    program = jax.jit(jax.value_and_grad(lambda p, old, w, batch: loss_fn({"trunk": p}, old, w, batch)[0]))

    def compare(world):
        groups = world.groups()
        e = world.episodes(groups, algorithm.needs())
        rows = Rows(algorithm, groups, e, 1, world.seed)
        batch = rows.batch
        found = [
            program(table, batch.old_values_C[..., m], batch.critic_weights_C[..., m], batch)
            for m, table in enumerate(rows.tables[: algorithm.critic.num])
        ]
        logps = [np.zeros(n) for n in e.lengths]
        episodes = told(groups, e, logps, algorithm)
        lam = algorithm.lam if algorithm.value_lam is None else algorithm.value_lam
        options = {"gamma": algorithm.gamma, "lam": lam}
        _, returns = ref.generalised_advantages(episodes, per_turn_rewards=True, **options)
        now = [rows.seen(table) for table in rows.tables]
        for n, one in enumerate(episodes):
            start = 0
            for turn in one["turns"]:
                part = slice(start, start + len(turn["logp"]))
                start = part.stop
                turn["old_values"] = turn["values"]
                turn["values"] = [now[m][n][part, 0].tolist() for m in range(algorithm.critic.num)]
        value, slopes = ref.critic_loss(episodes, returns, shards=shards(algorithm, e), clip=algorithm.critic.clip)
        assert sum(float(x) for x, _ in found) == pytest.approx(value, rel=1e-5)
        for (_, grad), rows_of_one in zip(found, slopes, strict=True):
            want = rows.dense([np.array(row)[:, None] for row in rows_of_one])
            np.testing.assert_allclose(grad, want, rtol=0, atol=1e-5 * np.abs(want).max() + 1e-12)
        largest.append(value)

    largest = []
    on_worlds(compare, 4)
    assert sum(x > 1e-3 for x in largest) >= len(RICH)


def shards(algorithm, e):
    """Deal the responses of each prompt in turn, starting one further with each prompt; or deal whole prompts."""
    if algorithm.critic.num == 1 or algorithm.critic.shard == "all":
        return None
    groups = e.groups.tolist()
    place = [n - groups.index(g) if algorithm.critic.shard == "response" else 0 for n, g in enumerate(groups)]
    return [(g + p) % algorithm.critic.num for g, p in zip(groups, place, strict=True)]
