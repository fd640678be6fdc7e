"""Input and output of credit: the sampled tokens of a step's trajectories, padded to `[N, T]`, their credit, and the
samples for the update. NumPy only.

Observations and prompts are left out: the policy did not choose them, so they get no credit. Therefore returns,
normalisation and ranks need no special case for tool outputs.

Shape letters: N trajectories, T sampled tokens of the longest, K turns, M critics, S teachers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rolljax.trainer.credit.estimators import GroupStats
from rolljax.trainer.credit.mismatch import effective_frac
from rolljax.types import TokenColumn, Trajectory

if TYPE_CHECKING:
    from rolljax.trainer.algorithms.base import Needs
    from rolljax.trainer.batch import Sample


@dataclasses.dataclass(frozen=True, eq=False)
class Episodes:
    """Trajectories of one step; members of a group are adjacent.

    rewards [N]: of the trajectory. groups [N]: index of its group, 0 to `num_groups - 1`. mask [N, T]: True where there
    is a token (left aligned). turns [N, T]: its turn, from 0; -1 where there is none. turn_rewards, turn_weights,
    states [N, K]: reward and supervised weight of every turn, and a hash of the context before it. num_turns [N]. cut
    [N, K]: which turns' answers were cut by a limit of tokens. truncated [N]: whether any was. success [N]: solved.
    texts, domains, parts [N]: text of all answers, name of the environment, named parts of the reward. sampler_logp [N,
    T]: behaviour log-probs. expert [N, T]: tokens that were replayed, not sampled. expert_turns [N]: turns of the full
    episode they come from.

    The other arrays exist if the algorithm requested them (`Needs`): trainer_logp, recomputed before the step's first
    update (the proximal policy), and entropy of the same distributions, in nats; ref_logp; scorer_logp; teacher_logp
    [S, N, T]; context_logp and context_ref_logp, of the policy and the reference after another prompt
    (`trainer.contexts`); values [M, N, T] of the state before the token.
    """

    rewards: np.ndarray
    groups: np.ndarray
    mask: np.ndarray
    turns: np.ndarray
    turn_rewards: np.ndarray
    turn_weights: np.ndarray
    states: np.ndarray
    num_turns: np.ndarray
    cut: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    texts: tuple[str, ...]
    domains: tuple[str, ...]
    parts: tuple[Mapping[str, float], ...]
    sampler_logp: np.ndarray
    expert: np.ndarray
    expert_turns: np.ndarray
    limit_tok: int
    """Maximum number of tokens in one answer."""
    step: int = 0
    """Step of the phase."""
    trainer_logp: np.ndarray | None = None
    entropy: np.ndarray | None = None
    ref_logp: np.ndarray | None = None
    scorer_logp: np.ndarray | None = None
    teacher_logp: np.ndarray | None = None
    context_logp: np.ndarray | None = None
    context_ref_logp: np.ndarray | None = None
    values: np.ndarray | None = None
    waad: np.ndarray | None = None
    """Attention statistic WAAD of the tokens."""
    fai: np.ndarray | None = None
    """Attention statistic FAI of the tokens."""

    @property
    def num(self) -> int:
        """Trajectories, N."""
        return len(self.rewards)

    @property
    def lengths(self) -> np.ndarray:
        """Sampled tokens of each trajectory, `[N]`."""
        return self.mask.sum(1)

    @property
    def longest_answers(self) -> np.ndarray:
        """Tokens of each trajectory's longest turn, `[N]`."""
        return np.max([(self.turns == k).sum(1) for k in range(self.turn_rewards.shape[1])], axis=0)

    @property
    def behaviour_logp(self) -> np.ndarray:
        """`sampler_logp`; an expert's tokens, which no sampler drew, have `trainer_logp` if it is there."""
        return (
            self.sampler_logp
            if self.trainer_logp is None
            else np.where(self.expert, self.trainer_logp, self.sampler_logp)
        )

    def required(self, name: str) -> np.ndarray:
        """Return an array that `needs()` asked for. A missing array is a bug of the caller and raises `ValueError`."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"credit uses {name}, but needs() did not ask for it")
        return value

    @staticmethod
    def of(groups: Sequence[Sequence[Trajectory]], *, limit_tok: int, step: int = 0) -> Episodes:
        """Build the arrays from the trajectories that take part, group by group."""
        every = [t for group in groups for t in group]
        tokens = max((t.num_sampled_tok for t in every), default=1)
        turns = max((len(t.turns) for t in every), default=1)
        by_turn = _padded(
            turns,
            rewards=[[turn.reward for turn in t.turns] for t in every],
            weights=[[turn.weight for turn in t.turns] for t in every],
            states=[[_digest(turn.prompt_ids) for turn in t.turns] for t in every],
            cut=[[turn.finish_reason != "stop" for turn in t.turns] for t in every],
        )
        turn_ids = [np.repeat(np.arange(len(t.turns)), [len(turn.tokens) for turn in t.turns]) for t in every]
        lengths = np.array([len(ids) for ids in turn_ids], np.int64).reshape(-1)
        mask = np.arange(max(tokens, 1)) < lengths[:, None]
        ids, logp, expert = np.full(mask.shape, -1, np.int64), np.zeros(mask.shape), np.zeros(mask.shape, bool)
        for n, t in enumerate(every):
            ids[n, : lengths[n]] = turn_ids[n]
            logp[n, : lengths[n]] = np.concatenate([turn.sampler_logp for turn in t.turns])
            expert[n, : lengths[n]] = np.concatenate([turn.versions for turn in t.turns]) < 0
        return Episodes(
            rewards=np.array([t.reward for t in every], np.float64),
            groups=np.repeat(np.arange(len(groups)), [len(g) for g in groups]),
            mask=mask,
            turns=ids,
            turn_rewards=by_turn["rewards"],
            turn_weights=by_turn["weights"],
            states=by_turn["states"],
            num_turns=np.array([len(t.turns) for t in every], np.int64),
            cut=by_turn["cut"] > 0,
            truncated=np.any(by_turn["cut"] > 0, axis=1),
            success=np.array([t.success for t in every], bool),
            texts=tuple("\n".join(turn.text for turn in t.turns) for t in every),
            domains=tuple(t.task.env for t in every),
            parts=tuple(t.reward_parts for t in every),
            sampler_logp=logp,
            expert=expert,
            expert_turns=np.array([t.expert.turns if t.expert else len(t.turns) for t in every], np.int64),
            limit_tok=limit_tok,
            step=step,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Credit:
    """The credit of episodes.

    advantages [N, T]. weights [N, T]: factor of the loss, or a number for all. mask [N, T]: tokens that count in the
    denominators and can have a loss (None: all). keep [N]: trajectories that take part (None: all). returns [N, T]:
    targets of the critics. critic_weights [M, N, T]: weight of each token in each critic's loss (None: 1).
    entropy_weights [N, T]: factor of the entropy bonus (None: 1). rewards [N, T]: the trajectory's reward at each of
    its tokens, for objectives that treat good and bad trajectories differently (None: not requested). reference_points
    [N, T]: log-ratio from which the trajectory's own is measured (None: not requested).
    """

    advantages: np.ndarray
    weights: np.ndarray | float = 1.0
    mask: np.ndarray | None = None
    keep: np.ndarray | None = None
    returns: np.ndarray | None = None
    critic_weights: np.ndarray | None = None
    entropy_weights: np.ndarray | None = None
    rewards: np.ndarray | None = None
    reference_points: np.ndarray | None = None
    stats: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics by name."""
    algorithm_state: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Numbers carried to the next step (adaptive coefficients, running statistics); saved with the run."""

    def trained(self, tokens_NT: np.ndarray) -> np.ndarray:
        """Return which of the tokens (`Episodes.mask`) are trained on; bool `[N, T]`."""
        trained = tokens_NT if self.mask is None else tokens_NT & self.mask
        return trained if self.keep is None else trained & self.keep[:, None]


def apply_credit(
    needs: Needs, samples: Sequence[Sequence[Sample]], episodes: Episodes, credit: Credit
) -> list[list[Sample]]:
    """Return the samples that take part, group by group, each with the columns of `TokenBatch` that credit and `needs`
    fill.

    Args:
      samples: of the same trajectories as `episodes`, in their order.
    """
    trained = credit.trained(episodes.mask)
    weights = np.broadcast_to(credit.weights, trained.shape)
    columns: dict[str, np.ndarray] = {"advantages": credit.advantages, "mask": trained, "weights": weights}
    optional = {n: getattr(credit, n) for n in ("entropy_weights", "rewards", "reference_points")}
    if needs.trainer_logp:
        optional |= {"trainer_logp": episodes.required("trainer_logp"), "sampler_logp": episodes.behaviour_logp}
    if needs.ref:
        optional["ref_logp"] = episodes.ref_logp
    if needs.critics:
        optional |= _critic_columns(episodes, credit, trained)
    columns |= {name: array for name, array in optional.items() if array is not None}
    keep = trained.sum(1) > 0
    kept: list[list[Sample]] = []
    n = 0
    for group in samples:
        members = []
        for sample in group:
            if keep[n]:
                own = {name: _row(array, n, len(sample.indices)) for name, array in columns.items()}
                members.append(sample.with_columns(**own))
            n += 1
        if members:
            kept.append(members)
    return kept


def _critic_columns(episodes: Episodes, credit: Credit, part: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns that train critics. part: tokens that are trained on, bool `[N, T]`."""
    values = np.moveaxis(episodes.required("values"), 0, -1)
    assert credit.returns is not None
    if credit.critic_weights is None:
        weights = np.ones(values.shape)
    else:
        weights = np.moveaxis(np.asarray(credit.critic_weights, np.float64), 0, -1)
        # every critic's loss is a mean over its own share
        own = (weights * part[..., None]).sum((0, 1))
        weights = weights * np.where(own > 0, part.sum() / np.maximum(own, 1), 0)
    return {"returns": credit.returns, "old_values_C": values, "critic_weights_C": weights}


