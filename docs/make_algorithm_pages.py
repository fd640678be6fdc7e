"""Make the site's pages of algorithms: `make docs` writes them into build/docs/algorithms.

A page shows the code: docstrings, settings with their defaults, gradients computed by differentiating the objective
itself, and the shipped recipe. The page of defaults compares the papers' settings (`Algorithm.paper`) with ours. Only
`WHEN` and `ORACLES` are written here.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import types
from collections.abc import Collection, Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from docstrings import cell, field_default, linked, meanings_of, paragraphs_of, shown

from rolljax.config import check
from rolljax.trainer import algorithms
from rolljax.trainer.algorithms.base import Algorithm, PolicyOutputs
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.kto import Kto
from rolljax.trainer.algorithms.opd import Opd
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.algorithms.reward_model import RewardModel
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.paper import Stated

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "algorithms"
CURVES = ROOT / "docs" / "curves" / "algorithms.json"
NOTICE = "<!-- made by docs/make_algorithm_pages.py from the code: do not edit -->"
FEW_SETTINGS: dict[str, tuple[str, ...]] = {
    "Cispo": ("quickstart", "rl/Phase.async_ratio = 2"),
    "DecoupledPpo": ("quickstart", "rl/Phase.async_ratio = 2"),
    "Dppo": ("quickstart", "rl/Phase.async_ratio = 2"),
    "DrGrpo": ("quickstart",),
    "Gdpo": ("quickstart",),
    "GiGpo": ("frozen_lake",),
    "Kto": ("quickstart",),
    "Kimi": ("quickstart", "rl/Phase.async_ratio = 2"),
    "LitePpo": ("quickstart",),
    "MaxRl": ("quickstart",),
    "RaftPP": ("quickstart",),
    "ReBn": ("frozen_lake",),
    "PairKto": ("algorithms/pair_dpo",),
    "Reinforce": ("quickstart", "Reinforce.mean = 'batch'"),
    "ReinforcePPBaseline": ("quickstart",),
    "Rft": ("quickstart", "rl/AdamW.lr = 5e-4"),
    "Rloo": ("quickstart", "Rloo.aggregation = 'token-mean'"),
    "Sdpo": ("quickstart",),
    "Tis": ("quickstart", "rl/Phase.async_ratio = 2"),
    "TurnReinforce": ("frozen_lake",),
}
"""Algorithms without a file in configs/algorithms: the config that they run on, and settings in addition to
`rl/Phase.algorithm`."""
LEVELS = {
    "token": "token",
    "turn": "turn (geometric mean)",
    "geometric": "trajectory (geometric mean)",
    "trajectory": "trajectory (product)",
}
"""The level of a ratio, by `PolicyGradient.level`."""

WHEN = """
Sft: To begin with: when there are good answers to imitate. A short warm start teaches the form of an answer, so that
  sampling finds some right ones. It cannot do better than its data, and forgets what the data leaves out.
Distill: When there is a better model with the same tokenizer and answers to learn from. The teacher's full
  distribution says more per token than the answer alone. For a teacher that corrects what the student itself writes,
  see `Opd`.
Opd: When there is a better model with the same tokenizer. The student learns on its own answers, so it meets its own
  mistakes, which off-policy distillation never shows it. Several teachers can each have their environments.
Sdpo: When some answers of a group are right, and the model can use one that it is shown: every token of the others is
  compared with what it would have said then. Small models that cannot learn from their context gain nothing.
Rft: When rewards can be checked, answers are often right already, and simplicity counts: it is supervised learning,
  and nothing can diverge. It learns nothing from wrong answers, and narrows what the policy says.
Dpo: When answers can be compared more easily than scored, or as a gentle step between imitation and reinforcement.
  `sft_coef` keeps the better answer's own probability from falling while the gap widens.
PairDpo: When preferences are recorded. They age: pairs from another policy teach less than the policy's own (`Dpo`).
Kto: When answers are only known to be good or bad, one by one. Unequal numbers of both are balanced by the two
  weights.
PairKto: When pairs are recorded but their labels are noisy: an answer far on the wrong side hardly pulls, where
  `PairDpo` pulls hardest.
RewardModel: To give PPO a critic that knows good answers from bad ones before its first step (`Critic.model =
  'previous'`).
PairRewardModel: The same from recorded preferences.
Reinforce: As the baseline everything else is compared with, or with `mean = 'batch'` as the simplest thing that works
  on-policy. It has no guard against stale samples: keep `Phase.async_ratio` at 0.
Rloo: On-policy, with a few answers per prompt and rewards on a meaningful scale: the unbiased form of a group
  baseline. No ratio, so one update per step, and an `async_ratio` of 0.
