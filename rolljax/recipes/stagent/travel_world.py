"""A small made-up country for the travel desk: cities on grids of kilometres, places with opening hours and prices,
hotels, trains, flights, weather and web pages. Everything follows from its seed and never changes."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import random
from collections.abc import Mapping

from rolljax.envs.bm25 import Bm25

FIRST_DAY = datetime.date(2030, 3, 4)
NUM_DAYS = 28
GRID_KM = 10
STATION = (0, 0)
"""The place where trains and flights arrive in every city."""
RIDE_MIN_PER_KM, WALK_MIN_PER_KM = 3, 12
THEMES: Mapping[str, tuple[str, str]] = {
    "art": ("museum", "sculpture garden"),
    "food": ("restaurant", "market"),
    "views": ("tower", "hilltop"),
    "rest": ("library", "park"),
    "history": ("archive", "ruin"),
    "music": ("concert hall", "bandstand"),
}
"""Travel theme -> its indoor and its outdoor kind of place."""
_CITIES = "Velmora Tasken Orrin Sulvay Perrin Quellin Hadria Mirsk".split()
MAX_CITIES = len(_CITIES)
_NAMES = "Amber Birch Copper Dawn Ember Falcon Garnet Heron Iris Juniper Kite Lark".split()
_SKIES = ("sun", "clouds", "rain")


@dataclasses.dataclass(frozen=True, slots=True)
class Poi:
    """A place."""

    id: str
    name: str
    city: str
    theme: str
    kind: str
    outdoor: bool
    x: int
    """Position of the place along the x axis, in km."""
    y: int
    """Position of the place along the y axis, in km."""
    opens: int
    """Opening time, in minutes after midnight."""
    closes: int
    """Closing time, in minutes after midnight."""
    closed_on: int
    """Weekday, Monday is 0."""
    price: int
    """Price of a ticket."""
    minutes: int
    """Duration of a visit, in minutes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hotel:
    """A hotel of a city."""

    id: str
    name: str
    city: str
    stars: int
    x: int
    y: int
    price: int
    """Price of one night."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ride:
    """A train or flight."""

    id: str
    means: str
    start: str
    end: str
    date: str
    departs: int
    """Departure time, in minutes after midnight of the same day."""
    arrives: int
    """Arrival time, in minutes after midnight of the same day."""
    price: int


def distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Return the straight-line distance in km."""
    return math.hypot(a[0] - b[0], a[1] - b[1])


def ride_minutes(km: float) -> int:
    """Return the minutes of a ride, rounded up."""
    return math.ceil(round(km * RIDE_MIN_PER_KM, 6))


def clock(minutes: int) -> str:
    """Format minutes after midnight as HH:MM."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def days() -> list[str]:
    """Return all dates, as texts."""
    return [(FIRST_DAY + datetime.timedelta(d)).isoformat() for d in range(NUM_DAYS)]


def weekday(date: str) -> int:
    """Return the weekday; Monday is 0."""
    return datetime.date.fromisoformat(date).weekday()


class World:
    """The country. Ids are random, so that a made-up one does not exist (with few digits: hardly ever)."""

    def __init__(self, num_cities: int, num_pois: int, seed: int, num_themes: int, id_digits: int) -> None:
        rng = random.Random(f"travel world {seed}")
        self.themes = tuple(THEMES)[:num_themes]
        self._id_digits = id_digits
        self.cities = tuple(_CITIES[:num_cities])
        self._taken: set[str] = set()
        self.pois = {p.id: p for c in self.cities for p in self._pois(rng, c, num_pois)}
        self.hotels = {h.id: h for c in self.cities for h in self._hotels(rng, c)}
        pairs = [(a, b) for a in self.cities for b in self.cities if a != b]
        self.rides = {r.id: r for date in days() for a, b in pairs for r in self._rides(rng, a, b, date)}
        self.sky = {(c, date): rng.choice(_SKIES) for c in self.cities for date in days()}
        self.degrees = {(c, date): rng.randint(4, 24) for c in self.cities for date in days()}
        self.pages = [(c, f"{c}: a city for {_best(self, c)}. Its station is at (0, 0).") for c in self.cities]
        self.pages += [(p.name, _page(p)) for p in self.pois.values()]
        self.index = Bm25([f"{title} {text}" for title, text in self.pages])

    def point(self, id: str) -> tuple[str, int, int] | None:
        """Return city and coordinates of a poi or hotel; None if there is no such id."""
        found = self.pois.get(id) or self.hotels.get(id)
        return (found.city, found.x, found.y) if found else None

    def _id(self, rng: random.Random, letter: str) -> str:
        while True:
            name = f"{letter}{rng.getrandbits(4 * self._id_digits):0{self._id_digits}X}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _pois(self, rng: random.Random, city: str, num: int) -> list[Poi]:
        spots = rng.sample([(x, y) for x in range(GRID_KM + 1) for y in range(GRID_KM + 1) if x or y], num)
        themes = self.themes
        pois = []
        for i, (x, y) in enumerate(spots):
            theme, outdoor = themes[i % len(themes)], i // len(themes) % 2 == 1
            kind = THEMES[theme][outdoor]
            name = f"{rng.choice(_NAMES)} {kind.title()} {i + 1}"
            opens = 60 * rng.randint(8, 11)
            closes = opens + 60 * rng.randint(5, 10)
            rest = rng.choice([15, 20, 30, 45, 60, 90])
            price = rng.randint(0, 12) if outdoor else rng.randint(6, 40)
            pois.append(
                Poi(self._id(rng, "P"), name, city, theme, kind, outdoor, x, y, opens, closes, i % 7, price, rest)
            )
        return pois

    def _hotels(self, rng: random.Random, city: str) -> list[Hotel]:
        return [
            Hotel(
                self._id(rng, "H"),
                f"Hotel {name}",
                city,
                stars,
                rng.randint(0, GRID_KM),
                rng.randint(1, GRID_KM),
                stars * 20 + rng.randint(0, 60),
            )
            for name, stars in zip(rng.sample(_NAMES, 5), (1, 2, 3, 4, 5), strict=True)
        ]

    def _rides(self, rng: random.Random, start: str, end: str, date: str) -> list[Ride]:
        rides = []
        for means, letter, takes, price in (
            ("train", "T", (120, 240), (20, 70)),
            ("train", "T", (120, 240), (20, 70)),
            ("flight", "F", (50, 80), (60, 160)),
        ):
            departs = rng.randrange(300, 660, 5)
            arrives = departs + rng.randrange(*takes, 5)
            rides.append(Ride(self._id(rng, letter), means, start, end, date, departs, arrives, rng.randint(*price)))
        return rides


@functools.lru_cache(maxsize=4)
def world(num_cities: int, num_pois: int, seed: int, num_themes: int = len(THEMES), id_digits: int = 5) -> World:
    """Return the world of these settings; made once per process."""
    return World(num_cities, num_pois, seed, num_themes, id_digits)


def _best(w: World, city: str) -> str:
    """Return the theme with the cheapest place."""
    return min((p for p in w.pois.values() if p.city == city), key=lambda p: (p.price, p.id)).theme


def _page(p: Poi) -> str:
    where = "under the open sky" if p.outdoor else "indoors"
    return f"A {p.kind} in {p.city}, {where}, for {p.theme}. A visit takes {p.minutes} minutes."
