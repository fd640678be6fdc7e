"""Settings of durations and answer lengths in a simulation, from a file or fitted to a run."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from rolljax.errors import Checked, ConfigError, Range, check_fields
from rolljax.simulation.coserving import ServingTimings
from rolljax.simulation.paths import NetworkTimings
from rolljax.simulation.reward_workers import RewardTimings
from rolljax.simulation.streaming import StreamTraining

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution of non-negative numbers."""

    kind: Literal["lognormal", "normal", "recorded"] = "normal"
    """`lognormal`: `center` is the median, `spread` the standard deviation of the logarithm. `normal`: mean and
    standard deviation, with negative values replaced by 0. `recorded`: a random one of `values`, times `center`."""
    center: Annotated[float, Range(low=0)] = 0.0
    """Location of the distribution, as defined by `kind`."""
    spread: Annotated[float, Range(low=0)] = 0.0
    """Width of the distribution, as defined by `kind`."""
    group_spread: Annotated[float, Range(low=0)] = 0.0
    """Standard deviation of the logarithm of a factor that all siblings of a group share."""
    group_values: tuple[float, ...] = ()
    """Recorded group factors; each group has a random one of them, in addition to the factor of `group_spread`."""
    cap: Annotated[float, Range(low=0)] = math.inf
    """Upper bound of the values."""
    hang_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of the values to which `hang` is added, even beyond `cap`."""
    hang: Annotated[float, Range(low=0)] = 0.0
    """Amount added to the share `hang_frac` of the values, even beyond `cap`."""
    values: tuple[float, ...] = ()
    """Values to sample from, for the kind `recorded`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.kind == "recorded") != bool(self.values):
            raise ConfigError(
                "goes with kind = 'recorded', and with no other", setting="Distribution.values", value=self.values
            )

    def draw(self, rng: np.random.Generator) -> float:
        """Sample one value."""
        if self.kind == "lognormal":
            value = self.center * math.exp(self.spread * rng.standard_normal())
        elif self.kind == "normal":
            value = max(0.0, self.center + self.spread * rng.standard_normal())
        else:
            value = self.center * self.values[rng.integers(len(self.values))]
        hang = self.hang if self.hang_frac and rng.random() < self.hang_frac else 0.0
        return min(value, self.cap) + hang

    @property
    def mean(self) -> float:
        """The approximate mean; it ignores `cap` and the cut at 0."""
        if self.kind == "recorded":
            middle = self.center * sum(self.values) / len(self.values)
        else:
            middle = self.center * (math.exp(self.spread**2 / 2) if self.kind == "lognormal" else 1.0)
        of_group = sum(self.group_values) / len(self.group_values) if self.group_values else 1.0
        return min(middle * of_group * math.exp(self.group_spread**2 / 2), self.cap) + self.hang_frac * self.hang

    def of_group(self, rng: np.random.Generator) -> Distribution:
        """Sample the group's factors and return the distribution for its siblings."""
        factor = math.exp(self.group_spread * rng.standard_normal()) if self.group_spread else 1.0
        if self.group_values:
            factor *= self.group_values[rng.integers(len(self.group_values))]
        if factor == 1.0:
            return self
        spread = self.spread * (factor if self.kind == "normal" else 1.0)
        return dataclasses.replace(self, center=self.center * factor, spread=spread, group_spread=0.0, group_values=())


