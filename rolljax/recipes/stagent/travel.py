"""A travel desk: plan a day trip with ten tools over a world that never changes. After STAgent (Amap); a generated
country replaces its live maps and timetables, and a checker of verifiable constraints replaces its judge."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, PureEnv, StepResult
from rolljax.envs.data.rows import Rows, find_files, open_rows, signature
from rolljax.envs.tools import ToolEnv, ToolLimits, ToolResult, ToolSet
from rolljax.errors import ConfigError, DataError, EnvError, Range, check_fields
from rolljax.recipes.stagent.itinerary import (
    Itinerary,
    Stop,
    Wanted,
    check,
    ids_of,
    is_complete,
    made_up,
    read,
    read_ids,
    scheduled,
    to_text,
    way_km,
)
from rolljax.recipes.stagent.travel_tools import EpisodeTools, desk_tools
from rolljax.recipes.stagent.travel_world import (
    MAX_CITIES,
    NUM_DAYS,
    RIDE_MIN_PER_KM,
    STATION,
    THEMES,
    Hotel,
    Poi,
    Ride,
    World,
    days,
    weekday,
    world,
)
from rolljax.types import Message, Task

_ASK = (
    "Plan a day trip from {start} to {city} on {date}, with a night at a hotel there. Visit {themes}: one place for "
    "each, and nothing outdoors if rain is forecast. Transport, tickets and hotel together cost at most {budget}; the "
    "way from the station at (0, 0) through the places to the hotel is at most {max_km} km. Riding takes {pace} "
    "minutes for a km. Places must be open while you are there, for as long as a visit takes.\n"
    "When you know enough, answer with JSON alone, with the ids that the tools gave:\n"
    '{{"date": "YYYY-MM-DD", "transport": "ID", "stops": [{{"poi": "ID", "arrive": "HH:MM", "leave": "HH:MM"}}], '
    '"hotel": "ID"}}'
)
_DRAWS = 40
_FAR_KM = 99.0
_SLACK = 5
Level = Annotated[int, Range(low=1, high=7)]
TINY: Mapping[str, Any] = {
    "num_cities": 2,
    "num_themes": 3,
    "num_pois": 12,
    "num_days": 7,
    "id_digits": 2,
    "levels": (1, 2, 3, 4),
    "style": "short",
    "reward": "rubric",
    "veto": "tools",
    "calls": 5,
    "calls_per_turn": 1,
    "shown_bytes": 96,
}
"""Settings of `Travel` for byte-level models of about 10^5 parameters: an episode takes two to five turns, and
150 to 450 tokens."""


@dataclasses.dataclass(frozen=True)
class TravelDesk(EnvSpec):
    """The requests of the travel desk and the check of an itinerary, without a way to call its tools: see `Travel`."""

    num_cities: int = 5
    """Number of cities."""
    num_pois: int = 24
    """Number of places in each city."""
    num_themes: Annotated[int, Range(low=2, high=len(THEMES))] = len(THEMES)
    """Themes of places that the world has."""
    num_stops: Annotated[int, Range(low=1, high=4)] = 3
    """Themes that a request names."""
    num_days: Annotated[int, Range(low=1, high=NUM_DAYS)] = NUM_DAYS
    """Days that requests are about: the first ones of the world."""
    id_digits: Annotated[int, Range(low=2, high=5)] = 5
    """Hexadecimal digits of an id."""
    levels: tuple[Level, ...] = ()
    """Levels of the requests, one of which is drawn for each. 1: a place on a dry day, 2: and a hotel, 3: and a train
    or flight, 4: and it may rain, n > 4: n - 3 places. Only the budget is limited, close to the cheapest trip. Empty:
    every request has `num_stops` places, a hotel, a train or flight, and a maximal distance."""
    style: Literal["full", "short"] = "full"
    """`full`: requests in prose, calls, results and itineraries in JSON. `short`, for small models: a line for the
    request, calls in compact form, lines of values as results, and as answer the ids of train, places and hotel alone,
    which the desk schedules as early as possible."""
    reward: Literal["share", "strict", "rubric"] = "share"
    """`share`, the share of wanted themes that is visited times the share of the other constraints that holds;
    `strict`, 1 for all of them; `rubric`, the sum of three dimensions with `weights`: `planning` (visited themes times
    the share of hours, times, weather, distance and budget that holds), `information` (the share of date, transport and
    city that holds), `service` (the answer has the parts that are asked for and no others). A made-up id makes it 0."""
    weights: tuple[float, float, float] = (0.4, 0.4, 0.2)
    """Weights of the dimensions of `rubric`, which sum to 1."""
    veto: Literal["world", "tools"] = "world"
    """Ids that count as made up: ids that do not exist, or ids that no tool has returned in this episode."""
    path: str = ""
    """File with rows whose column `task` is the content of a task, such as `rolljax.data` writes for tasks of
    equal settings; empty: requests are generated."""
    seed: int = 0
    """Seed of the world and the requests."""

    def __post_init__(self) -> None:
        Range(low=2, high=MAX_CITIES).check(self, "num_cities")
        check_fields(self)
        most_places = max([self.num_stops] if not self.levels else [_num_places(level) for level in self.levels])
        for name, low, high, remedy in (
            ("num_pois", 3 * self.num_themes + 2, 100, "three places for each theme, and two"),
            ("num_themes", most_places, len(THEMES), "as many themes as a request names"),
            ("id_digits", 4 if self.num_cities > 3 else 3 if self.num_cities == 3 else 2, 5, "an id for every train"),
        ):
            Range(low=low, high=high, remedy=remedy).check(self, name)
        if abs(sum(self.weights) - 1) > 1e-9 or min(self.weights) < 0:
            raise ConfigError(
                "are no weights",
                setting=f"{type(self).__name__}.weights",
                value=self.weights,
                remedy="numbers from 0 that sum to 1",
            )
        dry = (sky != "rain" for (_, date), sky in self.world.sky.items() if date in days()[: self.num_days])
        if self.levels and min(self.levels) < 4 and not any(dry):
            raise ConfigError(
                "are days of rain in every city",
                setting=f"{type(self).__name__}.num_days",
                value=self.num_days,
                remedy="more days, or another seed",
            )
        if self.path:
            find_files(self.path, f"{type(self).__name__}.path")

    @property
    def name(self) -> str:
        return "travel"

    @property
    def world(self) -> World:
        return world(self.num_cities, self.num_pois, self.seed, self.num_themes, self.id_digits)

    @property
    def num_tasks(self) -> int | None:
        return len(_rows(self.path)) if self.path else None

    def task(self, index: int) -> Task:
        if self.path:
            rows = _rows(self.path)
            content = rows.row(index % len(rows)).get("task")
            if not isinstance(content, str):
                raise DataError(f"{self.location(index)}: has no text in the column task")
            return Task(self.name, index, content)
        rng = random.Random(f"travel {self.seed} {index}")
        if self.levels:
            level = rng.choice(self.levels)
            wanted, trip = _graded_request(self.world, level, self.num_days, rng)
        else:
            level = 0
            wanted, trip = _request(self.world, self.num_stops, self.num_days, rng)
        content = {"wanted": dataclasses.asdict(wanted), "trip": dataclasses.asdict(trip), "level": level}
        return Task(self.name, index, json.dumps(content))

    def location(self, index: int) -> str:
        return _rows(self.path).location(index % len(_rows(self.path))) if self.path else ""

    def category(self, task: Task) -> str:
        level = json.loads(task.content).get("level")
        return f"level {level}" if level else ""

    def make(self) -> Env:
        return TravelDeskEnv(self)

    def bad_actions(self) -> Sequence[str]:
        empty = {"date": "2030-03-05", "transport": "T00000", "stops": [], "hotel": "H00000"}
        return (*super().bad_actions(), "{" * 5000, "[" * 5000, "9" * 9000, json.dumps(empty))


class TravelDeskEnv(PureEnv):
    """One request."""

    def __init__(self, spec: TravelDesk) -> None:
        self._spec = spec
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._wanted, self._trip = request_of(task)
        self._over = False
        self._told: set[str] = set()
        return (Message("user", request_text(self._wanted, self._spec.style)),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._over = True
        trip = self._read(action)
        if trip is None or self._made_up(trip):
            unread = {"unread_n": float(trip is None), "made_up_n": float(trip is not None)}
            return StepResult((), 0.0, terminated=True, reward_parts={"veto": 1.0}, metrics=unread)
        held = check(self._spec.world, self._wanted, trip)
        success = all(v == 1 for v in held.values())
        others = [float(v) for k, v in held.items() if k != "themes"]
        parts = {"veto": 0.0, **{k: float(v) for k, v in held.items()}}
        reward = held["themes"] * sum(others) / len(others) if self._spec.reward == "share" else float(success)
        if self._spec.reward == "rubric":
            dimensions = rubric(held, complete=is_complete(self._wanted, trip))
            parts |= dimensions
            reward = sum(w * v for w, v in zip(self._spec.weights, dimensions.values(), strict=True))
        return StepResult(
            (),
            reward,
            terminated=True,
            success=success,
            reward_parts=parts,
            metrics={"unread_n": 0.0, "made_up_n": 0.0},
        )

    def reference_answer(self) -> str:
        return " ".join(ids_of(self._trip)) if self._spec.style == "short" else to_text(self._trip)

    def tools(self) -> ToolSet:
        """Return the ten tools for this episode, whose results are noted for the veto."""
        s = self._spec
        shared = desk_tools(s.num_cities, s.num_pois, s.seed, s.num_themes, s.id_digits)
        return EpisodeTools(shared, self._told, brief=s.style == "short")

    def _read(self, action: str) -> Itinerary | None:
        if self._spec.style == "full":
            return read(action)
        ids = read_ids(action)
        return ids and scheduled(self._spec.world, self._wanted.date, *ids)

    def _made_up(self, trip: Itinerary) -> bool:
        untold = self._spec.veto == "tools" and not self._told.issuperset(ids_of(trip))
        return untold or made_up(self._spec.world, trip)

    def reference_call(self, results: Sequence[ToolResult]) -> tuple[str, dict[str, Any]] | None:
        """Return the next call of the reference player, who looks up every part of the itinerary in turn; None after
        the last."""
        w, trip = self._wanted, self._trip
        means = "train_search" if trip.transport.startswith("T") else "flight_search"
        points = [f"{w.city}:station", *ids_of(dataclasses.replace(trip, transport=""))]
        rain = self._spec.world.sky[w.city, w.date] == "rain"
        limited = w.max_km < _FAR_KM
        calls: list[tuple[str, dict[str, Any]]] = [
            *([(means, {"start": w.start, "end": w.city, "date": w.date})] if w.ride else []),
            *([("weather", {"city": w.city, "date": w.date})] if not w.dry else []),
            *(("poi_search", {"city": w.city, "filters": _filters(t, w.date, rain)}) for t in w.themes),
            *(("poi_detail", {"id": s.poi}) for s in trip.stops if self._spec.style == "full"),
            *([("hotel_search", {"city": w.city})] if w.hotel else []),
            *([("distance_matrix", {"ids": points})] if limited else []),
        ]
        return calls[len(results)] if len(results) < len(calls) else None


@dataclasses.dataclass(frozen=True)
class Travel(TravelDesk):
    """A request, ten tools and an itinerary. Calls are written as
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and their results returned; an answer without a call is
    the itinerary (`rolljax.recipes.stagent.itinerary.read`)."""

    calls: int = 19
    """Maximum number of tool uses in an episode, which has one turn more than that."""
    calls_per_turn: int = 4
    """Maximum number of tool uses in one answer."""
    shown_bytes: int = 4096
    """Maximum number of bytes of a result that the policy sees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        looked_up = 4 + 2 * self.num_stops
        if self.levels:
            looked_up = 3 + (1 if self.style == "short" else 2) * max(map(_num_places, self.levels))
        if self.calls < looked_up:
            raise ConfigError(
                "is too few to look up a trip",
                setting="Travel.calls",
                value=self.calls,
                remedy=f"at least {looked_up}",
            )
        _ = self._env

    @functools.cached_property
    def _env(self) -> ToolEnv:
        desk = TravelDesk(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TravelDesk)})
        limits = ToolLimits(self.calls_per_turn, self.calls, self.shown_bytes)
        if self.style == "short":
            return ToolEnv(desk, parser="compact", style="none", limits=limits, last_note="")
        return ToolEnv(desk, limits=limits)

    @property
    def max_turns(self) -> int:
        return self._env.max_turns

    def make(self) -> Env:
        return self._env.make()

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), *self._env.bad_actions())


