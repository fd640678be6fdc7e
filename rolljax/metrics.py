"""The metric table: every number that a run writes, with its unit, its reduction, its range and its meaning.

`docs/metrics.md` is made from it, and a test checks every written row against it. Names are `<room>/<name>_<unit>`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

Reduction = Literal["mean", "sum", "max", "first", "last"]


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table: unit, reduction of a step's parts to one number, bounds, and one line of meaning."""

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
    "reward/zero_std_frac": Metric("share", "mean", 0, 1, "trajectories in groups whose rewards are all equal"),
    "reward/all_high_frac": Metric("share", "mean", 0, 1, "of these: all at the step's highest reward"),
    "domain/NAME/share_frac": Metric(
        "share", "last", 0, 1, "of a mixture: share of the step's groups that domain NAME has"
    ),
    "domain/NAME/trained_n": Metric("groups", "sum", 0, INF, "its groups that the step took: whole ones of that share"),
    "domain/NAME/reward_mean": Metric("reward", "mean", -INF, INF, "its reward per trajectory"),
    "domain/NAME/success_frac": Metric("share", "mean", 0, 1, "its trajectories that solved their task"),
    "domain/NAME/len_tok": Metric("tokens", "mean", 0, INF, "its sampled (or reference) tokens per trajectory"),
    "domain/NAME/heldout_mean": Metric("reward", "mean", -INF, INF, "its reward on held-out tasks, when evaluated"),
    "domain/NAME/perplexity_ratio": Metric(
        "ratio", "last", 0, INF, "perplexity of student over teacher on its validation tasks, as last measured"
    ),
    "guidance/share_frac": Metric("share", "mean", 0, 1, "trajectories that began with a latent prefix"),
    "guidance/guided_reward_mean": Metric("reward", "mean", -INF, INF, "reward of these"),
    "guidance/free_reward_mean": Metric("reward", "mean", -INF, INF, "reward of the others"),
    "rewards/calls_n": Metric("calls", "sum", 0, INF, "verdicts that rewards of the recipe requested"),
    "rewards/requests_n": Metric("requests", "sum", 0, INF, "sent to servers for them, repeated ones too"),
    "rewards/answers_n": Metric("answers", "sum", 0, INF, "of these that were answered"),
    "rewards/cached_n": Metric("verdicts", "sum", 0, INF, "verdicts that an earlier call had stored"),
    "rewards/retries_n": Metric("calls", "sum", 0, INF, "calls that were made again"),
    "rewards/lost_n": Metric("trajectories", "sum", 0, INF, "without a verdict; they failed, and are no wrong answers"),
    "rewards/wait_s": Metric("s", "mean", 0, INF, "from the end of an episode until its reward is there"),
    "heldout/reward_mean": Metric("reward", "mean", -INF, INF, "reward on held-out tasks, when they were evaluated"),
    "rollout/len_tok": Metric("tokens", "mean", 0, INF, "sampled (or reference) tokens per trajectory"),
    "rollout/right_len_tok": Metric("tokens", "mean", 0, INF, "sampled tokens per trajectory that solved its task"),
    "rollout/wrong_len_tok": Metric("tokens", "mean", 0, INF, "sampled tokens per trajectory that did not"),
    "rollout/turns_n": Metric("turns", "mean", 0, INF, "turns per trajectory"),
    "rollout/trunc_frac": Metric("share", "mean", 0, 1, "trajectories cut by a limit of tokens, turns or context"),
    "rollout/fail_frac": Metric("share", "mean", 0, 1, "trajectories lost to a failure; left out of credit"),
    "rollout/cancelled_n": Metric("trajectories", "sum", 0, INF, "spare ones cancelled when enough others were done"),
    "faults/infra_n": Metric("trajectories", "sum", 0, INF, "lost to machine, worker, sandbox, server or sampler"),
    "faults/env_n": Metric("trajectories", "sum", 0, INF, "lost to a failure of the environment itself"),
    "faults/agent_n": Metric("trajectories", "sum", 0, INF, "ended early by what the policy did; loops are left out"),
    "faults/limit_n": Metric("trajectories", "sum", 0, INF, "ended by a limit of tokens, turns or time; they count"),
    "faults/set_aside_n": Metric(
        "trajectories", "sum", 0, INF, "of tasks that crashed their worker too often; in faults/env_n as well"
    ),
    "faults/retried_n": Metric("attempts", "sum", 0, INF, "episodes restarted after a fault of the infrastructure"),
    "faults/looped_n": Metric(
        "attempts", "sum", 0, INF, "episodes in which the policy repeated itself to no effect, and that were discarded"
    ),
    "faults/tampered_n": Metric("trajectories", "sum", 0, INF, "episodes in which the policy tampered with its task"),
    "start_states/distance_n": Metric("turns", "last", 0, INF, "turns left to the policy after an expert's"),
    "start_states/fork_frac": Metric(
        "share", "last", 0, 1, "experts of the step with a crucial turn that the policy lacks"
    ),
    "start_states/fallback_n": Metric(
        "groups", "sum", 0, INF, "groups of which all failed: the expert's turn is imitated"
    ),
    "start_states/experts_n": Metric("tasks", "last", 0, INF, "tasks with an episode to replay"),
    "groups/started_n": Metric(
        "groups", "sum", 0, INF, "groups started = trained + dropped + no signal + late + waiting"
    ),
    "groups/trained_n": Metric("groups", "sum", 0, INF, "groups that took part in an update"),
    "groups/dropped_credit_n": Metric("groups", "sum", 0, INF, "groups dropped by credit: nothing to learn from them"),
    "groups/dropped_failed_n": Metric("groups", "sum", 0, INF, "groups dropped: too few trajectories survived"),
    "groups/no_signal_n": Metric("groups", "sum", 0, INF, "groups replaced by dynamic sampling"),
    "groups/no_signal_len_tok": Metric(
        "tokens", "mean", 0, INF, "tokens per trajectory of these, if there are any; compare with rollout/len_tok"
    ),
    "groups/spare_failed_n": Metric("groups", "sum", 0, INF, "groups that failed, and whose place a spare one took"),
    "groups/late_n": Metric("groups", "sum", 0, INF, "groups cancelled: they would have exceeded the staleness bound"),
    "groups/waiting_n": Metric("groups", "last", 0, INF, "groups in flight, or ready, for later steps"),
    "groups/ready_n": Metric("groups", "last", 0, INF, "of these groups, the complete ones"),
    "groups/long_rounds_n": Metric("rounds", "sum", 0, INF, "of tail batching: 1 where a step was a long round"),
    "groups/wait_s": Metric("s", "mean", 0, INF, "from the end of a group's last trajectory until its step begins"),
    "loss/policy": Metric("loss", "mean", -INF, INF, "of it, per token: the surrogate, before KL and entropy terms"),
    "loss/total": Metric("loss", "mean", -INF, INF, "the loss that was differentiated"),
    "policy/entropy_nat": Metric("nats", "mean", 0, INF, "entropy of the next-token distribution on trained tokens"),
    "policy/clip_low_frac": Metric("share", "mean", 0, 1, "tokens of negative advantage clipped from below"),
    "policy/clip_high_frac": Metric("share", "mean", 0, 1, "tokens of positive advantage clipped from above"),
    "policy/ratio_mean": Metric("ratio", "mean", 0, INF, "ratio of the policy to its anchor, token mean"),
    "policy/ess_frac": Metric(
        "share", "mean", 0, 1.001, "effective sample size of the ratios, as a share of the tokens"
    ),
    "policy/ratio_max": Metric("ratio", "max", 0, INF, "largest ratio of the policy to its anchor"),
    "router/balance": Metric(
        "ratio", "mean", 0, INF, "load-balancing loss over its least value: 1 where all experts are used alike"
    ),
    "router/max_load_frac": Metric("share", "max", 0, 1, "choices of the busiest expert, of all in its layer"),
    "router/entropy_nat": Metric(
        "nats", "mean", 0, INF, "entropy of the router's probabilities, mean over tokens and layers"
    ),
    "router/unused_n": Metric("experts", "mean", 0, INF, "experts that no token of an update chose, over all layers"),
    "router/replayed_frac": Metric("share", "mean", 0, 1, "tokens whose experts are those they took in the sampler"),
    "mismatch/k3_nat": Metric(
        "nats", "first", -1e-6, INF, "KL(sampler || trainer), k3 estimate, before the first update"
    ),
    "mismatch/mult_ratio": Metric(
        "ratio", "first", 0, INF, "mean exp|sampler_logp - trainer_logp|, before the first update"
    ),
    "mismatch/abs_max_nat": Metric(
        "nats", "first", 0, INF, "largest |sampler_logp - trainer_logp|, before the first update"
    ),
    "mismatch/turn_abs_nat": Metric(
        "nats", "first", 0, INF, "the same gap averaged over a turn first: mean |mean of d|"
    ),
    "mismatch/geometric_abs_nat": Metric("nats", "first", 0, INF, "averaged over a trajectory first"),
    "mismatch/trajectory_abs_nat": Metric("nats", "first", 0, INF, "summed over a trajectory: mean |sum of d|"),
    "mismatch/trajectory_max_nat": Metric("nats", "first", 0, INF, "the largest of these sums"),
    "mismatch/filtered_frac": Metric("share", "mean", 0, 1, "tokens that a mismatch filter left out"),
    "mismatch/ess_frac": Metric(
        "share",
        "first",
        0,
        1.001,
        "effective sample size of exp(trainer_logp - sampler_logp), as a share of the trained tokens, before the first "
        "update",
    ),
    "kl/ref_nat": Metric("nats", "mean", -INF, INF, "KL to the reference as the loss sees it"),
    "kl/ref_k1_nat": Metric("nats", "mean", -INF, INF, "KL to the reference, k1 estimate, before the first update"),
    "kl/coef": Metric("ratio", "last", 0, INF, "coefficient of the KL term or penalty"),
    "credit/adv_mean": Metric("reward", "mean", -INF, INF, "advantage per trained token"),
    "credit/adv_std": Metric("reward", "mean", 0, INF, "standard deviation of advantages over trained tokens"),
    "credit/adv_abs_max": Metric("reward", "max", 0, INF, "largest advantage, either sign"),
    "credit/masked_frac": Metric("share", "mean", 0, 1, "sampled tokens that credit left out, by group or by token"),
    "credit/segment_frac": Metric("share", "mean", 0, 1, "tokens in segments that agree with the outcome"),
    "critic/loss": Metric("loss", "mean", 0, INF, "value loss, mean over critics"),
    "critic/abs_error": Metric("reward", "mean", 0, INF, "|value - return| per token"),
    "critic/explained_var": Metric(
        "share", "mean", -INF, 1, "variance of returns that values explain, before the update"
    ),
    "critic/value_mean": Metric("reward", "mean", -INF, INF, "value per token"),
    "critic/return_mean": Metric("reward", "mean", -INF, INF, "return per token"),
    "critic/spread": Metric("reward", "mean", 0, INF, "standard deviation over critics, token mean"),
    "critic/spread_error_corr": Metric(
        "ratio", "mean", -1.001, 1.001, "correlation of that spread with |value - return|"
    ),
    "critic/grad_norm": Metric("norm", "mean", 0, INF, "gradient norm of the critics before clipping, mean"),
    "preference/accuracy_frac": Metric(
        "share",
        "mean",
        0,
        1,
        "pairs in the right order (KTO: answers on the right side of their point), token mean",
    ),
    "preference/reference_point_nat": Metric("nats", "mean", 0, INF, "KTO's estimate of the KL to the reference"),
    "preference/margin_nat": Metric(
        "nats", "mean", -INF, INF, "implicit reward of the chosen over the rejected answer"
    ),
    "preference/chosen_nll_nat": Metric("nats", "mean", 0, INF, "mean cross-entropy of the chosen answer's tokens"),
    "distill/divergence_nat": Metric("nats", "mean", -1e-4, INF, "divergence from the teacher per token"),
    "distill/ce_nat": Metric("nats", "mean", 0, INF, "cross-entropy of the reference tokens"),
    "optim/grad_norm": Metric("norm", "mean", 0, INF, "gradient norm before clipping"),
    "optim/grad_norm_embed": Metric("norm", "mean", 0, INF, "of it: the embedding"),
    "optim/grad_norm_attention": Metric("norm", "mean", 0, INF, "of it: attention projections"),
    "optim/grad_norm_ffn": Metric("norm", "mean", 0, INF, "of it: feed-forward matrices"),
    "optim/grad_norm_norm": Metric("norm", "mean", 0, INF, "of it: norm scales"),
    "optim/grad_norm_head": Metric("norm", "mean", 0, INF, "of it: the output matrix, where it is not the embedding"),
    "optim/update_norm": Metric("norm", "mean", 0, INF, "norm of the parameter change"),
    "optim/lr": Metric("rate", "last", 0, INF, "learning rate of the last update"),
    "optim/skipped_n": Metric("updates", "sum", 0, INF, "updates without a token to train on: nothing was changed"),
    "optim/updates_n": Metric("updates", "sum", 0, INF, "optimizer updates of this step"),
    "stale/mean_ver": Metric("versions", "mean", 0, INF, "policy versions between sampling a token and training on it"),
    "stale/max_ver": Metric("versions", "max", 0, INF, "the oldest token's age"),
    "stale/p50_ver": Metric("versions", "mean", 0, INF, "the median token's age"),
    "stale/p99_ver": Metric("versions", "mean", 0, INF, "the age that 1 of 100 tokens exceeds"),
    "stale/start_mean_ver": Metric(
        "versions", "mean", 0, INF, "policy versions between the start of a group and training"
    ),
    "stale/start_p50_ver": Metric("versions", "mean", 0, INF, "of the median group"),
    "stale/start_p99_ver": Metric("versions", "mean", 0, INF, "the age that 1 of 100 groups exceeds"),
    "stale/start_max_ver": Metric("versions", "max", 0, INF, "of the oldest group"),
    "train/tokens_n": Metric("tokens", "sum", 0, INF, "tokens in the packed rows, shared prompts counted once"),
    "train/trained_tok_n": Metric("tokens", "sum", 0, INF, "tokens with a loss"),
    "train/sequences_n": Metric("trajectories", "sum", 0, INF, "trajectories with a token that has a loss"),
    "train/pack_frac": Metric("share", "mean", 0, 1, "filled part of the rows that were computed"),
    "time/rollout_s": Metric("s", "sum", 0, INF, "waiting for this step's groups"),
    "time/pack_s": Metric("s", "sum", 0, INF, "credit and packing"),
    "time/update_s": Metric("s", "sum", 0, INF, "optimizer updates"),
    "time/publish_s": Metric("s", "sum", 0, INF, "handing weights to the sampler"),
    "time/push_s": Metric(
        "s", "sum", 0, INF, "of it: cast, and moved to devices of the sampler's own, while it decodes"
    ),
    "time/swap_s": Metric("s", "sum", 0, INF, "of it: waiting for a dispatch, and replacing the old weights"),
    "time/eval_s": Metric("s", "sum", 0, INF, "held-out evaluation"),
    "time/save_s": Metric("s", "sum", 0, INF, "writing rollout files"),
    "time/checkpoint_s": Metric("s", "sum", 0, INF, "writing the checkpoint after the previous step, if there is one"),
    "time/step_s": Metric("s", "sum", 0, INF, "all of the step"),
    "sampler/prefill_tok": Metric("tokens", "sum", 0, INF, "prompt tokens that were computed"),
    "sampler/reuse_frac": Metric(
        "share", "mean", 0, 1, "prompt tokens that were in the cache or computed for a sibling"
    ),
    "sampler/prefills_n": Metric(
        "calls", "sum", 0, INF, "prefill programs, of `SamplerConfig.prefill_chunk` tokens each"
    ),
    "sampler/dispatches_n": Metric("dispatches", "sum", 0, INF, "rounds of decode steps"),
    "sampler/steps_n": Metric("steps", "sum", 0, INF, "decode steps, each one pass through the model"),
    "sampler/accept_frac": Metric(
        "share", "mean", 0, 1, "guessed tokens that were sampled (`SamplerConfig.speculate`)"
    ),
    "sampler/slot_frac": Metric("share", "mean", 0, 1, "slots that sampled a token, over all decode steps"),
    "sampler/idle_frac": Metric(
        "share",
        "mean",
        0,
        1,
        "of the time of all slots that none had a request, from the start of a step to its update's end",
    ),
    "sampler/abort_n": Metric(
        "requests", "sum", 0, INF, "aborted before their end: of cancelled groups and of spare siblings"
    ),
    "sampler/abort_len_tok": Metric(
        "tokens", "mean", 0, INF, "sampled tokens per aborted request, if there are any; compare with rollout/len_tok"
    ),
    "sampler/preempt_n": Metric("sequences", "sum", 0, INF, "sequences that gave up their pages and resumed later"),
    "sampler/NAME/gap_nat": Metric(
        "nats",
        "last",
        0,
        INF,
        "of sampler NAME, if samplers are processes of their own: mean |sampler_logp - trainer_logp| of its tokens in "
        "the first update",
    ),
    "sampler/NAME/trained_tok_n": Metric("tokens", "last", 0, INF, "its tokens in that update"),
    "time/prefill_s": Metric("s", "sum", 0, INF, "of the rollout: prefills"),
    "time/decode_s": Metric("s", "sum", 0, INF, "of the rollout: decode steps"),
    "time/schedule_s": Metric("s", "sum", 0, INF, "of the rollout: the scheduler on the host"),
    "time/env_s": Metric(
        "s", "max", 0, INF, "in calls of the environment (or agent program), of the episode with the most of it"
    ),
    "trackers/lost_n": Metric(
        "rows", "sum", 0, INF, "rows, texts and figures that a tracker refused, or that did not reach it in time"
    ),
    "tput/sample_tok_s": Metric("tokens/s", "last", 0, INF, "sampled tokens per second of rollout"),
    "tput/train_tok_s": Metric("tokens/s", "last", 0, INF, "packed tokens per second of update"),
}


