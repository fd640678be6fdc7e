"""Every algorithm once more: float64, one sequence at a time, from the formulas alone. Nothing here imports rolljax.

An episode is a dict:

    group: int                 episodes of one group have the same start
    reward: float              total reward
    turns: list of dict        one per turn of the policy, with lists that have one entry per sampled token:
        logp                   log-prob under the policy that is trained; the gradient is with respect to these
        sampler_logp, trainer_logp, ref_logp, scorer_logp, waad, fai     as far as the algorithm reads them
        values                 list over critics of such lists
        teacher_logp           list over teachers of such lists
        reward: float, state: hashable, weight: float                    of the turn; 0, none and 1 if left out
        frozen_logp            what stop-gradients see; `logp` if left out (there for finite differences)
    domain: str                name of the environment
    truncated: bool, success: bool, text: str, weight: float, teachers: list of bool (which teachers it is routed to)

Algorithms return `Result(loss, grad, advantages)`; grad and advantages are lists over episodes of lists over the
sampled tokens of all turns. Denominators are those of the whole batch. A token that is left out has gradient 0; its
advantage is reported as if it were not. All gradients are hand-derived except where a docstring says otherwise;
`finite_differences` checks them.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

Episode = dict[str, Any]
Tokens = list[list[float]]
Flags = list[list[bool]]


class Result(NamedTuple):
    loss: float
    grad: Tokens
    advantages: Tokens


# --- access --------------------------------------------------------------------------------------------------------


def flat(episode: Episode, name: str) -> list[float]:
    return [x for turn in episode["turns"] for x in turn[name]]


def frozen(episode: Episode) -> list[float]:
    return [x for turn in episode["turns"] for x in turn.get("frozen_logp", turn["logp"])]


def turn_ids(episode: Episode) -> list[int]:
    return [k for k, turn in enumerate(episode["turns"]) for _ in turn["logp"]]


def length(episode: Episode) -> int:
    return len(turn_ids(episode))


def like(episodes: list[Episode], value: Any) -> list[list[Any]]:
    return [[value] * length(e) for e in episodes]


def per_turn(episode: Episode, values: list[float]) -> list[float]:
    """Spread one value per turn over its tokens."""
    return [values[k] for k in turn_ids(episode)]


# --- statistics ----------------------------------------------------------------------------------------------------


def mean(x: list[float]) -> float:
    return math.fsum(x) / len(x)


def std(x: list[float], ddof: int = 1) -> float:
    m = mean(x)
    return math.sqrt(math.fsum((v - m) ** 2 for v in x) / (len(x) - ddof))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sign(x: float) -> int:
    return (x > 0) - (x < 0)


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def normalise(
    values: list[float],
    groups: list[int],
    centre: str | float = "group",
    scale: str | float = "group",
    eps: float = 1e-6,
    ddof: int = 1,
) -> list[float]:
    """Compute `(R - m) / (s + eps)`. centre: none, batch, group, leave_one_out or a number; scale: none, batch, group,
    group_mean or a number.

    A group of one: 0 under "group" and "leave_one_out"; nothing is divided by the spread of one element.
    """
    out = []
    for i, value in enumerate(values):
        group = [v for v, g in zip(values, groups, strict=True) if g == groups[i]]
        others = [v for j, (v, g) in enumerate(zip(values, groups, strict=True)) if g == groups[i] and j != i]
        if centre == "none":
            m = 0.0
        elif centre == "batch":
            m = mean(values)
        elif centre == "group":
            m = mean(group)
        elif centre == "leave_one_out":
            m = mean(others) if others else value
        else:
            m = float(centre)
        if scale == "none":
            out.append(value - m)
            continue
        if scale == "group_mean":
            out.append((value - m) / (mean(group) + eps))
            continue
        sample = {"batch": values, "group": group}.get(str(scale))
        if sample is not None and len(sample) == 1:
            out.append(value - m)
            continue
        s = std(sample, ddof) if sample is not None else float(scale)
        out.append((value - m) / (s + eps))
    return out


def length_reward(lengths: list[int], solved: list[bool], groups: list[int]) -> list[float]:
    """Compute Kimi k1.5's `.5 - (len - min) / (max - min)` in the group, at most 0 where not solved; 0 in groups of one
    length."""
    out = []
    for length_, good, g in zip(lengths, solved, groups, strict=True):
        group = [x for x, h in zip(lengths, groups, strict=True) if h == g]
        low, high = min(group), max(group)
        reward = 0.5 - (length_ - low) / (high - low) if high > low else 0.0
        out.append(reward if good else min(reward, 0.0))
    return out


def whiten(advantages: Tokens, ddof: int = 1, eps: float = 1e-8) -> Tokens:
    """Whiten over all sampled tokens of the batch; unchanged if there is at most one."""
    everything = [a for row in advantages for a in row]
    if len(everything) <= 1:
        return advantages
    m, s = mean(everything), std(everything, ddof)
    return [[(a - m) / (s + eps) for a in row] for row in advantages]


def chosen_by_rank(values: Tokens, share: float, highest: bool) -> Flags:
    """Mark floor(share * number of tokens) tokens of the whole batch with the lowest or highest value; ties: first
    come."""
    places = [(n, t) for n, row in enumerate(values) for t in range(len(row))]
    order = sorted(places, key=lambda p: -values[p[0]][p[1]] if highest else values[p[0]][p[1]])  # stable
    chosen = set(order[: math.floor(share * len(places))])
    return [[(n, t) in chosen for t in range(len(row))] for n, row in enumerate(values)]


# --- returns -------------------------------------------------------------------------------------------------------


def discounted(rewards: list[float], gamma: float) -> list[float]:
    """Compute `G_k = r_k + gamma G_{k+1}`."""
    out = list(rewards)
    for k in range(len(out) - 2, -1, -1):
        out[k] += gamma * out[k + 1]
    return out


def turn_returns(episode: Episode, gamma: float) -> list[float]:
    return discounted([float(turn.get("reward", 0.0)) for turn in episode["turns"]], gamma)


def discounted_outcomes(reward: float, num_turns: int, gamma: float) -> list[float]:
    """Compute `gamma^(turns after this one) R`."""
    return [gamma ** (num_turns - 1 - k) * reward for k in range(num_turns)]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Compute advantages and returns `A + V` of one sequence; the value after the last token is 0."""
    advantages = [0.0] * len(rewards)
    after_value = after_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * after_value - values[t]
        advantages[t] = delta + gamma * lam * after_advantage
        after_value, after_advantage = values[t], advantages[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def last_token(episode: Episode, reward: float) -> list[float]:
    """Put the reward on the last sampled token, 0 before."""
    n = length(episode)
    return [reward if t == n - 1 else 0.0 for t in range(n)]


def turn_ends(episode: Episode) -> list[float]:
    """Put each turn's reward on the last token of the turn."""
    out = []
    for turn in episode["turns"]:
        n = len(turn["logp"])
        out += [float(turn.get("reward", 0.0)) if t == n - 1 else 0.0 for t in range(n)]
    return out


# --- KL ------------------------------------------------------------------------------------------------------------


def kl(x: float, kind: str) -> float:
    """Estimate from `x = logp - ref_logp`."""
    k3 = math.expm1(-x) + x
    return {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": clamp(k3, -10.0, 10.0)}[kind]


def kl_slope(x: float, kind: str) -> float:
    k3 = 0.0 if abs(math.expm1(-x) + x) > 10 else -math.expm1(-x)
    return {"k1": 1.0, "abs": float(sign(x)), "k2": x, "k3": k3}[kind]


def kl_costs(episode: Episode, beta: float, kind: str, logp: str) -> list[float]:
    """Compute `-beta k(x_t)` of every token, with the log-probs of that name."""
    pairs = zip(flat(episode, logp), flat(episode, "ref_logp"), strict=True)
    return [-beta * kl(p - q, kind) for p, q in pairs]


def adaptive_beta(beta: float, measured: float, target: float, horizon: float, num_samples: float) -> float:
    return beta * (1 + clamp(measured / target - 1, -0.2, 0.2) * num_samples / horizon)


# --- which episodes, rewards ---------------------------------------------------------------------------------------


def degenerate(rewards: list[float], groups: list[int]) -> list[bool]:
    """Return whether all rewards of the episode's group are equal."""
    return [len({r for r, h in zip(rewards, groups, strict=True) if h == g}) == 1 for g in groups]


def moderate(rewards: list[float], groups: list[int], low: float = 0.1, high: float = 0.95) -> list[bool]:
    """Return whether the group's mean reward is strictly between the bounds."""
    return [low < mean([r for r, h in zip(rewards, groups, strict=True) if h == g]) < high for g in groups]


def longest_answer(episode: Episode) -> int:
    """Return the tokens of the longest turn."""
    return max(len(turn["logp"]) for turn in episode["turns"])


def overlong(num_tokens: int, limit: int, cache: int) -> float:
    if num_tokens <= limit - cache:
        return 0.0
    return (limit - cache - num_tokens) / cache if num_tokens <= limit else -1.0


def sample_weights(num: int, difficulty: list[float] | None = None, lengths: list[float] | None = None) -> list[float]:
    """Compute `.5 + 1.5 d` times `1.5 - l`, with mean 1. Both in 0..1."""
    out = [1.0] * num
    for n in range(num):
        if difficulty is not None:
            out[n] *= 0.5 + 1.5 * difficulty[n]
        if lengths is not None:
            out[n] *= 1.5 - lengths[n]
    m = mean(out)
    return [w / m for w in out]


# --- aggregation ---------------------------------------------------------------------------------------------------


def token_weights(counted: Flags, aggregation: str, constant: float | None = None) -> Tokens:
    """Return the weight of each token's loss: `loss = sum of weight * l`. One row per sample, 0 if not counted."""
    total = sum(sum(row) for row in counted)
    samples = sum(any(row) for row in counted)
    out = []
    for row in counted:
        if aggregation == "token-mean":
            share = 1 / max(total, 1)
        elif aggregation == "seq-mean-token-sum":
            share = 1 / max(samples, 1)
        elif aggregation == "seq-mean-token-mean":
            share = 1 / max(samples * sum(row), 1)
        elif aggregation == "seq-sum-norm":
            assert constant is not None
            share = 1 / constant
        else:
            raise ValueError(aggregation)
        out.append([share if counts else 0.0 for counts in row])
    return out


def aggregate(losses: Tokens, counted: Flags, aggregation: str, constant: float | None = None) -> float:
    weights = token_weights(counted, aggregation, constant)
    return math.fsum(w * x for ws, xs in zip(weights, losses, strict=True) for w, x in zip(ws, xs, strict=True) if w)


def sample_rows(episodes: list[Episode], rows: list[list[Any]], unit: str) -> list[list[Any]]:
    """Convert rows of episodes to rows of samples: a sample is an episode or a turn."""
    if unit == "episode":
        return rows
    out = []
    for episode, row in zip(episodes, rows, strict=True):
        start = 0
        for turn in episode["turns"]:
            out.append(row[start : start + len(turn["logp"])])
            start += len(turn["logp"])
    return out


def episode_rows(episodes: list[Episode], rows: list[list[Any]], unit: str) -> list[list[Any]]:
    """Convert rows of samples back to rows of episodes."""
    if unit == "episode":
        return rows
    left = iter(rows)
    return [[x for _ in episode["turns"] for x in next(left)] for episode in episodes]


# --- mismatch of trainer and sampler -------------------------------------------------------------------------------


def units(episode: Episode, level: str, valid: list[bool] | None = None) -> list[list[int]]:
    """Return, for every token, the tokens it shares its ratio with."""
    ids, n = turn_ids(episode), length(episode)
    valid = [True] * n if valid is None else valid
    if level == "token":
        return [[t] for t in range(n)]
    if level == "turn":
        return [[u for u in range(n) if ids[u] == ids[t] and valid[u]] for t in range(n)]
    return [[u for u in range(n) if valid[u]] for _ in range(n)]


def at_level(episode: Episode, x: list[float], level: str) -> list[float]:
    """Return log-probs or their differences at a level: means, but at level "trajectory" the sum."""
    out = []
    for members in units(episode, level):
        total = math.fsum(x[u] for u in members)
        out.append(total if level == "trajectory" else total / len(members))
    return out


def mismatch(
    episode: Episode,
    level: str = "token",
    weight_cap: float | None = 1.2,
    ratio_band: tuple[float, float] | None = None,
    prob_band: tuple[float, float] | None = None,
    also: tuple[dict[str, Any], ...] = (),
) -> tuple[list[float], list[bool]]:
    """Weight `clip(ratio, 0, cap)` of every token, and whether the filters keep it.

    The difference of probabilities at a level is the mean of the tokens' differences, at level "trajectory" their sum.
    also: arguments of further ones; weights are multiplied, and all filters must keep a token.
    """
    trainer, sampler = flat(episode, "trainer_logp"), flat(episode, "sampler_logp")
    delta = [p - q for p, q in zip(trainer, sampler, strict=True)]
    ratios = [math.exp(d) for d in at_level(episode, delta, level)]
    single = [math.exp(p) - math.exp(q) for p, q in zip(trainer, sampler, strict=True)]
    gaps = at_level(episode, single, level)
    keep = [True] * len(ratios)
    if ratio_band is not None:
        keep = [k and ratio_band[0] <= r <= ratio_band[1] for k, r in zip(keep, ratios, strict=True)]
    if prob_band is not None:
        keep = [k and prob_band[0] <= g <= prob_band[1] for k, g in zip(keep, gaps, strict=True)]
    weights = [1.0 if weight_cap is None else min(r, weight_cap) for r in ratios]
    for one in also:
        more, passed = mismatch(episode, **one)
        weights = [a * b for a, b in zip(weights, more, strict=True)]
        keep = [a and b for a, b in zip(keep, passed, strict=True)]
    return weights, keep


# --- surrogates ----------------------------------------------------------------------------------------------------


class Slopes(NamedTuple):
    loss: float
    by_log_ratio: float
    by_logp: float


def surrogate_of_token(
    name: str,
    log_ratio: float,
    frozen_log_ratio: float,
    logp: float,
    anchor: float,
    advantage: float,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual: float | None = None,
    cap: float = 1.0,
    positive: float = 1.0,
    negative: float = 1.0,
    tau: float = 0.1,
    unified_mask: bool = False,
    divergence: str = "tv",
    mask_low: float = math.inf,
    mask_high: float = math.inf,
    square: float = 0.0,
    good: bool | None = None,
    members: int = 1,
) -> Slopes:
    """Return the loss of one token, its slope through the log-ratio and its slope through logp itself.

    good: which side of TOPR it is on (None: the advantage says). members: tokens that share the log-ratio.
    """
    a = advantage
    low = -math.inf if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    if name == "clipped":
        r = math.exp(log_ratio)
        objective, slope = r * a, r * a
        if clamp(r, low, high) * a < objective:
            objective, slope = clamp(r, low, high) * a, 0.0
        if dual is not None and a < 0 and objective < dual * a:
            objective, slope = dual * a, 0.0
        return Slopes(-objective, -slope, 0.0)
    if name == "dppo":
        old, new = math.exp(anchor), math.exp(logp)
        moved = abs(new - old)
        if divergence == "kl":
            moved = old * (anchor - logp) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))
        is_out = new > old and moved > mask_high if a > 0 else new < old and moved > mask_low
        w, d = 0.0 if is_out else min(math.exp(log_ratio), cap), logp - anchor
        return Slopes(-w * a * logp + square * d * d, 0.0, -w * a + 2 * square * d)
    if name == "kimi of sequences":  # tau/2 (sum of log-ratios)^2, in equal shares; log_ratio is their mean
        square = tau / 2 * members * log_ratio * log_ratio
        return Slopes(-a * logp + square, tau * members * log_ratio, -a)
    if name == "kimi":
        d = logp - anchor
        return Slopes(-a * logp + tau / 2 * d * d, 0.0, -a + tau * d)
    r = math.exp(frozen_log_ratio)
    if name == "vanilla":
        w = 1.0
    elif name == "tis":
        w = clamp(r, 0.0, cap)
    elif name == "topr":
        w = positive if (a > 0 if good is None else good) else negative * clamp(r, 0.0, cap)
    elif name == "cispo":
        w = clamp(r, low, high)
        if unified_mask and ((a > 0 and r > high) or (a < 0 and r < low)):
            w = 0.0
    else:
        raise ValueError(name)
    return Slopes(-w * a * logp, 0.0, -w * a)