ReinforcePP: When prompts have one answer each, or groups are unwanted: the batch is the baseline. Sensitive to
  mixing easy and hard prompts, whose different means end up in the advantages.
ReinforcePPBaseline: Like GRPO where groups of one prompt have rewards of very different spread: only their mean is
  their own.
Grpo: The place to start for verifiable rewards with several answers per prompt. Dividing by the group's deviation
  makes nearly solved and nearly hopeless prompts weigh more; see `DrGrpo` and `LitePpo` for the cures.
DrGrpo: When answers grow long without getting better, or prompts of very different difficulty are mixed: no bias from
  length or from the group's deviation.
Dapo: Long reasoning with many prompts that are always or never solved: each step trains on a full batch that teaches
  something, at the price of sampling more. The wider upper clip keeps entropy up.
LitePpo: Base models without instruction tuning: two tricks that carried most of the effect in its paper.
  `lite_ppo.guideline` chooses the settings that the paper found best for aligned models, easy data and long answers.
MaxRl: Hard prompts with rewards of 0 and 1: a prompt that is rarely solved weighs as 1 / p, so that answers which are
  found at all are learned. Easy prompts weigh less than under GRPO.
Gdpo: Rewards of several parts, such as correctness, format and length: each part is compared by itself, so that a rare
  part is not drowned by one that differs more. Name the parts.
RaftPP: When only right answers shall teach, as a strong and simple baseline. Advantages are never negative; without
  negative examples it is fast at first, and entropy falls quickly.
Gspo: Mixtures of experts, and long answers: single-token ratios are noise there, the mean over an answer is not. Clip
  ranges are two orders of magnitude below PPO's and shrink with the length of answers.
Ppo: When rewards come in the middle of long episodes and there is room for a critic. One answer per prompt is enough.
  For a single reward at the end, group baselines do as well and are cheaper.
AsyPpo: When a critic is wanted but one as large as the policy is too much, with many answers per prompt: small
  critics, and their disagreement says where there is something to learn.
Tis: Asynchronous sampling, a step or two stale: nothing can blow up, because the weight never exceeds 1. Old answers
  that have become likelier count no more than fresh ones.
Cispo: Asynchronous sampling when rare tokens matter: a clipped token still has a gradient, which under PPO it has
  not.
Dppo: Asynchronous sampling, several updates, or a sampler whose log-probs differ from the trainer's: it bounds by how
  far a probability has moved, where a clip of ratios stops rare tokens at once and lets likely ones fall far.
Topr: Very stale or off-policy data with many wrong answers: what blows up then is the push away from answers that are
  already unlikely, and its weight goes to 0 here.
SequenceTopr: The same, where answers are good or bad as one and single-token ratios are noise; what IPA is compared
  with.
Kimi: Asynchronous sampling without clips: a soft pull to the sampling policy instead. `tau` trades speed for staying
  near.
DecoupledPpo: Asynchronous sampling with several updates per step: the clip bounds the step, a capped weight corrects
  for age. It costs one more forward pass.
AttentionRhythm: When one reward for a long answer shall be spent on the tokens that decided it, without a critic. It
  costs one forward pass of a few layers with explicit attention.
SegmentReward: When a policy trained on preferences can serve as a scorer, and answers have good and bad parts:
  segments that contradict the outcome get no gradient.
SegmentPpo: As `SegmentReward`, with a critic for a baseline: it sees every token, the policy the segments that agree.
SegmentDpo: As `Dpo`, where answers of a pair have parts in common with good and bad ones, and a scorer can tell them.
SegmentPairDpo: As `SegmentDpo`, when pairs have been recorded already.
SegmentRft: As `Rft`, where right answers contain detours, and a scorer can tell them.
TurnReinforce: The baseline for several turns. Simple and unbiased; high variance, as nothing is subtracted.
ReBn: Several turns with rewards along the way, any discount, no groups.
Spiral: Zero-sum games in which one policy plays both roles, as in `nim`. Where roles win unequally often, a baseline
  for both teaches which role one is; one for each teaches how to play it.
GiGpo: Several turns with one reward at the end, where siblings come back to the same states: those turns are compared
  with each other. It needs environments whose observations repeat exactly.
Ipa: Long episodes with tools and a reward at the end: credit, ratio and filter per turn, which is what the
  environment reacts to; robust to samplers that drift from the trainer.
