"""Settings that cannot work, or that nothing would read, are refused before anything starts: by name, with the value,
and with a remedy that helps."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolljax import cli
from rolljax.commands.train import main as train
from rolljax.config.foreign import NAMES, foreign
from rolljax.config.parser import Ref, leaves
from rolljax.config.source import Bindings
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.records import Records
from rolljax.errors import ConfigError
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Phase, Recipe
from rolljax.rollout.group_buffer import TailBatching
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.attention_rhythm import AttentionRhythm
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.dpo import Dpo, PairDpo
from rolljax.trainer.algorithms.gigpo import GiGpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.algorithms.kimi import Kimi
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.algorithms.policy_gradient import PolicyGradient
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.raft import RaftPP
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.reward_model import RewardModel
from rolljax.trainer.algorithms.rft import Rft
from rolljax.trainer.algorithms.rloo import Rloo
from rolljax.trainer.algorithms.segment_reward import SegmentReward
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter, RewardShaping
from rolljax.trainer.critic import Critic
from rolljax.trainer.kl import AdaptiveKl, KlLoss, KlReward
from rolljax.trainer.optimizer import Adafactor, AdamW, Lion, Muon

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = CONFIGS.parent / "rolljax" / "recipes"
QUICKSTART = str(CONFIGS / "quickstart.gin")
MAX_CONTEXT, MAX_ANSWER = 64, 16
sys.path.insert(0, str(CONFIGS.parent / "docs"))
pages = importlib.import_module("make_algorithm_pages")
sys.path.remove(str(CONFIGS.parent / "docs"))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return `build(algorithm, turns=1, before=(), **phase)`: a recipe with two updates per step and groups of four."""
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = [json.dumps({"prompt": f"{n} and {n}?", "answer": str(2 * n)}) for n in range(20)]
    path.write_text("\n".join(lines))
    one_turn = Records(str(path))
    assert one_turn.max_turns == 1

    def make(algorithm, *, turns=1, before=(), **phase):
        numbers = {"prompts_per_step": 4, "group_size": 4, "updates_per_step": 2, "row_len": 128, **phase}
        phases = [
            Phase(f"phase {n}", a, steps=1, **(numbers if a is algorithm else {"group_size": 4, "row_len": 128}))
            for n, a in enumerate([*before, algorithm])
        ]
        return Recipe(
            env=one_turn if turns == 1 else FrozenLake(max_turns=turns),
            phases=tuple(phases),
            max_answer_tok=MAX_ANSWER,
            sampler=SamplerConfig(max_context=MAX_CONTEXT),
        )

    return make


Build = Callable[..., Recipe]


@dataclasses.dataclass(frozen=True)
class Refused:
    """`bad` is refused because of `setting`; with what the remedy says, `good` is not.

    says: words of the message.
    """

    setting: str
    value: Any
    says: tuple[str, ...]
    bad: Callable[[Build], Recipe]
    good: Callable[[Build], Recipe]


CAPPED, FILTER = Correction(), Correction(weight_cap=None, ratio_band=(0.5, 2.0))
TEACHERS = (Teacher("run_start"),)
NO_CLIP: dict[str, Any] = {"clip_low": None, "clip_high": None}

