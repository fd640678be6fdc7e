"""Parse an itinerary from JSON, and check every constraint separately against the world."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from rolljax.envs.text import json_at
from rolljax.recipes.stagent.travel_world import STATION, Poi, World, clock, distance, ride_minutes, weekday

MAX_ANSWER_CHARS = 16_384
MAX_STOPS = 12
NINE = 9 * 60
ID = re.compile(r"[PHTF][0-9A-F]{1,8}")
"""An id of a place, a hotel, a train or a flight."""
_TRIES = 16
_CLOCK = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The constraints of a trip."""

    start: str
    """City of departure."""
    city: str
    date: str
    themes: tuple[str, ...]
    budget: int
    """Budget for the whole trip."""
    max_km: float
    """Maximum length in km of the way from the station through the places to the hotel."""
    ride: bool = True
    """Whether a train or flight is asked for; if not, the traveller is there at nine."""
    hotel: bool = True
    """Whether a hotel is asked for."""
    dry: bool = False
    """Whether the request says that no rain is forecast."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """A visit."""

    poi: str
    arrive: int
    """Arrival time, in minutes after midnight."""
    leave: int
    """Departure time, in minutes after midnight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Itinerary:
    """A trip: a train or flight, the visits in order, a hotel. transport, poi, hotel: ids; transport and hotel may be
    empty."""

    date: str
    transport: str
    hotel: str
    stops: tuple[Stop, ...]


