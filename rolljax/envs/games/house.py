"""A house of five rooms: find a thing, perhaps cool, heat or wash it, and put it somewhere."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.types import Task

ROOMS: dict[str, tuple[str, ...]] = {
    "hall": ("shelf", "box"),
    "kitchen": ("table", "fridge", "oven", "sink"),
    "bath": ("tub", "cabinet"),
    "bedroom": ("bed", "drawer"),
    "study": ("desk", "safe"),
}
"""Rooms and their places; the first place of each is open to see and to put things on."""
ROOM_OF = {place: room for room, places in ROOMS.items() for place in places}
DOORS = frozenset({"box", "fridge", "oven", "cabinet", "drawer", "safe"})
"""Places that can be open or shut."""
APPLIANCE = {"cool": "fridge", "hot": "oven", "clean": "sink"}
"""The place that puts a thing into each state. No thing starts in these places."""
GOALS = ("place", *APPLIANCE)
KITCHENWARE = ("apple", "bread", "egg", "cup", "bowl", "plate")
THINGS = (*KITCHENWARE, "book", "pen", "key", "soap", "towel", "sock")
LONGEST = 17
"""Maximum number of turns that the scripted player needs."""
_FILLERS = {"the", "a", "an", "to", "from", "in", "on", "into"}


@dataclasses.dataclass(frozen=True)
class House(EnvSpec):
    """Household tasks in text, in the manner of ALFWorld (arXiv 2010.03768), smaller: five rooms with twelve places,
    one hand.

    Observation: the goal and the room at first, such as `put cool apple in desk` and `hall: shelf cup; box shut`; then
    the room after `go to`, what is inside after `open`, `ok`, or `no` for what cannot be done (illegal, and it costs a
    turn). Actions: look, go to ROOM, open PLACE, close PLACE, take THING, put THING in PLACE; articles and prepositions
    are let pass. A thing is cool (hot) once the fridge (the oven) was shut with it inside, clean once it was in the
    sink. Reward: 1 as soon as the thing is in its place as it should be.

    Gold knows only what was seen: it looks through the rooms in order until it finds the thing.
    """

    runs = "inline"

    goals: tuple[str, ...] = GOALS
    """Kinds of tasks, of place, cool, hot, clean."""
    things: Annotated[int, Range(low=1, high=len(THINGS))] = 4
    """Number of things in the house."""
    max_turns: int = 30
    """Actions before the episode is cut."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        if not self.goals or set(self.goals) - set(GOALS):
            raise ConfigError(f"must be some of {', '.join(GOALS)}", setting="House.goals", value=self.goals)
        check_fields(self)
        if self.max_turns < LONGEST:
            raise ConfigError(
                "is too few for the longest task",
                setting="House.max_turns",
                value=self.max_turns,
                remedy=f"at least {LONGEST}",
            )

    @property
    def name(self) -> str:
        return "house"

    def task(self, index: int) -> Task:
        rng = random.Random(f"{self.seed} {index}")
        kind = rng.choice(self.goals)
        thing = rng.choice(THINGS if kind == "place" else KITCHENWARE)
        others = rng.sample([t for t in THINGS if t != thing], self.things - 1)
        starts = [p for p in ROOM_OF if p not in APPLIANCE.values()]
        lying = {t: rng.choice(starts) for t in sorted([thing, *others])}
        place = rng.choice([p for p in ROOM_OF if kind != "place" or p != lying[thing]])
        where = " ".join(f"{t}={p}" for t, p in lying.items())
        return Task(self.name, index, f"{kind} {thing} {place} {where}")

    def make(self) -> Env:
        return HouseEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "look", "take", "put in", "go to go to", "open " * 500, "take apple put apple")


