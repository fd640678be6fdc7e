"""Decide which groups may start, which a step trains, and which are cancelled: no threads, no clock.

A group is identified by its prompt index, the position of its task in the task stream. It starts at some policy version
and may be trained while the trainer is at most `async_ratio` versions further; its age counts from the version at its
*start*, so that a long answer counts as old as its oldest token. One set of rules serves synchronous and asynchronous
training, dynamic sampling, redundancy and tail batching (ROLL Flash, arXiv 2510.11345; RollPacker, arXiv 2509.21009):

- *capacity*: at most `(1 + async_ratio) x prompts_per_step` groups, and `spare_prompts` more, are in flight and ready
  together;
- *oldest start first*: a step takes the ready groups that started first, so that short answers are not preferred;
- *in time*: after a step at version `n`, of the groups that it did not take at most `(async_ratio - j) x
  prompts_per_step` are of age `j` or older, for every `j`. The coming steps can then train all of them before they are
    too old, and a step waits only for groups that would otherwise become too old: no started group is lost;
- *by domain*: with several domains, `shares.StepPlan` says how many groups of each a step trains. All of the above
  then holds within each domain: a group starts for the first place of the plan that has none, so a dropped group is
  replaced by one of its own domain;
- *every prompt*: unless `late` is `drop`, a prompt is taken from the task stream only when the plan has a place for it
  in addition to all prompts of its domain that are not trained yet. Spares are prompts of later steps then, and the
  last step has none.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from rolljax.errors import Checked, ConfigError, Range, check_fields
from rolljax.rollout.shares import StepPlan

Late = Literal["wait", "resample", "drop"]
Dropped = Literal["no_signal", "failed", "late"]
"""Why a group was not trained: its algorithm learns nothing from it, every trajectory failed, or it would have exceeded
the staleness bound."""
DROPPED: tuple[Dropped, ...] = get_args(Dropped)


@dataclasses.dataclass(frozen=True)
class TailBatching(Checked):
    """Synchronous steps that do not wait for their slowest answers (RollPacker, arXiv 2509.21009).

    A short round starts `eta` times the prompts that a step needs, and `eta` times the siblings of a group. The first
    to complete are trained on; the other prompts wait in a queue. Once the queue holds enough prompts for a step, or no
    new prompts are left, a long round starts the queued prompts alone and waits for all of them. Every prompt is
    trained once, with answers of the newest policy; only the order changes.
    """

    eta: Annotated[float, Range(above=1)] = 1.25
    """Factor on the prompts, and on the siblings of a group, of a short round."""
    epoch: Annotated[int, Range(low=0)] = 0
    """Number of prompts after which the queue must be empty (0: only at the end of the phase)."""


def favours(spare_siblings: int, late: Late) -> list[str]:
    """Return a warning for each setting that trains on short answers more often than they are sampled."""
    said = []
    if spare_siblings:
        said.append(
            f"spare_siblings = {spare_siblings} drops the slowest answers for good: short ones are trained on more "
            "often than they are sampled (tail_batching brings slow groups back)"
        )
    if late == "drop":
        said.append(
            "late = 'drop' drops the slowest groups for good: prompts with short answers are trained on more often "
            "than they are drawn ('resample' brings them back)"
        )
    return said


@dataclasses.dataclass(frozen=True)
class Admission:
    """The rules of a `GroupBuffer`."""

    prompts_per_step: Annotated[int, Range(low=1)]
    """Groups of a step."""
    num_steps: Annotated[int, Range(low=1)]
    """Number of steps of the phase."""
    async_ratio: Annotated[float, Range(low=0)] = 0.0
    """Maximum number of policy versions between the start of a group and its training; 0 is synchronous. With a
    fractional ratio, such as 1.5, that fraction of a step's groups (here half of them) may be one version older."""
    spare_prompts: Annotated[int, Range(low=0)] = 0
    """Groups in flight in excess of the groups that a step needs; with `resample`, prompts of later steps."""
    late: Late = "wait"
    """Treatment of a group that would exceed the bound `async_ratio`. wait: steps wait until the group is complete, so
    no group exceeds it. resample: the group starts again, with the newest policy and the same randomness, and steps
    then wait for it. drop: the group is cancelled, and its prompt is not trained."""
    max_replaced: Annotated[int, Range(low=0)] = 0
    """Maximum number of groups without a signal that a step may replace; further ones stay in the step."""
    tail: TailBatching | None = None
    in_rounds: bool = False
    """Replacements start only when nothing is in flight, so that a request always shares the sampler with the same
    requests."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.spare_prompts and self.late == "wait":
            raise ConfigError(
                "can have no effect: steps wait for every group",
                setting="Phase.spare_prompts",
                value=self.spare_prompts,
                remedy="set Phase.late to 'drop' or 'resample', or use tail_batching",
            )
        if self.late != "wait" and not (self.async_ratio or self.spare_prompts):
            raise ConfigError(
                "can have no effect: a synchronous step without spares waits for all of its groups",
                setting="Phase.late",
                value=self.late,
                remedy="leave it out, or set async_ratio or spare_prompts",
            )
        if self.tail and (self.async_ratio or self.spare_prompts or self.late != "wait"):
            raise ConfigError(
                "is synchronous and has its own spares",
                setting="Phase.tail_batching",
                value=self.tail,
                remedy="leave out async_ratio, spare_prompts and late",
            )

    @property
    def oldest(self) -> int:
        """Highest age at which a group is trained."""
        return math.ceil(self.async_ratio)

    @property
    def num_oldest(self) -> int:
        """Groups of a step that may be of that age."""
        return self.allowed(self.oldest - 1) if self.async_ratio else self.prompts_per_step

    def allowed(self, age: int) -> int:
        """Return how many groups of `age` or older a step may leave: floor((async_ratio - age) x prompts_per_step)."""
        return max(0, math.floor((self.async_ratio - age) * self.prompts_per_step + 1e-9))


@dataclasses.dataclass
class GroupEntry:
    """A group in flight, or ready."""

    prompt_index: int
    version: int
    """Policy version at the start of the group."""
    kept: bool
    """Steps wait for it, and it is never cancelled."""
    ready: bool = False
    has_signal: bool = True
    domain: str = ""
    """Domain of the group's task; empty without domains."""

    def age(self, version: int) -> int:
        """Return the number of versions since its start."""
        return version - self.version


