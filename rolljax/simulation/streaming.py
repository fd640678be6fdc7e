"""Training on finished groups while long answers of a synchronous step are still sampled: half of the replicas hand
over their answers, and their devices train (RollPacker, arXiv 2509.21009, section 4.4)."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from rolljax.errors import Checked, Range
from rolljax.trainer.paper import Reproduction

if TYPE_CHECKING:
    from rolljax.simulation.sampler import SimulatedSampler

REPRODUCTION = Reproduction(
    paper="2509.21009",
    name="RollPacker",
    claim="long answers go into rounds of their own",
    there="2.03 to 2.56 times as fast",
    here="2.10 times per round, a fifth of the rounds long (simulated)",
    state="partly",
    seeds=1,
    why="simulated; measured only on two cores (1.65 s to 0.92 s a step)",
)


@dataclasses.dataclass(frozen=True)
class StreamTraining(Checked):
    """When half of the replicas stop sampling in a synchronous step, and train (algorithm 1). The gradients of all
    groups are summed, and the weights change once, at the end of the step."""

    first_frac: Annotated[float, Range(low=0, high=1)] = 0.2
    """Share of a step's episodes that have ended, from which on the replicas may change."""
    last_frac: Annotated[float, Range(low=0, high=1)] = 0.5
    """Share up to which they may."""
    every_frac: Annotated[float, Range(above=0, high=1)] = 0.05
    """Share that has ended since the replicas were last found to be needed, before that is asked again."""
    start_s: Annotated[float, Range(low=0)] = 3.0
    """Seconds until the devices of the replicas train."""


class ScaleDown:
    """Decides once in each step whether half of the replicas are enough from now on."""

    def __init__(self, settings: StreamTraining) -> None:
        self._settings, self._asked_frac = settings, 0.0

    def is_due(self, ended_frac: float) -> bool:
        """Return whether to look at the memory now, after this share of the episodes has ended."""
        s = self._settings
        due = s.first_frac <= ended_frac <= s.last_frac and ended_frac - self._asked_frac >= s.every_frac - 1e-9
        if due:
            self._asked_frac = ended_frac
        return due


def projected_tok(running: Iterable[tuple[int, int]], lengths: Sequence[int]) -> float:
    """Return the tokens of context that running answers will need.

    Args:
      running: the context at the start of each answer, and the tokens that it has had since.
      lengths: of earlier answers, ascending. The expected length is the mean of the answers that got as far.
    """
    total = 0.0
    for context_tok, answer_tok in running:
        longer = lengths[bisect.bisect_right(lengths, answer_tok) :]
        total += context_tok + (sum(longer) / len(longer) if longer else answer_tok)
    return total


def trained_s(work: Iterable[tuple[float, float]], start_s: float, now_s: float, slowdown: float) -> float:
    """Return the seconds of training, on all devices, that a part of them has done by now.

    Args:
      work: of each group the time of its end, and its seconds on all devices. start_s: when the part began to train.
      slowdown: how much longer the part takes than all devices.
    """
    done, free_s = 0.0, start_s
    for ended_s, seconds in sorted(work):
        begin_s = max(free_s, ended_s)
        free_s = begin_s + seconds * slowdown
        done += max(0.0, min(free_s, now_s) - begin_s) / slowdown
    return done


class StreamTrainer:
    """Takes half of the replicas away from the sampler in each step, once the others have room, until the step ends.

    Args:
      kv_tok: tokens of context that a replica has room for; 0: any number.
    """

    def __init__(self, settings: StreamTraining, sampler: SimulatedSampler, kv_tok: int) -> None:
        self._settings, self._sampler, self._kv_tok = settings, sampler, kv_tok
        self._rule = ScaleDown(settings)
        self._started = self._ended = 0
        self._since_s: float | None = None  # since when devices train
        self._half = len(sampler.replicas) // 2
        self.ends: dict[int, float] = {}
        """When each group of this step, by prompt index, ended."""
        self.trained_s = 0.0
        """Seconds of training that were saved so far."""

    @contextlib.contextmanager
    def episode(self) -> Iterator[None]:
        """Count an episode of the step."""
        self._started += 1
        yield
        self._ended += 1
        if self._since_s is None and self._rule.is_due(self._ended / self._started) and self._has_room():
            self._sampler.fleet.lend(self._half)
            self._since_s = asyncio.get_running_loop().time() + self._settings.start_s

    def _has_room(self) -> bool:
        sampler, kept = self._sampler, len(self._sampler.replicas) - self._half
        running = [(a.prompt_tok, tok) for replica in sampler.replicas for a, tok in replica.running()]
        if not self._half or sampler.is_full or len(running) > kept * sampler.slots_each:
            return False
        lengths = sorted(a.answer_tok for a in sampler.ended[-4096:])
        return not self._kv_tok or projected_tok(running, lengths) <= kept * self._kv_tok

    def end_step(self, seconds: Mapping[int, float]) -> float:
        """Return the seconds of training that the devices have done, and give them back to the sampler.

        Args:
          seconds: of training on all devices, for each group of the step by prompt index.
        """
        done = 0.0
        if self._since_s is not None:
            work = [(self.ends[index], s) for index, s in seconds.items()]
            now_s = asyncio.get_running_loop().time()
            done = trained_s(work, self._since_s, now_s, len(self._sampler.replicas) / self._half)
            self._sampler.fleet.take_back()
        self._rule, self._started, self._ended, self._since_s = ScaleDown(self._settings), 0, 0, None
        self.ends = {}
        self.trained_s += done
        return done