class HouseEnv(Game[House]):
    """One task in one house."""

    def _begin(self, task: Task) -> str:
        try:
            kind, self._thing, self._goal, *lying = task.content.split(" ")
            self._where: dict[str, str] = dict(pair.split("=") for pair in lying)
        except ValueError:
            raise EnvError(f"task {task.index} is no task of a house") from None
        if kind not in GOALS or {self._goal, *self._where.values()} - set(ROOM_OF) or self._thing not in self._where:
            raise EnvError(f"task {task.index} is no task of a house")
        self._needs = "" if kind == "place" else kind
        self._is: dict[str, set[str]] = {thing: set() for thing in self._where}
        self._held, self._open = "", set[str]()
        self._seen = set(APPLIANCE.values())  # they are empty
        adjective = f"{self._needs} " if self._needs else ""
        return f"put {adjective}{self._thing} in {self._goal}\n{self._enter('hall')}"

    def _play(self, action: str) -> Outcome:
        said = self._act([w for w in action.lower().split() if w not in _FILLERS])
        as_wished = not self._needs or self._needs in self._is[self._thing]
        done = as_wished and self._where[self._thing] == self._goal
        return Outcome(said or "no", float(done), done, done, bool(said), {"goal": float(done)})

    def _act(self, words: list[str]) -> str:
        """Carry out an action and return the reply; empty if it cannot be done."""
        match words:
            case ["look"]:
                return self._look() + (f"; you {self._held}" if self._held else "")
            case ["go", room] if room in ROOMS:
                return self._enter(room)
            case ["open", place] if self._shut(place):
                self._open.add(place)
                self._seen.add(place)
                return self._inside(place)
            case ["close", place] if place in self._open and self._here(place):
                self._open.remove(place)
                for thing in self._things(place):
                    self._treat(thing, place)
                return "ok"
            case ["take", thing, *place] if not self._held and self._reach(thing):
                if place not in ([], [self._where[thing]]):
                    return ""
                self._held, self._where[thing] = thing, ""
                return "ok"
            case ["put", thing, place] if self._held and thing == self._held and self._here(place):
                if self._shut(place):
                    return ""
                self._held, self._where[thing] = "", place
                if place not in DOORS:
                    self._treat(thing, place)
                return "ok"
        return ""

    def _reference_answer(self) -> str:
        thing = self._thing
        if self._held and self._held != thing:
            return f"put {self._held} in {ROOMS[self._room][0]}"
        at = self._where[thing]
        if at and at not in self._seen:
            return self._search()
        todo = self._needs if self._needs and self._needs not in self._is[thing] else ""
        if todo and at == APPLIANCE[todo]:
            return f"close {at}"
        if at:
            return self._go_and(at, f"take {thing}")
        place = APPLIANCE[todo] if todo else self._goal
        return self._go_and(place, f"put {thing} in {place}")

    def _search(self) -> str:
        """Return the next action of a search: open an unseen place of this room, else walk to the next room that has
        one."""
        for place in ROOMS[self._room]:
            if place not in self._seen:
                return f"open {place}"
        return f"go to {next(ROOM_OF[place] for place in ROOM_OF if place not in self._seen)}"

    def _go_and(self, place: str, act: str) -> str:
        if not self._here(place):
            return f"go to {ROOM_OF[place]}"
        return f"open {place}" if self._shut(place) else act

    def _random(self, rng: random.Random) -> str:
        """Return a random action that can be done here."""
        here = ROOMS[self._room]
        acts = ["look", *(f"go to {room}" for room in ROOMS)]
        acts += [f"close {p}" if p in self._open else f"open {p}" for p in here if p in DOORS]
        if self._held:
            acts += [f"put {self._held} in {p}" for p in here if not self._shut(p)]
        else:
            acts += [f"take {t}" for t in self._where if self._reach(t)]
        return rng.choice(acts)

    def _enter(self, room: str) -> str:
        self._room = room
        self._seen |= {p for p in ROOMS[room] if p not in DOORS}
        return self._look()

    def _look(self) -> str:
        return f"{self._room}: " + "; ".join(self._inside(p) for p in ROOMS[self._room])

    def _inside(self, place: str) -> str:
        return f"{place} shut" if self._shut(place) else " ".join([place, *self._things(place)])

    def _things(self, place: str) -> list[str]:
        return [t for t, p in self._where.items() if p == place]

    def _here(self, place: str) -> bool:
        return ROOM_OF.get(place) == self._room

    def _shut(self, place: str) -> bool:
        """Return whether a place is here and shut."""
        return self._here(place) and place in DOORS and place not in self._open

    def _reach(self, thing: str) -> bool:
        place = self._where.get(thing, "")
        return self._here(place) and not self._shut(place)

    def _treat(self, thing: str, place: str) -> None:
        """Apply the effect of a place to a thing in it."""
        for state, appliance in APPLIANCE.items():
            if place == appliance:
                self._is[thing] -= {"cool", "hot"} if state != "clean" else set()
                self._is[thing].add(state)
