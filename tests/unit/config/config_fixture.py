"""Small frozen dataclasses that test_config.py configures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from rolljax.errors import ConfigError


class Algorithm(Protocol):
    clip_high: float

    def loss(self, x: float) -> float: ...


@dataclasses.dataclass(frozen=True)
class Grpo:
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        if not self.clip_low <= self.clip_high:
            raise ConfigError("must be at least clip_low", setting="Grpo.clip_high", value=self.clip_high)

    def loss(self, x: float) -> float:
        return x * self.clip_high


@dataclasses.dataclass(frozen=True)
class Gspo:
    clip_high: float = 4e-4

    def loss(self, x: float) -> float:
        return x


@dataclasses.dataclass(frozen=True)
class Schedule:
    warmup_steps: int = 10
    kind: Literal["constant", "cosine"] = "constant"


@dataclasses.dataclass(frozen=True)
class AdamW:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Schedule = Schedule()
    clip: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    steps: int
    temperature: float = 1.0
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert isinstance(self.tags, tuple), "tuples are made before __post_init__"
        if self.steps < 0:
            raise ConfigError("must not be negative", setting="Phase.steps", value=self.steps)
        if self.temperature < 0:
            raise ValueError("temperature is negative")


@dataclasses.dataclass(frozen=True)
class Critic:
    lr: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Needs:
    path: str


class NotAConfig:
    size = 3


@dataclasses.dataclass
class Thawed:
    size: int = 3


TABLE = {"a": 1}


def reward(text: str) -> float:
    return float(len(text))


@dataclasses.dataclass(frozen=True)
class Recipe:
    seed: int = 0
    rate: float = 1
    debug: bool = False
    name: str = "run"
    folder: Path | None = None
    algo: Algorithm = Grpo()
    optimizer: AdamW = dataclasses.field(default_factory=lambda: AdamW(lr=3e-6))
    critic: Critic | None = None
    phases: tuple[Phase, ...] = ()
    sizes: list[int] = dataclasses.field(default_factory=list)
    pair: tuple[int, str] = (1, "a")
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    envs: dict[str, Any] = dataclasses.field(default_factory=dict)
    reward_fn: Callable[[str], float] = reward
    maker: type[Any] | None = None
    anything: Any = None
    limit: int | Literal["none"] = "none"
