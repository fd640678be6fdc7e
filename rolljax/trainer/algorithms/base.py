"""Interface of an algorithm to the loop and to the update.

    trajectories -> Episodes -> credit -> advantages, weights -> TokenBatch -> objective -> loss per token

`credit` runs on the host, in NumPy, over a whole step; `objective` runs on devices, in the jitted update. Both are
pure.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import numpy as np

from rolljax.errors import ConfigError
from rolljax.model.moe import Load
from rolljax.trainer.aggregation import Aggregation
from rolljax.trainer.attention_stats import AttentionMaps
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.contexts import Context
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.critic import Critic
from rolljax.trainer.kl import PolicySource
from rolljax.trainer.paper import Stated

Source = Literal["reference", "sampler", "pairs"]
AlgorithmState = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class DivergenceTerm:
    """A reference policy whose full next-token distribution is compared with the trained one's, inside the update."""

    policy: PolicySource
    kind: Literal["forward", "reverse", "js", "skewed", "adaptive"] = "forward"
    """Forward is KL(reference || trained), reverse KL(trained || reference); for the others see `trainer.vocab`."""
    tau: float | None = 1.0
    """Temperature of both distributions; the divergence is multiplied by tau^2. None: compare the sampling
    distributions unchanged."""
    alpha: float = 0.1
    """Mixture weight of the skewed divergence."""
    top_k: int = 0
    """Compare only on the reference's k most likely tokens (0: all), the rest as one `bucket` or `renormalise`d
    away."""
    remainder: Literal["bucket", "renormalise"] = "bucket"


@dataclasses.dataclass(frozen=True)
class Needs:
    """The inputs that an algorithm requires in addition to tokens and rewards."""

    trainer_logp: bool = False
    """Log-probs by the weights at the start of the step."""
    ref: PolicySource = ""
    """Reference policy that scores every sampled token."""
    scorer: PolicySource = ""
    """Further reference policy that scores every sampled token."""
    teachers: tuple[PolicySource, ...] = ()
    """Reference policies, used as teachers, that score every sampled token."""
    context: Context | None = None
    """Another prompt under which the policy (by the weights at the start of the step) and `ref` score every sampled
    token."""
    divergence: DivergenceTerm | None = None
    """A reference policy whose full next-token distribution the objective is compared with, inside the update."""
    critics: Critic | None = None
    """Value models, trained together with the policy."""
    attention: AttentionMaps | None = None
    """Statistics of the policy's attention maps."""
    rewards: bool = False
    """The objective asks which trajectories were rewarded; credit hands them on."""
    entropy_weights: bool = False
    """The objective weighs the entropy of each token; credit has the weights."""
    reference_points: bool = False
    """The objective measures log-ratios from a point that credit computes."""

    @property
    def references(self) -> tuple[PolicySource, ...]:
        """Every reference policy once."""
        compared = self.divergence.policy if self.divergence else ""
        return tuple(dict.fromkeys(name for name in (self.ref, self.scorer, *self.teachers, compared) if name))

    @property
    def forward_passes(self) -> bool:
        """Return whether models must look at a step's samples before its first update."""
        logprobs = self.trainer_logp or self.ref or self.scorer or self.teachers
        return bool(logprobs or self.context or self.critics or self.attention)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings combined with an algorithm; `check` inspects them before anything starts."""

    group_size: int
    updates: int = 1
    """Optimizer updates per step, over all epochs."""
    staleness: int = 0
    max_turns: int = 1
    truncated_sampling: bool = False
    """Tokens are cut from the distribution that is sampled from (top-k, ...)."""
    first_phase: bool = False
    environments: tuple[str, ...] = ()
    """Names of its domains, as in `Episodes.domains` (empty: not known)."""

    @property
    def on_policy(self) -> bool:
        """Every token is trained on exactly once, by the weights that sampled it: ratios are 1."""
        return self.updates == 1 and not self.staleness


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyOutputs:
    """The trained model's outputs for a micro-batch; arrays `[B, T]` float32, aligned to the token they describe."""

    logp: jax.Array
    """Log-prob of the token."""
    entropy: jax.Array
    """Entropy of the distribution that the token was sampled from."""
    divergence: jax.Array | None = None
    """Divergence of the token's distribution from the reference's, if requested by `Needs.divergence`."""
    load: Load | None = None
    """Use of the model's experts, as sums over the micro-batch; not visible to objectives."""


