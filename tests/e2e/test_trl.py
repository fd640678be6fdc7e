"""Losses and gradients of whole updates against TRL's own trainers, on one frozen batch (`trl_oracle.py`).

Our side is everything between trajectories and gradients: credit, packing with shared prompts over several rows and
micro-batches, the jitted update. The batch has ragged lengths, observations inside of answers, answers cut by the limit,
a group whose rewards are equal, and old log-probs so far away that clips cut on both sides.
"""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rolljax.model import hf
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.dpo import Dpo
from rolljax.trainer.algorithms.dr_grpo import DrGrpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.gspo import Gspo
from rolljax.trainer.algorithms.kto import PairKto
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.sdpo import Sdpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.batch import PackShape
from rolljax.trainer.contexts import solved_siblings
from rolljax.trainer.credit.episodes import Episodes, apply_credit
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.kl import KlLoss
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer, Sample
from rolljax.trainer.update import gradients
from rolljax.types import Key, Task, Trajectory, Turn

from . import trl_oracle as trl

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers", "ignore::UserWarning:trl"),
]

GROUPS, GROUP_SIZE, LIMIT_TOK = 4, 4, 12
SHAPE = PackShape(num_micro=6, micro_rows=2, row_len=36)  # groups are split over rows; micro-batches stay empty