def request_of(task: Task) -> tuple[Wanted, Itinerary]:
    """Return the request of a task, and a trip that fulfils it.

    Raises:
      EnvError: the task is none of the desk's.
    """
    try:
        content = json.loads(task.content)
        wanted, trip = content["wanted"], content["trip"]
        stops = tuple(Stop(**s) for s in trip["stops"])
        return Wanted(**wanted | {"themes": tuple(wanted["themes"])}), Itinerary(**trip | {"stops": stops})
    except (ValueError, TypeError, KeyError) as e:
        raise EnvError(f"task {task.index} is no request: {e}") from None


def request_text(wanted: Wanted, style: str) -> str:
    """Return the request as the policy sees it."""
    if style == "full":
        asked = dataclasses.asdict(wanted) | {"themes": ", ".join(wanted.themes)}
        return _ASK.format(**asked, pace=RIDE_MIN_PER_KM)
    where = f"{wanted.start} to {wanted.city}" if wanted.ride else wanted.city
    parts = [*wanted.themes, *(["hotel"] if wanted.hotel else []), *(["dry"] if wanted.dry else [])]
    way = "" if wanted.max_km >= _FAR_KM else f", {wanted.max_km} km"
    return f"{where}, {wanted.date}: {', '.join(parts)}. At most {wanted.budget}{way}."