"""
"""When to use each class: `Class: text`, continued on indented lines."""

ORACLES = """
Sft: tests/e2e/test_trl.py::test_sft_of_what_the_assistant_wrote: loss and gradient of TRL's own SFTTrainer
Distill: tests/unit/trainer/test_papers_losses.py::test_skewed_divergence_is_distillms: the authors' skewed divergence;
  the plain one is the definition of a KL divergence
Opd: tests/unit/trainer/test_papers_defaults.py::test_on_policy_distillation: the advantages of tinker-cookbook
Opd: tests/unit/trainer/test_papers_defaults.py::test_distillation_from_two_teachers_and_rewards: ROLL's mixture of both
Rft: none: a choice of answers and a cross-entropy; the authors' code (github.com/OFA-Sys/gsm8k-ScRel) chooses by
  equations, which answers here need not have
Dpo: tests/e2e/test_trl.py::test_dpo: loss and gradient of TRL's own DPOTrainer
Dpo: tests/unit/trainer/test_papers_critics.py::test_dpo_is_its_authors: the authors' loss
Kto: tests/e2e/test_trl.py::test_kto: the same objective, there on recorded pairs
PairKto: tests/e2e/test_trl.py::test_kto: loss and gradient of TRL's own KTOTrainer
Sdpo: tests/e2e/test_trl.py::test_sdpo: the loss of TRL's own SDPOTrainer for sampled tokens, and its gradient
PairDpo: tests/e2e/test_trl.py::test_dpo: the same objective, there on sampled pairs
RewardModel: none: its loss is equation 1 of the paper, whose authors publish no code
PairRewardModel: none: its loss is equation 1 of the paper, whose authors publish no code
Reinforce: none: with the ratio at 1 and no baseline it is the definition; TRL and verl have no such trainer
Rloo: tests/unit/trainer/test_papers_effects.py::test_rloo: TRL's loss
Rloo: tests/unit/trainer/test_papers_losses.py::test_rloo_sums_over_an_answer: the estimator of the paper
ReinforcePP: tests/unit/trainer/test_papers_losses.py::test_reinforce_pp_normalises_over_all_tokens: equations 4 and 5
  of the paper and OpenRLHF's advantages
ReinforcePPBaseline: tests/unit/trainer/test_papers_losses.py::test_reinforce_pp_with_a_baseline: equations 6 and 7 of
  the paper and OpenRLHF's advantages
Grpo: tests/e2e/test_trl.py::test_grpo: loss and gradient of TRL's own GRPOTrainer
Grpo: tests/unit/trainer/test_papers_defaults.py::test_grpo: verl's advantages under equation 3 of the paper
Grpo: tests/unit/trainer/test_papers_defaults.py::test_grpo_with_the_papers_kl_term: and equation 4
DrGrpo: tests/e2e/test_trl.py::test_dr_grpo: loss and gradient of TRL's own GRPOTrainer
DrGrpo: tests/unit/trainer/test_papers_effects.py::test_dr_grpo: the authors' advantages and sums (oat)
Dapo: tests/e2e/test_trl.py::test_dapo_drops_groups_that_teach_nothing: loss and gradient of TRL's own GRPOTrainer
Dapo: tests/unit/trainer/test_papers_defaults.py::test_dapo_counts_tokens_of_groups_that_teach: equations 8, 9 and 11
Dapo: tests/unit/trainer/test_papers_defaults.py::test_dapo_punishes_long_answers_as_in_its_runs: equation 13, section
  4.1
Dapo: tests/unit/trainer/test_papers_effects.py::test_dapo: the loss as in verl's recipe
LitePpo: tests/unit/trainer/test_papers_losses.py::test_lite_ppo_divides_by_the_batch: ROLL's normalisation of rewards
MaxRl: tests/unit/trainer/test_papers_signals.py::test_maxrl_divides_by_the_success_rate: the authors' advantages
Gdpo: tests/unit/trainer/test_papers_signals.py::test_gdpo_is_its_authors: the authors' advantages
RaftPP: tests/unit/trainer/test_papers_defaults.py::test_raft_plus_plus: equation 6 of the paper
Gspo: tests/e2e/test_trl.py::test_gspo: loss and gradient of TRL's own GRPOTrainer
Gspo: tests/unit/trainer/test_papers_effects.py::test_gspo: the loss with the clips of section 5.1
Ppo: tests/unit/trainer/test_papers_critics.py::test_ppo_is_that_of_baselines: advantages, clip and value loss of the
  authors' ppo2
Ppo: tests/e2e/test_trl.py::test_ppo_clips_on_both_sides_and_again_below: the clip of TRL's own GRPOTrainer, PPO's
AsyPpo: tests/unit/trainer/test_papers_critics.py::test_asyppo_is_its_last_equation: the objective of section 4.2 of the
  paper, whose authors publish no code
