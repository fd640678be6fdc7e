"""The ten tools of the travel desk. Names follow STAgent's (Amap); data and schemas are this world's."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from rolljax.envs.tools import FunctionToolSet, ToolError, ToolLimits, ToolResult, ToolSet, ToolSpec
from rolljax.recipes.stagent.travel_world import (
    GRID_KM,
    RIDE_MIN_PER_KM,
    THEMES,
    WALK_MIN_PER_KM,
    Poi,
    Ride,
    World,
    clock,
    days,
    distance,
    weekday,
    world,
)

MAX_ROWS = 10
_BRIEF = ("id", "opens", "closes", "arrives", "price", "sky", "km", "minutes", "text")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
City = Annotated[str, "name of a city"]
Date = Annotated[str, "YYYY-MM-DD"]
Id = Annotated[str, "id of a place or hotel, or CITY:station"]


class Desk:
    """The tools, as methods over a world. What they return is a JSON value; what cannot be is a `ToolError`."""

    def __init__(self, w: World) -> None:
        self._world = w

    def poi_search(
        self,
        city: City,
        query: Annotated[str, "words of the name, the theme or the kind; empty for all"] = "",
        radius: Annotated[float, "km around the middle of the city"] = 2.0 * GRID_KM,
        filters: Annotated[dict[str, Any] | None, "any of theme, kind, max_price, outdoor, open_on (a date)"] = None,
    ) -> list[dict[str, Any]]:
        """Find places in a city, at most ten, nearest to the middle first."""
        middle = (GRID_KM / 2, GRID_KM / 2)
        wanted = self._filters(filters or {})
        words = query.lower().split()[:8]
        found = [
            p
            for p in self._pois(city)
            if distance((p.x, p.y), middle) <= radius
            and all(w in f"{p.name} {p.theme} {p.kind}".lower() for w in words)
            and all(test(p) for test in wanted)
        ]
        return [_row(p) for p in sorted(found, key=lambda p: (distance((p.x, p.y), middle), p.id))[:MAX_ROWS]]

    def poi_detail(self, id: Annotated[str, "id of a place"]) -> dict[str, Any]:
        """Opening hours, closing day, ticket price and length of a visit of a place."""
        p = self._world.pois.get(id)
        if p is None:
            raise ToolError(f"there is no place {id[:40]!r}")
        hours = {"opens": clock(p.opens), "closes": clock(p.closes), "closed_on": _WEEKDAYS[p.closed_on]}
        return {**_row(p), "city": p.city, **hours, "visit_minutes": p.minutes, "outdoor": p.outdoor}

    def route(self, start: Id, end: Id, mode: Literal["ride", "walk"] = "ride") -> dict[str, Any]:
        """Distance and time between two points of a city."""
        km = self._km(start, end)
        return {"km": round(km, 2), "minutes": round(km * (RIDE_MIN_PER_KM if mode == "ride" else WALK_MIN_PER_KM), 1)}

    def distance_matrix(self, ids: Annotated[list[str], "up to ten points of one city"]) -> list[list[float]]:
        """Distances in km between all pairs of points."""
        if not 1 <= len(ids) <= MAX_ROWS:
            raise ToolError(f"takes 1 to {MAX_ROWS} ids")
        return [[round(self._km(a, b), 2) for b in ids] for a in ids]

    def nearby(
        self, city: City, x: float, y: float, type: Annotated[str, "kind or theme"] = "", radius: float = 3.0
    ) -> list[dict[str, Any]]:
        """Places within a radius in km of a point of the city's grid, at most ten, nearest first."""
        found = [(distance((p.x, p.y), (x, y)), p) for p in self._pois(city) if type.lower() in ("", p.kind, p.theme)]
        near = sorted(((km, p.id, p) for km, p in found if km <= radius))[:MAX_ROWS]
        return [{**_row(p), "km": round(km, 2)} for km, _, p in near]

    def weather(self, city: City, date: Date) -> dict[str, Any]:
        """The forecast for a day: sun, clouds or rain, and the temperature."""
        at = (self._city(city), self._date(date))
        return {"sky": self._world.sky[at], "degrees_c": self._world.degrees[at]}

    def flight_search(self, start: City, end: City, date: Date) -> list[dict[str, Any]]:
        """Flights between two cities on a day."""
        return self._rides("flight", start, end, date)

    def train_search(self, start: City, end: City, date: Date) -> list[dict[str, Any]]:
        """Trains between two cities on a day."""
        return self._rides("train", start, end, date)

    def hotel_search(self, city: City, max_price: Annotated[int, "for a night"] = 10_000) -> list[dict[str, Any]]:
        """Hotels of a city, cheapest first."""
        name = self._city(city)
        found = [h for h in self._world.hotels.values() if h.city == name and h.price <= max_price]
        found.sort(key=lambda h: (h.price, h.id))
        return [{"id": h.id, "name": h.name, "stars": h.stars, "x": h.x, "y": h.y, "price": h.price} for h in found]

    def web_search(self, query: str) -> list[dict[str, str]]:
        """Search pages about cities and places, at most three."""
        scores = self._world.index.scores(query)
        best = sorted(scores, key=lambda i: (-scores[i], i))[:3]
        return [{"title": self._world.pages[i][0], "text": self._world.pages[i][1]} for i in best]

    # ---- what the tools share ----------------------------------------------------------------------------------------

    def _city(self, name: str) -> str:
        found = next((c for c in self._world.cities if c.lower() == name.strip().lower()), None)
        if found is None:
            raise ToolError(f"there is no city {name[:40]!r}; cities: {', '.join(self._world.cities)}")
        return found

    def _date(self, text: str) -> str:
        known = days()
        if text not in known:
            raise ToolError(f"no data for {text[:40]!r}; dates are {known[0]} to {known[-1]}")
        return text

    def _pois(self, city: str) -> list[Poi]:
        name = self._city(city)
        return [p for p in self._world.pois.values() if p.city == name]

    def _filters(self, filters: dict[str, Any]) -> list[Any]:
        known = {
            "theme": lambda v: lambda p: p.theme == v,
            "kind": lambda v: lambda p: p.kind == v,
            "outdoor": lambda v: lambda p: p.outdoor == v,
            "max_price": lambda v: lambda p: isinstance(v, (int, float)) and p.price <= v,
            "open_on": lambda v: lambda p: p.closed_on != weekday(self._date(str(v))),
        }
        for key in filters:
            if key not in known:
                raise ToolError(f"there is no filter {key[:40]!r}; filters: {', '.join(known)}")
        return [known[key](value) for key, value in filters.items()]

    def _km(self, a: str, b: str) -> float:
        (city_a, *at_a), (city_b, *at_b) = self._point(a), self._point(b)
        if city_a != city_b:
            raise ToolError(f"{a[:40]} and {b[:40]} are in different cities")
        return distance((at_a[0], at_a[1]), (at_b[0], at_b[1]))

    def _point(self, id: str) -> tuple[str, int, int]:
        city, _, station = id.partition(":")
        if station == "station":
            return (self._city(city), 0, 0)
        found = self._world.point(id)
        if found is None:
            raise ToolError(f"there is no place or hotel {id[:40]!r}")
        return found

    def _rides(self, means: str, start: str, end: str, date: str) -> list[dict[str, Any]]:
        wanted = (means, self._city(start), self._city(end), self._date(date))
        found = [r for r in self._world.rides.values() if (r.means, r.start, r.end, r.date) == wanted]
        return [_ride_row(r) for r in sorted(found, key=lambda r: r.departs)]