def rubric(held: Mapping[str, float], *, complete: bool) -> dict[str, float]:
    """Return the scores of the three dimensions, 0 to 1, from the constraints that hold (`itinerary.check`)."""
    mean = lambda names: sum(float(held[n]) for n in names) / len(names)  # noqa: E731
    return {
        "planning": held["themes"] * mean(("hours", "times", "weather", "distance", "budget")),
        "information": mean(("date", "transport", "city")),
        "service": float(complete),
    }


def _rows(path: str) -> Rows:
    files = tuple(find_files(path, "Travel.path"))
    return _opened(files, signature(files))


@functools.lru_cache(maxsize=16)
def _opened(files: tuple[Path, ...], state: Hashable) -> Rows:
    return open_rows(files)


def _num_places(level: int) -> int:
    return max(1, level - 3)


def _filters(theme: str, date: str, rain: bool) -> Mapping[str, Any]:
    return {"theme": theme, "open_on": date, **({"outdoor": False} if rain else {})}


# ---- requests -------------------------------------------------------------------------------------------------------


def _request(w: World, num_stops: int, num_days: int, rng: random.Random) -> tuple[Wanted, Itinerary]:
    """Return a request, and a possible trip, the best of a few, that just fulfils it."""
    while True:
        start, city = rng.sample(w.cities, 2)
        date = rng.choice(days()[:num_days])
        themes = tuple(rng.sample(w.themes, num_stops))
        drawn = [_draw(w, start, city, date, themes, rng) for _ in range(_DRAWS)]
        trips = [t for t in drawn if t is not None]
        if trips:
            price, km, trip = min(trips, key=lambda t: t[0] + 5 * t[1])
            budget = price + rng.randint(0, price // 10)
            return Wanted(start, city, date, themes, budget, round(km * 1.1 + 0.05, 1)), trip


def _graded_request(w: World, level: int, num_days: int, rng: random.Random) -> tuple[Wanted, Itinerary]:
    """Return a request of a level (`TravelDesk.levels`), and the cheapest trip that fulfils it."""
    while True:
        start, city = rng.sample(w.cities, 2)
        dry = level < 4
        dates = [d for d in days()[:num_days] if not dry or w.sky[city, d] != "rain"]
        if not dates:
            continue
        date = rng.choice(dates)
        themes = tuple(rng.sample(w.themes, _num_places(level)))
        trains = [r for r in _rides(w, start, city, date) if r.means == "train"]
        rides: list[Ride | None] = [*trains] if level >= 3 else [None]
        hotel = min(_hotels(w, city), key=lambda h: (h.price, h.id)) if level >= 2 else None
        wanted = Wanted(start, city, date, themes, 10**6, _FAR_KM, level >= 3, level >= 2, dry)
        found = []
        for ride, pois in itertools.product(rides, itertools.product(*(_pois(w, city, t) for t in themes))):
            trip = scheduled(w, date, ride.id if ride else "", [p.id for p in pois], hotel.id if hotel else "")
            if all(v == 1 for v in check(w, wanted, trip).values()):
                found.append((sum(x.price for x in (ride, hotel, *pois) if x), trip))
        if found:
            price, trip = min(found, key=lambda f: (f[0], ids_of(f[1])))
            return dataclasses.replace(wanted, budget=price + rng.randint(0, _SLACK)), trip


def _draw(
    w: World, start: str, city: str, date: str, themes: Sequence[str], rng: random.Random
) -> tuple[int, float, Itinerary] | None:
    """Generate a random trip with its price and its path in km; None if a place is closed on arrival."""
    ride = rng.choice(_rides(w, start, city, date))
    hotel = rng.choice(_hotels(w, city))
    dry = w.sky[city, date] != "rain"
    pois = []
    for theme in rng.sample(themes, len(themes)):
        open_then = [p for p in _pois(w, city, theme) if p.closed_on != weekday(date) and (dry or not p.outdoor)]
        if not open_then:
            return None
        pois.append(rng.choice(open_then))
    trip = scheduled(w, date, ride.id, [p.id for p in pois], hotel.id)
    if any(s.leave > p.closes for s, p in zip(trip.stops, pois, strict=True)):
        return None
    km = way_km([STATION, *((p.x, p.y) for p in pois), (hotel.x, hotel.y)])
    price = ride.price + hotel.price + sum(p.price for p in pois)
    return price, km, trip


@functools.lru_cache(maxsize=4096)
def _rides(w: World, start: str, end: str, date: str) -> list[Ride]:
    return [r for r in w.rides.values() if (r.start, r.end, r.date) == (start, end, date)]


@functools.lru_cache(maxsize=64)
def _hotels(w: World, city: str) -> list[Hotel]:
    return [h for h in w.hotels.values() if h.city == city]


@functools.lru_cache(maxsize=256)
def _pois(w: World, city: str, theme: str) -> list[Poi]:
    return [p for p in w.pois.values() if (p.city, p.theme) == (city, theme)]