# --- the policy gradient every algorithm ends in --------------------------------------------------------------------


def policy_loss(
    episodes: list[Episode],
    advantages: Tokens,
    *,
    surrogate: str = "clipped",
    level: str = "token",
    anchor: str = "sampler_logp",
    ratio_over: str = "sampled",
    aggregation: str = "token-mean",
    constant: float | None = None,
    unit: str = "episode",
    keep: list[bool] | None = None,
    counted: Flags | None = None,
    multiply: Tokens | None = None,
    correction: dict[str, Any] | None = None,
    kl_loss: float = 0.0,
    kl_kind: str = "k3",
    weigh_kl: bool = False,
    drop_truncated: bool = False,
    split: str = "advantage",
    sft: float = 0.0,
    **settings: Any,
) -> Result:
    """Compute the surrogate loss of all episodes and its gradient.

    keep: episodes that take part. counted: tokens that take part, also in denominators. multiply: factors of single
    tokens that leave denominators alone. correction: arguments of `mismatch`; its filters take tokens out of the
    denominators. ratio_over: whether the means of levels turn and geometric are over the "sampled" tokens or the
    "valid" ones (those still counted). weigh_kl: whether factors multiply the KL in the loss too. settings: of
    `surrogate_of_token`. split: whether TOPR tells good from bad by "advantage" or by "reward". sft: weight of the
    cross-entropy of episodes with a positive reward. Episodes may carry a `weight`, which multiplies all of their
    losses.
    """
    valid = [list(row) for row in (counted or like(episodes, True))]
    factors = [list(row) for row in (multiply or like(episodes, 1.0))]
    for n, episode in enumerate(episodes):
        if (keep is not None and not keep[n]) or (drop_truncated and episode.get("truncated", False)):
            valid[n] = [False] * length(episode)
        if correction is not None:
            weights, passed = mismatch(episode, **correction)
            factors[n] = [f * w for f, w in zip(factors[n], weights, strict=True)]
            valid[n] = [v and p for v, p in zip(valid[n], passed, strict=True)]
    shares = token_weights(sample_rows(episodes, valid, unit), aggregation, constant)
    shares = episode_rows(episodes, shares, unit)

    loss, grad = 0.0, like(episodes, 0.0)
    for n, episode in enumerate(episodes):
        logp, still, other = flat(episode, "logp"), frozen(episode), flat(episode, anchor)
        members = units(episode, level, valid[n] if ratio_over == "valid" else None)
        joined = math.fsum if level == "trajectory" else mean
        good = float(episode["reward"]) > 0
        mine = {**settings, "good": good} if split == "reward" else settings
        for t in range(length(episode)):
            if not valid[n][t]:
                continue
            share = shares[n][t] * float(episode.get("weight", 1.0))
            d = joined([logp[u] - other[u] for u in members[t]])
            d_still = joined([still[u] - other[u] for u in members[t]])
            size = len(members[t])
            token = surrogate_of_token(surrogate, d, d_still, logp[t], other[t], advantages[n][t], members=size, **mine)
            loss += share * factors[n][t] * token.loss
            grad[n][t] += share * factors[n][t] * token.by_logp
            for u in members[t]:
                slope = token.by_log_ratio if level == "trajectory" else token.by_log_ratio / size
                grad[n][u] += share * factors[n][t] * slope
            if sft and good:
                loss -= share * sft * logp[t]
                grad[n][t] -= share * sft
            if kl_loss:
                x = logp[t] - flat(episode, "ref_logp")[t]
                weight = share * kl_loss * (factors[n][t] if weigh_kl else 1.0)
                loss += weight * kl(x, kl_kind)
                grad[n][t] += weight * kl_slope(x, kl_kind)
    return Result(loss, grad, advantages)