@dataclasses.dataclass(frozen=True)
class EngineTimings:
    """The sampler: replicas that share out its slots, each a copy of the weights on devices of its own.

    A decode step of a replica gives a token to each of its `n` sequences, which have `c` tokens of context together.
    It takes `step_s + sequence_s * n + context_s * c` seconds (a roofline: reading the weights, arithmetic, reading
    keys and values). A prompt token takes `prefill_s`, in which the replica decodes nothing; siblings share a prompt.
    Programs of a fixed size take `prefill_call_s` each in addition, however many prompts they have: the prompts that
    arrive before the program starts, padded to one length of `prefill_sizes`, of which the largest is its capacity.
    """

    replicas: Annotated[int, Range(low=1)] = 1
    """Number of replicas: each holds a copy of the weights."""
    step_s: Annotated[float, Range(low=0)] = 0.02
    """Fixed seconds of every decode step, regardless of its load."""
    sequence_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds added to a decode step for each sequence."""
    context_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds added to a decode step for each token of context."""
    prefill_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds to prefill one prompt token."""
    prefill_call_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds of each prefill program, in addition to its tokens."""
    prefill_sizes: tuple[int, ...] = ()
    """Padded lengths in tokens, ascending."""
    scheduling: Literal["queue", "group", "batch"] = "queue"
    """`queue`: a free slot immediately takes the answer whose group started first. `group`: all answers of a prompt go
    to one replica, whose slots become free for others when the last of them is done (for episodes of one turn).
    `batch`: answers start together, once all episodes wait for one, and no others start before all are done. `group`
    and `batch` exist for comparison."""
    kv_tok: Annotated[int, Range(low=0)] = 0
    """Capacity of a replica in tokens of context (0: unknown). If the simulation needs more, a warning is shown."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill_call_s and not self.prefill_sizes:
            raise ConfigError(
                "goes with prefill_sizes, and there are none",
                setting="EngineTimings.prefill_call_s",
                value=self.prefill_call_s,
                remedy="give the padded lengths of prompts: EngineTimings.prefill_sizes = (16, 32, 64, 128)",
            )


@dataclasses.dataclass(frozen=True)
class ClusterTimings(Checked):
    """What happens to the replicas of the sampler: they are lost, join, are slow, fetch weights, or are of two kinds.

    A run's own router (`rolljax.cluster.router`) places the answers. A lost replica's answers continue at others
    from the tokens of their last whole dispatch.
    """

    mtbf_s: Annotated[float, Range(low=0)] = 0.0
    """Mean seconds between two losses of one replica; 0: none is lost."""
    rejoin_s: Annotated[float, Range(low=0)] = 180.0
    """Seconds from the loss of a replica until it is ready again. It gets answers from the next version on."""
    join_s: tuple[float, ...] = ()
    """Seconds at which as many of the replicas become ready; the others are there from the start."""
    slow_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of the replicas that are slow."""
    slow_factor: Annotated[float, Range(low=1)] = 2.0
    """Slow replicas take this many times the seconds of others."""
    fetch_s: Distribution = Distribution()
    """Seconds that each replica takes to fetch published weights, while it decodes. Groups that start with a version
    go to replicas that have it."""
    bandwidth_replicas: Annotated[int, Range(low=0)] = 0
    """Number of the replicas that are of kind `bandwidth`; the others are of kind `compute`, whose seconds
    `EngineTimings` has."""
    bandwidth_prefill_speed: Annotated[float, Range(above=0)] = 1.0
    """Speed of prefill on replicas of kind `bandwidth`, as a multiple of those of kind `compute`."""
    bandwidth_decode_speed: Annotated[float, Range(above=0)] = 1.0
    """Speed of decode steps on replicas of kind `bandwidth`, as a multiple of those of kind `compute`."""
    siblings_together: bool = True
    """Answers to one prompt go to one replica while it has free slots: the prompt is computed once, but answers of like
    length share a replica."""
    affinity: bool = True
    """Answers go to the kind of replicas that suits their domain (RollArt), if there are both kinds."""
    affinity_ratio: Annotated[float, Range(above=0)] = 8.0
    """Prefill tokens for each decoded one above which the kind `compute` suits a domain."""