ENV_PREFIX = "env/"
"""Prefix of an environment's own numbers (`StepResult.metrics`), per trajectory; they are not in the table."""
REWARD_PARTS, REWARD_FAULTS = "rewards/part/", "rewards/faults/"
"""Prefixes of the parts of `Recipe.reward` by name, mean over trajectories (in a mixture, over the domains that have
the part), and of faults of the calls of rewards, by kind (`timeout`, `garbage`, `connection`, `status_503`, ...). They
are not in the table either."""


NAMED = re.compile(r"(domain|sampler)/[^/]+/")
"""Prefix of the metrics of a mixture's domain or of a sampler; in the table its name is NAME."""


def metric(name: str) -> Metric | None:
    """Return the table's row for a metric; None: it has none."""
    return NAMES.get(NAMED.sub(r"\1/NAME/", name))


def reduce_parts(name: str, values: Sequence[float]) -> float:
    """Reduce the parts of a metric to one number, by the reduction in its row of `NAMES`.

    Raises:
      KeyError: the metric has no row.
    """
    known = metric(name)
    if known is None:
        raise KeyError(name)
    match known.reduction:
        case "mean":
            return float(np.mean(values))
        case "sum":
            return float(sum(values))
        case "max":
            return float(max(values))
        case "first":
            return float(values[0])
        case "last":
            return float(values[-1])