# each case compiles a program that it runs once; without fusion that takes a third of the time
QUICKER = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    """Limit torch to one thread: its threads wait by spinning, which costs more than these small matrices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(model, params, tmp_path_factory):
    """Save the model as a Hugging Face folder, so that both sides have bit-equal weights."""
    folder = tmp_path_factory.mktemp("trl") / "model"
    hf.save(folder, model, params, byte_tokenizer())
    return folder


def answer(rng, eos):
    """Return the ids of one completion, and which of them were sampled; the limit cuts one in four."""
    cut = rng.random() < 0.25
    length = LIMIT_TOK if cut else int(rng.integers(1, LIMIT_TOK + 1))
    ids, sampled = rng.integers(0, 256, length), np.ones(length, bool)
    if not cut:
        ids[-1] = eos
    if length > 6:  # an observation, from 1 to 3 tokens, after the first few
        sampled[2 : 2 + int(rng.integers(1, 4))] = False
    return ids, sampled, cut


@pytest.fixture(scope="module")
def frozen(folder):
    rng, eos = np.random.default_rng(7), byte_tokenizer().eos_token_id
    prompts = [rng.integers(0, 256, rng.integers(3, 10)) for _ in range(GROUPS)]
    completions, sampled, truncated = zip(*(answer(rng, eos) for _ in range(GROUPS * GROUP_SIZE)), strict=True)
    assert 0 < sum(truncated) < len(truncated)
    rewards = rng.normal(size=(GROUPS, GROUP_SIZE)).round(2)
    rewards[1] = 0.5
    batch = trl.FrozenBatch(
        group_size=GROUP_SIZE,
        prompts=[p for p in prompts for _ in range(GROUP_SIZE)],
        completions=list(completions),
        sampled=list(sampled),
        truncated=np.array(truncated),
        limit_tok=LIMIT_TOK,
        rewards=rewards.reshape(-1),
        advantages=None,
        **dict.fromkeys(("sampler_logp", "trainer_logp", "ref_logp"), [np.zeros(len(c)) for c in completions]),
    )
    logp = trl.token_logp(folder, batch)
    noise = lambda std: [(x + rng.normal(0, std, len(x))).astype(np.float32) for x in logp]  # noqa: E731
    return dataclasses.replace(batch, sampler_logp=noise(0.4), trainer_logp=noise(0.25), ref_logp=noise(0.5))


def only_answers(frozen):
    """Return the same batch without observations: every token of a completion was sampled."""
    return dataclasses.replace(frozen, sampled=[np.ones(len(c), bool) for c in frozen.completions])


def cut_to(frozen, length):
    """Return completions of one length, made of the long ones and of copies of them."""
    cut = lambda rows: [np.resize(x, length) for x in rows]  # noqa: E731
    names = ("completions", "sampled", "sampler_logp", "trainer_logp", "ref_logp")
    return dataclasses.replace(frozen, **{n: cut(getattr(frozen, n)) for n in names})


def with_advantages(frozen):
    rng = np.random.default_rng(8)
    return dataclasses.replace(frozen, advantages=[rng.normal(size=len(c)) for c in frozen.completions])


def large_rewards(frozen):
    """Scale rewards: TRL adds 1e-4 to their standard deviation, we add 1e-6, and large ones hide both."""
    return dataclasses.replace(frozen, rewards=frozen.rewards * 1e4)


def trajectory(frozen, n):
    """Return sequence `n` as a rollout records it: an observation begins the next turn."""
    ids, logp = frozen.completions[n].astype(np.int32), frozen.sampler_logp[n]
    turns, told = [], [frozen.prompts[n].astype(np.int32)]
    for sampled, run in itertools.groupby(range(len(ids)), key=lambda t: bool(frozen.sampled[n][t])):
        at = list(run)
        if not sampled:
            told = [ids[at]]
            continue
        turns.append(Turn(np.concatenate(told), ids[at], logp[at], np.zeros(len(at), np.int32), "stop", 0.0, ""))
        told = []
    if frozen.truncated[n]:
        turns[-1] = dataclasses.replace(turns[-1], finish_reason="length")
    return Trajectory(
        key=Key(0, n // frozen.group_size, n % frozen.group_size),
        task=Task("frozen", n // frozen.group_size, str(n // frozen.group_size)),
        turns=tuple(turns),
        reward=float(frozen.rewards[n]),
        reward_parts={},
        success=bool(frozen.rewards[n] > 0),
        status="truncated" if frozen.truncated[n] else "ok",
    )


def ours(model, params, algorithm, frozen, temperature=1.0, shape=SHAPE, **more):
    """Return loss, gradient by tensor of the folder, and statistics of one update on the batch.

    more: further fields of `Episodes`, arrays `[T]` of each sequence.
    """
    trainer = PhaseTrainer(
        mesh=MeshSpec().build(jax.devices()[:1]),
        model=model,
        algorithm=algorithm,
        optimizer=AdamW(),
        shape=shape,
        steps=1,
        groups_per_step=GROUPS,
        temperature=temperature,
        limit_tok=LIMIT_TOK,
    )
    order = np.arange(len(frozen)).reshape(-1, frozen.group_size)
    groups = [[trajectory(frozen, n) for n in group] for group in order]
    episodes = Episodes.of(groups, limit_tok=LIMIT_TOK)
    padded = lambda rows: pad([x[s] for x, s in zip(rows, frozen.sampled, strict=True)], episodes.mask)  # noqa: E731
    given = {name: padded(getattr(frozen, name)) for name in ("trainer_logp", "ref_logp")}
    given |= {name: padded(rows) for name, rows in more.items()}
    episodes = dataclasses.replace(episodes, **given, values=np.zeros((1, *episodes.mask.shape)))
    samples = [[Sample.of(t) for t in group] for group in groups]
    if algorithm.needs().context and not more:
        episodes = trainer.compute_context_inputs(types.SimpleNamespace(params=params), samples, episodes)
    credit = algorithm.credit(episodes, {})
    if frozen.advantages is not None:
        credit = dataclasses.replace(credit, advantages=padded(frozen.advantages))
    packed = trainer.pack(apply_credit(trainer.algorithm.needs(), samples, episodes, credit), algorithm.kl_coef)
    assert (packed.batch.segment_ids > 0).any(-1).sum() > 1
    update = jax.jit(lambda p, b: gradients(model, algorithm, p, b), compiler_options=QUICKER)
    grads, stats = update(params, packed.batch)
    return float(stats["loss/total"]), grads, {k: float(v) for k, v in stats.items()}


def pad(rows, mask):
    out = np.zeros(mask.shape)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


@pytest.fixture
def agree(model, params, tmp_path):
    """Assert that our update and a verdict of TRL's are the same; returns our statistics."""

    def check(algorithm, frozen, verdict, *, times=1.0, **settings):
        loss, grads, stats = ours(model, params, algorithm, frozen, **settings)
        np.testing.assert_allclose(loss, times * verdict.loss, rtol=1e-6, atol=1e-5)
        hf.save(
            tmp_path / "grads", model, grads, byte_tokenizer()
        )  # a gradient has the names and shapes of the weights
        by_name = load_file(tmp_path / "grads" / hf.WEIGHTS)
        assert by_name.keys() == verdict.grads.keys()
        for name, theirs in verdict.grads.items():
            scale = times * np.abs(theirs).max()
            assert scale > 1e-6, f"{name} has no gradient to compare"
            np.testing.assert_allclose(by_name[name], times * theirs, rtol=0, atol=1e-4 * scale, err_msg=name)
        return stats

    return check