TABLE = {
    # ratios that are 1, or wrong
    "clip with ratio 1": Refused(
        "Grpo.clip_high",
        0.3,
        ("ratio is 1", "updates_per_step", "Grpo.clip_high = None"),
        lambda build: build(Grpo(clip_high=0.3), updates_per_step=1),
        lambda build: build(Grpo(**NO_CLIP), updates_per_step=1),
    ),
    "clip of sequences with ratio 1": Refused(
        "Gspo.clip_high",
        1e-3,
        ("ratio is 1", "updates_per_step"),
        lambda build: build(Gspo(clip_high=1e-3), updates_per_step=1),
        lambda build: build(Gspo(clip_high=1e-3), updates_per_step=1, epochs=2),
    ),
    "clip of weights with ratio 1": Refused(
        "Cispo.clip_high",
        0.3,
        ("ratio is 1", "updates_per_step"),
        lambda build: build(Cispo(clip_high=0.3), updates_per_step=1),
        lambda build: build(Cispo(clip_high=0.3), updates_per_step=1, async_ratio=1),
    ),
    "clip around the proximal policy of one update": Refused(
        "DecoupledPpo.clip_high",
        0.3,
        ("ratio is 1", "updates_per_step"),
        lambda build: build(DecoupledPpo(clip_high=0.3), updates_per_step=1),
        lambda build: build(DecoupledPpo(clip_high=0.3), updates_per_step=2),
    ),
    "proximal policy of one update": Refused(
        "Tis.anchor",
        "proximal",
        ("ratio 1", "updates_per_step", "behaviour"),
        lambda build: build(Tis(anchor="proximal"), updates_per_step=1),
        lambda build: build(Tis(anchor="behaviour"), updates_per_step=1),
    ),
    "anchor of an objective without a ratio": Refused(
        "Rloo.anchor",
        "proximal",
        ("no ratio", "leave it out"),
        lambda build: build(Rloo(anchor="proximal")),
        lambda build: build(Rloo()),
    ),
    "top-p and the ratio to the behaviour policy": Refused(
        "Grpo.anchor",
        "behaviour",
        ("top_p", "proximal"),
        lambda build: build(Grpo(), top_p=0.9),
        lambda build: build(Grpo(anchor="proximal"), top_p=0.9),
    ),
    "top-k and the ratio to the behaviour policy": Refused(
        "Kimi.anchor",
        "behaviour",
        ("top_k", "proximal"),
        lambda build: build(Kimi(), top_k=20),
        lambda build: build(Kimi(anchor="proximal"), top_k=20),
    ),
    "min-p and a correction": Refused(
        "DecoupledPpo.correction",
        Correction(weight_cap=2.0),
        ("min_p", "None"),
        lambda build: build(DecoupledPpo(), min_p=0.1),
        lambda build: build(DecoupledPpo(correction=None), min_p=0.1),
    ),
    "top-p and a correction without a ratio": Refused(
        "Reinforce.correction",
        CAPPED,
        ("top_p", "None"),
        lambda build: build(Reinforce(correction=CAPPED), top_p=0.9),
        lambda build: build(Reinforce(), top_p=0.9),
    ),
    "top-p and a KL penalty": Refused(
        "Grpo.kl",
        KlReward(0.1),
        ("top_p", "proximal"),
        lambda build: build(Grpo(kl=KlReward(0.1)), top_p=0.9),
        lambda build: build(Grpo(kl=KlReward(0.1), anchor="proximal"), top_p=0.9),
    ),
    "top-k and teachers": Refused(
        "Opd.teachers",
        TEACHERS,
        ("top_k", "full distribution"),
        lambda build: build(Opd(teachers=TEACHERS), top_k=20),
        lambda build: build(Opd(teachers=TEACHERS)),
    ),
    "the same gap weighed twice": Refused(
        "Grpo.correction",
        CAPPED,
        ("twice", "proximal", "weight_cap = None"),
        lambda build: build(Grpo(correction=CAPPED)),
        lambda build: build(Grpo(correction=FILTER)),
    ),
    "dual clip inside the clip": Refused(
        "Grpo.dual_clip",
        1.2,
        ("1 + clip_high",),
        lambda build: build(Grpo(dual_clip=1.2)),
        lambda build: build(Grpo(dual_clip=3.0)),
    ),
    "a ratio below 0": Refused(
        "Dapo.clip_low",
        1.0,
        ("less than 1",),
        lambda build: build(Dapo(shaping=None, clip_low=1.0)),
        lambda build: build(Dapo(shaping=None, clip_low=0.9)),
    ),
    "a weight below 0": Refused(
        "Cispo.clip_low",
        1.5,
        ("less than 1",),
        lambda build: build(Cispo(clip_low=1.5)),
        lambda build: build(Cispo(clip_low=0.5)),
    ),
    "a mask for no clip": Refused(
        "Cispo.unified_mask",
        True,
        ("clip_low or clip_high",),
        lambda build: build(Cispo(**NO_CLIP, unified_mask=True)),
        lambda build: build(Cispo(clip_low=None, unified_mask=True)),
    ),
    # KL
    "a target for the KL over the vocabulary": Refused(
        "KlLoss.adaptive",
        AdaptiveKl(0.1),
        ("k3",),
        lambda build: build(Grpo(kl=KlLoss(0.1, AdaptiveKl(0.1), estimator="full"))),
        lambda build: build(Grpo(kl=KlLoss(0.1, AdaptiveKl(0.1), estimator="k3"))),
    ),
    # groups, turns, rewards
    "a discount per turn of single turns": Refused(
        "Ipa.gamma",
        0.95,
        ("one turn", "SequenceTopr"),
        lambda build: build(Ipa()),
        lambda build: build(Ipa(), turns=8),
    ),
    "states of single turns": Refused(
        "GiGpo.turn_weight",
        1.0,
        ("one turn", "Grpo"),
        lambda build: build(GiGpo()),
        lambda build: build(GiGpo(), turns=8),
    ),
    "a group of one as a baseline": Refused(
        "Phase.group_size",
        1,
        ("baseline", "2 or more"),
        lambda build: build(Grpo(), group_size=1),
        lambda build: build(Grpo(), group_size=2),
    ),
    "the others of a group of one": Refused(
        "Phase.group_size",
        1,
        ("baseline", "2 or more"),
        lambda build: build(Rloo(), group_size=1),
        lambda build: build(Reinforce(), group_size=1),
    ),
    "groups of one that are all equal": Refused(
        "Phase.group_size",
        1,
        ("Reinforce.filter", "2 or more"),
        lambda build: build(Reinforce(filter=GroupFilter()), group_size=1),
        lambda build: build(Reinforce(filter=GroupFilter()), group_size=4),
    ),
    "a filter that filters nothing": Refused(
        "GroupFilter.drop_degenerate",
        False,
        ("no group is ever dropped", "filter = None"),
        lambda build: build(Dapo(shaping=None, filter=GroupFilter(drop_degenerate=False))),
        lambda build: build(Dapo(shaping=None, filter=GroupFilter(drop_degenerate=False, solve_range=(0.1, 0.9)))),
    ),
    "a shaping that shapes nothing": Refused(
        "RewardShaping.overlong_cache",
        0,
        ("shapes nothing", "shaping = None"),
        lambda build: build(Dapo(shaping=RewardShaping(overlong_cache=0))),
        lambda build: build(Dapo(shaping=None)),
    ),
    "no mean is in the range": Refused(
        "GroupFilter.solve_range",
        (0.9, 0.1),
        ("empty", "(low, high)"),
        lambda build: build(Grpo(filter=GroupFilter(solve_range=(0.9, 0.1)))),
        lambda build: build(Grpo(filter=GroupFilter(solve_range=(0.1, 0.9)))),
    ),
    "turns that are made equal twice": Refused(
        "TurnReinforce.equal_turns",
        True,
        ("token-mean",),
        lambda build: build(TurnReinforce(equal_turns=True, aggregation="seq-mean-token-mean"), turns=8),
        lambda build: build(TurnReinforce(equal_turns=True), turns=8),
    ),
    "a penalty longer than the answer": Refused(
        "RewardShaping.overlong_cache",
        4096,
        ("Recipe.max_answer_tok", str(MAX_ANSWER)),
        lambda build: build(Dapo()),
        lambda build: build(Dapo(shaping=RewardShaping(overlong_cache=MAX_ANSWER))),
    ),
    "a lower clip without negative advantages": Refused(
        "RaftPP.clip_low",
        0.2,
        ("negative advantages", "None"),
        lambda build: build(RaftPP(clip_low=0.2)),
        lambda build: build(RaftPP()),
    ),
    "settings of another rhythm": Refused(
        "AttentionRhythm.share",
        0.3,
        ("coupled",),
        lambda build: build(AttentionRhythm(rhythm="local", share=0.3)),
        lambda build: build(AttentionRhythm(rhythm="coupled", share=0.3)),
    ),
    "another end of two statistics": Refused(
        "AttentionRhythm.pick",
        "bottom",
        ("coupled", "global"),
        lambda build: build(AttentionRhythm(rhythm="coupled", pick="bottom")),
        lambda build: build(AttentionRhythm(rhythm="global", pick="bottom")),
    ),
    "a scorer that is its base": Refused(
        "SegmentReward.scorer",
        "run_start",
        ("two different policies",),
        lambda build: build(SegmentReward(scorer="run_start")),
        lambda build: build(SegmentReward(scorer="phase_start", base="run_start"), before=[Dpo()]),
    ),
    "a scorer that is its base in the first phase": Refused(
        "SegmentReward.scorer",
        "phase_start",
        ("first phase", "Dpo phase before it"),
        lambda build: build(SegmentReward()),
        lambda build: build(SegmentReward(), before=[Dpo()]),
    ),
    # distillation
    "a teacher of another environment": Refused(
        "Teacher.domains",
        ("alfworld", "shop"),
        ("'records'", "'/models/a'", "would teach nothing"),
        lambda build: build(Opd(teachers=(*TEACHERS, Teacher("/models/a", domains=("alfworld", "shop"))))),
        lambda build: build(Opd(teachers=(*TEACHERS, Teacher("/models/a", domains=("records",))))),
    ),
    "an unknown domain of a teacher, next to a known one": Refused(
        "Teacher.domains",
        ("records", "shop"),
        ("'shop'", "no domain of this run"),
        lambda build: build(Opd(teachers=(Teacher("run_start", domains=("records", "shop")),))),
        lambda build: build(Opd(teachers=(Teacher("run_start", domains=("records",)),))),
    ),
    "teachers that do not count": Refused(
        "Teacher.coef",
        0.0,
        ("reward_coef too", "every advantage would be 0"),
        lambda build: build(Opd(teachers=(Teacher("run_start", 0.0),))),
        lambda build: build(Opd(teachers=(Teacher("run_start", 0.0),), reward_coef=1.0)),
    ),
    "no teacher to learn from": Refused(
        "Opd.teachers", (), ("@Teacher()",), lambda build: build(Opd()), lambda build: build(Opd(teachers=TEACHERS))
    ),
    **{
        f"{name} of rewards that do not count": Refused(
            f"Opd.{name}",
            value,
            ("reward_coef is 0", "set reward_coef"),
            lambda build, given={name: value}: build(Opd(teachers=TEACHERS, **given)),
            lambda build, given={name: value}: build(Opd(teachers=TEACHERS, reward_coef=1.0, **given)),
        )
        for name, value in (("shaping", RewardShaping(overlong_cache=4)), ("std", "batch"), ("filter", GroupFilter()))
    },
    "no teacher": Refused(
        "Distill.teacher",
        "",
        ("Hugging Face folder",),
        lambda build: build(Distill(), group_size=1),
        lambda build: build(Distill(teacher="run_start"), group_size=1),
    ),
    "the skew of another divergence": Refused(
        "Distill.alpha",
        0.2,
        ("skewed",),
        lambda build: build(Distill(teacher="run_start", alpha=0.2), group_size=1),
        lambda build: build(Distill(teacher="run_start", alpha=0.2, divergence="skewed"), group_size=1),
    ),
    "the likeliest tokens of another divergence": Refused(
        "Distill.top_k",
        8,
        ("forward", "top_k = 0"),
        lambda build: build(Distill(teacher="run_start", top_k=8, divergence="js"), group_size=1),
        lambda build: build(Distill(teacher="run_start", top_k=8), group_size=1),
    ),
    "the remainder of all tokens": Refused(
        "Distill.remainder",
        "renormalise",
        ("top_k is 0", "set top_k"),
        lambda build: build(Distill(teacher="run_start", remainder="renormalise"), group_size=1),
        lambda build: build(Distill(teacher="run_start", remainder="renormalise", top_k=8), group_size=1),
    ),
    "copies of a reference answer": Refused(
        "Phase.group_size",
        4,
        ("group_size = 1", "prompts_per_step"),
        lambda build: build(Sft(), group_size=4),
        lambda build: build(Sft(), group_size=1),
    ),
    "reference answers that age": Refused(
        "Phase.async_ratio",
        1,
        ("no effect", "reference answers"),
        lambda build: build(Sft(), group_size=1, async_ratio=1),
        lambda build: build(Rft(), async_ratio=1),
    ),
    # preferences
    "smoothing of IPO": Refused(
        "Dpo.label_smoothing",
        0.1,
        ("ipo", "sigmoid"),
        lambda build: build(Dpo(loss="ipo", label_smoothing=0.1)),
        lambda build: build(Dpo(label_smoothing=0.1)),
    ),
    "a margin without SimPO": Refused(
        "Dpo.margin",
        0.5,
        ("simpo",),
        lambda build: build(Dpo(margin=0.5)),
        lambda build: build(Dpo(loss="simpo", margin=0.5)),
    ),
    "a reference of SimPO": Refused(
        "Dpo.reference",
        "run_start",
        ("simpo", "leave it out"),
        lambda build: build(Dpo(loss="simpo", reference="run_start")),
        lambda build: build(Dpo(reference="run_start")),
    ),
    "a pair of three": Refused(
        "Phase.group_size",
        3,
        ("pair", "group_size = 2"),
        lambda build: build(PairDpo(), group_size=3),
        lambda build: build(PairDpo(), group_size=2),
    ),
    "a pair of one": Refused(
        "Phase.group_size",
        1,
        ("no other answer to prefer", "2 or more"),
        lambda build: build(Dpo(), group_size=1),
        lambda build: build(Dpo(), group_size=2),
    ),
    "a row too short for a pair": Refused(
        "Phase.row_len",
        MAX_CONTEXT,
        ("pair of answers", f"set it to {MAX_CONTEXT + MAX_ANSWER}"),
        lambda build: build(Dpo(), row_len=MAX_CONTEXT),
        lambda build: build(Dpo(), row_len=MAX_CONTEXT + MAX_ANSWER),
    ),
    # critics
    "one critic to disagree": Refused(
        "AsyPpo.critic",
        Critic(),
        ("Critic.num = 2",),
        lambda build: build(AsyPpo(critic=Critic())),
        lambda build: build(AsyPpo(critic=Critic(num=2))),
    ),
    "critics that learn the same": Refused(
        "AsyPpo.critic",
        Critic(num=2, shard="all"),
        ("Critic.shard = 'response'",),
        lambda build: build(AsyPpo(critic=Critic(num=2, shard="all"))),
        lambda build: build(AsyPpo(critic=Critic(num=2, shard="response"))),
    ),
    "more critics than responses": Refused(
        "AsyPpo.critic",
        Critic(num=3),
        ("group_size", "Critic.shard = 'prompt'"),
        lambda build: build(AsyPpo(critic=Critic(num=3)), group_size=2),
        lambda build: build(AsyPpo(critic=Critic(num=3, shard="prompt")), group_size=2),
    ),
    "critics of no phase": Refused(
        "Critic.model",
        "previous",
        ("which has none", "RewardModel"),
        lambda build: build(Ppo(critic=Critic(model="previous"))),
        lambda build: build(Ppo(critic=Critic(model="previous")), before=[RewardModel()]),
    ),
    "critics of a phase without": Refused(
        "Critic.model",
        "previous",
        ("which has none", "RewardModel"),
        lambda build: build(Ppo(critic=Critic(model="previous")), before=[RewardModel(), Rft()]),
        lambda build: build(Ppo(critic=Critic(model="previous")), before=[Rft(), RewardModel()]),
    ),
    "more critics than the phase before leaves": Refused(
        "Critic.num",
        2,
        ("set it to 1",),
        lambda build: build(AsyPpo(critic=Critic(num=2, model="previous")), before=[RewardModel()]),
        lambda build: build(AsyPpo(critic=Critic(num=2, model="previous")), before=[RewardModel(critic=Critic(num=2))]),
    ),
    "critics of another shape": Refused(
        "Critic.model",
        "previous",
        ("shape of their own", "leave out the shape"),
        lambda build: build(
            Ppo(critic=Critic(model="previous")), before=[RewardModel(critic=Critic(model=Qwen3Config()))]
        ),
        lambda build: build(Ppo(critic=Critic(model="previous")), before=[RewardModel(critic=Critic(model=None))]),
    ),
    "epochs of a policy that is not trained": Refused(
        "Phase.epochs",
        2,
        ("RewardModel", "Critic.epochs"),
        lambda build: build(RewardModel(), epochs=2),
        lambda build: build(RewardModel(critic=Critic(epochs=2))),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_refused(name, build):
    row = TABLE[name]
    with pytest.raises(ConfigError) as caught:
        row.bad(build)
    error = caught.value
    assert (error.setting, error.value) == (row.setting, row.value)
    assert error.remedy
    for part in row.says:
        assert part in str(error), str(error)


@pytest.mark.parametrize("name", TABLE)
def test_the_remedy_helps(name, build):
    assert TABLE[name].good(build).phases


# ---- what may be meant ----------------------------------------------------------------------------------------------

ONE_UPDATE = {"updates_per_step": 1}
WARNED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (Tis(), ONE_UPDATE, {"async_ratio": 2}),
    (Reinforce(), ONE_UPDATE | {"async_ratio": 0.5}, ONE_UPDATE),
    (Grpo(anchor="proximal"), {"async_ratio": 1}, {}),
    (Topr(), ONE_UPDATE, {"updates_per_step": 2}),
    (SequenceTopr(), ONE_UPDATE, {"updates_per_step": 1, "epochs": 2}),
    (Kimi(), ONE_UPDATE, {"updates_per_step": 2}),
    (Grpo(), ONE_UPDATE, {"updates_per_step": 1, "async_ratio": 1}),
    (Gspo(), ONE_UPDATE, {"updates_per_step": 2}),
    (Cispo(**NO_CLIP), ONE_UPDATE, {"updates_per_step": 2}),
    (Ipa(failure=-1.0), ONE_UPDATE | {"turns": 8}, {"turns": 8}),
    (Rft(cap=4), {"group_size": 2}, {"group_size": 4}),
    (Reinforce(), {"updates_per_step": 2}, {"updates_per_step": 2, "algorithm": Reinforce(correction=CAPPED)}),
]


@pytest.mark.parametrize(("algorithm", "suspicious", "usual"), WARNED, ids=[type(row[0]).__name__ for row in WARNED])
def test_warned(build, algorithm, suspicious, usual):
    """Legitimate, but perhaps not meant: a warning that names phase and class; none once there is no reason."""
    (warning,) = build(algorithm, **suspicious).warnings()
    assert warning.startswith(f"phase phase 0: {type(algorithm).__name__}")
    assert any(part in warning for part in ("differs from REINFORCE", "no effect", "nothing corrects"))
    assert build(**{"algorithm": algorithm, **usual}).warnings() == []


def test_a_range_that_no_group_can_be_in_is_warned_about(build):
    """Means of 4 rewards of 0 or 1 are quarters; rewards of other sizes have others, so it is no error."""
    (text,) = build(Grpo(filter=GroupFilter(solve_range=(0.3, 0.45)))).warnings()
    assert "no mean of 4" in text and "GroupFilter.solve_range of Grpo" in text
    assert build(Grpo(filter=GroupFilter(solve_range=(0.3, 0.55)))).warnings() == []


def test_short_answers_that_are_favoured_are_warned_about(build):
    spares = {"spare_prompts": 1}
    for name, settings in (("'drop'", spares | {"late": "drop"}), ("spare_siblings", {"spare_siblings": 1})):
        (text,) = build(Grpo(), **settings).warnings()
        assert name in text and "more often" in text
    assert build(Grpo(), **spares, late="resample").warnings() == []
    assert build(Grpo(), tail_batching=TailBatching()).warnings() == []


def test_asynchronous_training_warns_where_nothing_corrects_for_it():
    """Of all shipped algorithms: those without a ratio to the log-probs that were sampled with, and without a
    correction. Who imitates, or prefers, does not ask whose answers they are."""
    warned, corrects = set(), set()
    for cls in (cls for classes in pages.algorithm_classes().values() for cls in classes):
        config, settings = pages.command_of(cls)
        loaded = cli.load_recipe([config], settings).value
        phases = [dataclasses.replace(p, async_ratio=1.5 if p.samples else 0.0) for p in loaded.phases]
        found = any("nothing corrects" in text for text in dataclasses.replace(loaded, phases=tuple(phases)).warnings())
        algorithms = [p.algorithm for p in phases if p.samples and isinstance(p.algorithm, PolicyGradient)]
        assert found == any(
            a.correction is None and not (a.uses_ratio() and a.anchor == "behaviour") for a in algorithms
        ), cls.__name__
        (warned if found else corrects).add(cls.__name__)
    assert warned == {"Opd", "Reinforce", "Rloo", "Sdpo", "Spiral", "TurnReinforce"}
    assert {"Grpo", "Ppo", "Tis", "Cispo", "Topr", "DecoupledPpo", "Ipa", "Kimi", "Gspo", "Rft", "Dpo"} < corrects


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["Tis", "Cispo", "Topr", "DecoupledPpo"])
def test_off_policy_algorithms_at_every_preset_of_the_dial(name, ratio):
    """What corrects for older samples has nothing to be warned of, however old they are."""
    found = cli.load_recipe(["quickstart", f"presets/async_ratio_{ratio}"], [f"rl/Phase.algorithm = @{name}()"]).value
    rl = found.phases[-1]
    assert (rl.async_ratio, rl.admission().oldest) == (ratio, ratio) and found.phases[0].async_ratio == 0
    assert type(rl.algorithm).__name__ == name and found.warnings() == []


