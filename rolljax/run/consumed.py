"""The fate of groups, step by step: the lines of `consumed.jsonl`, and their sum over a phase."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from rolljax.recipe import Phase
from rolljax.rollout.group_buffer import DROPPED, GroupEntry


@dataclasses.dataclass(frozen=True)
class ConsumedStep:
    """A line of `consumed.jsonl`. A replay needs nothing else but the rollouts of the step (`run.replay`)."""

    step: int
    """Step of the run."""
    phase: str
    """Name of the phase."""
    version: int
    """Version of the policy that was trained."""
    prompt_indices: list[int]
    """Prompt indices of the groups that the step trained, in order."""
    start_versions: list[int]
    """Policy version at the start of each trained group."""
    dropped: dict[str, list[int]]
    """Prompt indices dropped since the previous line, by reason (`group_buffer.Dropped`)."""
    waiting: dict[str, int]
    """Index of the task of each group that is in flight, ready, or starts again, by prompt index."""
    stream_position: str
    """Position of the task stream."""
    cancelled: dict[str, int]
    """Number of cancelled spare episodes of each group, by prompt index."""
    demonstrations: dict[str, Any]
    """Demonstration of an expert for the task (`Group.demonstration`), by prompt index, as JSON."""
    mixture: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the shares of a mixture's domains (`MixtureShares.state`, `StepPlan.state`); else empty."""
    phase_end: str = ""
    """Reason why the phase ended with this step, if it ended early."""
    rollouts: str = ""
    """SHA-256 of the step's file of rollouts; empty if none was written."""


class DrawAccount:
    """The fate of the prompt indices of a phase: the sum of its lines of `consumed.jsonl`."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._waiting: dict[str, int] = {}
        self._late: list[int] = []
        self._plan: dict[str, Any] = {}
        self.num_trained = self.num_drawn = 0
        self.dropped: Counter[str] = Counter()

    def add(self, line: ConsumedStep) -> None:
        """Add the next line."""
        self._waiting = line.waiting
        self._plan = {"plan": line.mixture["plan"]} if line.mixture else {}
        self._late += line.dropped["late"]
        self.num_trained += len(line.prompt_indices)
        self.dropped.update({why: len(prompt_indices) for why, prompt_indices in line.dropped.items()})
        named = [*line.prompt_indices, *(d for why in DROPPED for d in line.dropped[why]), *map(int, line.waiting)]
        self.num_drawn = max([self.num_drawn, *(d + 1 for d in named)])

    @property
    def again(self) -> list[int]:
        """Cancelled prompt indices that wait to start again, in the order of their cancellation."""
        return [prompt_index for prompt_index in self._late if str(prompt_index) in self._waiting]

    @property
    def in_flight(self) -> list[int]:
        """Prompt indices of groups that were started, and neither trained nor dropped."""
        again = set(self.again)
        return [prompt_index for prompt_index in map(int, self._waiting) if prompt_index not in again]

    @property
    def num_started(self) -> int:
        """The number of started groups."""
        return self.num_trained + self.dropped.total() + len(self.in_flight)

    def groups(self, version: int) -> dict[str, Any]:
        """Return `RunProgress.groups` after the last line, for a run that continues from there without ready groups.

        Args:
          version: of the policy that was trained last.
        """
        entries = [
            GroupEntry(prompt_index, version, kept=self._phase.late == "wait")
            for prompt_index in sorted(self.in_flight)
        ]
        buffer = self._plan | {
            "num_started": self.num_started,
            "num_trained": self.num_trained,
            "num_drawn": self.num_drawn,
            "dropped": dict(self.dropped),
            "again": self.again,
            "taken_at": version,
            "entries": [dataclasses.asdict(e) for e in entries],
        }
        counted = {"started": self.num_started, **self.dropped}
        return {"buffer": buffer, "tasks": self._waiting, "counted": counted, "unlogged": {why: [] for why in DROPPED}}
