"""Lite PPO, and the guidelines of its paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from rolljax.errors import ConfigError
from rolljax.trainer.algorithms.policy_gradient import ClippedRatio, NormalisedReward, PolicyGradient
from rolljax.trainer.credit.episodes import Episodes
from rolljax.trainer.credit.estimators import Std
from rolljax.trainer.paper import Reproduction, Stated

REPRODUCTION = Reproduction(
    paper="2508.08221",
    name="Tricks or Traps",
    claim="two tricks beat GRPO and DAPO on base models",
    there="Lite PPO above both",
    here="steadier gradients than GRPO, and hard prompts learned better",
    state="partly",
    seeds=5,
    config="quickstart",
    figure="docs/effects.png",
    why="on a table of logits; not compared with DAPO, nor on base models",
)


@dataclasses.dataclass(frozen=True)
class LitePpo(NormalisedReward, ClippedRatio, PolicyGradient):
    """Lite PPO ("Tricks or Traps?", arXiv 2508.08221): rewards less the group's mean, over the deviation of the batch;
    mean over tokens; PPO's clip; nothing else. The settings for sampling are a separate preset
    (`configs/presets/tricks_or_traps.gin`)."""

    std: Std = "batch"
    min_std: float = 1e-3
    """A step whose rewards deviate less than this over the batch teaches nothing and is left out."""

    paper: ClassVar[Mapping[str, Stated]] = {
        "mean": Stated("group", "arXiv 2508.08221, section 5, and section 4.1"),
        "std": Stated("batch", "arXiv 2508.08221, section 5, and section 4.1"),
        "min_std": Stated(
            0.0,
            "arXiv 2508.08221, section 5: no such bound",
            "a batch of nearly equal rewards would be divided by nearly 0",
        ),
        "aggregation": Stated("token-mean", "arXiv 2508.08221, section 5, and section 4.3"),
        "clip_low": Stated(0.2, "arXiv 2508.08221, section 5: vanilla PPO loss; section 4.2: its usual bound"),
        "clip_high": Stated(0.2, "arXiv 2508.08221, section 5: vanilla PPO loss; section 4.2: its usual bound"),
        "mask_truncated": Stated(False, "arXiv 2508.08221, section 5: no overlong filtering"),
        "filter": Stated(None, "arXiv 2508.08221, section 5: no dynamic sampling"),
        "kl": Stated(None, "arXiv 2508.08221, section 5, and equation 1: PPO's loss, which has no KL term"),
    }

    def prepare(self, e: Episodes) -> tuple[np.ndarray, np.ndarray]:
        rewards, keep = super().prepare(e)
        flat = self.std == "batch" and e.num > 1 and float(np.std(rewards, ddof=1)) < self.min_std
        return rewards, keep & (not flat)


def guideline(
    *, aligned: bool = False, concentrated: bool = False, params_b: float = 4.0, max_answer_tok: int = 8192
) -> LitePpo:
    """Return Lite PPO with the settings that "Tricks or Traps?" (arXiv 2508.08221) found best for a situation (section
    4).

    Args:
      aligned: the model was instruction-tuned (else a base model): it profits from a higher upper clip and from a loss
        that counts sequences, a base model does not.
      concentrated: most rewards are equal (easy or hopeless tasks): do not divide by a deviation.
      params_b: billions of parameters; the best upper clip is .32 at 4, .28 at 8.
      max_answer_tok: leaving out cut answers helps at 8k tokens, and no longer at 20k.
    """
    if params_b <= 0 or max_answer_tok < 1:
        raise ConfigError("must be positive", setting="guideline.params_b", value=params_b, remedy="4 for a 4B model")
    return LitePpo(
        clip_high=(0.32 if params_b < 6 else 0.28) if aligned else 0.2,
        aggregation="seq-mean-token-mean" if aligned else "token-mean",
        std="none" if concentrated else "batch",
        mask_truncated=max_answer_tok <= 8192,
    )