Tis: tests/unit/trainer/test_papers_losses.py::test_tis_truncates_to_one: ROLL's loss
Cispo: tests/e2e/test_trl.py::test_cispo: loss and gradient of TRL's own GRPOTrainer
Cispo: tests/unit/trainer/test_papers_losses.py::test_cispo_has_no_lower_bound: equations 4 and 5 of the paper
Dppo: tests/unit/trainer/test_papers_signals.py::test_dppo_leaves_out_what_has_moved_far_enough: the authors' mask
Dppo: tests/unit/trainer/test_papers_signals.py::test_dppo_pulls_all_tokens_back_as_in_prime_rl: prime-rl's loss
Topr: tests/unit/trainer/test_papers_losses.py::test_topr_tapers_whole_trajectories_by_the_sign_of_the_reward: equation
  8 of the paper
SequenceTopr: tests/unit/trainer/test_papers_losses.py::test_topr_with_a_geometric_mean_is_the_baseline_of_ipa:
  equations 4 and 5 of IPA's paper
Kimi: tests/unit/trainer/test_papers_losses.py::test_kimi_squares_the_sum: equation 3 of the paper
DecoupledPpo: tests/e2e/test_trl.py::test_decoupled_ppo_corrects_for_the_sampler: TRL's own GRPOTrainer
DecoupledPpo: tests/unit/trainer/test_papers_losses.py::test_decoupled_ppo_is_areals_below_the_cap: the authors' loss
AttentionRhythm: tests/unit/trainer/test_papers_defaults.py::test_attention_rhythm_amplifies_the_anchors: the paper's
  factors on verl's advantages; no code of the authors is published
SegmentReward: none: the paper has segments under PPO, DPO and rejection sampling; under GRPO they are ours
SegmentPpo: tests/unit/trainer/test_papers_critics.py::test_segments_of_ppo_keep_their_advantage_and_their_place: the
  rule of the paper; its authors publish no code
SegmentDpo: tests/unit/trainer/test_papers_critics.py::test_segments_of_dpo_are_what_is_summed: the paper's rule; its
  authors publish no code
SegmentPairDpo: tests/unit/trainer/test_papers_critics.py::test_segments_of_dpo_are_what_is_summed: the same, there on
  sampled pairs
SegmentRft: tests/unit/trainer/test_papers_critics.py::test_segments_of_right_answers_are_imitated: the rule of the
  paper; its authors publish no code
TurnReinforce: tests/unit/trainer/test_papers_losses.py::test_turns_get_their_discounted_return: ROLL's returns
ReBn: tests/unit/trainer/test_papers_losses.py::test_rebn_has_gems_gradient: the loss of the authors' repository
Spiral: none: a moving average of returns by role; the authors' code (github.com/spiral-rl/spiral) moves it game by
  game, here it is moved by all games of a step before the step's advantages
GiGpo: tests/unit/trainer/test_papers_defaults.py::test_gigpo: the two advantages of the authors' repository
GiGpo: tests/unit/trainer/test_papers_effects.py::test_gigpo: the same with and without the deviation, and ROLL's
Ipa: tests/unit/trainer/test_papers_ipa.py::test_the_gradient_is_that_of_eq_9_over_runs: equation 9 over the authors'
  runs