def read(text: str) -> Itinerary | None:
    """Return the last JSON object in a text that is an itinerary; None if there is none.

    `{"date": "2030-03-05", "transport": "T0A1B2", "stops": [{"poi": "P3C4D5", "arrive": "10:30", "leave": "12:00"}],
    "hotel": "H6E7F8"}`
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    found, at = None, text.find("{")
    for _ in range(_TRIES):
        if at < 0:
            break
        try:
            value, end = json_at(text, at)
        except ValueError:
            value, end = None, at + 1
        found = _itinerary(value) or found
        at = text.find("{", end)
    return found


def _itinerary(value: Any) -> Itinerary | None:
    if not isinstance(value, dict) or not isinstance(value.get("stops"), list) or len(value["stops"]) > MAX_STOPS:
        return None
    date, transport, hotel = (value.get(key) for key in ("date", "transport", "hotel"))
    if not (isinstance(date, str) and isinstance(transport, str) and isinstance(hotel, str)):
        return None
    stops = [_stop(s) for s in value["stops"]]
    return Itinerary(date, transport, hotel, tuple(s for s in stops if s)) if all(stops) else None


def _stop(value: Any) -> Stop | None:
    if not isinstance(value, dict) or not isinstance(value.get("poi"), str):
        return None
    arrive, leave = _minutes(value.get("arrive")), _minutes(value.get("leave"))
    return None if arrive is None or leave is None else Stop(value["poi"], arrive, leave)


def _minutes(value: Any) -> int | None:
    found = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    return int(found[1]) * 60 + int(found[2]) if found else None


def read_ids(text: str) -> tuple[str, tuple[str, ...], str] | None:
    """Return the train or flight, the places in order, and the hotel of an answer that is ids alone, such as
    `T0A P3C H6E`; of several trains or hotels the last. A part that is not named is empty. None: other text, or no id.
    """
    words = text.split()
    if not words or len(words) > MAX_STOPS or not all(ID.fullmatch(word) for word in words):
        return None
    rides, hotels = ([w for w in words if w[0] in letters] for letters in ("TF", "H"))
    return (rides or [""])[-1], tuple(w for w in words if w[0] == "P"), (hotels or [""])[-1]


def scheduled(world: World, date: str, ride: str, pois: Sequence[str], hotel: str) -> Itinerary:
    """Return the trip in which every place is visited as early as possible, even if it is closed then. An id that does
    not exist takes no time."""
    found = world.rides.get(ride)
    at, now, stops = STATION, found.arrives if found else NINE, []
    for id in pois:
        p = world.pois.get(id)
        arrive = max(p.opens, now + ride_minutes(distance(at, (p.x, p.y)))) if p else now
        at, now = ((p.x, p.y), arrive + p.minutes) if p else (at, now)
        stops.append(Stop(id, arrive, now))
    return Itinerary(date, ride, hotel, tuple(stops))


def ids_of(trip: Itinerary) -> list[str]:
    """Return the ids that a trip names."""
    return [id for id in (trip.transport, *(s.poi for s in trip.stops), trip.hotel) if id]


def made_up(world: World, trip: Itinerary) -> bool:
    """Return whether the trip names a place, hotel, train or flight that does not exist."""
    known = [s.poi in world.pois for s in trip.stops]
    others = (trip.hotel in ("", *world.hotels), trip.transport in ("", *world.rides))
    return not (all(known) and all(others))


def is_complete(wanted: Wanted, trip: Itinerary) -> bool:
    """Return whether the trip has the parts that are asked for and no others."""
    return (bool(trip.transport), len(trip.stops), bool(trip.hotel)) == (wanted.ride, len(wanted.themes), wanted.hotel)


def way_km(points: Sequence[tuple[float, float]]) -> float:
    """Return the length of a path through points."""
    return sum(distance(a, b) for a, b in zip(points, points[1:], strict=False))


def check(world: World, wanted: Wanted, trip: Itinerary) -> dict[str, bool | float]:
    """Check every constraint by name; `themes` is the fraction of the wanted themes with a separate visit. The trip
    must name nothing that is made up.

    transport: right cities, right day; if one is asked for, there is one. date: of the trip. city: of hotel and places;
    if a hotel is asked for, there is one. hours: every visit on an opening day, within opening hours, and long enough.
    times: enough to ride from one point to the next. weather: nothing outdoors on a day of rain. distance, budget: not
    above.
    """
    pois = [world.pois[s.poi] for s in trip.stops]
    visits = list(zip(trip.stops, pois, strict=True))
    hotel, ride = world.hotels.get(trip.hotel), world.rides.get(trip.transport)
    points = [STATION, *((p.x, p.y) for p in pois), *([(hotel.x, hotel.y)] if hotel else [])]
    visited = {p.theme for p in pois}
    cities = {p.city for p in pois} | ({hotel.city} if hotel else set())
    free = [ride.arrives if ride else NINE, *(s.leave for s in trip.stops)]
    hops = [distance(a, b) for a, b in zip(points[:-1], points[1:-1], strict=False)]
    return {
        "themes": sum(t in visited for t in wanted.themes) / len(wanted.themes),
        "date": trip.date == wanted.date,
        "transport": (ride.start, ride.end, ride.date) == (wanted.start, wanted.city, wanted.date)
        if ride
        else not wanted.ride,
        "city": cities == {wanted.city} and (hotel is not None or not wanted.hotel),
        "hours": all(_within(s, p, wanted.date) for s, p in visits),
        "times": all(s.arrive >= t + ride_minutes(km) for s, t, km in zip(trip.stops, free, hops, strict=False)),
        "weather": world.sky[wanted.city, wanted.date] != "rain" or not any(p.outdoor for p in pois),
        "distance": way_km(points) <= wanted.max_km + 1e-9,
        "budget": sum(x.price for x in (ride, hotel, *pois) if x) <= wanted.budget,
    }


def _within(stop: Stop, poi: Poi, date: str) -> bool:
    open_then = poi.closed_on != weekday(date) and poi.opens <= stop.arrive and stop.leave <= poi.closes
    return open_then and stop.leave - stop.arrive >= poi.minutes


def to_text(trip: Itinerary) -> str:
    """Return the itinerary in the form that `read` parses."""
    stops = [{"poi": s.poi, "arrive": clock(s.arrive), "leave": clock(s.leave)} for s in trip.stops]
    return json.dumps({"date": trip.date, "transport": trip.transport, "stops": stops, "hotel": trip.hotel})
