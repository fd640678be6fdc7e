"""Groups of trajectories: where each starts, and which of several are taken."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence

from rolljax.errors import RolljaxError
from rolljax.recipe import Phase
from rolljax.rollout.barrier import Barrier
from rolljax.rollout.builder import fault_of
from rolljax.rollout.episodes import Rollouts
from rolljax.rollout.starts import StartCurriculum, fallback
from rolljax.types import Group, Key, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class GroupDue:
    """A group to be begun: its task, and the step and number that address its randomness."""

    task: Task
    step: int
    index: int


async def start_groups(
    rollouts: Rollouts,
    starts: StartCurriculum | None,
    phase: Phase,
    stream: int,
    due: Sequence[GroupDue],
    wanted: int,
    barrier: Barrier | None = None,
) -> list[Group]:
    """`wanted` of the groups that are due, those that are complete first."""
    groups = [start_group(rollouts, starts, d.task, phase, Key(stream, d.step, d.index, 0), barrier) for d in due]
    return await first_complete(groups, wanted)


async def start_group(
    rollouts: Rollouts, starts: StartCurriculum | None, task: Task, phase: Phase, key: Key, barrier: Barrier | None
) -> Group:
    """One group, from where it is to start. `key`: of its first trajectory."""
    try:
        start = await starts.choose(task, key.step, key.group) if starts else None
    except RolljaxError as e:  # the expert's episode failed, and with it the group
        if barrier:
            barrier.leave(phase.group_size + phase.spare_siblings)
        keys = [dataclasses.replace(key, sibling=s) for s in range(phase.group_size)]
        lost = tuple(Trajectory(k, task, (), 0.0, {}, False, "failed", fault_of(e)) for k in keys)
        return Group(task, key.step, key.group, lost)
    group = await rollouts.group(
        task,
        stream=key.stream,
        step=key.step,
        index=key.group,
        group_size=phase.group_size,
        spare=phase.spare_siblings,
        start=start,
        barrier=barrier,
    )
    if start is None or not phase.algorithm.imitates:
        return group
    return dataclasses.replace(group, demonstration=fallback(start, group.trajectories))


async def first_complete(groups: Sequence[Coroutine[None, None, Group]], wanted: int) -> list[Group]:
    """The first `wanted` groups to be complete, in their order; the others are let go."""
    running = [asyncio.ensure_future(g) for g in groups]
    try:
        if len(running) == wanted:
            return list(await asyncio.gather(*running))
        done: list[Group] = []
        lost: list[Group] = []
        for future in asyncio.as_completed(running):
            group = await future
            complete = all(t.status != "failed" for t in group.trajectories)
            (done if complete else lost).append(group)
            if len(done) == wanted:
                break
        return sorted(done + lost[: wanted - len(done)], key=lambda g: (g.step, g.index))
    finally:
        for group_future in running:
            group_future.cancel()