@dataclasses.dataclass(frozen=True)
class EnvTimings(Checked):
    """Environments: seconds of `reset`, of `step`, and of the last step, in which the answer is scored, on top of
    that."""

    reset_s: Distribution = Distribution()
    """Seconds of the environment's `reset` at the beginning of an episode."""
    step_s: Distribution = Distribution()
    """Seconds of each action."""
    alike: bool = False
    """All actions of an episode take the same time: `step_s` is sampled once per episode. Timings fitted to a run use
    this, because a run records the seconds of whole episodes; slow episodes thus stay slow."""
    score_s: Distribution = Distribution()
    """Seconds added to the last action."""
    fail_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of episodes whose reset fails for good, after the seconds of the reset."""


@dataclasses.dataclass(frozen=True)
class TrainerTimings(Checked):
    """A training step takes `step_s` and `token_s` for each token of its packed rows."""

    step_s: Annotated[float, Range(low=0)] = 0.0
    """Fixed seconds of each training step."""
    token_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds for each token of a step's packed rows."""
    publish_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds until new weights have reached the sampler."""
    pause_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds for which decoding stops when new weights are published."""
    save_s: Annotated[float, Range(low=0)] = 0.0
    """Seconds to write the rollouts of a step."""


@dataclasses.dataclass(frozen=True)
class Slices(Checked):
    """TPU slices for trainer and sampler, in place of seconds for both (`simulation.roofline`)."""

    train_chip: str = "v5p"
    """Kind of the trainer's chips (`aot.chips`)."""
    train_chips: Annotated[int, Range(low=1)] = 64
    """Number of the trainer's chips."""
    sample_chip: str = "v5e"
    """Kind of the sampler's chips (`aot.chips`)."""
    sample_chips: Annotated[int, Range(low=1)] = 64
    """Number of the sampler's chips."""
    chips_per_replica: Annotated[int, Range(low=1)] = 8
    """Chips that a copy of the sampler's weights is split over."""
    train_mfu: Annotated[float, Range(above=0, high=1)] = 0.45
    """Share of the chips' peak arithmetic that training reaches."""
    prefill_mfu: Annotated[float, Range(above=0, high=1)] = 0.45
    """Share of the chips' peak arithmetic that prefill reaches."""
    decode_mfu: Annotated[float, Range(above=0, high=1)] = 0.45
    """Share of the chips' peak arithmetic that decoding reaches."""
    hbm_frac: Annotated[float, Range(above=0, high=1)] = 0.7
    """Share of the peak memory bandwidth that is reached while decoding."""
    memory_frac: Annotated[float, Range(above=0, high=1)] = 0.9
    """Share of usable memory that weights, keys and values may fill."""
    collective_s: Annotated[float, Range(low=0)] = 0.002
    """Seconds of a decode step spent on collectives between the chips of a replica."""
    publish_bytes_s: Annotated[float, Range(above=0)] = 10e9
    """Bytes per second at which each replica receives new weights, all replicas at the same time."""


@dataclasses.dataclass(frozen=True)
class DomainLengths:
    """Lengths of a domain of a mixture; None: those of `Timings`."""

    answer_tok: Distribution | None = None
    """Tokens of an answer."""
    prompt_tok: Distribution | None = None
    """Number of tokens of the opening prompt."""
    observation_tok: Distribution | None = None
    """Number of tokens of the environment's message after an answer."""
    turns: Distribution | None = None
    """Number of turns of an episode."""