Ipa: tests/unit/trainer/test_papers_ipa.py::test_returns_over_runs_are_those_of_the_twin: equation 7
"""
"""What outside this repository each class was compared with: `Class: file::test: what`, several lines for several
tests; or `Class: none: why not`."""


def algorithm_classes() -> dict[str, list[type[Algorithm]]]:
    """Return the algorithms by module, in the order of their files."""
    found: dict[str, list[type[Algorithm]]] = {}
    for info in pkgutil.iter_modules(algorithms.__path__):
        module = importlib.import_module(f"{algorithms.__name__}.{info.name}")
        for cls in vars(module).values():
            own = inspect.isclass(cls) and issubclass(cls, Algorithm) and cls.__module__ == module.__name__
            if own and not inspect.isabstract(cls):
                found.setdefault(info.name, []).append(cls)
    return found


def module_of(cls: type) -> str:
    return cls.__module__.rpartition(".")[2]


def when(cls: type[Algorithm]) -> str:
    """Return when to use an algorithm, from `WHEN`.

    Raises:
      KeyError: the entry is missing.
    """
    entries = re.sub(r"\n +", " ", WHEN).strip().split("\n")
    return dict(entry.split(": ", 1) for entry in entries)[cls.__name__]


def recipe_name(cls: type[Algorithm]) -> str:
    """Return the file name in configs/algorithms: the module's name for its first class, else the class's."""
    if algorithm_classes()[module_of(cls)][0] is cls:
        return module_of(cls)
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def papers(cls: type) -> str:
    """Return links to the papers in a docstring."""
    text = " ".join(paragraphs_of(cls))
    ids = re.findall(r"arXiv \d{4}\.\d{4,5}|doi 10\.\d+/[\w.]+\w", text)
    return ", ".join(linked(i) for i in dict.fromkeys(ids)) or "none: standard practice"


# ---- tables ---------------------------------------------------------------------------------------------------------


def settings(cls: type[Algorithm]) -> list[str]:
    """Return the class's own settings (new ones and changed defaults) and its shared ones, as tables."""
    hints, meanings = check.hints(cls), meanings_of(cls)
    base = {f.name: field_default(f) for f in dataclasses.fields(PolicyGradient)}
    own: list[str] = []
    shared: list[str] = []
    newest = sorted(dataclasses.fields(cls), key=lambda f: _depth(cls, f.name))  # type: ignore[arg-type]
    for field in newest:
        default = field_default(field)
        values = check.describe(hints[field.name])
        row = f"| `{field.name}` | `{shown(default)}` | {cell(values)} | {cell(linked(meanings[field.name]))} |"
        same = field.name in base and base[field.name] == default
        (shared if same and issubclass(cls, PolicyGradient) else own).append(row)
    head = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    lines = [*head, *own] if own else ["It has no settings."]
    if shared:
        lines += [
            "",
            "<details><summary>Settings that policy gradients share</summary>",
            "",
            *head,
            *shared,
            "",
            "</details>",
        ]
    return lines


def _depth(cls: type, name: str) -> int:
    """Return how many bases up a field is declared."""
    return next(i for i, base in enumerate(cls.__mro__) if name in inspect.get_annotations(base))


def at_a_glance(cls: type[Algorithm]) -> str:
    """Describe who acts, how losses are summed, and what else is computed."""
    algorithm = example(cls)
    needs = algorithm.needs()
    learns = {"reference": "the environment's answers", "sampler": "its own answers", "pairs": "recorded pairs"}[
        cls.source
    ]
    extra = [
        text
        for there, text in (
            (needs.trainer_logp, "the trainer's own log-probs before the first update"),
            (needs.ref, f"a reference policy ({needs.ref})"),
            (needs.scorer, f"a scorer ({needs.scorer})"),
            (needs.teachers, "teachers"),
            (needs.context, "log-probs after another prompt"),
            (needs.divergence, "the teacher's full distribution"),
            (needs.critics, f"{needs.critics.num if needs.critics else 0} critic(s)"),
            (needs.attention, "attention maps of some layers"),
        )
        if there
    ]
    facts = [f"learns from {learns}", f"sums losses by `{algorithm.aggregation}`"]
    if isinstance(algorithm, PolicyGradient) and algorithm.uses_ratio():
        facts.append(f"ratio per {LEVELS[algorithm.level]} to the {algorithm.anchor} policy")
    text = "; ".join([*facts, f"needs {', '.join(extra)}" if extra else "needs nothing else"])
    return f"{text[0].upper()}{text[1:]}."


# ---- gradients ------------------------------------------------------------------------------------------------------

ADVANTAGES, RATIOS, MARGINS = (1.0, -1.0), (0.5, 0.95, 1.05, 1.5), (-10.0, 0.0, 10.0)


def example(cls: type[Algorithm]) -> Algorithm:
    """Return an algorithm with its defaults, and with a teacher if it needs one."""
    if cls is Distill:
        return Distill(teacher="phase_start")
    if cls is Opd:
        return Opd(teachers=(importlib.import_module(Opd.__module__).Teacher("phase_start"),))
    return cls()


def batch_of(shape: tuple[int, int], **arrays: jax.Array) -> TokenBatch:
    """Return rows in which every token counts; a row is one sequence and one segment."""
    zeros, ones = jnp.zeros(shape, jnp.int32), jnp.ones(shape, jnp.int32)
    names = {f.name: None for f in dataclasses.fields(TokenBatch)}
    scalars = dict.fromkeys(("num_micro", "num_tokens", "num_sequences", "temperature", "kl_coef"), jnp.float32(1))
    counted = {
        **dict.fromkeys(("tokens", "positions", "branch_ids", "prev"), zeros),
        **dict.fromkeys(("segment_ids", "sequence_ids", "turn_ids"), ones),
        "scale": jnp.ones(shape),
        **dict.fromkeys(("advantages", "sampler_logp"), jnp.zeros(shape)),
    }
    return TokenBatch(**{**names, **scalars, **counted, **arrays})


