"""A travel desk: plan a day trip with ten tools over a world that never changes. After STAgent (Amap); a generated
country replaces its live maps and timetables, and a checker of verifiable constraints replaces its judge."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from rolljax.envs.base import Env, EnvSpec, PureEnv, StepResult
from rolljax.envs.tools import ToolEnv, ToolLimits, ToolResult, ToolSet
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.recipes.stagent.itinerary import Itinerary, Stop, Wanted, check, made_up, read, to_text, way_km
from rolljax.recipes.stagent.travel_tools import desk_tools
from rolljax.recipes.stagent.travel_world import (
    MAX_CITIES,
    RIDE_MIN_PER_KM,
    STATION,
    THEMES,
    Hotel,
    Poi,
    Ride,
    World,
    days,
    distance,
    ride_minutes,
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


@dataclasses.dataclass(frozen=True)
class TravelDesk(EnvSpec):
    """The requests of the travel desk and the check of an itinerary, without a way to call its tools: see `Travel`."""

    num_cities: int = 5
    """Number of cities."""
    num_pois: Annotated[int, Range(low=20, high=100)] = 24
    """Number of places in each city."""
    num_stops: Annotated[int, Range(low=1, high=4)] = 3
    """Themes that a request names."""
    reward: Literal["share", "strict"] = "share"
    """`share`, the share of wanted themes that is visited times the share of the other constraints that holds, or
    `strict`, 1 for all of them. A made-up id makes either 0."""
    seed: int = 0
    """Seed of the world and the requests."""

    def __post_init__(self) -> None:
        Range(low=2, high=MAX_CITIES).check(self, "num_cities")
        check_fields(self)

    @property
    def name(self) -> str:
        return "travel"

    @property
    def world(self) -> World:
        return world(self.num_cities, self.num_pois, self.seed)

    def task(self, index: int) -> Task:
        rng = random.Random(f"travel {self.seed} {index}")
        wanted, trip = _request(self.world, self.num_stops, rng)
        content = {"wanted": dataclasses.asdict(wanted), "trip": dataclasses.asdict(trip)}
        return Task(self.name, index, json.dumps(content))

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
        try:
            content = json.loads(task.content)
            wanted, trip = content["wanted"], content["trip"]
            self._wanted = Wanted(**wanted | {"themes": tuple(wanted["themes"])})
            self._trip = Itinerary(**trip | {"stops": tuple(Stop(**s) for s in trip["stops"])})
        except (ValueError, TypeError, KeyError) as e:
            raise EnvError(f"task {task.index} is no request: {e}") from None
        self._over = False
        asked = dataclasses.asdict(self._wanted) | {"themes": ", ".join(self._wanted.themes)}
        return (Message("user", _ASK.format(**asked, pace=RIDE_MIN_PER_KM)),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._over = True
        trip = read(action)
        if trip is None or made_up(self._spec.world, trip):
            unread = {"unread_n": float(trip is None), "made_up_n": float(trip is not None)}
            return StepResult((), 0.0, terminated=True, reward_parts={"veto": 1.0}, metrics=unread)
        held = check(self._spec.world, self._wanted, trip)
        success = all(v == 1 for v in held.values())
        others = [float(v) for k, v in held.items() if k != "themes"]
        reward = held["themes"] * sum(others) / len(others) if self._spec.reward == "share" else float(success)
        parts = {"veto": 0.0, **{k: float(v) for k, v in held.items()}}
        return StepResult(
            (),
            reward,
            terminated=True,
            success=success,
            reward_parts=parts,
            metrics={"unread_n": 0.0, "made_up_n": 0.0},
        )

    def reference_answer(self) -> str:
        return to_text(self._trip)

    def tools(self) -> ToolSet:
        """Return the ten tools."""
        return desk_tools(self._spec.num_cities, self._spec.num_pois, self._spec.seed)

    def reference_call(self, results: Sequence[ToolResult]) -> tuple[str, dict[str, Any]] | None:
        """Return the next call of the reference player, who looks up every part of the itinerary in turn; None after
        the last."""
        w, trip = self._wanted, self._trip
        means = "train_search" if trip.transport.startswith("T") else "flight_search"
        points = [f"{w.city}:station", *(s.poi for s in trip.stops), trip.hotel]
        rain = self._spec.world.sky[w.city, w.date] == "rain"
        calls: list[tuple[str, dict[str, Any]]] = [
            (means, {"start": w.start, "end": w.city, "date": w.date}),
            ("weather", {"city": w.city, "date": w.date}),
            *(("poi_search", {"city": w.city, "filters": _filters(t, w.date, rain)}) for t in w.themes),
            *(("poi_detail", {"id": s.poi}) for s in trip.stops),
            ("hotel_search", {"city": w.city}),
            ("distance_matrix", {"ids": points}),
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
        if self.calls < 4 + 2 * self.num_stops:
            raise ConfigError(
                "is too few to look up a trip",
                setting="Travel.calls",
                value=self.calls,
                remedy=f"at least {4 + 2 * self.num_stops}",
            )
        _ = self._env

    @functools.cached_property
    def _env(self) -> ToolEnv:
        desk = TravelDesk(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TravelDesk)})
        limits = ToolLimits(self.calls_per_turn, self.calls, self.shown_bytes)
        return ToolEnv(desk, limits=limits)

    @property
    def max_turns(self) -> int:
        return self._env.max_turns

    def make(self) -> Env:
        return self._env.make()

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), *self._env.bad_actions())


def _filters(theme: str, date: str, rain: bool) -> Mapping[str, Any]:
    return {"theme": theme, "open_on": date, **({"outdoor": False} if rain else {})}


# ---- requests -------------------------------------------------------------------------------------------------------


def _request(w: World, num_stops: int, rng: random.Random) -> tuple[Wanted, Itinerary]:
    """Return a request, and a possible trip, the best of a few, that just fulfils it."""
    while True:
        start, city = rng.sample(w.cities, 2)
        date = rng.choice(days())
        themes = tuple(rng.sample(list(THEMES), num_stops))
        drawn = [_draw(w, start, city, date, themes, rng) for _ in range(_DRAWS)]
        trips = [t for t in drawn if t is not None]
        if trips:
            price, km, trip = min(trips, key=lambda t: t[0] + 5 * t[1])
            budget = price + rng.randint(0, price // 10)
            return Wanted(start, city, date, themes, budget, round(km * 1.1 + 0.05, 1)), trip


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
    at, now, stops = STATION, ride.arrives, []
    for p in pois:
        arrive = max(p.opens, now + ride_minutes(distance(at, (p.x, p.y))))
        at, now = (p.x, p.y), arrive + p.minutes
        if now > p.closes:
            return None
        stops.append(Stop(p.id, arrive, now))
    km = way_km([STATION, *((p.x, p.y) for p in pois), (hotel.x, hotel.y)])
    price = ride.price + hotel.price + sum(p.price for p in pois)
    return price, km, Itinerary(date, ride.id, hotel.id, tuple(stops))


@functools.lru_cache(maxsize=4096)
def _rides(w: World, start: str, end: str, date: str) -> list[Ride]:
    return [r for r in w.rides.values() if (r.start, r.end, r.date) == (start, end, date)]


@functools.lru_cache(maxsize=64)
def _hotels(w: World, city: str) -> list[Hotel]:
    return [h for h in w.hotels.values() if h.city == city]


@functools.lru_cache(maxsize=256)
def _pois(w: World, city: str, theme: str) -> list[Poi]:
    return [p for p in w.pois.values() if (p.city, p.theme) == (city, theme)]
