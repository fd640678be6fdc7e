"""The metric table: every number a run writes, with its unit, its reduction, its range and what it means.

`docs/metrics.md` is made from it and a test holds every written row against it. Names are `<room>/<name>_<unit>`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

Reduction = Literal["mean", "sum", "max", "first", "last"]


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """unit, how a step's parts are reduced to one number, the range it cannot leave, and one line of meaning."""

    unit: str
    reduction: Reduction
    low: float
    high: float
    meaning: str


INF = math.inf
NAMES: Mapping[str, Metric] = {
    "reward/mean": Metric("reward", "mean", -INF, INF, "reward per trajectory"),
    "reward/std": Metric("reward", "last", 0, INF, "standard deviation of reward over trajectories"),
    "reward/success_frac": Metric("share", "mean", 0, 1, "trajectories that solved their task"),
    "reward/zero_std_frac": Metric("share", "mean", 0, 1, "groups whose rewards are all equal: nothing to compare"),
    "heldout/reward_mean": Metric("reward", "mean", -INF, INF, "reward on held-out tasks, when they were evaluated"),
    "rollout/len_tok": Metric("tokens", "mean", 0, INF, "sampled (or gold) tokens per trajectory"),
    "rollout/turns_n": Metric("turns", "mean", 0, INF, "turns per trajectory"),
    "rollout/trunc_frac": Metric("share", "mean", 0, 1, "trajectories cut by a limit of tokens, turns or context"),
    "rollout/fail_frac": Metric("share", "mean", 0, 1, "trajectories lost to a failure; left out of credit"),
    "groups/started_n": Metric("groups", "sum", 0, INF, "groups drawn for this step = trained + dropped"),
    "groups/trained_n": Metric("groups", "sum", 0, INF, "groups that took part in an update"),
    "groups/dropped_degenerate_n": Metric("groups", "sum", 0, INF, "groups dropped: all rewards equal"),
    "groups/dropped_failed_n": Metric("groups", "sum", 0, INF, "groups dropped: too few trajectories survived"),
    "groups/waiting_n": Metric("groups", "last", 0, INF, "groups in flight for later steps"),
    "loss/total": Metric("loss", "mean", -INF, INF, "the loss that was differentiated, token mean"),
    "policy/entropy_nat": Metric("nats", "mean", 0, INF, "entropy of the next-token distribution on trained tokens"),
    "policy/clip_low_frac": Metric("share", "mean", 0, 1, "tokens of negative advantage clipped from below"),
    "policy/clip_high_frac": Metric("share", "mean", 0, 1, "tokens of positive advantage clipped from above"),
    "policy/ratio_max": Metric("ratio", "max", 0, INF, "largest ratio of trainer to sampler probability"),
    "mismatch/k3_nat": Metric(
        "nats", "first", -1e-6, INF, "KL(sampler || trainer), k3 estimate, before the first update"
    ),
    "mismatch/mult_ratio": Metric(
        "ratio", "first", 0, INF, "mean exp|sampler_logp - trainer_logp|, before the first update"
    ),
    "mismatch/abs_max_nat": Metric(
        "nats", "first", 0, INF, "largest |sampler_logp - trainer_logp|, before the first update"
    ),
    "optim/grad_norm": Metric("norm", "mean", 0, INF, "gradient norm before clipping"),
    "optim/update_norm": Metric("norm", "mean", 0, INF, "norm of the parameter change"),
    "optim/lr": Metric("rate", "last", 0, INF, "learning rate of the last update"),
    "optim/updates_n": Metric("updates", "sum", 0, INF, "optimizer updates of this step"),
    "stale/mean_ver": Metric("versions", "mean", 0, INF, "policy versions between sampling a token and training on it"),
    "stale/max_ver": Metric("versions", "max", 0, INF, "the oldest token's age"),
    "train/tokens_n": Metric("tokens", "sum", 0, INF, "tokens in the packed rows, shared prompts counted once"),
    "train/trained_tok_n": Metric("tokens", "sum", 0, INF, "tokens with a loss weight"),
    "train/pack_frac": Metric("share", "mean", 0, 1, "filled part of the rows that were computed"),
    "time/rollout_s": Metric("s", "sum", 0, INF, "waiting for this step's groups"),
    "time/pack_s": Metric("s", "sum", 0, INF, "credit and packing"),
    "time/update_s": Metric("s", "sum", 0, INF, "optimizer updates"),
    "time/publish_s": Metric("s", "sum", 0, INF, "handing weights to the sampler"),
    "time/eval_s": Metric("s", "sum", 0, INF, "held-out evaluation"),
    "time/save_s": Metric("s", "sum", 0, INF, "writing rollout files"),
    "time/step_s": Metric("s", "sum", 0, INF, "the whole step"),
    "sampler/prefill_tok": Metric("tokens", "sum", 0, INF, "prompt tokens that were computed"),
    "sampler/reuse_frac": Metric(
        "share", "mean", 0, 1, "prompt tokens that were in the cache or computed for a sibling"
    ),
    "sampler/dispatches_n": Metric("dispatches", "sum", 0, INF, "rounds of decode steps"),
    "sampler/slot_frac": Metric("share", "mean", 0, 1, "slots that sampled a token, over all decode steps"),
    "sampler/preempt_n": Metric("sequences", "sum", 0, INF, "sequences that gave their pages back and went on later"),
    "time/prefill_s": Metric("s", "sum", 0, INF, "of the rollout: starting prefills"),
    "time/decode_s": Metric(
        "s", "sum", 0, INF, "of the rollout: waiting for decode steps (and the prefills before them)"
    ),
    "time/schedule_s": Metric("s", "sum", 0, INF, "of the rollout: the scheduler on the host"),
    "tput/sample_tok_s": Metric("tokens/s", "last", 0, INF, "sampled tokens per second of rollout"),
    "tput/train_tok_s": Metric("tokens/s", "last", 0, INF, "packed tokens per second of update"),
}


def check_row(row: Mapping[str, float]) -> list[str]:
    """What is wrong with a row of metrics: unknown names and values outside their range. Empty when all is well."""
    wrong = [f"{name} is not in metrics.NAMES" for name in row if "/" in name and name not in NAMES]
    for name, value in row.items():
        if (m := NAMES.get(name)) and not m.low <= value <= m.high:
            wrong.append(f"{name} = {value} is outside [{m.low}, {m.high}]")
    return wrong


def markdown() -> str:
    """The table for the docs."""
    lines = ["| name | unit | reduction | range | meaning |", "|---|---|---|---|---|"]
    for name, m in NAMES.items():
        meaning = m.meaning.replace("|", r"\|")
        lines.append(f"| `{name}` | {m.unit} | {m.reduction} | {_range(m)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _range(m: Metric) -> str:
    if math.isinf(m.high):
        return "any" if math.isinf(m.low) else f">= {m.low:g}"
    return f"{m.low:g} to {m.high:g}"
