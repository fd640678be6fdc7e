"""The rules for every environment as checks, run by the contract tests and by `python -m rolljax.validate`.

A check plays episodes and returns a sentence about the result; it raises `EnvError` where the environment fails.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rolljax.concurrency import child
from rolljax.envs import constants
from rolljax.envs.base import NUM_INDICES, Env, EnvSpec, StepResult
from rolljax.errors import EnvError, InfraError
from rolljax.types import Message, Task

MAX_STEPS = 1000
"""Maximum number of steps of an episode in a check; a longer episode fails the check."""
OTHER_PROCESS_S = 1800.0
"""Seconds that another process may take to play the episodes of a check."""
NONSENSE = "nonsense"
NUM_DIGESTS = 5

Act = Callable[[Env, int], str]
"""A player: a function of the episode and the turn (0, 1, ...) that returns the answer."""


@runtime_checkable
class HasRandomAction(Protocol):
    """An environment with a random player, which knows the rules and nothing else."""

    def random_action(self, rng: random.Random) -> str: ...


@dataclasses.dataclass(frozen=True)
class Transcript:
    """The messages before each action, and its result."""

    task: Task
    seen: list[tuple[Message, ...]]
    results: list[StepResult]

    @property
    def success(self) -> bool:
        return any(r.success for r in self.results)

    @property
    def reward(self) -> float:
        return sum(r.reward for r in self.results)


def reference(env: Env, turn: int) -> str:
    """Return the reference answer: the scripted player."""
    return env.reference_answer()


def lacks_reference(spec: EnvSpec) -> str:
    """Return why an environment has no reference answers, in its own words; empty if it has.

    Raises:
      InfraError: the machine fails, not the environment.
    """
    env = spec.make()
    try:
        env.reset(spec.task(0))
        env.reference_answer()
        return ""
    except InfraError:
        raise
    except EnvError as e:
        return str(e)
    finally:
        env.close()


def always(action: str) -> Act:
    """Return a player with a constant action."""
    return lambda env, turn: action


def wrong_first(env: Env, turn: int) -> str:
    """Return nonsense in the first turn, then the reference answers."""
    return env.reference_answer() if turn else NONSENSE


def play(spec: EnvSpec, task: Task, act: Act) -> Transcript:
    """Play a whole episode in a new environment, and return its transcript."""
    env = spec.make()
    try:
        return follow(env, Transcript(task, [env.reset(task)], []), act)
    finally:
        env.close()


def follow(env: Env, so_far: Transcript, act: Act) -> Transcript:
    """Play the rest of an episode, and return the transcript of all of it."""
    seen, results = list(so_far.seen), list(so_far.results)
    while not results or not over(results[-1]):
        _require(len(results) < MAX_STEPS, f"an episode of {so_far.task} has not ended after {MAX_STEPS} steps")
        if results:
            seen.append(results[-1].messages)
        results.append(env.step(act(env, len(results))))
    return Transcript(so_far.task, seen, results)


def over(result: StepResult) -> bool:
    """Return whether the episode ended with this step."""
    return result.terminated or result.truncated


def reference_solves(spec: EnvSpec, num_tasks: int, reward: float | None = None) -> str:
    """Check that the scripted player solves every task in time, with exactly this `reward` if one is given."""
    episodes = [play(spec, spec.task(i), reference) for i in range(num_tasks)]
    for e in episodes:
        last = e.results[-1]
        _require(last.success and last.terminated, f"the reference answer does not solve {e.task}")
        _in_time(spec, e)
        _require(
            reward is None or math.isclose(e.reward, reward, abs_tol=1e-6),
            f"the reference answer gets {e.reward:g} for {e.task}",
        )
    turns = sum(len(e.results) for e in episodes) / num_tasks
    return f"{num_tasks} tasks, {turns:.1f} turns, reward {sum(e.reward for e in episodes) / num_tasks:g}"


def bad_actions_fail(spec: EnvSpec, num_tasks: int) -> str:
    """Check that the environment's bad actions solve nothing, earn less than the reference answer, and raise
    nothing."""
    actions = spec.bad_actions()
    for i in range(num_tasks):
        best = play(spec, spec.task(i), reference)
        for action in actions:
            e = play(spec, spec.task(i), always(action))
            worse = e.reward < best.reward or not best.success
            _require(not e.success and worse, f"{action[:50]!r} gets {e.reward:g} for {e.task}")
            _in_time(spec, e)
    return f"{len(actions)} bad actions"


def well_formed(spec: EnvSpec, num_tasks: int) -> str:
    """Check that messages end with one to the policy, numbers are finite, and an episode ends once, without further
    messages."""
    shown = []
    for i in range(num_tasks):
        for act in (reference, always(NONSENSE)):
            e = play(spec, spec.task(i), act)
            for messages in e.seen:
                _require(bool(messages) and messages[-1].role != "assistant", f"{e.task}: no message to the policy")
                _require(all(isinstance(m.content, str) for m in messages), f"{e.task}: a message that is no text")
            for r in e.results:
                numbers = {"reward": r.reward, "weight": r.weight, **r.reward_parts, **r.metrics}
                for name, value in numbers.items():
                    _require(math.isfinite(value), f"{e.task}: {name} is {value}")
                _require(not (r.terminated and r.truncated), f"{e.task}: terminated and truncated")
            _require(not e.results[-1].messages, f"{e.task}: messages after the end")
            shown.append(sum(len(m.content.encode()) for messages in e.seen for m in messages))
    return f"{sum(shown) / len(shown):.0f} bytes shown in an episode, at most {max(shown)}"


def ends_are_final(spec: EnvSpec, num_tasks: int) -> str:
    """Check that a step after the end is an `EnvError`."""
    for i in range(num_tasks):
        env = spec.make()
        try:
            follow(env, Transcript(spec.task(i), [env.reset(spec.task(i))], []), reference)
            _require(_refuses_a_step(env), f"a step after the end of {spec.task(i)} is let pass")
        finally:
            env.close()
    return "no step after the end"


def tasks_are_their_index(spec: EnvSpec, num_tasks: int) -> str:
    """Check that equal settings give equal tasks, in any order, and that tasks differ."""
    fresh = dataclasses.replace(spec)  # type: ignore[type-var]
    _require(fresh is not spec and fresh == spec, "settings do not equal their copy")
    tasks = [spec.task(i) for i in range(num_tasks)]
    _require([fresh.task(i) for i in reversed(range(num_tasks))] == tasks[::-1], "tasks depend on the order")
    for i, task in enumerate(tasks):
        _require(task.index == i and task.env in spec.specs, f"{task} does not name its index and environment")
    _require(fresh.task(NUM_INDICES - 1) == spec.task(NUM_INDICES - 1), "the last task is not the same twice")
    different = len({t.id for t in tasks})
    _require(num_tasks == 1 or different > 1, "all tasks are the same")
    return f"{different} of {num_tasks} different"


def interleave(spec: EnvSpec, num_tasks: int) -> str:
    """Check that interleaved episodes give the same messages as alone."""
    pairs = [(spec.task(i), wrong_first if i % 2 else reference) for i in range(max(2, num_tasks))]
    alone = [play(spec, task, act) for task, act in pairs]
    envs = [spec.make() for _ in pairs]
    try:
        together = [Transcript(task, [env.reset(task)], []) for env, (task, _) in zip(envs, pairs, strict=True)]
        for turn in range(MAX_STEPS):
            for env, e, (_, act) in zip(envs, together, pairs, strict=True):
                if e.results and over(e.results[-1]):
                    continue
                if e.results:
                    e.seen.append(e.results[-1].messages)
                e.results.append(env.step(act(env, turn)))
    finally:
        for env in envs:
            env.close()
    _require(together == alone, "episodes side by side differ from episodes alone")
    return f"{len(pairs)} side by side"


def snapshots_continue(spec: EnvSpec, num_tasks: int) -> str:
    """Check that another environment continues from a snapshot as the first one does, any number of times."""
    if not can_snapshot(spec):
        return "no snapshots"
    for i in range(num_tasks):
        for act in (reference, wrong_first):
            full = play(spec, spec.task(i), act)
            for middle in sorted({0, len(full.results) // 2}):
                _same_from(spec, full, middle, act)
    return "at the start and in the middle"


def can_snapshot(spec: EnvSpec) -> bool:
    """Return whether an episode of task 0 gives a snapshot."""
    env = spec.make()
    try:
        env.reset(spec.task(0))
        return isinstance(env.snapshot(), bytes)
    except EnvError:
        return False
    finally:
        env.close()


def _same_from(spec: EnvSpec, full: Transcript, middle: int, act: Act) -> None:
    """Play the first `middle` turns, take a snapshot, and check that episodes restored from it continue as the whole
    episode did."""
    first, second = spec.make(), spec.make()
    try:
        so_far = Transcript(full.task, [first.reset(full.task)], [])
        for turn in range(middle):
            if turn:
                so_far.seen.append(so_far.results[-1].messages)
            so_far.results.append(first.step(act(first, turn)))
        state = first.snapshot()
        _require(follow(first, so_far, act) == full, f"taking a snapshot changes {full.task}")
        for env in (second, first):  # a fresh one, and one whose episode is over
            env.restore(state)
            _require(follow(env, so_far, act) == full, f"{full.task} continues differently from turn {middle}")
    finally:
        first.close()
        second.close()


def same_in_another_process(specs: Sequence[EnvSpec], num_tasks: int = NUM_DIGESTS) -> str:
    """Check that another process, with another hash seed, makes the same tasks and plays the same episodes."""
    work = child.pickled((list(specs), num_tasks))
    code = f"import {__name__} as checks, {child.__name__} as child; child.answer_messages(checks.answer_digests)"
    other = child.Child(
        [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": child.python_path()}
    )
    try:
        found = other.ask(work, OTHER_PROCESS_S)
    except child.ChildError as e:
        raise EnvError(f"another process {e}") from e
    finally:
        other.stop()
    for spec, there in zip(specs, found, strict=True):
        _require(digests(spec, num_tasks) == there, f"{spec.name} differs in another process")
    return f"{num_tasks} tasks and episodes"


def digests(spec: EnvSpec, num_tasks: int) -> list[list[str]]:
    """Return each task's id and a hash of the environment's replies to the reference answer and to nonsense."""
    return [[spec.task(i).id, _digest(spec, spec.task(i))] for i in range(num_tasks)]


def answer_digests(work: str) -> list[list[list[str]]]:
    """Return the digests of pickled settings. It runs in the other process."""
    specs, num_tasks = child.unpickled(work)
    return [digests(spec, num_tasks) for spec in specs]


def _digest(spec: EnvSpec, task: Task) -> str:
    said: list[object] = []
    for act in (reference, wrong_first):
        e = play(spec, task, act)
        said += [[[(m.role, m.content) for m in messages] for messages in e.seen], [r.reward for r in e.results]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def success_frac(spec: EnvSpec, tasks: Iterable[Task], act: Act) -> float:
    """Return the share of tasks that a player solves."""
    solved = [play(spec, task, act).success for task in tasks]
    return sum(solved) / len(solved)


def constant_wins(spec: EnvSpec, num_tasks: int, within_s: float = math.inf) -> constants.ConstantAnswerResults:
    """Measure the wins of a hundred constant answers on `num_tasks` tasks, or on fewer once `within_s` has passed."""
    tally, end = constants.AnswerCounts(), time.monotonic() + within_s
    for i in range(num_tasks):
        if i and time.monotonic() > end:
            num_tasks = i
            break
        task = spec.task(i)
        fresh = _openings(spec, task)
        tally.task(_prompt(fresh()[1]), functools.partial(_given, fresh, task))
    try:
        player, _ = random_player(spec)
        episodes = [play(spec, spec.task(i), player) for i in range(num_tasks)]
    except EnvError:  # there is no reference answer
        episodes = []
    wrong = [e.reward for e in episodes if not e.success]
    chance = (len(episodes) - len(wrong)) / num_tasks
    return constants.ConstantAnswerResults(tally.wins(), num_tasks, chance, sum(wrong) / max(1, len(wrong)))


def no_constant_wins(spec: EnvSpec, num_tasks: int) -> str:
    """Check that no constant answer wins more often than chance, unless it is the reference answer."""
    found = constant_wins(spec, num_tasks)
    _require(found.hole is None, f"{spec.name}: {found}")
    return str(found)


def _openings(spec: EnvSpec, task: Task) -> Callable[[], tuple[Env, tuple[Message, ...]]]:
    """Return a function that opens a task repeatedly: from a snapshot if the environment has them."""
    first = spec.make()
    initial_messages = first.reset(task)
    try:
        state = first.snapshot()
    except EnvError:
        state = None
    finally:
        first.close()

    def fresh() -> tuple[Env, tuple[Message, ...]]:
        env = spec.make()
        if state is None:
            return env, env.reset(task)
        env.restore(state)
        return env, initial_messages

    return fresh


def _prompt(initial_messages: Sequence[Message]) -> str:
    return "\n".join(m.content for m in initial_messages if m.role == "user")


def _given(fresh: Callable[[], tuple[Env, tuple[Message, ...]]], task: Task, text: str) -> tuple[bool, bool, float]:
    """Play an episode with the same answer in every turn; return whether it solves the task, whether it is the
    reference answer in every turn, and the reward."""
    env, initial_messages = fresh()
    try:
        e = follow(env, Transcript(task, [initial_messages], []), always(text))
    finally:
        env.close()
    if not e.success:
        return False, False, e.reward
    env, initial_messages = fresh()
    are_reference: list[bool] = []

    def compare(env: Env, turn: int) -> str:
        try:
            are_reference.append(constants.same(text, env.reference_answer()))
        except EnvError:
            are_reference.append(False)
        return text

    try:
        follow(env, Transcript(task, [initial_messages], []), compare)
    finally:
        env.close()
    return True, all(are_reference), e.reward


def random_player(spec: EnvSpec, seed: int = 0) -> tuple[Act, str]:
    """Return a player that does not use the task, and its description: random legal actions if the environment has
    them, otherwise reference answers of other tasks."""
    rng = random.Random(seed)
    if isinstance(spec.make(), HasRandomAction):
        return lambda env, turn: env.random_action(rng), "random legal actions"
    said: list[str] = []

    def remembered(env: Env, turn: int) -> str:
        said.append(env.reference_answer())
        return said[-1]

    for i in range(NUM_INDICES - 20, NUM_INDICES):
        play(spec, spec.task(i), remembered)
    return lambda env, turn: rng.choice(said), "reference answers of other tasks"


CHECKS: Mapping[str, Callable[[EnvSpec, int], str]] = {
    "the reference answer solves": reference_solves,
    "bad actions fail": bad_actions_fail,
    "well formed": well_formed,
    "ends are final": ends_are_final,
    "tasks are their index": tasks_are_their_index,
    "same in another process": lambda spec, num_tasks: same_in_another_process([spec], min(num_tasks, NUM_DIGESTS)),
    "side by side": interleave,
    "snapshots": snapshots_continue,
}
"""The checks by name; each takes an environment and how many of its tasks to play."""
NEED_GOLD = frozenset(CHECKS) - {"tasks are their index"}
"""Checks whose player gives the reference answers."""


def _in_time(spec: EnvSpec, e: Transcript) -> None:
    _require(len(e.results) <= spec.max_turns, f"{len(e.results)} turns, at most {spec.max_turns}: {e.task}")


def _refuses_a_step(env: Env) -> bool:
    try:
        env.step(NONSENSE)
    except EnvError:
        return True
    return False


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise EnvError(message if len(message) < 500 else message[:500] + " ...")