def coefficients(algorithm: Algorithm) -> dict[tuple[float, float], float]:
    """Return -d loss / d logp of the only token of a trajectory, by (advantage, ratio to the anchor)."""
    cases = [(a, r) for a in ADVANTAGES for r in RATIOS]
    a, r = (jnp.float32(x)[:, None] for x in zip(*cases, strict=True))
    logp = jnp.full(a.shape, -2.0)
    anchor = logp - jnp.log(r)
    batch = batch_of(a.shape, advantages=a, rewards=a, sampler_logp=anchor, trainer_logp=anchor)

    def loss(logp: jax.Array) -> jax.Array:
        return algorithm.objective(PolicyOutputs(logp, jnp.zeros_like(logp), jnp.zeros_like(logp)), batch).loss.sum()

    return dict(zip(cases, map(float, -jax.grad(loss)(logp)[:, 0]), strict=True))


def pair_coefficients(algorithm: Dpo) -> dict[float, tuple[float, float]]:
    """Return -d loss / d logp of the chosen and of the rejected answer (one token each) by the margin, in nats: the
    gain of the chosen answer on the reference minus that of the rejected one."""
    found = {}
    for margin in MARGINS:
        logp = jnp.float32([[margin / 2 - 9, -margin / 2 - 9]])
        batch = batch_of((1, 2), advantages=jnp.float32([[1, -1]]), ref_logp=jnp.full((1, 2), -9.0))
        batch = dataclasses.replace(batch, sequence_ids=jnp.int32([[1, 2]]))

        def loss(logp: jax.Array, batch: TokenBatch = batch) -> jax.Array:
            return algorithm.objective(PolicyOutputs(logp, jnp.zeros_like(logp)), batch).loss[0, 0]

        found[margin] = tuple(map(float, -jax.grad(loss)(logp)[0]))
    return found  # type: ignore[return-value]


def label_coefficients(algorithm: Kto) -> dict[float, tuple[float, float]]:
    """Return -d loss / d logp of a good and of a bad answer (one token each) by the margin, in nats: the answer's gain
    on the reference minus the reference point."""
    found = {}
    for margin in MARGINS:
        logp = jnp.full((2, 1), margin - 9)
        batch = batch_of((2, 1), advantages=jnp.float32([[1], [-1]]), ref_logp=jnp.full((2, 1), -9.0))
        batch = dataclasses.replace(batch, reference_points=jnp.zeros((2, 1)))

        def loss(logp: jax.Array, batch: TokenBatch = batch) -> jax.Array:
            return algorithm.objective(PolicyOutputs(logp, jnp.zeros_like(logp)), batch).loss.sum()

        found[margin] = tuple(map(float, -jax.grad(loss)(logp)[:, 0]))
    return found  # type: ignore[return-value]


def score_coefficients(algorithm: RewardModel) -> dict[float, tuple[float, float]]:
    """Return -d loss / d score of the better and of the worse answer, by the difference of their scores."""
    found = {}
    for margin in (-2.0, 0.0, 2.0):
        values, signs = jnp.float32([[margin / 2, -margin / 2]]), jnp.float32([[1, -1]])

        def loss(values: jax.Array, signs: jax.Array = signs) -> jax.Array:
            return algorithm.critic_loss(values, signs, values, batch_of((1, 2)))[0][0, 0]

        found[margin] = tuple(map(float, -jax.grad(loss)(values)[0]))
    return found  # type: ignore[return-value]


def number(x: float) -> str:
    return f"{x or 0.0:.5g}"  # float32 has seven digits, of which versions of JAX agree on six