@functools.lru_cache(maxsize=4)
def desk_tools(
    num_cities: int, num_pois: int, seed: int, num_themes: int = len(THEMES), id_digits: int = 5
) -> FunctionToolSet:
    """Return the ten tools over a world. They change nothing, so all episodes share them."""
    d = Desk(world(num_cities, num_pois, seed, num_themes, id_digits))
    tools: list[Callable[..., Any]] = [d.poi_search, d.poi_detail, d.route, d.distance_matrix, d.nearby, d.weather]
    tools += [d.flight_search, d.train_search, d.hotel_search, d.web_search]
    return FunctionToolSet(tools)


class EpisodeTools(ToolSet):
    """The tools as one episode uses them.

    shared: the tools of all episodes. told: receives every id that a result names. brief: whether results are lines of
    values instead of JSON.
    """

    def __init__(self, shared: FunctionToolSet, told: set[str], *, brief: bool) -> None:
        self._shared, self._told, self._brief = shared, told, brief

    def list(self) -> tuple[ToolSpec, ...]:
        return self._shared.list()

    def run(self, spec: ToolSpec, arguments: Mapping[str, Any], limits: ToolLimits) -> ToolResult:
        result = self._shared.run(spec, arguments, limits)
        self._told.update(_ids_in(result.structured))
        return dataclasses.replace(result, text=in_lines(result.structured)) if self._brief else result


def _ids_in(value: Any) -> set[str]:
    rows = value if isinstance(value, list) else [value]
    return {row["id"] for row in rows if isinstance(row, dict) and "id" in row}


def in_lines(value: Any) -> str:
    """Return a tool's value in few bytes: a line for each row, with the values that an itinerary needs."""
    if isinstance(value, list):
        return "\n".join(map(in_lines, value)) or "none"
    if isinstance(value, dict):
        return " ".join(str(value[key]) for key in _BRIEF if key in value)
    return json.dumps(value)


def _row(p: Poi) -> dict[str, Any]:
    return {"id": p.id, "name": p.name, "theme": p.theme, "kind": p.kind, "x": p.x, "y": p.y, "price": p.price}


def _ride_row(r: Ride) -> dict[str, Any]:
    return {"id": r.id, "departs": clock(r.departs), "arrives": clock(r.arrives), "price": r.price}