# --- advantages from the outcome alone ------------------------------------------------------------------------------


def outcome(
    episodes: list[Episode],
    *,
    centre: str | float = "group",
    scale: str | float = "group",
    eps: float = 1e-6,
    rewards: list[float] | None = None,
    reward_clip: float | None = None,
    kl_reward: float = 0.0,
    kl_reward_kind: str = "k1",
    kl_reward_logp: str = "sampler_logp",
    kl_reward_order: str = "after",
    gamma: float = 1.0,
    whitened: bool = False,
    ddof: int = 1,
    advantage_clip: float | None = None,
    drop_degenerate: bool = False,
    difficulty: tuple[float, float] | None = None,
    gammas: Tokens | None = None,
    **policy: Any,
) -> Result:
    """Normalise and clip one reward per episode, give it to all of its tokens, and compute `policy_loss(**policy)`.

    ddof: of whitening. KL in the reward, kl_reward_order "after": the normalised reward stands on the last token, the
    KL's cost on every token, and a token's advantage is the discounted sum of what follows. "before": the costs of an
    episode are added to its reward before that is normalised. Dropping comes after normalising. gammas: multiply the
    advantages.
    """
    groups = [e["group"] for e in episodes]
    raw = [float(e["reward"]) for e in episodes] if rewards is None else rewards
    scores = raw
    costs = like(episodes, 0.0)
    if kl_reward:
        costs = [kl_costs(e, kl_reward, kl_reward_kind, kl_reward_logp) for e in episodes]
    if kl_reward_order == "before":
        scores = [s + math.fsum(c) for s, c in zip(scores, costs, strict=True)]
    scores = normalise(scores, groups, centre, scale, eps)
    if reward_clip is not None:
        scores = [clamp(s, -reward_clip, reward_clip) for s in scores]
    if kl_reward and kl_reward_order == "after":
        advantages = []
        for episode, score, cost in zip(episodes, scores, costs, strict=True):
            token_rewards = [c + r for c, r in zip(cost, last_token(episode, score), strict=True)]
            advantages.append(discounted(token_rewards, gamma))
    else:
        advantages = [discounted(last_token(e, s), gamma) for e, s in zip(episodes, scores, strict=True)]
    if whitened:
        advantages = whiten(advantages, ddof)
    if advantage_clip is not None:
        advantages = [[clamp(a, -advantage_clip, advantage_clip) for a in row] for row in advantages]
    if gammas is not None:
        advantages = [[a * g for a, g in zip(r, s, strict=True)] for r, s in zip(advantages, gammas, strict=True)]
    keep = [True] * len(episodes)
    if drop_degenerate:
        keep = [not d for d in degenerate([float(e["reward"]) for e in episodes], groups)]
    if difficulty is not None:
        bounds = moderate([float(e["reward"]) for e in episodes], groups, *difficulty)
        keep = [k and m for k, m in zip(keep, bounds, strict=True)]
    return policy_loss(episodes, advantages, keep=keep, **policy)