@dataclasses.dataclass(frozen=True)
class Timings(Checked):
    """All that a simulation knows of the world."""

    answer_tok: Distribution = Distribution("lognormal", 200.0, 1.0)
    """Tokens of an answer; it is cut at `Recipe.max_answer_tok`."""
    prompt_tok: Distribution = Distribution()
    """Number of tokens of the opening prompt."""
    observation_tok: Distribution = Distribution()
    """Number of tokens of the environment's message after an answer."""
    turns: Distribution = Distribution(center=1.0)
    """Number of turns of an episode, at most the number that the recipe allows."""
    domains: Mapping[str, DomainLengths] = dataclasses.field(default_factory=dict)
    """Lengths of the domains of a mixture by name, where they differ (`DomainLengths`)."""
    engine: EngineTimings = EngineTimings()
    """Timings of the sampler in seconds (`EngineTimings`)."""
    cluster: ClusterTimings = ClusterTimings()
    """Losses, speeds and kinds of the sampler's replicas (`ClusterTimings`)."""
    env: EnvTimings = EnvTimings()
    """Timings of environments in seconds (`EnvTimings`)."""
    rewards: RewardTimings = RewardTimings()
    """Workers that score answers (`RewardTimings`)."""
    trainer: TrainerTimings = TrainerTimings()
    """Timings of the trainer in seconds (`TrainerTimings`)."""
    slices: Slices | None = None
    """Chips that the seconds of engine and trainer follow from; None: they are given."""
    stream: StreamTraining | None = None
    """Half of the replicas' devices train before a synchronous step has ended (`StreamTraining`); None: none does. Only
    with `shared_devices`."""
    serving: ServingTimings | None = None
    """Requests of users to the sampler's replicas; None: the replicas only roll out."""
    network: NetworkTimings | None = None
    """The network that new weights take to the sampler; None: `TrainerTimings.publish_s` is given."""
    shared_devices: bool = False
    """Trainer and sampler have the same devices: nothing is decoded in a training step."""
    solved_frac: Annotated[float, Range(low=0, high=1)] = 0.5
    """Answers with reward 1."""
    no_signal_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Groups whose rewards are all equal, in addition to equal rewards by chance; dynamic sampling replaces them."""

    def of_domain(self, name: str) -> Timings:
        """Return the timings with the lengths of a domain."""
        lengths = self.domains.get(name)
        if lengths is None:
            return self
        own = {field.name: getattr(lengths, field.name) for field in dataclasses.fields(lengths)}
        return dataclasses.replace(self, **{name: value for name, value in own.items() if value is not None})


def to_json(timings: Any) -> dict[str, Any]:
    """Return the timings as a JSON value without settings at their default."""
    found = {}
    for field in dataclasses.fields(timings):
        value = getattr(timings, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value == default:
            continue
        if isinstance(value, Mapping):
            value = {name: to_json(each) for name, each in value.items()}
        found[field.name] = to_json(value) if dataclasses.is_dataclass(value) else value
    return found


def from_json(record: Mapping[str, Any], cls: type[T], where: str = "") -> T:
    """Build settings of class `cls` from a JSON object; missing fields have their default.

    Raises:
      ConfigError: an unknown name, or a value of another type or out of range.
    """
    hints = typing.get_type_hints(cls)
    found: dict[str, Any] = {}
    for name, value in record.items():
        setting = f"{cls.__name__}.{name}"
        if name not in hints:
            raise ConfigError(
                "is not known", setting=setting, where=where, remedy=f"fields of {cls.__name__}: {', '.join(hints)}"
            )
        found[name] = _fitted(value, hints[name], setting, where)
    return cls(**found)


def _fitted(value: Any, hint: Any, setting: str, where: str) -> Any:
    if typing.get_origin(hint) is Mapping and isinstance(value, Mapping):
        return {
            name: _fitted(each, typing.get_args(hint)[1], f"{setting}.{name}", where) for name, each in value.items()
        }
    of_class = next((arg for arg in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(arg)), None)
    if of_class and isinstance(value, Mapping):
        return from_json(value, typing.cast(type[Any], of_class), where)
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_fitted(v, float, setting, where) for v in value)
    if typing.get_origin(hint) is Literal and value in typing.get_args(hint):
        return value
    is_number = isinstance(value, (int, float)) and isinstance(value, bool) == (hint is bool)
    if is_number and hint in (int, float, bool) and (hint is not int or isinstance(value, int)):
        return hint(value)
    if hint is str and isinstance(value, str):
        return value
    raise ConfigError("is of another type than it must be", setting=setting, value=value, where=where)
