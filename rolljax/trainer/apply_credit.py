"""From credit to samples that can be packed for an update, and the metrics of credit. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rolljax.trainer.algorithms.base import Needs
from rolljax.trainer.batch import Sample
from rolljax.trainer.credit import estimators, mismatch
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.types import TokenColumn


def apply_credit(
    needs: Needs, samples: Sequence[Sequence[Sample]], episodes: Episodes, credit: Credit
) -> list[list[Sample]]:
    """The samples that take part, group by group, each with the columns of `TokenBatch` that credit and `needs` fill.

    Args:
      samples: of the same trajectories as `episodes`, in their order.
    """
    trained = credit.trained(episodes.mask)
    columns: dict[str, np.ndarray] = {"advantages": credit.advantages, "mask": trained}
    optional = {n: getattr(credit, n) for n in ("weights", "entropy_weights", "rewards")}
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
    """part: tokens that are trained on, bool `[N, T]`."""
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
    """What training makes of the sampled tokens of each trajectory, for the record.

    advantages: None where a token takes no part. trainer_logp, entropy: of the policy before the step's first update,
    where the algorithm asks for its log-probs.
    """
    trained = credit.trained(e.mask)
    columns = {"advantages": np.where(trained, credit.advantages, np.nan)}
    if e.trainer_logp is not None:
        columns |= {"trainer_logp": e.trainer_logp, "entropy": e.required("entropy")}
    return [{name: _column(array[n, :t]) for name, array in columns.items()} for n, t in enumerate(e.lengths)]


def _column(values: np.ndarray) -> TokenColumn:
    """Values `[T]` in six decimals; NaN is None."""
    known = ~np.isnan(values)
    if not known.any():
        return None
    if known.all() and values.min() == values.max():
        return round(float(values[0]), 6)
    rounded: list[float] = np.round(values, 6).tolist()
    return [v if k else None for v, k in zip(rounded, known, strict=True)]


def credit_metrics(e: Episodes, credit: Credit) -> dict[str, float]:
    """Metrics of a step's credit."""
    part = credit.trained(e.mask)
    values = np.where(part, credit.advantages, 0)[part]
    groups = estimators.GroupStats(e.groups)
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
        row["mismatch/ess_frac"] = mismatch.effective_frac((e.trainer_logp - e.sampler_logp)[own])
    return row | {k: float(v) for k, v in credit.stats.items()}