class GroupBuffer:
    """The groups of a phase, from their start until they are trained or dropped.

    The order of calls: `start` until it returns None, `finished` for each completed group, `take` until it returns the
    groups of a step, `expire` for the version that this step makes.

    Args:
      plan: of domains; None: no domains.
    """

    def __init__(self, admission: Admission, plan: StepPlan | None = None) -> None:
        self.admission, self.plan = admission, plan or StepPlan(admission.prompts_per_step)
        assert not (admission.tail and self.plan.is_mixed), "tail batching knows no domains"
        self.num_started = self.num_trained = self.num_drawn = 0
        self.dropped: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()
        """How many groups were trained at each age."""
        self._entries: dict[int, GroupEntry] = {}
        self._standing: Counter[str] = Counter()  # entries by domain
        self._unfinished: Counter[tuple[int, bool]] = Counter()  # those in flight by version and whether they are kept
        self._again: dict[int, str] = {}  # cancelled draws that start again, with their domains
        self._restart: list[GroupEntry] = []  # groups in flight when the run ended
        self._round: list[tuple[int, bool]] = []  # tail batching: draws to start next
        self._round_size, self._is_short = 0, False
        self._taken_at = -1
        self._replaced = 0
        self._some_finished = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[GroupEntry]:
        return iter(self._entries.values())

    @property
    def num_ready(self) -> int:
        """Complete groups that wait for a step."""
        return len(self) - self._unfinished.total()

    @property
    def in_long_round(self) -> bool:
        """Return whether the current round, or the last trained one, is a long round of tail batching."""
        return self.admission.tail is not None and not self._is_short

    # ---- starting

    def start(self, version: int) -> GroupEntry | None:
        """Start the next group and return it; None if no further group may start now."""
        found = self._next(version)
        if found is None:
            return None
        prompt_index, kept, domain = found
        self._again.pop(prompt_index, None)
        self.num_drawn = max(self.num_drawn, prompt_index + 1)
        self.num_started += 1
        self._enter(GroupEntry(prompt_index, version, kept, domain=domain))
        return self._entries[prompt_index]

    def _enter(self, entry: GroupEntry) -> None:
        self._entries[entry.prompt_index] = entry
        self._standing[entry.domain] += 1
        self._unfinished[entry.version, entry.kept] += not entry.ready

    def _remove(self, entry: GroupEntry) -> None:
        del self._entries[entry.prompt_index]
        self._standing[entry.domain] -= 1
        self._unfinished[entry.version, entry.kept] -= not entry.ready

    def _next(self, version: int) -> tuple[int, bool, str] | None:
        """Return the prompt index of the next group, whether the group is kept, and its domain; None if none may
        start."""
        rules = self.admission
        if self._restart:
            if version <= self._taken_at and len(self) >= rules.allowed(0):
                return None
            entry = self._restart.pop(0)
            return entry.prompt_index, entry.kept, entry.domain
        if rules.in_rounds and self._some_finished and self.num_ready < len(self):
            return None
        if rules.tail:
            return self._next_of_round(version, rules.tail)
        capacity, spare = self._capacity(version)
        if len(self) >= capacity + spare:
            return None
        places, spares = self._places(capacity, spare)
        for domain in self._open([*places, *spares]):
            again = next((prompt_index for prompt_index, of in self._again.items() if of == domain), None)
            if again is not None and sum(e.kept and e.domain == domain for e in self) < places.count(domain):
                return again, True, domain
            if rules.late == "drop" or self._has_new(domain, len(places) + len(spares)):
                return self.num_drawn, rules.late == "wait", domain
        return None

    @property
    def _step(self) -> int:
        """Index of the step that trains next."""
        return self.num_trained // self.admission.prompts_per_step

    @property
    def _left(self) -> int:
        """Groups that the phase still trains."""
        return self.admission.prompts_per_step * self.admission.num_steps - self.num_trained

    def _capacity(self, version: int) -> tuple[int, int]:
        """Return the number of groups that may be in flight and ready together, and of spare groups."""
        rules = self.admission
        capacity, spares = rules.allowed(0), 0
        if version > self._taken_at:
            capacity, spares = capacity + rules.prompts_per_step, rules.spare_prompts
        capacity = min(capacity, self._left)
        if not capacity:
            return 0, 0
        return capacity, spares if rules.late == "drop" else min(spares, self._left - capacity)

    def _places(self, capacity: int, spares: int) -> tuple[list[str], list[str]]:
        """Return the domains of this many groups, in the order of the plan, and the domains of spare groups: the next
        places of the plan, or if late groups are dropped, the next step's again."""
        if self.admission.late == "drop":
            again = itertools.cycle(self.plan.places(self._step))
            return list(self.plan.first(self._step, capacity)), list(itertools.islice(again, spares))
        places = list(self.plan.first(self._step, capacity + spares))
        return places[:capacity], places[capacity:]

    def _open(self, places: list[str]) -> list[str]:
        """Return the domains of the places without a group."""
        if not self.plan.is_mixed:
            return places[len(self) :]
        standing, found = self._standing.copy(), []
        for domain in places:
            if standing[domain]:
                standing[domain] -= 1
            else:
                found.append(domain)
        return found

    def _has_new(self, domain: str, num_places: int) -> bool:
        """Return whether the phase needs a new prompt of a domain, in addition to the prompts that started and are not
        trained yet.

        Args:
          num_places: places of the plan that may have a group now.
        """
        drawn = self._standing[domain] + sum(of == domain for of in self._again.values())
        known = list(self.plan.first(self._step, min(num_places + len(self._again), self._left)))
        return drawn < known.count(domain)

    # ---- tail batching

    @property
    def _num_new(self) -> int:
        """Number of prompts of the phase that have not been started yet, if each is trained once."""
        return self._left - len(self) - len(self._again)

    def _next_of_round(self, version: int, tail: TailBatching) -> tuple[int, bool, str] | None:
        if version <= self._taken_at:
            return None
        if not self._round_size:
            self._plan_round(tail)
        if self._round:
            return *self._round.pop(0), ""
        if len(self) < self._round_size:  # one was dropped
            return self.num_drawn, not self._is_short, ""
        return None

    def _plan_round(self, tail: TailBatching) -> None:
        prompts = self.admission.prompts_per_step
        new = self._num_new
        if tail.epoch:
            of_epoch = (new - prompts * self.admission.num_steps) % tail.epoch or (0 if self._again else tail.epoch)
            new = min(new, of_epoch) if of_epoch + len(self._again) >= prompts else new
        self._is_short = len(self._again) < prompts <= new
        late = [] if self._is_short else list(self._again)[:prompts]
        size = min(math.ceil(tail.eta * prompts), new) if self._is_short else prompts
        fresh = range(self.num_drawn, self.num_drawn + size - len(late))
        self._round, self._round_size = [(d, not self._is_short) for d in (*late, *fresh)], size

    # ---- while they run

    def finished(self, prompt_index: int, *, has_signal: bool = True, failed: bool = False) -> bool:
        """Mark a group as complete. Return True if it waits to be trained, False if it was dropped.

        Args:
          has_signal: whether its algorithm learns from it. failed: nothing of it can be trained on.
        """
        entry = self._entries[prompt_index]
        needed = self.plan.places(self._step).count(entry.domain)
        spare = not entry.kept and self._standing[entry.domain] > needed
        if not has_signal and not failed and self._replaced < self.admission.max_replaced:
            self._replaced += 1
            self._drop(entry, "no_signal")
        elif failed and spare:
            self._drop(entry, "failed")
        else:
            entry.ready, entry.has_signal = True, has_signal
            self._unfinished[entry.version, entry.kept] -= 1
        self._some_finished = self.num_ready < len(self)
        return prompt_index in self._entries

    def _drop(self, entry: GroupEntry, why: Dropped) -> None:
        self._remove(entry)
        self.dropped[why] += 1

    # ---- training

    def take(self, version: int) -> list[GroupEntry] | None:
        """Return the groups that the step at `version` trains, by prompt index; None if the step must wait."""
        if self._must_wait(version):
            return None
        rules, places = self.admission, self.plan.places(self._step)
        room, of_oldest = Counter(places), Counter(places[: rules.num_oldest])
        taken: list[GroupEntry] = []
        for entry in sorted((e for e in self if e.ready), key=lambda e: (not e.kept, e.version, e.prompt_index)):
            is_oldest = entry.age(version) == rules.oldest
            if room[entry.domain] and not (is_oldest and not of_oldest[entry.domain]):
                room[entry.domain] -= 1
                of_oldest[entry.domain] -= is_oldest
                taken.append(entry)
        if len(taken) < rules.prompts_per_step or not self._in_time(taken, version):
            return None
        for entry in taken:
            assert entry.age(version) <= rules.oldest, (
                f"group {entry.prompt_index} is {entry.age(version)} versions old"
            )
            self._remove(entry)
            self.ages[entry.age(version)] += 1
        self.num_trained += len(taken)
        self.plan.forget(self._step)
        self._taken_at, self._replaced, self._some_finished = version, 0, False
        self._round_size = 0
        self._check()
        return sorted(taken, key=lambda e: e.prompt_index)

    def _must_wait(self, version: int) -> bool:
        """Return whether the numbers of groups in flight alone tell that a step has to wait."""
        rules, in_flight = self.admission, 0
        for (started, kept), number in sorted(self._unfinished.items()):  # the oldest first
            in_flight += number * kept
            if number and in_flight > rules.allowed(version - started):
                return True
        return self.num_ready < rules.prompts_per_step

    def _in_time(self, taken: list[GroupEntry], version: int) -> bool:
        """Return whether all other kept groups can still be trained in time if `taken` are trained now."""
        chosen = {e.prompt_index for e in taken}
        left = [e for e in self if e.kept and e.prompt_index not in chosen]
        for age in range(max((e.age(version) for e in left), default=-1) + 1):
            waiting = Counter(e.domain for e in left if e.age(version) >= age)
            if not waiting <= Counter(self.plan.first(self._step + 1, self.admission.allowed(age))):
                return False
        return True

    def expire(self, version: int) -> list[GroupEntry]:
        """Drop the groups that will be too old for the step at `version`.

        Returns:
          The dropped groups; the caller cancels their episodes. With `resample` and tail batching they start again.
        """
        rules = self.admission
        room = Counter(self.plan.places(self._step)[: rules.num_oldest])
        late = [e for e in self if e.age(version) > rules.oldest]
        oldest = (e for e in self if e.age(version) == rules.oldest)
        for entry in sorted(oldest, key=lambda e: (not e.kept, not e.ready, e.prompt_index)):
            if room[entry.domain]:
                room[entry.domain] -= 1
            else:
                late.append(entry)
        for entry in late:
            assert not entry.kept, f"group {entry.prompt_index} is kept and cannot expire"
            self._drop(entry, "late")
            if rules.late == "resample" or rules.tail:
                self._again[entry.prompt_index] = entry.domain
        self._some_finished = self._some_finished and self.num_ready < len(self)
        self._check()
        return late

    def _check(self) -> None:
        gone = self.num_trained + sum(self.dropped.values())
        assert self.num_started == gone + len(self), "a group was lost"

    # ---- continuing

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; the trajectories of ready groups are saved separately."""
        parts: dict[str, Any] = {"plan": self.plan.state()} if self.plan.is_mixed else {}
        if self._replaced or self._some_finished or self._round_size:  # in the middle of a step
            parts["replaced"], parts["some_finished"] = self._replaced, self._some_finished
            parts["round"] = {"next": list(self._round), "size": self._round_size, "is_short": self._is_short}
        return parts | {
            "num_started": self.num_started + len(self._restart),
            "num_trained": self.num_trained,
            "num_drawn": self.num_drawn,
            "dropped": dict(self.dropped),
            "again": list(self._again),
            "taken_at": self._taken_at,
            "entries": [dataclasses.asdict(e) for e in (*self, *self._restart)],
        }

    def restore(self, state: dict[str, Any], domains: Mapping[int, str] | None = None) -> None:
        """Continue from `state`: ready groups stay ready; groups that were in flight start again, before all others.

        Args:
          domains: of every prompt index that is in flight, ready, or starts again; None: no domains.
        """
        of = domains or {}
        self.num_trained, self.num_drawn = state["num_trained"], state["num_drawn"]
        self.dropped, self._taken_at = Counter(state["dropped"]), state["taken_at"]
        self._again = {prompt_index: of.get(prompt_index, "") for prompt_index in state["again"]}
        if "round" in state:
            self._replaced, self._some_finished = state["replaced"], state["some_finished"]
            self._round = [(prompt_index, kept) for prompt_index, kept in state["round"]["next"]]
            self._round_size, self._is_short = state["round"]["size"], state["round"]["is_short"]
        entries = [GroupEntry(**e | {"domain": of.get(e["prompt_index"], "")}) for e in state["entries"]]
        if "plan" in state:
            self.plan.restore(state["plan"])
        for entry in entries:
            if entry.ready:
                self._enter(entry)
        self._restart = [e for e in entries if not e.ready]
        self.num_started = state["num_started"] - len(self._restart)