def with_defaults(options: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    return {**defaults, **options}


def reinforce(episodes: list[Episode], baseline: str = "none", **options: Any) -> Result:
    """Compute `A = R`, or minus the mean of the batch or of the group; no ratio."""
    return outcome(episodes, **with_defaults(options, centre=baseline, scale="none", surrogate="vanilla"))


def rloo(episodes: list[Episode], **options: Any) -> Result:
    """Compute `A = R - mean of the others in the group`."""
    defaults = {"surrogate": "vanilla", "aggregation": "seq-mean-token-sum"}
    return outcome(episodes, **with_defaults(options, centre="leave_one_out", scale="none", **defaults))


def reinforce_pp(
    episodes: list[Episode], variant: str = "tokens", whiten_over: str = "tokens", **options: Any
) -> Result:
    """Compute REINFORCE++. tokens: reward minus the KL costs from the token on, whitened over all tokens (population
    spread). rewards: rewards normalised over the batch, KL costs added as they are. baseline: minus the group's mean,
    then whitened over the batch.

    whiten_over: whether the last variant whitens over "tokens" or over "episodes".
    """
    over_tokens = {"scale": "none", "whitened": True, "ddof": 0}
    if variant == "tokens":
        return outcome(episodes, **with_defaults(options, centre="none", **over_tokens))
    if variant == "rewards":
        return outcome(episodes, **with_defaults(options, centre="batch", scale="batch"))
    if whiten_over == "tokens":
        return outcome(episodes, **with_defaults(options, centre="group", **over_tokens))
    groups = [e["group"] for e in episodes]
    centred = normalise([float(e["reward"]) for e in episodes], groups, "group", "none")
    return outcome(episodes, **with_defaults(options, rewards=centred, centre="batch", scale="batch"))


def grpo(episodes: list[Episode], **options: Any) -> Result:
    return outcome(episodes, **with_defaults(options, aggregation="seq-mean-token-mean"))


def dr_grpo(episodes: list[Episode], max_tokens: int, **options: Any) -> Result:
    """Compute GRPO without dividing by the spread; summed losses are divided by `number of episodes * max_tokens`."""
    constant = float(len(episodes) * max_tokens)
    return outcome(episodes, **with_defaults(options, scale="none", aggregation="seq-sum-norm", constant=constant))


def raft_pp(episodes: list[Episode], **options: Any) -> Result:
    """Compute RAFT++: only episodes of positive reward contribute; all count."""
    rewards = [max(float(e["reward"]), 0.0) for e in episodes]
    defaults = {"aggregation": "seq-mean-token-mean"}
    return outcome(episodes, **with_defaults(options, rewards=rewards, centre="none", scale="none", **defaults))


def dapo(episodes: list[Episode], limit: int | None = None, cache: int = 0, **options: Any) -> Result:
    """Compute DAPO: clip-higher, soft penalty of long answers (an episode's longest), token mean, groups of equal
    rewards dropped.

    Whether a group is degenerate is read from rewards before the penalty.
    """
    rewards = [float(e["reward"]) for e in episodes]
    if limit is not None:
        rewards = [r + overlong(longest_answer(e), limit, cache) for r, e in zip(rewards, episodes, strict=True)]
    return outcome(episodes, **with_defaults(options, rewards=rewards, clip_high=0.28, drop_degenerate=True))


def gspo(episodes: list[Episode], **options: Any) -> Result:
    """Compute GSPO: one ratio per sequence, the geometric mean of its tokens'."""
    clips = {"clip_low": 3e-4, "clip_high": 4e-4}
    return outcome(episodes, **with_defaults(options, level="geometric", aggregation="seq-mean-token-mean", **clips))


def cispo(episodes: list[Episode], **options: Any) -> Result:
    return outcome(episodes, **with_defaults(options, surrogate="cispo", clip_low=0.1, clip_high=0.1))


def dppo(episodes: list[Episode], max_tokens: int, **options: Any) -> Result:
    """Compute Dr. GRPO's advantages and sums under DPPO's loss."""
    constant = float(len(episodes) * max_tokens)
    defaults = {"mask_low": 0.15, "mask_high": 0.15, "cap": 10.0, "surrogate": "dppo"}
    sums = {"scale": "none", "aggregation": "seq-sum-norm", "constant": constant}
    return outcome(episodes, **with_defaults(options, **sums, **defaults))


def gdpo(episodes: list[Episode], weights: dict[str, float], **options: Any) -> Result:
    """Compute `A = sum of w_k (part_k - mean) / std` in the group, whitened over all tokens."""
    groups = [e["group"] for e in episodes]
    scores = [0.0] * len(episodes)
    for name, weight in weights.items():
        values = normalise([float(e["parts"].get(name, 0.0)) for e in episodes], groups)
        scores = [s + weight * v for s, v in zip(scores, values, strict=True)]
    return outcome(episodes, **with_defaults(options, rewards=scores, centre="none", scale="none", whitened=True))


def topr(episodes: list[Episode], **options: Any) -> Result:
    """Compute TOPR: tapered by the trajectory's ratio where the reward is not positive; `A = R` by default."""
    defaults = {"level": "trajectory", "split": "reward", "aggregation": "seq-mean-token-sum"}
    return outcome(episodes, **with_defaults(options, surrogate="topr", centre="none", scale="none", **defaults))


def tis(episodes: list[Episode], **options: Any) -> Result:
    return outcome(episodes, **with_defaults(options, surrogate="tis"))


def kimi(episodes: list[Episode], square: str = "sequence", **options: Any) -> Result:
    """Average over episodes `-A log pi + tau/2 (log pi - log anchor)^2`, of sequences or of single tokens."""
    if square == "sequence":
        options = with_defaults(options, surrogate="kimi of sequences", level="geometric")
    defaults = {"surrogate": "kimi", "scale": "none", "aggregation": "seq-mean-token-sum"}
    return outcome(episodes, **with_defaults(options, **defaults))


def decoupled_weights(episodes: list[Episode], cap: float | None) -> Tokens:
    """Compute `proximal / behaviour` of every token, capped."""
    rows = []
    for e in episodes:
        pairs = zip(flat(e, "trainer_logp"), flat(e, "sampler_logp"), strict=True)
        rows.append([min(math.exp(p - q), math.inf if cap is None else cap) for p, q in pairs])
    return rows


def decoupled_ppo(episodes: list[Episode], weight_cap: float | None = 2.0, **options: Any) -> Result:
    """Compute PPO's clip around the proximal policy, times a constant weight `proximal / behaviour`."""
    weights = decoupled_weights(episodes, weight_cap)
    return outcome(episodes, **with_defaults(options, anchor="trainer_logp", multiply=weights))


def lite_ppo(episodes: list[Episode], min_std: float = 1e-3, **options: Any) -> Result:
    """Compute Lite PPO: minus the group's mean, divided by the batch's spread; token mean. No loss below `min_std`."""
    rewards = [float(e["reward"]) for e in episodes]
    scale = "batch" if len(rewards) > 1 and std(rewards) >= min_std else math.inf
    return outcome(episodes, **with_defaults(options, scale=scale))


# --- credit of turns ------------------------------------------------------------------------------------------------


def turn_reinforce(
    episodes: list[Episode], gamma: float = 0.95, centre: str = "none", scale: str = "none", **options: Any
) -> Result:
    """Give every token of turn k the discounted return from k on; each turn is a sample.

    centre and scale normalise the returns of all turns of the group or of the batch.
    """
    returns = [turn_returns(e, gamma) for e in episodes]
    groups = [e["group"] for e in episodes for _ in e["turns"]]
    flat_returns = iter(normalise([g for row in returns for g in row], groups, centre, scale))
    rows = [[next(flat_returns) for _ in row] for row in returns]
    advantages = [per_turn(e, row) for e, row in zip(episodes, rows, strict=True)]
    return policy_loss(episodes, advantages, **with_defaults(options, surrogate="vanilla", unit="turn"))


def rebn(episodes: list[Episode], gamma: float = 0.9, eps: float = 1e-9, **options: Any) -> Result:
    """Normalise the returns of all turns of the batch by their mean and population spread.

    Each turn is a sample; the default aggregation needs `constant`.
    """
    returns = [turn_returns(e, gamma) for e in episodes]
    everything = [g for row in returns for g in row]
    m, s = mean(everything), std(everything, ddof=0)
    advantages = [per_turn(e, [(g - m) / (s + eps) for g in row]) for e, row in zip(episodes, returns, strict=True)]
    return policy_loss(episodes, advantages, **with_defaults(options, aggregation="seq-sum-norm", unit="turn"))


def gigpo(
    episodes: list[Episode],
    gamma: float = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    divide: bool = True,
    eps: float = 1e-6,
    **options: Any,
) -> Result:
    """Sum the advantage normalised in the group of episodes and that among turns of the group that began in the same
    state."""
    scale = "group" if divide else "none"
    outer = normalise([float(e["reward"]) for e in episodes], [e["group"] for e in episodes], "group", scale, eps)
    returns = [g for e in episodes for g in turn_returns(e, gamma)]
    states: list[Hashable] = [(e["group"], turn["state"]) for e in episodes for turn in e["turns"]]
    numbers = [states.index(s) for s in states]
    inner = iter(normalise(returns, numbers, "group", scale, eps))
    advantages = []
    for n, e in enumerate(episodes):
        advantages.append(per_turn(e, [episode_weight * outer[n] + step_weight * next(inner) for _ in e["turns"]]))
    return policy_loss(episodes, advantages, **options)


def ipa(
    episodes: list[Episode],
    gamma: float = 0.95,
    limit: float = 5.0,
    count_masked: bool = True,
    lambda_rl: float = 1.0,
    lambda_il: float = 0.1,
    expert_reward: float | None = None,
    **options: Any,
) -> Result:
    """Compute IPA on turns: discounted outcome, geometric ratio truncated on negatives, mask where trainer and sampler
    disagree.

    count_masked: whether masked turns stay in the denominators. An episode's first `expert_turns` turns (0 if left out)
    are imitated: no ratio, no mask, weight lambda_il times the turn's own instead of lambda_rl. The gradient of these
    is that of `-lambda_il weight G logp`, with G from expert_reward, the outcome the expert had (None: that of the
    episode), discounted to the last of its `expert_length` turns (those of the episode if left out).
    """
    expert = [[k < e.get("expert_turns", 0) for k in turn_ids(e)] for e in episodes]
    advantages = []
    for e, row in zip(episodes, expert, strict=True):
        own = float(e["reward"])
        outcomes = [own if expert_reward is None or not x else expert_reward for x in row]
        last = [(e.get("expert_length", len(e["turns"])) if x else len(e["turns"])) - 1 for x in row]
        ahead = [end - k for end, k in zip(last, turn_ids(e), strict=True)]
        advantages.append([gamma**n * outcome for n, outcome in zip(ahead, outcomes, strict=True)])
    agree = [mismatch(e, "turn", None, (0.0, limit))[1] for e in episodes]
    keep = [[a or x for a, x in zip(r, s, strict=True)] for r, s in zip(agree, expert, strict=True)]
    counted = None if count_masked else keep

    ones = [[1.0] * len(row) for row in expert]
    own_weights = [per_turn(e, [turn.get("weight", 1.0) for turn in e["turns"]]) for e in episodes]

    def part(chosen: Flags, factor: float, weights: Tokens = ones, **settings: Any) -> Result:
        multiply = [
            [factor * w if k and c else 0.0 for k, c, w in zip(r, s, v, strict=True)]
            for r, s, v in zip(keep, chosen, weights, strict=True)
        ]
        common = with_defaults(options, anchor="trainer_logp", level="turn")
        return policy_loss(episodes, advantages, **{**common, "multiply": multiply, "counted": counted, **settings})

    sampled = part([[not x for x in row] for row in expert], lambda_rl, surrogate="topr")
    copied = part(expert, lambda_il, own_weights, surrogate="vanilla", kl_loss=0.0)
    grad = [[a + b for a, b in zip(r, s, strict=True)] for r, s in zip(sampled.grad, copied.grad, strict=True)]
    return Result(sampled.loss + copied.loss, grad, advantages)


# --- critics --------------------------------------------------------------------------------------------------------


def critic_values(episode: Episode) -> list[list[float]]:
    """Return values `[M][T]`."""
    num = len(episode["turns"][0]["values"])
    return [[v for turn in episode["turns"] for v in turn["values"][m]] for m in range(num)]


def mean_and_spread(episode: Episode) -> tuple[list[float], list[float]]:
    """Return the critics' mean and population spread at every token."""
    columns = list(zip(*critic_values(episode), strict=True))
    return [mean(list(c)) for c in columns], [std(list(c), ddof=0) for c in columns]


def generalised_advantages(
    episodes: list[Episode],
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_reward: float = 0.0,
    kl_reward_kind: str = "k1",
    kl_reward_logp: str = "sampler_logp",
    per_turn_rewards: bool = False,
) -> tuple[Tokens, Tokens]:
    """Compute GAE under the mean of the critics, observations skipped: advantages and returns.

    The episode's reward is on its last token, or each turn's reward on the turn's last token.
    """
    advantages, returns = [], []
    for e in episodes:
        rewards = turn_ends(e) if per_turn_rewards else last_token(e, float(e["reward"]))
        if kl_reward:
            costs = kl_costs(e, kl_reward, kl_reward_kind, kl_reward_logp)
            rewards = [r + c for r, c in zip(rewards, costs, strict=True)]
        a, r = gae(rewards, mean_and_spread(e)[0], gamma, lam)
        advantages.append(a)
        returns.append(r)
    return advantages, returns


GAE_SETTINGS = ("gamma", "lam", "kl_reward", "kl_reward_kind", "kl_reward_logp", "per_turn_rewards")


def ppo(episodes: list[Episode], whitened: bool = False, advantage_clip: float | None = None, **options: Any) -> Result:
    """Compute the actor's part; `generalised_advantages` has the critics' targets and `critic_loss` their loss."""
    settings = {k: options.pop(k) for k in GAE_SETTINGS if k in options}
    advantages, _ = generalised_advantages(episodes, **settings)
    if whitened:
        advantages = whiten(advantages)
    if advantage_clip is not None:
        advantages = [[clamp(a, -advantage_clip, advantage_clip) for a in row] for row in advantages]
    return policy_loss(episodes, advantages, **options)


def asy_ppo(episodes: list[Episode], mask_share: float = 0.2, **options: Any) -> Result:
    """Compute PPO under the mean of several critics, without a gradient where they agree most. A response's denominator
    counts all of its tokens."""
    agree = chosen_by_rank([mean_and_spread(e)[1] for e in episodes], mask_share, highest=False)
    multiply = [[0.0 if a else 1.0 for a in row] for row in agree]
    return ppo(episodes, **with_defaults(options, multiply=multiply, aggregation="seq-mean-token-mean"))


def critic_loss(
    episodes: list[Episode],
    returns: Tokens,
    *,
    shards: list[int] | None = None,
    clip: float | None = None,
    factor: float = 0.5,
) -> tuple[float, list[Tokens]]:
    """Sum over critics of the mean squared error over the tokens each learns from, and its slope in the values.

    shards: the critic that learns from each episode; None: every critic from all. `turn["old_values"]` (like values)
    is what the clip is around.
    """
    num = len(episodes[0]["turns"][0]["values"])
    loss, grad = 0.0, [like(episodes, 0.0) for _ in range(num)]
    for m in range(num):
        mine = [n for n in range(len(episodes)) if shards is None or shards[n] == m]
        total = sum(length(episodes[n]) for n in mine)
        for n in mine:
            values = critic_values(episodes[n])[m]
            old = [v for turn in episodes[n]["turns"] for v in turn.get("old_values", turn["values"])[m]]
            for t, (v, target) in enumerate(zip(values, returns[n], strict=True)):
                error, slope = (v - target) ** 2, 2 * (v - target)
                if clip is not None:
                    moved = clamp(v, old[t] - clip, old[t] + clip)
                    if (moved - target) ** 2 > error:
                        error, slope = (moved - target) ** 2, 0.0
                loss += factor * error / total
                grad[m][n][t] += factor * slope / total
    return loss, grad


# --- attention rhythm -----------------------------------------------------------------------------------------------


def top_tokens(values: list[float], count: int) -> set[int]:
    """Return the indices of the highest values; ties: first come."""
    return set(sorted(range(len(values)), key=lambda t: -values[t])[:count])


def quantile(values: list[float], share: float) -> float:
    """Interpolate linearly between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def waad_steps(waad: list[float]) -> list[float]:
    """Compute `|WAAD_t - WAAD_{t+1}|`, one fewer than tokens."""
    return [abs(waad[t] - waad[t + 1]) for t in range(len(waad) - 1)]


def rhythm(
    waad: list[float],
    fai: list[float],
    mode: str,
    amp: float = 1.5,
    top: float = 0.4,
    alpha: float = 0.5,
    window: int = 2,
    waad_pct: float = 0.4,
    delta_pct: float = 0.6,
) -> list[float]:
    """Return the factors of one sequence's advantages. Percentiles are the sequence's own."""
    n = len(waad)
    count, steps = math.floor(top * n), waad_steps(waad)
    if mode == "local":
        return [amp if t in top_tokens(steps, count) else 1.0 for t in range(n)]
    anchors = top_tokens(fai, count)
    if mode == "global":
        return [amp if t in anchors else 1.0 for t in range(n)]
    if not steps:
        return [amp if t in anchors else 1.0 for t in range(n)]
    low, high = quantile(waad, waad_pct), quantile(steps, delta_pct)
    dominated, intros = set(), set()
    for t in anchors:
        before = [u for u in range(t - window, t) if u >= 0]
        if not before or waad[t] > low:
            continue
        intro = max(before, key=lambda u: steps[u])
        if steps[intro] >= high:
            dominated.add(t)
            intros.add(intro)
    out = []
    for t in range(n):
        g = 1.0
        if t in dominated:
            g += (1 - alpha) * (amp - 1)
        elif t in anchors:
            g += amp - 1
        if t in intros:
            g += alpha * (amp - 1)
        out.append(g)
    return out


RHYTHM_SETTINGS = ("amp", "top", "alpha", "window", "waad_pct", "delta_pct")


def attention_rhythm(episodes: list[Episode], mode: str = "coupled", **options: Any) -> Result:
    """Compute GRPO with advantages multiplied by `rhythm`."""
    settings = {k: options.pop(k) for k in RHYTHM_SETTINGS if k in options}
    gammas = [rhythm(flat(e, "waad"), flat(e, "fai"), mode, **settings) for e in episodes]
    return grpo(episodes, **with_defaults(options, gammas=gammas))


# --- segment rewards ------------------------------------------------------------------------------------------------


def smoothed(q: list[float], window: int, smoother: str = "mean") -> list[float]:
    """Smooth by the mean over a centred window, cut off at the ends; or by its median, the ends repeated."""
    half = window // 2
    if smoother == "mean":
        return [mean(q[max(0, t - half) : t + half + 1]) for t in range(len(q))]
    longer = [q[0]] * half + q + [q[-1]] * half
    return [sorted(longer[t : t + 2 * half + 1])[half] for t in range(len(q))]


def segments(q: list[float], delta: float, min_len: int = 1, sign_at: float = 0.1) -> list[tuple[int, int]]:
    """Return half-open intervals between pivots. A pivot nearer than min_len to the previous one is skipped."""
    starts = [0]
    for t in range(1, len(q)):
        jump = abs(q[t] - q[t - 1]) > delta
        turn = q[t] * q[t - 1] < 0 and abs(q[t]) > sign_at
        if (jump or turn) and t - starts[-1] >= min_len:
            starts.append(t)
    return list(zip(starts, [*starts[1:], len(q)], strict=True))


def agreement(
    rows: Tokens,
    signs: list[int],
    delta: float | None = None,
    baseline: float | None = None,
    min_len: int = 1,
    min_keep: float = 0.0,
    smooth: int = 1,
    ddof: int = 0,
    smoother: str = "mean",
    means_of: str = "smoothed",
) -> Flags:
    """Return whether the mean token reward of each token's segment agrees with the sequence's sign.

    delta None: one spread of the batch's absolute differences; baseline None: the batch's mean. Less than min_keep of a
    sequence: all of it is kept. means_of: "smoothed" token rewards take the place of the raw ones everywhere; "raw":
    only where segments are cut.
    """
    raw, rows = rows, [smoothed(q, smooth, smoother) for q in rows]
    if delta is None:
        jumps = [abs(q[t] - q[t - 1]) for q in rows for t in range(1, len(q))]
        delta = std(jumps, ddof) if len(jumps) > ddof else 0.0
    if baseline is None:
        baseline = mean([x for q in (rows if means_of == "smoothed" else raw) for x in q])
    out = []
    for q, given, y in zip(rows, raw, signs, strict=True):
        keep = [False] * len(q)
        for start, end in segments(q, delta, min_len):
            if y * (mean((q if means_of == "smoothed" else given)[start:end]) - baseline) > 0:
                keep[start:end] = [True] * (end - start)
        out.append(keep if sum(keep) >= min_keep * len(q) else [True] * len(q))
    return out


def token_rewards(episode: Episode, beta: float = 0.1) -> list[float]:
    """Compute `beta (scorer - reference)`."""
    pairs = zip(flat(episode, "scorer_logp"), flat(episode, "ref_logp"), strict=True)
    return [beta * (p - q) for p, q in pairs]


AGREEMENT_SETTINGS = ("delta", "baseline", "min_len", "min_keep", "smooth", "ddof", "smoother", "means_of")


def segment_reward(episodes: list[Episode], beta: float = 0.1, **options: Any) -> Result:
    """Compute GRPO with `A_t <- M_t A_t`; the sign of an episode is its success."""
    settings = {k: options.pop(k) for k in AGREEMENT_SETTINGS if k in options}
    signs = [1 if e["success"] else -1 for e in episodes]
    masks = agreement([token_rewards(e, beta) for e in episodes], signs, **settings)
    return grpo(episodes, **with_defaults(options, gammas=[[float(m) for m in row] for row in masks]))


# --- distillation as an advantage -----------------------------------------------------------------------------------


def opd(
    episodes: list[Episode],
    coefs: list[float] | None = None,
    student: str = "sampler_logp",
    mixed: bool = False,
    centre: str = "group",
    scale: str = "group",
    **options: Any,
) -> Result:
    """Compute `A_t = -sum_i coef_i (student - teacher_i)`; mixed: plus the normalised outcome.

    Pure: an episode that is routed to no teacher is left out, also of the denominators.
    """
    outcomes = [0.0] * len(episodes)
    if mixed:
        rewards = [float(e["reward"]) for e in episodes]
        outcomes = normalise(rewards, [e["group"] for e in episodes], centre, scale)
    advantages, keep = [], []
    for e, score in zip(episodes, outcomes, strict=True):
        num = len(e["turns"][0]["teacher_logp"])
        routed = e.get("teachers", [True] * num)
        row = [score] * length(e)
        for i in range(num):
            if routed[i]:
                teacher = [x for turn in e["turns"] for x in turn["teacher_logp"][i]]
                coef = 1.0 if coefs is None else coefs[i]
                row = [a - coef * (p - q) for a, p, q in zip(row, flat(e, student), teacher, strict=True)]
        advantages.append(row)
        keep.append(mixed or any(routed))
    return policy_loss(episodes, advantages, **with_defaults(options, surrogate="vanilla", keep=keep))


def sdpo(episodes: list[Episode], reward_coef: float = 0.0, student: str = "sampler_logp", **options: Any) -> Result:
    """Compute `A_t = teacher - student` where another episode of the group is solved, the teacher being
    `context_logp`; plus `reward_coef` times the normalised outcome. Pure: the others are left out."""
    outcomes = normalise([float(e["reward"]) for e in episodes], [e["group"] for e in episodes])
    advantages, keep = [], []
    for n, e in enumerate(episodes):
        shown = any(o["success"] and o["group"] == e["group"] and m != n for m, o in enumerate(episodes))
        row = [reward_coef * outcomes[n]] * length(e)
        if shown:
            row = [a + q - p for a, q, p in zip(row, flat(e, "context_logp"), flat(e, student), strict=True)]
        advantages.append(row)
        keep.append(shown or reward_coef > 0)
    return policy_loss(episodes, advantages, **with_defaults(options, surrogate="vanilla", keep=keep))


def spiral(
    episodes: list[Episode], roles: tuple[str, str] = ("first", "second"), decay: float = 0.95, **options: Any
) -> Result:
    """Compute `A = +-R - b` of the two roles, whose turns alternate; b the moving averages of the roles' returns over
    all episodes of the domain, one after the other, from 0 on."""
    averages: dict[tuple[str, str], float] = {}
    for e in episodes:
        for role, outcome in zip(roles, (e["reward"], -e["reward"]), strict=True):
            of_role = (e["domain"], role)
            averages[of_role] = decay * averages.get(of_role, 0.0) + (1 - decay) * outcome
    advantages = []
    for e in episodes:
        of_roles = [(x - averages[e["domain"], r]) for r, x in zip(roles, (e["reward"], -e["reward"]), strict=True)]
        advantages.append([of_roles[k % 2] for k in turn_ids(e)])
    return policy_loss(episodes, advantages, **with_defaults(options, surrogate="vanilla"))


# --- supervised -----------------------------------------------------------------------------------------------------


def sft(
    episodes: list[Episode],
    keep: list[bool] | None = None,
    masks: Flags | None = None,
    aggregation: str = "token-mean",
    constant: float | None = None,
) -> Result:
    """Compute `-sum m logp / sum m`. Turns of weight 0 are left out; another weight multiplies. Advantages: these
    weights."""
    weights = [per_turn(e, [float(turn.get("weight", 1.0)) for turn in e["turns"]]) for e in episodes]
    counted = []
    for n, row in enumerate(weights):
        taken = keep is None or keep[n]
        counted.append([taken and w != 0 and (masks is None or masks[n][t]) for t, w in enumerate(row)])
    shares = token_weights(counted, aggregation, constant)
    loss, grad = 0.0, like(episodes, 0.0)
    for n, episode in enumerate(episodes):
        for t, logp in enumerate(flat(episode, "logp")):
            loss -= shares[n][t] * weights[n][t] * logp
            grad[n][t] = -shares[n][t] * weights[n][t]
    return Result(loss, grad, weights)


def select_for_imitation(episodes: list[Episode], cap: int = 4, similarity: float = 0.9) -> list[bool]:
    """Select successes, first come, unlike those already kept of their group, at most `cap` per group."""
    kept: dict[int, list[str]] = {}
    out = []
    for e in episodes:
        text = " ".join(e["text"].lower().split())
        mine = kept.setdefault(e["group"], [])
        twin = any(text == x or difflib.SequenceMatcher(None, x, text).ratio() >= similarity for x in mine)
        out.append(bool(e["success"]) and not twin and len(mine) < cap)
        if out[-1]:
            mine.append(text)
    return out


def rft(episodes: list[Episode], cap: int = 4, similarity: float = 0.9, **options: Any) -> Result:
    return sft(episodes, keep=select_for_imitation(episodes, cap, similarity), **options)


# --- preferences ----------------------------------------------------------------------------------------------------


def best_and_worst(episodes: list[Episode]) -> list[tuple[int, int]]:
    """Return one pair (chosen, rejected) per group whose rewards are not all equal; the first wins ties."""
    pairs = []
    for group in dict.fromkeys(e["group"] for e in episodes):
        members = [n for n, e in enumerate(episodes) if e["group"] == group]
        best = max(members, key=lambda n: episodes[n]["reward"])
        worst = min(members, key=lambda n: episodes[n]["reward"])
        if episodes[best]["reward"] > episodes[worst]["reward"]:
            pairs.append((best, worst))
    return pairs


def kto(
    episodes: list[Episode],
    beta: float = 0.1,
    good_weight: float = 1.0,
    bad_weight: float = 1.0,
    good: list[bool] | None = None,
    policy: str = "trainer_logp",
    reference: str = "ref_logp",
) -> Result:
    """Average `lambda (1 - sigmoid(+-beta (r - z)))` over answers: r the summed log-ratio to the reference, z the mean
    over answers of the sums of `policy - reference`, at least 0. good: None is what is solved. Advantages: +-1."""
    good = [bool(e["success"]) for e in episodes] if good is None else good
    gaps = [math.fsum(flat(e, policy)) - math.fsum(flat(e, reference)) for e in episodes]
    z = max(mean(gaps), 0.0)
    loss, grad, labels = 0.0, like(episodes, 0.0), like(episodes, 0.0)
    for n, (e, up) in enumerate(zip(episodes, good, strict=True)):
        side, weight = (1.0, good_weight) if up else (-1.0, bad_weight)
        r = math.fsum(flat(e, "logp")) - math.fsum(flat(e, "ref_logp"))
        value = sigmoid(side * beta * (r - z))
        loss += weight * (1 - value) / len(episodes)
        grad[n] = [-side * beta * weight * value * (1 - value) / len(episodes)] * length(e)
        labels[n] = [side] * length(e)
    return Result(loss, grad, labels)


def dpo(
    episodes: list[Episode],
    kind: str = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    ftx: float = 0.0,
    pairs: list[tuple[int, int]] | None = None,
    masks: Flags | None = None,
) -> Result:
    """Average dpo, ipo or simpo over pairs, plus `ftx * NLL(chosen) / |chosen|`. masks: tokens that count (dpo, ipo).

    Advantages: 1 on chosen, -1 on rejected episodes, else 0.
    """
    pairs = best_and_worst(episodes) if pairs is None else pairs
    loss, grad, roles = 0.0, like(episodes, 0.0), like(episodes, 0.0)
    for chosen, rejected in pairs:
        scores = []
        for n in (chosen, rejected):
            logp = flat(episodes[n], "logp")
            if kind == "simpo":
                scores.append(mean(logp))
            else:
                ref = flat(episodes[n], "ref_logp")
                counts = masks[n] if masks is not None else [True] * len(logp)
                scores.append(math.fsum(p - q for p, q, m in zip(logp, ref, counts, strict=True) if m))
        h = scores[0] - scores[1]
        if kind == "ipo":
            value, slope = (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        else:
            margin = beta * h - (gamma if kind == "simpo" else 0.0)
            value = (1 - label_smoothing) * softplus(-margin) + label_smoothing * softplus(margin)
            slope = beta * (label_smoothing * sigmoid(margin) - (1 - label_smoothing) * sigmoid(-margin))
        loss += value / len(pairs)
        for n, side in ((chosen, 1.0), (rejected, -1.0)):
            size = length(episodes[n])
            roles[n] = [side] * size
            for t in range(size):
                if kind == "simpo":
                    grad[n][t] += side * slope / size / len(pairs)
                elif masks is None or masks[n][t]:
                    grad[n][t] += side * slope / len(pairs)
        if ftx:
            size = length(episodes[chosen])
            loss -= ftx * mean(flat(episodes[chosen], "logp")) / len(pairs)
            grad[chosen] = [g - ftx / size / len(pairs) for g in grad[chosen]]
    return Result(loss, grad, roles)


# --- distillation on logits -----------------------------------------------------------------------------------------


def softmax(z: list[float], tau: float = 1.0) -> list[float]:
    top = max(z)
    e = [math.exp((x - top) / tau) for x in z]
    total = math.fsum(e)
    return [x / total for x in e]


def divergence(
    teacher: list[float], student: list[float], kind: str, alpha: float = 0.1, head: float = 0.5
) -> tuple[float, list[float]]:
    """Compute the divergence of two distributions, and its slope in each probability of the student (as if they were
    free).

    skewed: KL(teacher || alpha teacher + (1 - alpha) student). adaptive: forward and reverse KL weighted by how much of
    the absolute difference is in the teacher's head (its most likely entries, up to and with the one that takes their
    sum to `head`) and in its tail; the weights are constants.
    """
    pairs = list(zip(teacher, student, strict=True))
    forward = math.fsum(p * math.log(p / q) for p, q in pairs if p > 0)
    reverse = math.fsum(q * math.log(q / p) for p, q in pairs if q > 0)
    forward_slope = [-p / q for p, q in pairs]
    reverse_slope = [math.log(q / p) + 1 for p, q in pairs]
    if kind == "forward":
        return forward, forward_slope
    if kind == "reverse":
        return reverse, reverse_slope
    if kind == "js":
        mix = [(p + q) / 2 for p, q in pairs]
        value = sum(p * math.log(p / m) + q * math.log(q / m) for (p, q), m in zip(pairs, mix, strict=True)) / 2
        return value, [math.log(q / m) / 2 for (_, q), m in zip(pairs, mix, strict=True)]
    if kind == "skewed":
        mix = [alpha * p + (1 - alpha) * q for p, q in pairs]
        value = sum(p * math.log(p / m) for (p, _), m in zip(pairs, mix, strict=True))
        return value, [-(1 - alpha) * p / m for (p, _), m in zip(pairs, mix, strict=True)]
    assert kind == "adaptive"
    order, mass, in_head = sorted(range(len(teacher)), key=lambda v: -teacher[v]), 0.0, set()
    for v in order:
        if mass >= head:
            break
        in_head.add(v)
        mass += teacher[v]
    gaps = [abs(p - q) for p, q in pairs]
    total = math.fsum(gaps)
    share = math.fsum(gaps[v] for v in in_head) / total if total > 0 else 0.5
    slopes = [share * f + (1 - share) * r for f, r in zip(forward_slope, reverse_slope, strict=True)]
    return share * forward + (1 - share) * reverse, slopes


def distill_token(
    student: list[float],
    teacher: list[float],
    label: int,
    *,
    kind: str = "forward",
    lam: float = 0.5,
    ce: float = 1.0,
    tau: float = 1.0,
    alpha: float = 0.1,
    head: float = 0.5,
    top_k: int | None = None,
    remainder: bool = False,
) -> tuple[float, list[float]]:
    """Compute `ce * CE(label) + lam * tau^2 * D` of one position's logits, and its slope in the student's logits.

    top_k without remainder: both distributions are renormalised over the teacher's k largest logits. With remainder:
    all other entries are one bucket, whose probability is their sum.
    """
    plain = softmax(student)
    loss = -ce * math.log(plain[label])
    grad = [ce * (p - (v == label)) for v, p in enumerate(plain)]
    vocabulary = list(range(len(student)))
    kept = vocabulary if top_k is None else sorted(vocabulary, key=lambda v: -teacher[v])[:top_k]
    support = vocabulary if remainder or top_k is None else kept
    p_student = dict(zip(support, softmax([student[v] for v in support], tau), strict=True))
    p_teacher = dict(zip(support, softmax([teacher[v] for v in support], tau), strict=True))
    buckets = [[v] for v in kept]
    rest = [v for v in support if v not in kept]
    if rest:
        buckets.append(rest)
    value, slopes = divergence(
        [math.fsum(p_teacher[v] for v in b) for b in buckets],
        [math.fsum(p_student[v] for v in b) for b in buckets],
        kind,
        alpha,
        head,
    )
    slope = {v: s for b, s in zip(buckets, slopes, strict=True) for v in b}
    middle = math.fsum(p_student[v] * slope[v] for v in support)
    for v in support:
        grad[v] += lam * tau**2 * p_student[v] * (slope[v] - middle) / tau
    return loss + lam * tau**2 * value, grad


def distill(
    student: list[list[float]], teacher: list[list[float]], labels: list[int], mask: list[bool], **settings: Any
) -> tuple[float, list[list[float]]]:
    """Average over the positions in the mask; `[T][V]` logits, the gradient has their shape."""
    total = max(sum(mask), 1)
    loss, grad = 0.0, [[0.0] * len(z) for z in student]
    for t, counts in enumerate(mask):
        if counts:
            value, slope = distill_token(student[t], teacher[t], labels[t], **settings)
            loss += value / total
            grad[t] = [g / total for g in slope]
    return loss, grad


# --- check of the hand-derived gradients ----------------------------------------------------------------------------


def finite_differences(
    algorithm: Callable[[list[Episode]], Result], episodes: list[Episode], step: float = 1e-5
) -> Tokens:
    """Compute central differences of the loss in every logp; stop-gradients see unchanged values."""
    base = copy.deepcopy(episodes)
    for e in base:
        for turn in e["turns"]:
            turn["frozen_logp"] = list(turn["logp"])
    out = []
    for n, e in enumerate(base):
        row = []
        for k, turn in enumerate(e["turns"]):
            for t in range(len(turn["logp"])):
                losses = []
                for h in (step, -step):
                    moved = copy.deepcopy(base)
                    moved[n]["turns"][k]["logp"][t] += h
                    losses.append(algorithm(moved).loss)
                row.append((losses[0] - losses[1]) / (2 * step))
        out.append(row)
    return out