def gradient(cls: type[Algorithm]) -> list[str]:
    """Return the objective's gradient of log-probs as a table."""
    algorithm = example(cls)
    if isinstance(algorithm, Dpo):
        table = pair_coefficients(algorithm)
        text = (
            "The gradient is a sum of `c * grad logp` over the tokens of both answers. `c` by the margin, in nats: "
            "how much more the chosen answer has gained on the reference than the rejected one."
        )
        return [text, "", *_columns("margin", table, ("chosen", "rejected"))]
    if isinstance(algorithm, RewardModel):
        text = "The gradient is `c * grad score`, summed over both answers. `c` by the difference of their scores:"
        return [text, "", *_columns("difference", score_coefficients(algorithm), ("better", "worse"))]
    if isinstance(algorithm, Kto):
        text = (
            "The gradient is a sum of `c * grad logp` over an answer's tokens. `c` by the margin, in nats: how much "
            "more the answer has gained on the reference than the reference point."
        )
        return [text, "", *_columns("margin", label_coefficients(algorithm), ("good", "bad"))]
    c = coefficients(algorithm)
    if not isinstance(algorithm, PolicyGradient):
        (only,) = set(c.values())
        more = " The teacher's divergence adds its own." if cls is Distill else ""
        return [f"The gradient of the cross-entropy is `c * grad logp` with c = {number(only)} for every token.{more}"]
    text = "The gradient is a sum of `c * grad logp` over tokens. `c` by advantage A and ratio"
    text += f" (of a {LEVELS[algorithm.level]}):" if algorithm.level != "token" else ":"
    if algorithm.correction is not None and algorithm.correction.weight_cap is not None:
        text = f"{text[:-1]}, before `correction` multiplies it by its weight:"
    head = ["| A | " + " | ".join(f"ratio {r:g}" for r in RATIOS) + " |", "|---" * (len(RATIOS) + 1) + "|"]
    rows = [f"| {a:+g} | " + " | ".join(number(c[a, r]) for r in RATIOS) + " |" for a in ADVANTAGES]
    return [text, "", *head, *rows]


def _columns(what: str, table: dict[float, tuple[float, float]], names: tuple[str, str]) -> list[str]:
    head = [f"| {what} | " + " | ".join(f"{m:g}" for m in table) + " |", "|---" * (len(table) + 1) + "|"]
    return head + [f"| {n} | " + " | ".join(number(c[i]) for c in table.values()) + " |" for i, n in enumerate(names)]


# ---- pages ----------------------------------------------------------------------------------------------------------


def command_of(cls: type[Algorithm]) -> tuple[str, list[str]]:
    """Return the name of the config that runs an algorithm, and the settings that go with it."""
    if cls.__name__ not in FEW_SETTINGS:
        return f"algorithms/{recipe_name(cls)}", []
    config, *settings = FEW_SETTINGS[cls.__name__]
    return config, [f"rl/Phase.algorithm = @{cls.__name__}()", *settings]


def command_text(cls: type[Algorithm]) -> str:
    """Return the arguments of `rolljax.train` that run an algorithm, as they are typed."""
    config, settings = command_of(cls)
    quoted = [f'"{s}"' if "'" in s else f"'{s}'" for s in settings]
    return " ".join([f"--gin {config}", *(f"--set {s}" for s in quoted)])


def recipe(cls: type[Algorithm]) -> list[str]:
    """Return the command, and the shipped recipe without its import lines, if there is one."""
    if cls.__name__ in FEW_SETTINGS:
        return ["```", f"python -m rolljax.train {command_text(cls)}", "```"]
    name = recipe_name(cls)
    lines = (RECIPES / f"{name}.gin").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("from ", "#   python"))]
    command = ["```", f"python -m rolljax.train --gin algorithms/{name}", "```"]
    return [*command, "", f"[{name}.gin](../../configs/algorithms/{name}.gin):", "", "```", *kept, "```"]


def figure(cls: type[Algorithm], measured: Collection[str]) -> list[str]:
    """Return the learning curve, if one was measured."""
    if bench_name(cls) not in measured:
        return []
    text = "Success on a bandit, with samples from the newest policy and from older ones; [how it is measured]"
    picture = f"![Learning curve of {cls.__name__}](curves/{recipe_name(cls)}.png)"
    return ["", "### Learning curve", "", f"{text}(../algorithms.md#measured-on-small-problems).", "", picture]


def bench_name(cls: type[Algorithm]) -> str:
    """Return the name of an algorithm in `benchmarks/algorithms.py`."""
    return f"{module_of(cls)}.{cls.__name__}"


def page(module: types.ModuleType, classes: list[type[Algorithm]], measured: Collection[str]) -> str:
    title = inspect.cleandoc(module.__doc__ or "").rstrip(".")
    lines = [NOTICE, "", f"# {title}", "", "[All algorithms](index.md)"]
    for cls in classes:
        lines += ["", f"## {module_of(cls)}.{cls.__name__}", ""]
        lines += [line for text in paragraphs_of(cls) for line in (linked(text), "")]
        lines += [f"**When.** {when(cls)}", "", f"**At a glance.** {at_a_glance(cls)}", ""]
        lines += [f"**Papers.** {papers(cls)}", "", "### Settings", "", *settings(cls), ""]
        lines += ["### Gradient", "", *gradient(cls), "", "### Recipe", "", *recipe(cls), *figure(cls, measured)]
    return "\n".join(lines).rstrip() + "\n"