class MetricsReport:
    """Collects metrics: parts are added under their names, and `row` reduces the parts of each to one number.

    A metric without a row in `NAMES` (an environment's, a reward's, an own algorithm's) is the mean of its parts.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[float]] = {}

    def add(self, name: str, *parts: float) -> None:
        """Add parts of a metric. `row` reduces them by the metric's reduction in `NAMES`: mean, sum, max, first or
        last."""
        self._parts.setdefault(name, []).extend(parts)

    def add_row(self, row: Mapping[str, float]) -> None:
        """Add one part of each metric of a row."""
        for name, value in row.items():
            self.add(name, value)

    def add_histogram(self, prefix: str, counts: np.ndarray) -> None:
        """Add mean, median, 99th percentile and maximum of a histogram of ages in versions.

        Args:
          prefix: of the metrics' names. counts: how many items have each age; int `[A]`, all 0 if there are none.
        """
        ages, weights = np.arange(len(counts)), counts if counts.any() else np.eye(1, len(counts))[0]
        p50, p99 = np.percentile(ages, (50, 99), weights=weights, method="inverted_cdf")
        self.add(f"{prefix}mean_ver", float(np.average(ages, weights=weights)))
        self.add(f"{prefix}p50_ver", float(p50))
        self.add(f"{prefix}p99_ver", float(p99))
        self.add(f"{prefix}max_ver", float(ages[weights > 0][-1]))

    def get(self, name: str) -> float | None:
        """Return a metric's number as of now; None: it has no part."""
        parts = self._parts.get(name)
        return _number(name, parts) if parts else None

    def row(self) -> dict[str, float]:
        """Return the number of every metric that has a part."""
        return {name: _number(name, parts) for name, parts in self._parts.items() if parts}


