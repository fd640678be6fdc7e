"""The progress of a run: saved with the train state in a checkpoint, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rolljax.recipe import Phase

ALL_STEPS = "all steps done"
"""Reason for the end of a phase that did all of its steps."""


@dataclasses.dataclass
class RunProgress:
    """The progress of a run. `phase` and `step` are the next ones; `total_steps` counts over all phases."""

    phase: int = 0
    step: int = 0
    total_steps: int = 0
    version: int = 0
    stream_position: str = ""
    heldout_reward: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    weights_reward: float | None = None
    """Held-out reward of the current weights; None until they are evaluated."""
    phase_wall_s: dict[str, float] = dataclasses.field(default_factory=dict)
    other_wall_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds outside of phases: `start` (settings, checks, weights, compiling the sampler, the first evaluation),
    `save`, `result`."""
    phase_steps: dict[str, int] = dataclasses.field(default_factory=dict)
    phase_end: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reason why each finished phase ended."""
    algorithm_state: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the phase's algorithm carries from step to step."""
    start_states: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the expert starts of the phase (`StartCurriculum.state`)."""
    run_times: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the longest correct program, by task (`RunLimits.state`)."""
    mixture: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the shares of the phase's mixture (`MixtureShares.state`)."""
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Groups of the phase that are in flight or wait (`GroupBuffer.state`), the index of each one's task, and the
    counts that rows of metrics already contain."""
    waiting: str = ""
    """The groups that wait to be trained, a JSON line each (`Group.to_json`)."""
    recorded: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes and hashes of the logs and held-out answers when this was saved (`RunFolder.recorded`)."""
    drained_samplers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The step after which each was drained, and `types.DrainedSampler`."""
    failed_steps: int = 0
    """Consecutive steps in which no trajectory survived."""
    finished: bool = False
    """The last phase is done."""

    def has_more(self, phases: Sequence[Phase]) -> bool:
        """Return whether a finished run can continue: its last phase has more steps now, or another phase follows."""
        phase = phases[self.phase]
        more_steps = self.step < phase.steps and self.phase_end[phase.name] == ALL_STEPS
        return more_steps or self.phase + 1 < len(phases)

    def reopen(self, phases: Sequence[Phase]) -> None:
        """Continue a finished run that has more to do."""
        phase = phases[self.phase]
        self.finished = False
        if self.phase_end[phase.name] == ALL_STEPS:
            del self.phase_end[phase.name]

    def is_in(self, phase: Phase) -> bool:
        """Return whether steps of `phase`, the current one, are left."""
        return self.step < phase.steps and phase.name not in self.phase_end

    def end_step(self, phase: Phase) -> None:
        """Count a completed step of `phase`, which made a new version of the policy."""
        self.step, self.total_steps, self.version = self.step + 1, self.total_steps + 1, self.version + 1
        self.phase_steps[phase.name] = self.step

    def begin_next_phase(self) -> None:
        """Move to the next phase."""
        self.phase, self.step, self.algorithm_state, self.start_states = self.phase + 1, 0, {}, {}
        self.groups, self.waiting, self.mixture = {}, "", {}