# ---- what papers state ----------------------------------------------------------------------------------------------


def paper_of(cls: type[Algorithm]) -> Mapping[str, Stated]:
    """Return the class's own statements about its paper, without those of its bases."""
    return vars(cls).get("paper", {})


def oracles(cls: type[Algorithm]) -> list[tuple[str, str]]:
    """Return tests against an external reference, and that reference; `none` and the reason if there is none.

    Raises:
      KeyError: the entry is missing.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\n +", " ", ORACLES).strip().split("\n"):
        name, where, what = re.match(r"(\w+): (none|\S+::\S+): (.+)", line).groups()  # type: ignore[union-attr]
        found.setdefault(name, []).append((where, what))
    return found[cls.__name__]


def stated(cls: type[Algorithm]) -> list[str]:
    """Return a class's section of the page of defaults."""
    module = module_of(cls)
    lines = [f"## {cls.__name__}", "", f"[`{module}.{cls.__name__}`]({module}.md). **Papers.** {papers(cls)}", ""]
    defaults = {f.name: field_default(f) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if paper_of(cls):
        lines += ["| setting | our default | the paper's | where | why another |", "|---|---|---|---|---|"]
    for name, s in paper_of(cls).items():
        row = (f"`{name}`", f"`{shown(defaults[name])}`", f"`{shown(s.value)}`", linked(s.where), linked(s.why))
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    if not paper_of(cls):
        lines.append("It follows no paper.")
    return [*lines, "", *(f"**Outside.** {_oracle(where, what)}" for where, what in oracles(cls)), ""]


def _oracle(where: str, what: str) -> str:
    if where == "none":
        return f"No oracle: {what}."
    file, _, test = where.partition("::")
    return f"[`{test}`](../../{file}): {what}."


def defaults_page() -> str:
    """Return the page of defaults."""
    classes = [cls for group in algorithm_classes().values() for cls in group]
    differ = sum(bool(s.why) for cls in classes for s in paper_of(cls).values())
    every = sum(len(paper_of(cls)) for cls in classes)
    lines = [
        NOTICE,
        "# Defaults, and what papers state",
        "",
        f"Of {every} settings to which a paper or its authors' code gives a value, {every - differ} have it as their "
        f"class's default; the other {differ} say why not. Recipes may set others still. What a paper leaves open is "
        "not here.",
        "",
        "**Outside** names what else than our own second implementation an algorithm was compared with.",
        "",
    ]
    return "\n".join(lines + [line for cls in classes for line in stated(cls)]).rstrip() + "\n"


def index() -> str:
    """Return the page that lists every algorithm."""
    lines = [NOTICE, "", "# All algorithms", "", "[How to choose one, and write your own](../algorithms.md).", ""]
    lines += ["| algorithm | learns from | papers | recipe |", "|---|---|---|---|"]
    for module, classes in algorithm_classes().items():
        for cls in classes:
            source = {"reference": "reference answers", "sampler": "own answers", "pairs": "recorded pairs"}[cls.source]
            anchor = f"{module}{cls.__name__}".lower()
            lines.append(
                f"| [`{module}.{cls.__name__}`]({module}.md#{anchor}) | {source} | {papers(cls)} "
                f"| `{command_text(cls)}` |"
            )
    return "\n".join(lines) + "\n"


def measured_in(curves: Path) -> set[str]:
    """Return the algorithms with learning curves by `benchmarks/algorithms.py`."""
    data = json.loads(curves.read_text()) if curves.is_file() else {}
    return {name.partition("|")[0] for name in data.get("bandit", {})}


def pages(curves: Path = CURVES) -> dict[str, str]:
    """Make every page, by its file name; links are relative to docs/algorithms."""
    measured = measured_in(curves)
    made = {"index.md": index(), "defaults.md": defaults_page()}
    for name, classes in algorithm_classes().items():
        module = importlib.import_module(f"{algorithms.__name__}.{name}")
        made[f"{name}.md"] = page(module, classes, measured)
    return made


def curves() -> dict[str, str]:
    """Return the pictures of learning curves by their file names, with the measured algorithm that each shows."""
    known = {bench_name(c): recipe_name(c) for classes in algorithm_classes().values() for c in classes}
    return {f"{known[name]}.png": name for name in sorted(measured_in(CURVES) & known.keys())}


def draw(folder: Path) -> None:
    """Draw the learning curves that were measured, one picture each."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    bench = importlib.import_module("algorithms")
    folder.mkdir(parents=True, exist_ok=True)
    for picture, name in curves().items():
        bench.curve_figure([name], folder / picture)
