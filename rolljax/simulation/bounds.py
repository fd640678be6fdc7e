"""Bounds on asynchronous training from queueing theory, without a simulation: the propositions of ROLL Flash (arXiv
2510.11345, section 4)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from rolljax.errors import Checked, Range
from rolljax.trainer.paper import Reproduction

REPRODUCTION = Reproduction(
    paper="2510.11345",
    name="ROLL Flash",
    claim="asynchrony and queue scheduling shorten steps",
    there="2.24 times (RLVR), 2.72 times (agents)",
    here="the ratios of its small simulations within 10 %; steps of a run on two cores in the figure",
    state="partly",
    config="presets/async_ratio_2",
    figure="docs/async_speedup.png",
    why="simulated, and measured on two cores only",
)


@dataclasses.dataclass(frozen=True)
class Workload(Checked):
    """A step of `samples` answers on `workers` devices, which take turns or share out both roles."""

    samples: Annotated[int, Range(low=1)]
    workers: Annotated[int, Range(low=1)]
    generate_s: Annotated[float, Range(above=0)]
    """Mean time in seconds to generate an answer on one device."""
    longest_s: Annotated[float, Range(above=0)]
    """Time in seconds to generate the longest answer on one device."""
    train_s: Annotated[float, Range(low=0)] = 0.0
    """Mean seconds to train one;."""
    epochs: Annotated[int, Range(low=1)] = 1
    """Number of times that each answer is trained on."""

    def sample_s(self, async_ratio: float) -> float:
        """Bound the seconds per sample if a free worker takes the next one at once and `(1 + async_ratio) x samples`
        are in flight (Proposition 1)."""
        return self.generate_s / self.workers + self.longest_s / ((1 + async_ratio) * self.samples)

    @property
    def generation_speedup(self) -> float:
        """Largest speedup of generation by asynchrony, with as many samples as workers (Proposition 1)."""
        return (self.longest_s + self.generate_s) / self.generate_s

    def trainer_frac(self, async_ratio: float) -> float:
        """Return the fraction of the devices for training that is best by the bound (Proposition 2).

        Where few answers per device have a long tail, most of the tail is hidden and the trainer can use up to twice as
        many devices: sweep a simulation.
        """
        train = self.epochs * self.samples * self.train_s
        tail = self.workers * self.longest_s / (async_ratio + 1)
        return train / (self.samples * self.generate_s + tail + train)

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which no device ever waits."""
        return self.samples / self.workers * (self.generate_s + self.epochs * self.train_s)

    def step_s(self, async_ratio: float) -> float:
        """Bound the seconds of a step with the best fraction (Proposition 2); at 0 those of a synchronous one."""
        return self.busy_s + self.longest_s / (async_ratio + 1)

    @property
    def speedup(self) -> float:
        """Proposition 2: the limit of `step_s(0) / step_s(async_ratio)`."""
        return self.step_s(0) / self.busy_s
