"""Critics: value models that are trained together with the policy. Any number, any size, one program for all."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rolljax.errors import ConfigError
from rolljax.model.decoder import DecoderConfig, Model
from rolljax.model.value import ValueModel
from rolljax.trainer.optimizer import AdamW, Optimizer


@dataclasses.dataclass(frozen=True)
class Critic:
    """Settings of critics: the number of value models, their size, and how they are fitted."""

    num: int = 1
    """Critics; their mean is the value."""
    model: DecoderConfig | Literal["previous"] | None = None
    """Shape of critics that start from random weights. None: the policy's shape and, at the start of the phase, its
    weights; `previous` keeps the critics (or the reward model) of the phase before."""
    shard: Literal["response", "prompt", "all"] = "response"
    """Data that each of several critics learns from: some `response`s of every prompt, all responses of some `prompt`s
    (disjoint shares either way), or `all`."""
    epochs: int = 1
    """Passes over each step's data (of the policy: `Phase.epochs`)."""
    warmup_steps: int = 0
    """Steps at the start in which only critics learn."""
    first: bool = False
    """A step's advantages come from critics that have learned from it already; False: from the values before."""
    clip: float | None = None
    """Distance that a value may move from its value at the start of the step before its loss stops counting (None: no
    bound)."""
    optimizer: Optimizer = AdamW(lr=1e-5)
    """Optimizer of the critics."""

    def value_model(self, policy: Model) -> ValueModel:
        """Return the model of each critic. With its own shape all its weights are trained; with the policy's shape it
        trains the same weights as the policy (such as adapters)."""
        if isinstance(self.model, DecoderConfig):
            return ValueModel(dataclasses.replace(policy.plain, cfg=self.model))
        return ValueModel(policy)

    def __post_init__(self) -> None:
        for name in ("num", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", setting=f"Critic.{name}", value=getattr(self, name))
        if self.optimizer.offload:
            raise ConfigError("is for policies only", setting=f"{type(self.optimizer).__name__}.offload", value=True)
        if self.warmup_steps < 0:
            raise ConfigError("must not be negative", setting="Critic.warmup_steps", value=self.warmup_steps)
        if self.clip is not None and self.clip <= 0:
            raise ConfigError("must be positive, or None", setting="Critic.clip", value=self.clip)


def check_previous(before: Critic | None, critic: Critic | None) -> None:
    """Check that critics taken over from the previous phase exist and have the expected number and shape."""
    if critic is None or critic.model != "previous":
        return
    if before is None:
        raise ConfigError(
            "names the critics of the phase before, which has none",
            setting="Critic.model",
            value="previous",
            remedy="put a RewardModel or Ppo phase before it, or give a shape or None",
        )
    if isinstance(before.model, DecoderConfig):
        raise ConfigError(
            "names the critics of the phase before, which have a shape of their own; only the policy's is taken over",
            setting="Critic.model",
            value="previous",
            remedy="leave out the shape in the phase before, or give it here too and start again from scratch",
        )
    if before.num != critic.num:
        raise ConfigError(
            f"is not the number of critics that the phase before leaves ({before.num})",
            setting="Critic.num",
            value=critic.num,
            remedy=f"set it to {before.num}",
        )