def _row(array: np.ndarray, n: int, length: int) -> np.ndarray:
    values = array[n, :length]
    return values if values.dtype == bool else values.astype(np.float32)


def token_columns(e: Episodes, credit: Credit) -> list[dict[str, TokenColumn]]:
    """Return the trained quantities of the sampled tokens of each trajectory, for the record.

    advantages: None where a token takes no part. trainer_logp, entropy: of the policy before the step's first update,
    where the algorithm asks for its log-probs.
    """
    trained = credit.trained(e.mask)
    columns = {"advantages": np.where(trained, credit.advantages, np.nan)}
    if e.trainer_logp is not None:
        columns |= {"trainer_logp": e.trainer_logp, "entropy": e.required("entropy")}
    return [{name: _column(array[n, :t]) for name, array in columns.items()} for n, t in enumerate(e.lengths)]


def _column(values: np.ndarray) -> TokenColumn:
    """Round values `[T]` to six decimals; NaN becomes None."""
    known = ~np.isnan(values)
    if not known.any():
        return None
    if known.all() and values.min() == values.max():
        return round(float(values[0]), 6)
    rounded: list[float] = np.round(values, 6).tolist()
    return [v if k else None for v, k in zip(rounded, known, strict=True)]


def credit_metrics(e: Episodes, credit: Credit) -> dict[str, float]:
    """Return the metrics of a step's credit."""
    part = credit.trained(e.mask)
    values = np.where(part, credit.advantages, 0)[part]
    groups = GroupStats(e.groups)
    flat = groups.flat(e.rewards)
    high = e.rewards >= (e.rewards.max() if e.num else 0)
    row = {
        "credit/adv_mean": float(values.mean()) if values.size else 0.0,
        "credit/adv_std": float(values.std()) if values.size else 0.0,
        "credit/adv_abs_max": float(np.abs(values).max()) if values.size else 0.0,
        "credit/masked_frac": 1 - float(part.sum()) / max(int(e.mask.sum()), 1),
        "reward/zero_std_frac": float(flat.mean()) if e.num else 0.0,
        "reward/all_high_frac": float((flat & high).mean()) if e.num else 0.0,
    }
    if e.trainer_logp is not None:
        own = part & ~e.expert
        row["mismatch/ess_frac"] = effective_frac((e.trainer_logp - e.sampler_logp)[own])
    return row | {k: float(v) for k, v in credit.stats.items()}


def _padded(width: int, **lists: list[list[float]]) -> dict[str, np.ndarray]:
    out = {}
    for name, ragged in lists.items():
        out[name] = np.zeros((len(ragged), max(width, 1)), np.int64 if name == "states" else np.float64)
        for row, values in zip(out[name], ragged, strict=True):
            row[: len(values)] = values
    return out


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(np.asarray(ids, np.int32).tobytes(), digest_size=8).digest(), signed=True)
