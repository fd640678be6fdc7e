"""The reference implementations against published and hand-computed numbers, and their gradients against differences."""

import ast
import copy
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.reference import algorithms as ref


def near(x, digits=6):
    return pytest.approx(x, abs=0.6 * 10**-digits)


def episode(reward=0.0, lengths=(1,), group=0, **names):
    """Return an episode of zeros; `names` are lists over the tokens of all turns, or lists of such lists."""
    total = sum(lengths)
    names = {"logp": [0.0] * total, "sampler_logp": [0.0] * total, **names}
    turns, start = [], 0
    for n in lengths:
        turn = {}
        for name, x in names.items():
            nested = isinstance(x[0], list)
            turn[name] = [row[start : start + n] for row in x] if nested else x[start : start + n]
        turns.append(turn)
        start += n
    return {"group": group, "reward": reward, "turns": turns}


def one_token(rewards_of_groups):
    return [episode(r, group=g) for g, rewards in enumerate(rewards_of_groups) for r in rewards]


def first_advantages(result):
    return [row[0] for row in result.advantages]


def test_the_reference_imports_nothing_of_rolljax():
    tree = ast.parse(Path(ref.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert imported == {"__future__", "collections", "copy", "difflib", "math", "typing"}


# shared pieces


@pytest.mark.parametrize(
    "how, constant, want",
    [
        ("token-mean", None, 2.5),
        ("seq-mean-token-sum", None, 5.0),
        ("seq-mean-token-mean", None, 3.0),
        ("seq-sum-norm", 4, 2.5),
        ("seq-sum-norm", 8, 1.25),
    ],
)
def test_aggregation(how, constant, want):
    losses: ref.Tokens = [[1, 2, 3, 9], [4, 9, 9, 9]]
    counted = [[True] * 3 + [False], [True] + [False] * 3]
    assert ref.aggregate(losses, counted, how, constant) == near(want)
    # a sequence without valid tokens is no sequence
    assert ref.aggregate([*losses, [7]], [*counted, [False]], how, constant) == near(want)


def test_aggregation_through_an_algorithm():
    """Vanilla with logp = -l and A = 1 has the losses of the aggregation oracle."""
    episodes = [episode(1, (3,), logp=[-1.0, -2.0, -3.0]), episode(1, (1,), logp=[-4.0])]
    for how, want in [("token-mean", 2.5), ("seq-mean-token-sum", 5.0), ("seq-mean-token-mean", 3.0)]:
        assert ref.reinforce(episodes, aggregation=how).loss == near(want)
    got = ref.reinforce(episodes, aggregation="seq-sum-norm", constant=8)
    assert got.loss == near(1.25) and got.grad == [[-1 / 8] * 3, [-1 / 8]]
    episodes[1]["weight"] = 0.5
    assert ref.reinforce(episodes).loss == near(2.0)
    episodes[1]["truncated"] = True
    assert ref.reinforce(episodes, drop_truncated=True).loss == near(2.0)  # of three tokens


def test_kl_estimates():
    assert [ref.kl(x, "k1") for x in (0.2, -0.3)] == near([0.2, -0.3])
    assert [ref.kl(x, "abs") for x in (0.2, -0.3)] == near([0.2, 0.3])
    assert [ref.kl(x, "k2") for x in (0.2, -0.3)] == near([0.02, 0.045])
    assert [ref.kl(x, "k3") for x in (0.2, -0.3)] == near([0.018731, 0.049859])
    assert ref.kl(-20, "k3") == 10 and ref.kl_slope(-20, "k3") == 0
    assert ref.kl_slope(-2.2, "k3") == near(1 - math.exp(2.2))


def test_kl_in_the_loss():
    one = [episode(0.0, (2,), logp=[-1.0, -1.5], ref_logp=[-1.2, -1.2])]
    assert ref.grpo(one, kl_loss=2.0).loss == near(0.018731 + 0.049859)
    assert ref.grpo(one, kl_loss=2.0, kl_kind="k1").loss == near(-0.1)
    one[0]["turns"][0].update(sampler_logp=[-1.0, -1.5], trainer_logp=[-1.5, -1.5])
    options = {"kl_loss": 2.0, "kl_kind": "k1", "correction": {}}
    assert ref.grpo(one, **options).loss == near(-0.1)
    assert ref.grpo(one, weigh_kl=True, **options).loss == near(0.2 * math.exp(-0.5) - 0.3)


def test_kl_in_the_reward():
    one = episode(1.0, (3,), sampler_logp=[-1.0, -1.0, -1.0], ref_logp=[-1.2, -0.7, -1.0])
    k3 = [0.018731, 0.049859, 0.0]
    got = ref.reinforce([one], kl_reward=0.5, kl_reward_kind="k3").advantages[0]
    assert got == near([1 - 0.5 * sum(k3), 1 - 0.5 * k3[1], 1.0])
    early = ref.reinforce([one], kl_reward=0.5, kl_reward_kind="k1", kl_reward_order="before").advantages[0]
    assert early == near([1 - 0.5 * (0.2 - 0.3)] * 3)
    assert ref.adaptive_beta(0.1, 0.3, 0.1, 100, 50) == near(0.1 * 1.1)
    assert ref.adaptive_beta(0.1, 0.09, 0.1, 100, 50) == near(0.1 * 0.95)


def test_gae():
    advantages, returns = ref.gae([0, 0, 0, 1], [0.2, 0.4, 0.5, 0.8], 1.0, 0.95)
    assert advantages == near([0.737225, 0.5655, 0.49, 0.2])
    assert returns == near([0.937225, 0.9655, 0.99, 1])


def test_which_episodes_count():
    rewards, groups = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]
    assert ref.degenerate(rewards, groups) == [True, True, False, False, True, True]
    assert ref.moderate(rewards, groups) == [False, False, True, True, False, False]
    assert [ref.overlong(n, 100, 20) for n in (80, 85, 100, 101)] == near([0, -0.25, -1, -1])
    assert ref.sample_weights(2, difficulty=[0.0, 1.0]) == near([0.4, 1.6])
    assert ref.sample_weights(2, lengths=[1.0, 0.0]) == near([0.5, 1.5])


# advantages of outcomes

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 1]]
LOW, HIGH = -0.724567, 1.207612
OUTCOMES: dict[str, Any] = {
    "grpo": (ref.grpo, [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, -0.499999, 1.499997]),
    "dr_grpo": (partial(ref.dr_grpo, max_tokens=4), [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]),
    "rloo": (ref.rloo, [0.666667, -0.666667, -0.666667, 0.666667, -0.333333, -0.333333, -0.333333, 1.0]),
    "reinforce_pp of rewards": (
        partial(ref.reinforce_pp, variant="rewards"),
        [HIGH, LOW, LOW, HIGH, LOW, LOW, LOW, HIGH],
    ),
    "lite_ppo": (ref.lite_ppo, [0.96609, -0.96609, -0.96609, 0.96609, -0.483045, -0.483045, -0.483045, 1.449135]),
    "reinforce": (ref.reinforce, [1, 0, 0, 1, 0, 0, 0, 1]),
    "batch baseline": (partial(ref.reinforce, baseline="batch"), [0.625, *[-0.375] * 2, 0.625, *[-0.375] * 3, 0.625]),
    "raft_pp": (ref.raft_pp, [1, 0, 0, 1, 0, 0, 0, 1]),
    "kimi": (ref.kimi, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_advantages(name):
    algorithm, want = OUTCOMES[name]
    assert first_advantages(algorithm(one_token(REWARDS))) == near(want)


def test_dr_grpo_divides_by_what_could_have_been_said():
    assert ref.dr_grpo(one_token(REWARDS), max_tokens=4).grad[0] == near([-0.5 / 32])


def test_an_easy_group():
    episodes = one_token([[1] * 7 + [0]])
    assert first_advantages(ref.grpo(episodes)) == near([0.353552] * 7 + [-2.474867])
    assert first_advantages(ref.outcome(episodes, scale=0.5)) == near([0.25] * 7 + [-1.75], digits=5)


def test_groups_of_one_and_equal_rewards():
    assert first_advantages(ref.grpo(one_token([[1], [0, 0]]))) == [0, 0, 0]
    assert first_advantages(ref.rloo(one_token([[1], [0, 1]]))) == [0, -1, 1]
    assert first_advantages(ref.lite_ppo(one_token([[1, 1], [1, 1]]))) == [0] * 4
    assert first_advantages(ref.lite_ppo(one_token([[1]]))) == [0]
    alone = ref.grpo([episode(1.0, (2,))], centre="batch", scale="batch")
    assert alone.advantages == [[0.0, 0.0]]


def test_reinforce_pp_baseline_whitens_tokens_or_episodes():
    episodes = [episode(r, (n,)) for r, n in zip([1, 0, 0], [4, 1, 1], strict=True)]
    centred = [2 / 3, -1 / 3, -1 / 3]
    over_episodes = ref.reinforce_pp(episodes, "baseline", whiten_over="episodes")
    assert first_advantages(over_episodes) == near([c / math.sqrt(1 / 3) for c in centred], digits=5)
    over_tokens = ref.reinforce_pp(episodes, "baseline").advantages
    flat = [a for row in over_tokens for a in row]
    assert sum(flat) == near(0) and sum(a * a for a in flat) / 6 == near(1)
    assert flat[0] == near(1 / 3 / math.sqrt(2 / 9))


def test_dapo_drops_degenerate_groups_and_punishes_length():
    episodes = [episode(1, (10,)), episode(0, (18,)), episode(1, (30,), group=1), episode(1, (3,), group=1)]
    got = ref.dapo(episodes, limit=20, cache=4)
    assert first_advantages(got)[:2] == near([0.707106, -0.707106])  # rewards 1 and -0.5
    assert [sum(map(abs, row)) > 0 for row in got.grad] == [True, True, False, False]
    assert got.grad[0][0] == near(-0.707106 / 28)
    assert first_advantages(ref.dapo(episodes, limit=20, cache=4, scale="none")) == near([0.75, -0.75, -0.5, 0.5])
    assert first_advantages(ref.dapo(episodes, scale="none")) == near([0.5, -0.5, 0, 0])


def test_clips_and_difficulty():
    episodes = one_token([[30, 0], [1, 1]])
    assert first_advantages(ref.reinforce(episodes, reward_clip=10)) == [10, 0, 1, 1]
    assert first_advantages(ref.reinforce(episodes, advantage_clip=2)) == [2, 0, 1, 1]
    got = ref.reinforce(one_token([[1, 0], [1, 1]]), difficulty=(0.1, 0.95))
    assert got.grad == [[-0.5], [0], [0], [0]]


# surrogates

RATIOS = (0.5, 0.9, 1.1, 1.5, 4.0)


@pytest.mark.parametrize(
    "advantage, high, dual, objective, want",
    [
        (1, 0.2, None, [0.5, 0.9, 1.1, 1.2, 1.2], [0.5, 0.9, 1.1, 0, 0]),
        (1, 0.28, None, [0.5, 0.9, 1.1, 1.28, 1.28], [0.5, 0.9, 1.1, 0, 0]),
        (-1, 0.2, None, [-0.8, -0.9, -1.1, -1.5, -4], [0, -0.9, -1.1, -1.5, -4]),
        (-1, 0.2, 3.0, [-0.8, -0.9, -1.1, -1.5, -3], [0, -0.9, -1.1, -1.5, 0]),
    ],
)
def test_ppo(advantage, high, dual, objective, want):
    for ratio, value, c in zip(RATIOS, objective, want, strict=True):
        got = ref.reinforce(
            [episode(advantage, logp=[math.log(ratio)])], surrogate="clipped", clip_high=high, dual=dual
        )
        assert (-got.loss, -got.grad[0][0]) == (near(value), near(c))
        double = [episode(2 * advantage, logp=[math.log(ratio)])]
        got = ref.reinforce(double, surrogate="clipped", clip_high=high, dual=dual)
        assert (-got.loss, -got.grad[0][0]) == (near(2 * value), near(2 * c))


OFF_POLICY = """
+1  .5   1 .5    .5   1    .9   .9   1.069315
+1  .95  1 .95   .95  1    .95  .95  1.005129
+1  1.05 1 1.05  1    1    1.05 1.05 .995121
+1  1.5  1 0     1    1    1.1  0    .959453
-1  .5  -1 0    -.5  -.5  -.9   0   -.930685
-1  .95 -1 -.95 -.95 -.95 -.95 -.95 -.994871
-1  1.5 -1 -1.5 -1   -1   -1.1 -1.1 -1.040547
"""
VARIANTS: dict[str, Any] = {
    "vanilla": ref.reinforce,
    "ppo": ref.grpo,
    "tis": ref.tis,
    "topr": partial(ref.topr, level="token"),
    "cispo": ref.cispo,
    "cispo with mask": partial(ref.cispo, unified_mask=True),
    "kimi": partial(ref.kimi, square="token"),
}


@pytest.mark.parametrize("place, name", list(enumerate(VARIANTS, start=2)))
def test_off_policy_coefficients(place, name):
    algorithm = VARIANTS[name]
    options = {} if name == "vanilla" else {"centre": "none", "scale": "none"}
    for line in OFF_POLICY.strip().splitlines():
        numbers = [float(x) for x in line.split()]
        one = episode(numbers[0], logp=[-1 + math.log(numbers[1])], sampler_logp=[-1.0])
        assert -algorithm([one], **options).grad[0][0] == near(numbers[place]), line


def test_gspo_uses_the_geometric_mean_of_the_sequence():
    delta = [0.1, -0.2, 0.4]
    assert [math.exp(d) for d in delta] == near([1.105171, 0.818731, 1.491825])
    one = [episode(1.0, (2, 1), logp=delta)]
    got = ref.gspo(one, centre="none", scale="none", clip_low=0.2, clip_high=0.2)
    assert -got.loss == near(1.105171)
    assert got.grad[0] == near([-1.105171 / 3] * 3)
    clipped = ref.gspo(one, centre="none", scale="none")
    assert -clipped.loss == near(1.0004) and clipped.grad[0] == [0, 0, 0]


def test_decoupled_ppo():
    one = [episode(1.0, logp=[-1.0], trainer_logp=[-1.1], sampler_logp=[-1.4])]
    got = ref.decoupled_ppo(one, centre="none", scale="none")
    assert ref.decoupled_weights(one, 2.0) == [near([1.349859])]
    assert (-got.loss, -got.grad[0][0]) == (near(1.491825), near(1.491825))
    naive = ref.grpo(one, centre="none", scale="none")
    assert (-naive.loss, -naive.grad[0][0]) == (near(1.2), 0)
    assert -ref.decoupled_ppo(one, weight_cap=1.2, centre="none", scale="none").loss == near(1.2 * 1.105171)


def test_mismatch_levels_and_bands():
    one = episode(0, (2, 2), trainer_logp=[-0.9, -0.7, -1.0, -1.4], sampler_logp=[-1.0] * 4)
    weights, keep = ref.mismatch(one, "turn", None, (0.8, 1.2))
    assert keep == [False, False, True, True] and weights == [1] * 4
    levels = {level: ref.mismatch(one, level, 1e9)[0] for level in ("turn", "geometric", "trajectory", "token")}
    assert levels["turn"] == near([1.221403, 1.221403, 0.818731, 0.818731])
    assert levels["geometric"] == near([1.0] * 4) and levels["trajectory"] == near([1.0] * 4)
    assert levels["token"] == near([math.exp(0.1), math.exp(0.3), 1.0, math.exp(-0.4)])
    assert ref.mismatch(one)[0] == near([math.exp(0.1), 1.2, 1.0, math.exp(-0.4)])
    longer = episode(0, (2,), trainer_logp=[-0.9, -0.7], sampler_logp=[-1.0, -1.0])
    assert ref.mismatch(longer, "trajectory", 1e9)[0] == near([math.exp(0.4)] * 2)
    gaps = [math.exp(x) - math.exp(-1) for x in (-0.9, -0.7, -1.0, -1.4)]
    assert ref.mismatch(one, prob_band=(-0.11, 0.11))[1] == [abs(g) <= 0.11 for g in gaps] == [True, False, True, False]

    # turn 1: probabilities .406570 and .496585 against twice .367879
    assert ref.mismatch(one, "turn", prob_band=(-1, 0.0838))[1] == [True, True, True, True]
    assert ref.mismatch(one, "turn", prob_band=(-1, 0.0836))[1] == [False, False, True, True]
    # turn 2: .367879 and .246597, so that the sum of all four is .046115
    assert ref.mismatch(one, "trajectory", prob_band=(-1, 0.0462))[1] == [True] * 4
    assert ref.mismatch(one, "trajectory", prob_band=(-1, 0.0461))[1] == [False] * 4
    both = ref.mismatch(one, "turn", 1.1, prob_band=(-1, 0.0836), also=({"weight_cap": 1.05},))
    assert both[0] == near([1.1 * 1.05, 1.1 * 1.05, 0.818731, 0.818731 * math.exp(-0.4)])
    assert both[1] == [False, False, True, True]


def test_correction_weighs_losses_and_filters_denominators():
    one = episode(1, (2, 2), trainer_logp=[-0.9, -0.7, -1.0, -1.4], sampler_logp=[-1.0] * 4)
    weighted = ref.reinforce([one], correction={})
    assert weighted.grad[0] == near([-math.exp(0.1) / 4, -0.3, -0.25, -math.exp(-0.4) / 4])
    settings = {"level": "turn", "weight_cap": None, "ratio_band": (0.8, 1.2)}
    assert ref.reinforce([one], correction=settings).grad[0] == near([0, 0, -0.5, -0.5])


# turns


def multi_turn(rewards, **extra):
    one = episode(sum(rewards), [1] * len(rewards), **extra)
    for turn, r in zip(one["turns"], rewards, strict=True):
        turn["reward"] = r
    return one


def test_step_returns():
    one = episode(1, (2, 1, 3))
    one["turns"][2]["reward"] = 1.0
    got = ref.turn_reinforce([one], gamma=0.95)
    assert got.advantages[0] == near([0.9025, 0.9025, 0.95, 1, 1, 1])
    assert ref.turn_reinforce([one], aggregation="seq-mean-token-mean").grad[0] == near(
        [-0.9025 / 6] * 2 + [-0.95 / 3] + [-1 / 9] * 3
    )  # turns are samples
    batch = ref.turn_reinforce([multi_turn([1, 1]), multi_turn([0])], gamma=1.0, centre="batch", scale="batch")
    assert batch.advantages == [near([1.0, 0.0], digits=5), near([-1.0], digits=5)]


def test_rebn():
    got = ref.rebn([multi_turn([0, 0, 1]), multi_turn([0, -0.1])], gamma=0.9, constant=10)
    assert got.advantages[0] == near([0.620977, 0.803617, 1.006551])
    assert got.advantages[1] == near([-1.205426, -1.22572])
    assert got.grad[0][0] == near(-0.0620977)


def gigpo_episodes(states):
    episodes = [multi_turn([0, r]) for r in (1, 0, 1, 0)]
    for one, (a, b) in zip(episodes, states, strict=True):
        one["turns"][0]["state"], one["turns"][1]["state"] = a, b
    return episodes


def test_gigpo():
    lonely = gigpo_episodes([(n, 10 + n) for n in range(4)])
    assert first_advantages(ref.gigpo(lonely)) == near([0.866024, -0.866024, 0.866024, -0.866024])
    assert first_advantages(ref.gigpo(lonely, divide=False)) == near([0.5, -0.5, 0.5, -0.5])
    shared = gigpo_episodes([("s", "a"), ("s", "b"), ("t", "c"), ("u", "c")])
    got = ref.gigpo(shared, episode_weight=0.0).advantages
    pair = 1 / math.sqrt(2)
    assert got[0] == near([pair, 0], digits=5) and got[1] == near([-pair, 0], digits=5)
    assert got[2] == near([0, pair], digits=5) and got[3] == near([0, -pair], digits=5)
    shared[1]["group"] = 1  # equal states of other groups do not meet
    assert ref.gigpo(shared, episode_weight=0.0).advantages[0] == [0, 0]


@pytest.mark.parametrize(
    "limit, reward, want", [(5, 1, (0.9025, 0, 1)), (5, -1, (-0.9025, 0, -1)), (10, -1, (-0.9025, -0.777794, -1))]
)
def test_ipa(limit, reward, want):
    one = episode(
        reward,
        (2, 3, 1),
        logp=[0.1, 0.3, -0.2, 0.1, -0.5, 0.05],
        trainer_logp=[0.0] * 6,
        sampler_logp=[0, -0.1, -2, -1.5, -2, -0.01],
    )
    got = ref.ipa([one], limit=limit)
    assert got.advantages[0] == near([reward * g for g in [0.9025] * 2 + [0.95] * 3 + [1]])
    assert [-6 * g for g in got.grad[0]] == near([c for c, n in zip(want, (2, 3, 1), strict=True) for _ in range(n)])
    assert ref.discounted_outcomes(2.0, 2, 0.5) == [1.0, 2.0]
    if limit == 5:
        left_out = ref.ipa([one], limit=limit, count_masked=False)
        assert [-3 * g for g in left_out.grad[0]] == near([want[0], want[0], 0, 0, 0, want[2]])
    one["expert_turns"] = 2  # imitated: neither masked nor tapered
    copied = ref.ipa([one], limit=limit).grad[0]
    assert [-6 * g for g in copied] == near([0.09025 * reward] * 2 + [0.095 * reward] * 3 + [want[2]])


def test_loss_of_ipa_adds_imitation():
    one = episode(2.0, (1, 1), logp=[-1.0, -2.0], trainer_logp=[-1.0, -2.0], sampler_logp=[-1.0, -2.0])
    one["expert_turns"] = 1
    assert ref.ipa([one], lambda_il=0.5, lambda_rl=3.0).loss == near((0.5 * 0.95 * 2 * 1 + 3 * 2 * 2) / 2)


def test_mismatch_of_ipas_chunks():
    one = episode(0, (2, 3, 1), trainer_logp=[0, 0.1, 2, 1.5, 2, 0.01], sampler_logp=[0.0] * 6)
    assert ref.mismatch(one, "turn", None, (0, 5.0))[1] == [True, True, False, False, False, True]
    assert ref.mismatch(one, "turn", 99)[0] == near([1.051271] * 2 + [6.254701] * 3 + [1.010050])


# critics

VALUES = [[0.2, 0.5, 0.9, 0.4, 0.1], [0.4, 0.5, 0.5, 0.6, 0.2]]


def test_asy_ppo():
    one = episode(1.0, (2, 3), values=VALUES)
    centre, spread = ref.mean_and_spread(one)
    assert centre == near([0.3, 0.5, 0.7, 0.5, 0.15]) and spread == near([0.1, 0, 0.2, 0.1, 0.05])
    want = [0.601749, 0.422894, 0.234625, 0.4575, 0.85]
    got = ref.asy_ppo([one])
    assert got.advantages[0] == near(want)
    assert -got.loss == near(0.428775)  # on-policy: the mean of the advantages, the masked one as 0
    assert got.grad[0] == near([-want[0] / 5, 0, *[-a / 5 for a in want[2:]]])
    assert ref.chosen_by_rank([spread], 0.2, highest=True) == [[False, False, True, False, False]]
    assert ref.chosen_by_rank([[0.0, 0.0], [0.0]], 0.7, highest=False) == [[True, True], [False]]


def test_ppo_and_its_critic():
    one = episode(1.0, (2, 2), values=[[0.2, 0.4, 0.5, 0.8]])
    assert ref.ppo([one]).advantages[0] == near([0.737225, 0.5655, 0.49, 0.2])
    _, returns = ref.generalised_advantages([one])
    assert returns[0] == near([0.937225, 0.9655, 0.99, 1])
    loss, grad = ref.critic_loss([one], returns)
    assert loss == near(sum(a * a for a in (0.737225, 0.5655, 0.49, 0.2)) / 8)
    assert grad[0][0] == near([-a / 4 for a in (0.737225, 0.5655, 0.49, 0.2)])
    one["turns"][0]["reward"], one["turns"][1]["reward"] = 0.5, 1.0
    by_turn, _ = ref.generalised_advantages([one], lam=1.0, per_turn_rewards=True)
    assert by_turn[0] == near([1.3, 1.1, 0.5, 0.2])
    one["turns"][0]["ref_logp"], one["turns"][1]["ref_logp"] = [-1.0, 0.0], [0.0, 0.0]
    costly, _ = ref.generalised_advantages([one], lam=1.0, kl_reward=0.1)
    assert costly[0] == near([1 - 0.2 - 0.1, 0.6, 0.5, 0.2])
    whitened = ref.ppo([one], whitened=True).advantages[0]
    assert sum(whitened) == near(0) and sum(a * a for a in whitened) / 3 == near(1)


def test_critics_learn_from_their_shards_and_clipping_stops_them():
    episodes = [episode(0, (1,), values=[[0.5], [0.5]]), episode(0, (2,), values=[[0.0, 1.0], [0.0, 1.0]])]
    returns = [[1.0], [1.0, 1.0]]
    loss, grad = ref.critic_loss(episodes, returns, shards=[0, 1], factor=1.0)
    assert loss == near(0.25 + 0.5) and grad == [[[-1.0], [0, 0]], [[0], [-1.0, 0]]]
    episodes[0]["turns"][0]["old_values"] = [[0.0], [0.0]]
    loss, grad = ref.critic_loss(episodes[:1], returns[:1], shards=[0], clip=0.2)
    assert loss == near(0.32) and grad[0] == [[0.0]]
    loss, grad = ref.critic_loss(episodes[:1], [[0.1]], shards=[0], clip=0.2)  # moved away from the return: it stands
    assert loss == near(0.08) and grad[0] == [[0.4]]
    episodes[0]["turns"][0]["old_values"] = [[0.9], [0.9]]
    loss, grad = ref.critic_loss(episodes[:1], [[0.0]], shards=[0], clip=0.2)
    assert loss == near(0.245) and grad[0] == [[0.0]]


# attention


def test_rhythm():
    waad, fai = [0, 0.5, 1.4, 1.0, 1.5, 1.8], [0.4, 0.1, 0.366667, 0.1, 0, 0]
    assert ref.waad_steps(waad) == near([0.5, 0.9, 0.4, 0.5, 0.3])
    assert ref.rhythm(waad, fai, "global") == [1.5, 1, 1.5, 1, 1, 1]
    assert ref.rhythm(waad, fai, "local") == [1.5, 1.5, 1, 1, 1, 1]  # .9, and the first of two of .5
    # tau_waad = 1.0, tau_delta = .5. Anchor 2 (1.4) is not dominated, anchor 0 has nothing before it
    assert ref.rhythm(waad, fai, "coupled") == [1.5, 1, 1.5, 1, 1, 1]
    # anchors 2 and 3: 3 (1.0) is dominated and introduced by 1, the largest step among 1 and 2
    got = ref.rhythm(waad, [0, 0, 1, 1, 0, 0], "coupled", alpha=0.25)
    assert got == near([1, 1.125, 1.5, 1.375, 1, 1])
    assert ref.rhythm(waad, [0, 0, 1, 1, 0, 0], "coupled") == near([1, 1.25, 1.5, 1.25, 1, 1])
    for mode in ("local", "global", "coupled"):
        assert ref.rhythm(waad, fai, mode, amp=1.0) == [1.0] * 6


def test_quantile():
    assert [ref.quantile([3.0, 1.0, 2.0], x) for x in (0, 0.25, 0.5, 0.9, 1)] == near([1, 1.5, 2, 2.8, 3])


def test_attention_rhythm_multiplies_grpo():
    waad, fai = [0, 0.5, 1.4, 1.0, 1.5, 1.8], [0.4, 0.1, 0.366667, 0.1, 0, 0]
    episodes = [episode(r, (2, 4), waad=waad, fai=fai) for r in (1, 0)]
    plain, loud = ref.grpo(episodes), ref.attention_rhythm(episodes, "global")
    assert loud.advantages[1] == near([1.5 * a if t in (0, 2) else a for t, a in enumerate(plain.advantages[1])])
    assert ref.attention_rhythm(episodes, amp=1.0) == plain


# segments

Q = [0.1, 0.12, 0.08, -0.6, -0.55, -0.5, 0.4, 0.45]


def test_segments_and_agreement():
    assert ref.segments(Q, 0.3) == [(0, 3), (3, 6), (6, 8)]
    assert [ref.mean(Q[a:b]) for a, b in ref.segments(Q, 0.3)] == near([0.1, -0.55, 0.425])
    good, bad = ref.agreement([Q, Q], [1, -1], delta=0.3, baseline=0.0)
    assert [t for t in range(8) if good[t]] == [0, 1, 2, 6, 7] and bad == [not x for x in good]
    assert ref.agreement([[-1.0, -1.0]], [1], delta=9.0, baseline=0.0, min_keep=0.2) == [[True, True]]
    assert ref.segments([0, 1, 0, 1, 1, 1], 0.5, min_len=3) == [(0, 3), (3, 6)]
    assert ref.segments([0.2, -0.05, -0.2, 0.2], 9.0) == [(0, 3), (3, 4)]  # a change of sign, where it is large
    assert ref.segments([0, 0, 0, 1, 1, 0, 0, 1], 0.5, min_len=2) == [(0, 3), (3, 5), (5, 7), (7, 8)]
    assert ref.agreement([[0.1, 0.5]], [1], delta=0.3, baseline=0.2) == [[False, True]]
    assert ref.agreement([[0.1, 0.5]], [-1], delta=0.3) == [[True, False]]  # the batch's mean is .3
    assert ref.agreement([[0.0, 1.0, 1.0, 1.0, 1.0]], [1]) == [[False, *[True] * 4]]  # jumps 1, 0, 0, 0: spread .43
    steps = [10.0, 10.0, 6.0, 6.0, 0.0, 0.0]  # jumps 4 and 6, spread 2.5; mean 5.3
    assert ref.agreement([steps], [1]) == [[True] * 4 + [False] * 2]
    assert ref.smoothed([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]
    assert ref.smoothed([0.0, 3.0, 6.0, 0.0], 3, "median") == [0.0, 3.0, 3.0, 0.0]
    spike = [0.0, 0.0, -9.0, 0.0, 0.0]  # the median removes it; of raw values it is all there is
    settings: dict[str, Any] = {"delta": 1.0, "baseline": -1.0, "smooth": 3, "smoother": "median"}
    assert ref.agreement([spike], [1], **settings) == [[True] * 5]
    assert ref.agreement([spike], [1], means_of="raw", **settings) == [[False] * 5]


def test_segment_reward_masks_grpo_and_dpo():
    episodes = [episode(r, (4, 4), scorer_logp=Q, ref_logp=[0.0] * 8) for r in (1, 0)]
    episodes[0]["success"], episodes[1]["success"] = True, False
    settings: dict[str, Any] = {"delta": 0.3, "baseline": 0.0}
    got = ref.segment_reward(episodes, beta=1.0, **settings)
    plain = ref.grpo(episodes)
    masks = ref.agreement([Q, Q], [1, -1], **settings)
    for n in range(2):
        want = [a if m else 0.0 for a, m in zip(plain.advantages[n], masks[n], strict=True)]
        assert got.advantages[n] == near(want)
        assert got.grad[n] == near([-a / 16 for a in want])
    assert ref.dpo(episodes, masks=[[True] * 8] * 2) == ref.dpo(episodes)
    assert ref.dpo(episodes, masks=masks).grad[0] == near([-0.05 * m for m in masks[0]])
    assert ref.sft(episodes, keep=[True, False], masks=masks).grad[0] == near([-m / 5 for m in masks[0]])


# supervised, preferences, distillation


def test_on_policy_distillation():
    one = episode(1.0, (2,), sampler_logp=[-1.0, -2.0], teacher_logp=[[-1.5, -1.8]])
    assert ref.opd([one]).advantages[0] == near([-0.5, 0.2])
    assert ref.opd([one]).grad[0] == near([0.25, -0.1])
    assert ref.opd([one], coefs=[2.0], mixed=True, centre="none", scale="none").advantages[0] == near([0.0, 1.4])
    two = episode(0.0, (1,), sampler_logp=[-1.0], teacher_logp=[[-3.0]])
    two["teachers"] = [False]
    got = ref.opd([one, two])
    assert got.grad[0] == near([0.25, -0.1]) and got.grad[1] == [0.0]


def test_sft_supervises_some_turns():
    one = episode(0, (2, 4), logp=[-1.0, -3.0, -1.0, -1.0, -1.0, -1.0])
    one["turns"][1]["weight"] = 0.0
    assert ref.sft([one]).loss == near(2.0) and ref.sft([one]).grad[0] == near([-0.5, -0.5, 0, 0, 0, 0])
    user_assistant_tool_assistant = episode(0, (2, 3))
    assert ref.sft([user_assistant_tool_assistant]).grad[0] == near([-0.2] * 5)


def test_rejection_sampling_keeps_different_successes():
    texts = ["the answer is 42", "The  answer is 42", "the answer is 43", "so we get forty-two", "42", "wrong"]
    episodes = []
    for text in texts:
        episodes.append({**episode(1.0, (2,)), "text": text, "success": text != "wrong"})
    assert ref.select_for_imitation(episodes, cap=4) == [True, False, False, True, True, False]
    assert ref.select_for_imitation(episodes, cap=2) == [True, False, False, True, False, False]
    episodes[1]["group"] = 1
    assert ref.select_for_imitation(episodes, cap=4)[1]
    assert ref.rft(episodes, cap=1).grad == [near([-0.25] * 2), near([-0.25] * 2), *[[0, 0]] * 4]


def pair_of(chosen, chosen_ref, rejected, rejected_ref):
    return [
        episode(0.0, (len(rejected),), logp=rejected, ref_logp=rejected_ref),
        episode(1.0, (len(chosen),), logp=chosen, ref_logp=chosen_ref),
    ]


def test_dpo():
    episodes = pair_of([-4.0, -6.0], [-6.0, -6.0], [-15.0, -5.0], [-10.0, -9.0])
    got = ref.dpo(episodes)
    assert got.loss == near(0.554355)
    slope = 0.1 / (1 + math.exp(0.3))
    assert got.grad == [near([slope] * 2), near([-slope] * 2)] and got.advantages == [[-1, -1], [1, 1]]
    assert ref.dpo(episodes, ftx=0.5).loss == near(0.554355 + 0.5 * 5)
    smooth = ref.dpo(episodes, label_smoothing=0.1).loss
    assert smooth == near(0.9 * 0.554355 + 0.1 * 0.854355)
    assert ref.dpo(episodes, kind="ipo").loss == near((3 - 5) ** 2)
    simpo = ref.dpo(episodes, kind="simpo", beta=2.0, gamma=0.5)
    assert simpo.loss == near(math.log1p(math.exp(-9.5)))
    assert ref.dpo([*episodes, episode(1.0, group=1), episode(1.0, group=1)]).loss == near(0.554355)
    assert ref.best_and_worst(one_token([[0, 1, 1, 0], [1, 1], [2, 1, 3]])) == [(1, 0), (8, 7)]


STUDENT, TEACHER = [1.0, 0.0, -1.0], [2.0, 0.0, -2.0]


def test_divergences():
    p, q = ref.softmax(TEACHER), ref.softmax(STUDENT)
    assert q == near([0.665241, 0.244728, 0.090031]) and p == near([0.866813, 0.117310, 0.015876])
    assert ref.divergence(p, q, "forward")[0] == near(0.115611)
    assert ref.divergence(p, q, "reverse")[0] == near(0.160115)
    assert ref.divergence(p, q, "js")[0] == near(0.032433)
    assert ref.divergence(p, q, "skewed", alpha=0.0)[0] == near(0.115611)
    # the teacher's head is its first entry; it holds exactly half of all absolute differences
    assert ref.divergence(p, q, "adaptive")[0] == near((0.115611 + 0.160115) / 2)

    mix = [0.1 * a + 0.9 * b for a, b in zip(p, q, strict=True)]
    skewed = sum(a * math.log(a / m) for a, m in zip(p, mix, strict=True))
    assert ref.divergence(p, q, "skewed")[0] == near(skewed) and 0 < skewed < 0.115611


def test_adaptive_kl_weighs_head_and_tail():
    p, q = [0.1, 0.4, 0.3, 0.2], [0.2, 0.4, 0.1, 0.3]  # head: entries 1 and 2, with .2 of differences of .4
    values, slopes = zip(*(ref.divergence(p, q, kind) for kind in ("forward", "reverse")), strict=True)
    for head, share in [(0.5, 0.5), (0.8, 0.75)]:  # at .8 entry 3 belongs to the head too: .3 of .4
        value, slope = ref.divergence(p, q, "adaptive", head=head)
        assert value == near(share * values[0] + (1 - share) * values[1])
        assert slope == near([share * f + (1 - share) * r for f, r in zip(*slopes, strict=True)])
    assert ref.divergence(p, q, "adaptive") == ref.divergence(p, q, "adaptive", head=0.5)


def test_distillation_of_one_token():
    assert ref.distill_token(STUDENT, TEACHER, 0)[0] == near(-math.log(0.665241) + 0.5 * 0.115611)
    assert ref.distill_token(STUDENT, TEACHER, 0, lam=0.0)[0] == near(-math.log(0.665241))
    plain: dict[str, Any] = {"lam": 1.0, "ce": 0.0}
    assert ref.distill_token(STUDENT, TEACHER, 0, **plain)[0] == near(0.115611)
    # at temperature 2 the teacher is the student of temperature 1
    warm = ref.distill_token(STUDENT, TEACHER, 0, tau=2.0, **plain)
    at_two = ref.divergence(ref.softmax(TEACHER, 2.0), ref.softmax(STUDENT, 2.0), "forward")[0]
    assert ref.softmax(TEACHER, 2.0) == near(ref.softmax(STUDENT)) and warm[0] == near(4 * at_two)
    bucket = ref.distill_token(STUDENT, TEACHER, 0, top_k=1, remainder=True, **plain)[0]
    p, q = 0.866813, 0.665241
    assert bucket == near(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), digits=5)
    assert ref.distill_token(STUDENT, TEACHER, 0, top_k=1, **plain)[0] == near(0)
    assert ref.distill_token(STUDENT, TEACHER, 0, top_k=3, **plain)[0] == near(0.115611)
    assert ref.distill([STUDENT] * 2, [TEACHER] * 2, [0, 0], [True, False], **plain)[0] == near(0.115611)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js", "skewed"])
@pytest.mark.parametrize("top", [{}, {"top_k": 3}, {"top_k": 3, "remainder": True}])
def test_distillation_gradients(kind, top):
    rng = random.Random(0)
    student, teacher = ([rng.gauss(0, 1.5) for _ in range(6)] for _ in range(2))
    settings: dict[str, Any] = {"kind": kind, "tau": 1.7, **top}
    _, grad = ref.distill_token(student, teacher, 2, **settings)
    for v in range(6):
        losses = []
        for h in (1e-5, -1e-5):
            moved = [z + h * (u == v) for u, z in enumerate(student)]
            losses.append(ref.distill_token(moved, teacher, 2, **settings)[0])
        assert grad[v] == near((losses[0] - losses[1]) / 2e-5)


# every gradient


def random_episodes(seed=0):
    """Return two groups of three and two episodes, each of one to three turns, with every field that an algorithm may
    read."""
    rng = random.Random(seed)
    episodes = []
    for group, rewards in enumerate([[1.0, -1.0, 0.5], [-1.0, 1.0]]):
        for reward in rewards:
            turns = []
            for _ in range(rng.randint(1, 3)):
                n = rng.randint(1, 2)
                names = ("logp", "ref_logp", "scorer_logp")
                turn: dict[str, Any] = {name: [rng.uniform(-2, -0.5) for _ in range(n)] for name in names}
                for name in ("sampler_logp", "trainer_logp"):
                    turn[name] = [x + rng.gauss(0, 0.4) for x in turn["logp"]]
                turn["values"] = [[rng.random() for _ in range(n)] for _ in range(2)]
                turn["teacher_logp"] = [[rng.uniform(-2, 0) for _ in range(n)]]
                turn.update({name: [rng.random() for _ in range(n)] for name in ("waad", "fai")})
                turn.update(reward=rng.random(), state=rng.randint(0, 1), weight=rng.choice([1.0, 1.0, 0.0]))
                turns.append(turn)
            text = "".join(rng.choice("abcdefgh ") for _ in range(20))
            extra = {"success": reward > 0, "truncated": False, "text": text}
            episodes.append({"group": group, "reward": reward, "turns": turns, **extra})
    return episodes


def all_kinds_of_kl(algorithm):
    return {kind: partial(algorithm, kl_loss=0.3, kl_kind=kind) for kind in ("k1", "abs", "k2", "k3")}


ALGORITHMS: dict[str, Any] = {
    "reinforce": partial(ref.reinforce, baseline="group"),
    "rloo clipped": partial(ref.rloo, surrogate="clipped"),
    "reinforce++": partial(ref.reinforce_pp, kl_reward=0.1),
    "reinforce++ of rewards": partial(ref.reinforce_pp, variant="rewards", kl_reward=0.1),
    "reinforce++ baseline": partial(ref.reinforce_pp, variant="baseline"),
    "grpo": partial(ref.grpo, dual=1.3),
    "grpo and cross-entropy": partial(ref.grpo, sft=0.3),
    **{f"grpo {k}": a for k, a in all_kinds_of_kl(ref.grpo).items()},
    "grpo corrected": partial(ref.grpo, anchor="trainer_logp", kl_loss=0.1, weigh_kl=True, correction={}),
    "dr_grpo": partial(ref.dr_grpo, max_tokens=6),
    "raft++": ref.raft_pp,
    "dapo": partial(ref.dapo, limit=4, cache=2),
    "gspo": partial(ref.gspo, clip_low=0.2, clip_high=0.2),
    "gspo filtered": partial(
        ref.gspo,
        clip_low=0.2,
        clip_high=0.2,
        ratio_over="valid",
        correction={"ratio_band": (0.7, 1.4), "weight_cap": None},
    ),
    "cispo": partial(ref.cispo, unified_mask=True),
    "topr": partial(ref.topr, positive=0.5, negative=2.0),
    "topr of sequences": partial(ref.topr, level="geometric"),
    "tis": ref.tis,
    "decoupled_ppo": ref.decoupled_ppo,
    "kimi": ref.kimi,
    "kimi of tokens": partial(ref.kimi, square="token"),
    "turn_reinforce": ref.turn_reinforce,
    "gigpo": ref.gigpo,
    "rebn": partial(ref.rebn, constant=9.0),
    "ppo": partial(ref.ppo, kl_reward=0.1, whitened=True),
    "asy_ppo": ref.asy_ppo,
    "lite_ppo": ref.lite_ppo,
    "ipa": partial(ref.ipa, limit=1.2),
    "attention_rhythm": ref.attention_rhythm,
    "segment_reward": ref.segment_reward,
    "opd": partial(ref.opd, mixed=True, surrogate="clipped"),
    "sft": ref.sft,
    "rft": ref.rft,
    "dpo": partial(ref.dpo, label_smoothing=0.1, ftx=0.5),
    "ipo": partial(ref.dpo, kind="ipo"),
    "simpo": partial(ref.dpo, kind="simpo", beta=2.0, ftx=0.1),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_the_losses(name):
    episodes = random_episodes()
    before = copy.deepcopy(episodes)
    got = ALGORITHMS[name](episodes)
    assert episodes == before
    differences = ref.finite_differences(ALGORITHMS[name], episodes)
    assert [g for row in got.grad for g in row] == near([g for row in differences for g in row], digits=7)
    assert sum(g != 0 for row in got.grad for g in row) > 3
    assert [len(row) for row in got.advantages] == [len(row) for row in got.grad]


def test_stop_gradients_matter():
    """Without them the truncated weight's own slope would show: differences that let it move are not the gradient."""
    episodes = random_episodes()
    got = ref.tis(episodes)

    def unfrozen(moved):
        for e in moved:
            for turn in e["turns"]:
                del turn["frozen_logp"]
        return ref.tis(moved)

    differences = ref.finite_differences(unfrozen, episodes)
    gap = [abs(a - b) for r, s in zip(got.grad, differences, strict=True) for a, b in zip(r, s, strict=True)]
    assert max(gap) > 1e-2