@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """The result of an objective; every array is `[B, T]`, aligned to the token it describes."""

    loss: jax.Array
    """Loss per token, before the scale of its aggregation."""
    mean: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Statistics that the update reduces by token mean."""
    largest: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    """Statistics that the update reduces by maximum."""


class Algorithm(abc.ABC):
    """Credit and objective of one phase. Subclasses are frozen dataclasses, one per file of this folder."""

    source: ClassVar[Source] = "sampler"
    """The actor in the environments: the policy, the reference answers that come with them, or pairs of a reference
    answer and a rejected one."""
    trains_policy: ClassVar[bool] = True
    mini_critics: ClassVar[bool] = False
    """Critics have to be smaller than the policy, where their shape is given."""
    unsplit_groups: ClassVar[bool] = False
    """The loss relates members of a group, so that a group must not be split over rows."""
    matches_contexts: ClassVar[bool] = False
    """Credit compares turns of siblings that have the same context before them."""
    paper: ClassVar[Mapping[str, Stated]] = {}
    """The paper's values for this class's settings; not inherited by subclasses."""

    @property
    def aggregation(self) -> Aggregation:
        """The aggregation of token losses (`trainer.aggregation`); a field in algorithms that offer a choice."""
        return "token-mean"

    def needs(self) -> Needs:
        """Return the model outputs that this algorithm's credit and objective need (`Needs`)."""
        return Needs()

    @property
    def entropy_grad(self) -> bool:
        """Return whether the objective differentiates the entropy."""
        return False

    @abc.abstractmethod
    def credit(self, e: Episodes, algorithm_state: AlgorithmState) -> Credit:
        """Compute the advantages and which trajectories take part. `algorithm_state` is `Credit.algorithm_state` of the
        previous step; empty at first."""

    def has_signal(self, e: Episodes) -> np.ndarray:
        """Return which trajectories credit will keep, judged by rewards alone, bool `[N]`; dynamic sampling samples
        further groups in place of the others."""
        return np.ones(e.num, bool)

    @property
    def solve_range(self) -> tuple[float, float] | None:
        """Train only on groups whose mean reward is strictly between these two values (None: on all groups)."""
        return None

    @property
    def dynamic_sampling_rounds(self) -> int:
        """Most rounds of additional groups that dynamic sampling starts while too few groups have a signal."""
        return 0

    @property
    def overlong_cache(self) -> int:
        """Number of tokens below the answer limit over which the length penalty grows (0: no penalty)."""
        return 0

    @property
    def kl_coef(self) -> float:
        """Weight of the KL term in the loss in the first step (0: there is none)."""
        return 0.0

    @property
    def imitates(self) -> bool:
        """Whether the algorithm trains on the replayed turns of an expert (`Phase.start_states`), in addition to the
        policy's own turns that follow."""
        return False

    @abc.abstractmethod
    def objective(self, policy: PolicyOutputs, batch: TokenBatch) -> TokenLoss:
        """Return the per-token loss of one micro-batch (arrays `[B, T]`, clean where `batch.scale` is 0)."""

    def critic_scale(self, batch: TokenBatch) -> jax.Array:
        """Return the weight `[B, T]` of each token in the loss of a critic that learns from all tokens; by default that
        of the policy's loss."""
        return batch.scale

    def critic_loss(
        self, values: jax.Array, returns: jax.Array, old_values: jax.Array, batch: TokenBatch
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the per-token loss `[B, T]` of one critic, and statistics (token means)."""
        raise NotImplementedError(f"{type(self).__name__} asks for critics, but has no loss for them")

    def check(self, setup: Setup) -> list[str]:
        """Return warnings about this combination. Raise `ConfigError` if it cannot work or a setting would have no
        effect."""
        return []

    def refuse(self, setting: str, why: str, remedy: str) -> ConfigError:
        """Return the error for one of this algorithm's own settings."""
        return refusal(self, setting, why, remedy)


def refusal(settings: object, name: str, why: str, remedy: str) -> ConfigError:
    """Return the error for field `name` of a settings object: why its value cannot be used, and the remedy."""
    value = getattr(settings, name)
    return ConfigError(why, setting=f"{type(settings).__name__}.{name}", value=value, remedy=remedy)