def _number(name: str, parts: Sequence[float]) -> float:
    return reduce_parts(name, parts) if metric(name) else float(np.mean(parts))


def check_row(row: Mapping[str, float]) -> list[str]:
    """Return the errors of a row of metrics: unknown names, and values outside their range."""
    wrong = [f"{name} is not in metrics.NAMES" for name in row if "/" in name and not is_known(name)]
    for name, value in row.items():
        if (m := metric(name)) and not m.low <= value <= m.high:
            wrong.append(f"{name} = {value} is outside [{m.low}, {m.high}]")
    return wrong


def is_known(name: str) -> bool:
    """Return whether a row may have a metric of this name."""
    return metric(name) is not None or name.startswith((ENV_PREFIX, REWARD_PARTS, REWARD_FAULTS))


def markdown() -> str:
    """Return the table for the docs."""
    lines = ["| name | unit | reduction | range | meaning |", "|---|---|---|---|---|"]
    for name, m in NAMES.items():
        meaning = m.meaning.replace("|", r"\|")
        lines.append(f"| `{name}` | {m.unit} | {m.reduction} | {_range(m)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _range(m: Metric) -> str:
    if math.isinf(m.high):
        return "any" if math.isinf(m.low) else f">= {m.low:g}"
    return f"{m.low:g} to {m.high:g}"