def assert_clipped(stats):
    assert stats["policy/clip_low_frac"] > 0.03
    assert stats["policy/clip_high_frac"] > 0.03


def test_grpo(folder, frozen, agree):
    frozen = large_rewards(frozen)
    verdict = trl.grpo(folder, frozen, loss_type="grpo", epsilon=0.2)
    stats = agree(Grpo(), frozen, verdict)
    assert_clipped(stats)


@pytest.mark.slow
def test_grpo_with_kl_entropy_bonus_and_temperature(folder, frozen, agree):
    frozen = large_rewards(frozen)
    verdict = trl.grpo(
        folder, frozen, loss_type="dapo", beta=0.05, use_bias_correction_kl=False, entropy_coef=0.02, temperature=0.8
    )
    agree(Grpo(aggregation="token-mean", entropy_coef=0.02, kl=KlLoss(0.05)), frozen, verdict, temperature=0.8)


@pytest.mark.slow
def test_dapo_without_truncated_answers(folder, frozen, agree):
    frozen = large_rewards(frozen)
    verdict = trl.grpo(
        folder, frozen, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True
    )
    assert_clipped(
        agree(
            Dapo(mask_truncated=True, filter=None, shaping=None),
            frozen,
            verdict,
        )
    )


@pytest.mark.slow
def test_dapo_drops_groups_that_teach_nothing(folder, frozen, agree):
    frozen = large_rewards(frozen)
    kept = [n for n in range(len(frozen)) if n // GROUP_SIZE != 1]
    ragged = {f.name for f in dataclasses.fields(frozen) if isinstance(getattr(frozen, f.name), list)}
    rest = dataclasses.replace(
        frozen,
        **{name: [getattr(frozen, name)[n] for n in kept] for name in ragged},
        truncated=frozen.truncated[kept],
        rewards=frozen.rewards[kept],
    )
    agree(Dapo(shaping=None), frozen, trl.grpo(folder, rest, loss_type="dapo", epsilon=0.2, epsilon_high=0.28))


@pytest.mark.slow
def test_dr_grpo(folder, frozen, agree):
    verdict = trl.grpo(folder, frozen, loss_type="dr_grpo", scale_rewards="none", epsilon=0.2)
    assert_clipped(agree(DrGrpo(), frozen, verdict))


def test_gspo(folder, frozen, agree):
    frozen = large_rewards(frozen)
    verdict = trl.grpo(
        folder, frozen, loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.08
    )
    assert_clipped(agree(Gspo(clip_low=0.05, clip_high=0.08), frozen, verdict))


def test_ppo_clips_on_both_sides_and_again_below(folder, frozen, agree):
    frozen = with_advantages(frozen)
    without = trl.grpo(folder, frozen, loss_type="dapo", epsilon=0.1, epsilon_high=0.2)
    verdict = trl.grpo(folder, frozen, loss_type="dapo", epsilon=0.1, epsilon_high=0.2, delta=1.4)
    assert abs(without.loss - verdict.loss) > 1e-3  # the dual clip is at work
    assert_clipped(agree(Ppo(clip_low=0.1, clip_high=0.2, dual_clip=1.4), frozen, verdict))


@pytest.mark.slow
@pytest.mark.parametrize(("level", "theirs"), [("token", "token"), ("trajectory", "sequence")])
def test_decoupled_ppo_corrects_for_the_sampler(folder, frozen, agree, level, theirs):
    frozen = large_rewards(frozen)
    verdict = trl.grpo(
        folder,
        frozen,
        corrected=True,
        loss_type="dapo",
        epsilon=0.2,
        vllm_importance_sampling_mode=f"{theirs}_truncate",
        vllm_importance_sampling_clip_max=1.5,
    )
    algorithm = DecoupledPpo(correction=Correction(level, weight_cap=1.5))
    assert_clipped(agree(algorithm, frozen, verdict))


@pytest.mark.slow
def test_cispo(folder, frozen, agree):
    frozen = large_rewards(frozen)
    # TRL's bound is that of the ratio itself
    verdict = trl.grpo(folder, frozen, loss_type="cispo", epsilon_high=1.2)
    stats = agree(Cispo(clip_low=None, clip_high=0.2), frozen, verdict)
    assert stats["policy/clip_high_frac"] > 0.03


def test_sft_of_what_the_assistant_wrote(folder, frozen, agree):
    agree(Sft(), frozen, trl.sft(folder, frozen))


def best_and_worst(frozen):
    """Return (chosen, rejected) of every group whose rewards differ."""
    by_group = frozen.rewards.reshape(-1, frozen.group_size)
    first = np.arange(len(by_group)) * frozen.group_size
    found = zip(first + by_group.argmax(1), first + by_group.argmin(1), strict=True)
    return [(int(best), int(worst)) for best, worst in found if best != worst]


def test_dpo(folder, frozen, agree):
    frozen = only_answers(frozen)
    verdict = trl.dpo(folder, frozen, best_and_worst(frozen), loss_type=["sigmoid"], beta=0.3)
    agree(Dpo(beta=0.3), frozen, verdict)


@pytest.mark.slow
def test_conservative_dpo(folder, frozen, agree):
    frozen = only_answers(frozen)
    verdict = trl.conservative_dpo(folder, frozen, best_and_worst(frozen), beta=0.3, label_smoothing=0.2)
    agree(Dpo(beta=0.3, label_smoothing=0.2), frozen, verdict)


def test_kto(folder, frozen, agree):
    """Pairs taken apart, with an estimate of the KL that is not 0."""
    frozen = dataclasses.replace(only_answers(frozen), group_size=2)
    after_next = dataclasses.replace(frozen, prompts=frozen.prompts[2:] + frozen.prompts[:2])
    own = trl.token_logp(folder, after_next)
    reference = [x - 0.1 * np.abs(np.sin(np.arange(len(x)))).astype(np.float32) for x in own]
    good = [n % 2 == 0 for n in range(len(frozen))]
    settings = {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.3}
    verdict = trl.kto(folder, frozen, good, reference, **settings)
    without = trl.kto(folder, frozen, good, own, **settings)
    assert abs(without.loss - verdict.loss) > 1e-4  # the reference point is at work
    algorithm = PairKto(beta=0.3, good_weight=0.7, bad_weight=1.3)
    agree(algorithm, frozen, verdict, context_logp=own, context_ref_logp=reference)


@pytest.mark.slow
def test_sdpo(folder, frozen, agree):
    """The teacher's log-probs are the trainer's own, after the conversation of a solved sibling."""
    frozen = only_answers(frozen)
    frozen = dataclasses.replace(frozen, trainer_logp=trl.token_logp(folder, frozen))
    shown = solved_siblings(frozen.rewards > 0, np.arange(len(frozen)) // GROUP_SIZE)
    agree(Sdpo(), frozen, trl.sdpo(folder, frozen, shown.tolist()), shape=PackShape(6, 2, 48))


@pytest.mark.slow
def test_dpo_with_cross_entropy(folder, frozen, agree):
    # TRL's cross-entropy is a mean over the tokens of all pairs, ours a mean over pairs: the same for equal lengths
    frozen = cut_to(only_answers(frozen), 5)
    verdict = trl.dpo(
        folder, frozen, best_and_worst(frozen), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], beta=0.3
    )
    agree(Dpo(beta=0.3, sft_coef=0.5), frozen, verdict)


@pytest.mark.slow
def test_ipo(folder, frozen, agree):
    # TRL divides log-ratios by the length n: (h/n - 1/(2 n beta))^2 is ours over n^2
    n, beta = 5, 0.2
    frozen = cut_to(only_answers(frozen), n)
    verdict = trl.dpo(folder, frozen, best_and_worst(frozen), loss_type=["ipo"], beta=n * beta)
    agree(Dpo(loss="ipo", beta=beta), frozen, verdict, times=n**2)


@pytest.mark.slow
def test_simpo(folder, frozen, agree):
    frozen = only_answers(frozen)
    verdict = trl.simpo(folder, frozen, best_and_worst(frozen), beta=2.0, simpo_gamma=0.7)
    agree(Dpo(loss="simpo", beta=2.0, margin=0.7), frozen, verdict)