@pytest.mark.parametrize("algorithm", [Reinforce(), Rloo(), Grpo(**NO_CLIP), Rft(), Dpo()])
def test_on_policy_is_nothing_to_warn_of(build, algorithm):
    assert build(algorithm, updates_per_step=1).warnings() == []


# ---- from a file ----------------------------------------------------------------------------------------------------

HEAD = f"""include '{QUICKSTART}'
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.trainer import critic
from rolljax.trainer import kl
from rolljax.trainer.algorithms import asyppo
from rolljax.trainer.algorithms import dpo
from rolljax.trainer.algorithms import grpo
from rolljax.trainer.algorithms import opd
from rolljax.trainer.algorithms import ppo
"""  # bindings start at line 11
FILES = {
    "an estimator of no KL term": (
        ["kl.KlLoss.estimator = 'k2'"],
        ["broken.gin:11: KlLoss.estimator", "'k2'", "no KlLoss is built", "kl.KlLoss()"],
    ),
    "a KL term without a weight": (["grpo.Grpo.kl = @kl.KlLoss()"], ["broken.gin:11: KlLoss.coef", "set it"]),
    "an estimator without a gradient": (
        ["grpo.Grpo.kl = @kl.KlLoss()", "kl.KlLoss.coef = 0.1", "kl.KlLoss.estimator = 'k1'"],
        ["broken.gin:13: KlLoss.estimator", "'k1'", "'k2' or 'k3' or 'full'"],
    ),
    "ratio 1": (
        ["rl/recipe.Phase.updates_per_step = 1"],
        ["quickstart.gin", "Grpo.clip_high", "0.5", "Grpo.clip_high = None"],
    ),
    "one critic": (
        ["rl/recipe.Phase.algorithm = @asyppo.AsyPpo()", "asyppo.AsyPpo.critic = @critic.Critic()"],
        ["broken.gin:12: AsyPpo.critic", "set Critic.num = 2"],
    ),
    "no critics before": (
        [
            "rl/recipe.Phase.algorithm = @ppo.Ppo()",
            "ppo.Ppo.critic = @critic.Critic()",
            "critic.Critic.model = 'previous'",
        ],
        ["broken.gin:13: Critic.model", "'previous'", "RewardModel"],
    ),
    "pairs do not fit": (
        ["rl/recipe.Phase.algorithm = @dpo.Dpo()", "rl/recipe.Phase.row_len = 80"],
        ["broken.gin:12", "Phase.row_len", "80", "set it to 86"],
    ),
    "a teacher that is not there": (
        [
            "rl/recipe.Phase.algorithm = @opd.Opd()",
            "opd.Opd.teachers = [@opd.Teacher()]",
            "opd.Teacher.policy = '/nowhere/teacher'",
        ],
        ["Teacher.policy", "'/nowhere/teacher'", "Hugging Face folder"],
    ),
    "a reference that is not there": (
        ["grpo.Grpo.kl = @kl.KlLoss()", "kl.KlLoss.coef = 0.1", "kl.KlLoss.reference = '/nowhere/reference'"],
        ["KlLoss.reference", "'/nowhere/reference'", "phase_start, run_start"],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_refused_from_a_file(name, tmp_path, monkeypatch, capsys):
    lines, says = FILES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gin").write_text(HEAD + "\n".join(lines) + "\n")
    assert train(["--gin", "broken.gin", "--dry_run"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and captured.out == ""
    for part in says:
        assert part in captured.err, captured.err


# ---- names of other frameworks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart():
    """Return the source of the quickstart's settings, to which tests add more."""
    source = Bindings(Recipe)
    source.read_file(QUICKSTART, (0,))
    return source


def answer(source, name):
    with pytest.raises(ConfigError) as caught:
        source.take_settings([f"{name} = 1"])
    return str(caught.value)


def test_every_name_of_another_framework_has_an_answer():
    for framework, table in NAMES.items():
        for theirs, ours in table.items():
            for name in (theirs, f"{'actor_rollout_ref' if framework == 'verl' else 'a/GRPOConfig'}.{theirs}"):
                error = foreign(name, ("steps", "lr", "beta"), "here")
                assert framework in error.message and error.setting == name and error.where == "here"
                assert all(each in error.remedy for each in ours.split())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("num_generations", "is a setting of TRL and Tunix"),
        ("GRPOConfig.num_generations", "ours: Phase.group_size;"),
        ("rl/Phase.num_generations", "ours: Phase.group_size;"),
        ("Grpo.epsilon_high", "ours: Grpo.clip_high;"),
        ("RolloutConfig.kv_cache_size", "ours: SamplerConfig.pages;"),
        ("ppo_mini_batch_size", "is a setting of verl"),
        ("optim.lr", "ours: Critic.optimizer, AdamW.lr;"),
        ("actor_rollout_ref.rollout.temperature", "is a setting of verl"),
        ("GRPOConfig.temperature", "ours: Phase.temperature;"),
        ("beta", "ours: Grpo.kl, KlLoss.coef, KlLoss.estimator;"),
        ("seed", "Recipe.seed"),
        ("Recpie.seed", "did you mean 'Recipe'"),
        ("Phasee.temperature", "did you mean 'Phase'"),
        ("steps", "did you mean 'Phase.steps'"),
        ("lr", "AdamW.lr"),
        ("Grpo.clip_hihg", "did you mean 'clip_high'"),
        ("Phase.n_generations", "is not a field of Phase"),
    ],
)
def test_how_a_name_is_answered(quickstart, name, says):
    assert says in answer(quickstart, name)


def test_settings_of_ours_that_others_have_too_are_set():
    for name in ("Phase.temperature", "rl/Phase.temperature", "recipe.Phase.temperature"):
        recipe = cli.load_recipe([QUICKSTART], [f"{name} = 0.5"]).value
        assert recipe.phases[-1].temperature == 0.5


# ---- learning rates --------------------------------------------------------------------------------------------------


def of_folder(model, optimizer, algorithm=None):
    phase = Phase("rl", algorithm or Reinforce(), 1, optimizer=optimizer)
    return Recipe(env=FrozenLake(), phases=(phase,), model=model)


@pytest.mark.parametrize("cls", [AdamW, Muon, Adafactor, Lion])
def test_the_weights_of_a_folder_are_trained_at_a_rate_that_was_set(cls):
    with pytest.raises(ConfigError, match=rf"(?s){cls.__name__}.lr is not set.*model of my_model.*1e-6"):
        of_folder("my_model", cls()).check_rates()
    of_folder("my_model", cls(lr=1e-3)).check_rates()  # whatever it is
    of_folder(Qwen3Config(), cls()).check_rates()
    assert cls().highest_lr == cls(lr=cls.random_lr).highest_lr == (1e-4 if cls is Lion else 1e-3)


def test_critics_that_start_from_a_folder_too():
    rated = AdamW(lr=1e-6)
    of_folder("my_model", rated, Ppo()).check_rates()
    with pytest.raises(ConfigError, match="AdamW.lr is not set"):
        of_folder("my_model", rated, Ppo(critic=Critic(optimizer=AdamW()))).check_rates()
    of_folder("my_model", rated, Ppo(critic=Critic(model=Qwen3Config(), optimizer=AdamW()))).check_rates()


def test_every_config_of_a_folder_has_its_rates():
    """Whether or not the files are there that it names."""
    paths = [
        p for p in [*CONFIGS.rglob("*.gin"), *RECIPES.rglob("*.gin")] if "recipe.Recipe.model = '" in p.read_text()
    ]
    assert len(paths) > 4
    for path in paths:
        source = Bindings(Recipe)
        source.read_file(str(path), (0,))
        for phase in leaves(source.live[Recipe, "", "phases"].value, Ref):
            (optimizer,) = leaves(source.live[Phase, phase.scope, "optimizer"].value, Ref)
            assert any((optimizer.obj, scope, "lr") in source.live for scope in (optimizer.scope, "")), path
