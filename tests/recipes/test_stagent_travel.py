"""The travel desk: its tools, its world, and every constraint of an itinerary."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.catalog import make_spec, ref_of
from rolljax.errors import ConfigError, EnvError
from rolljax.recipes.stagent.itinerary import Itinerary, Stop, Wanted, check, made_up, read, to_text, way_km
from rolljax.recipes.stagent.travel import Travel, TravelDesk
from rolljax.recipes.stagent.travel_tools import desk_tools
from rolljax.recipes.stagent.travel_world import THEMES, clock, days, distance, ride_minutes, weekday, world
from rolljax.types import Task

SPEC = Travel()
DESK = TravelDesk()
WORLD = DESK.world
TOOLS = desk_tools(5, 24, 0)


def minutes(text):
    hour, minute = text.split(":")
    return 60 * int(hour) + int(minute)


def call(name, **arguments):
    result = TOOLS.call(name, arguments)
    assert not result.is_error, result.text
    return json.loads(result.text)


def trip_of(index):
    """Return the wishes of a task, and a trip that fulfils them."""
    env = DESK.make()
    env.reset(DESK.task(index))
    content = json.loads(DESK.task(index).content)["wanted"]
    return Wanted(**content | {"themes": tuple(content["themes"])}), read(env.reference_answer())


def score(index, trip, spec=DESK):
    env = spec.make()
    env.reset(spec.task(index))
    return env.step(trip if isinstance(trip, str) else to_text(trip))


# ---- the world ------------------------------------------------------------------------------------------------------


def test_distances_are_straight():
    assert distance((0, 0), (3, 4)) == 5 and way_km([(0, 0), (3, 4), (3, 0)]) == 9
    assert ride_minutes(5) == 15 and ride_minutes(0.1) == 1 and ride_minutes(distance((0, 0), (1, 1))) == 5


def test_a_world_is_its_settings():
    again = world.__wrapped__(5, 24, 0)
    assert again.pois == WORLD.pois and again.rides == WORLD.rides and again.sky == WORLD.sky
    assert world(5, 24, 1).pois != WORLD.pois
    for city in WORLD.cities:
        pois = [p for p in WORLD.pois.values() if p.city == city]
        assert len(pois) == 24 and len({(p.x, p.y) for p in pois}) == 24
        assert {(p.theme, p.outdoor) for p in pois} == set(itertools.product(THEMES, (False, True)))
        assert all(0 <= p.x <= 10 and 0 <= p.y <= 10 and p.opens < p.closes < 24 * 60 for p in pois)
    ids = [*WORLD.pois, *WORLD.hotels, *WORLD.rides]
    assert len(ids) == len(set(ids))


# ---- the tools ------------------------------------------------------------------------------------------------------


def test_the_ten_tools_are_told():
    names = (
        "poi_search poi_detail route distance_matrix nearby weather flight_search train_search hotel_search web_search"
    )
    assert [s.name for s in TOOLS.list()] == names.split()
    assert all(s.description for s in TOOLS.list())


def test_places_can_be_found_and_looked_up():
    city, date = WORLD.cities[1], days()[3]
    rows = call(
        "poi_search", city=city.lower(), filters={"theme": "art", "open_on": date, "outdoor": False, "max_price": 30}
    )
    want = {
        p.id for p in WORLD.pois.values()
        if p.city == city and p.theme == "art" and not p.outdoor and p.price <= 30 and p.closed_on != weekday(date)
    }  # fmt: skip
    assert {r["id"] for r in rows} == want
    assert len(call("poi_search", city=city)) == 10
    assert {r["kind"] for r in call("poi_search", city=city, query="MUSEUM")} == {"museum"}
    middle = call("poi_search", city=city, radius=2)
    assert all(distance((r["x"], r["y"]), (5, 5)) <= 2 for r in middle)
    poi = next(p for p in WORLD.pois.values() if p.city == city)
    detail = call("poi_detail", id=poi.id)
    assert (minutes(detail["opens"]), minutes(detail["closes"]), detail["visit_minutes"]) == (
        poi.opens,
        poi.closes,
        poi.minutes,
    )
    near = call("nearby", city=city, x=poi.x, y=poi.y, type=poi.kind)
    assert near[0]["id"] == poi.id and near[0]["km"] == 0 and [r["km"] for r in near] == sorted(r["km"] for r in near)


def test_ways_rides_hotels_weather_and_pages():
    city, other, date = WORLD.cities[0], WORLD.cities[1], days()[5]
    a, b = [p for p in WORLD.pois.values() if p.city == city][:2]
    km = distance((a.x, a.y), (b.x, b.y))
    assert call("route", start=a.id, end=b.id) == {"km": round(km, 2), "minutes": round(3 * km, 1)}
    assert call("route", start=a.id, end=b.id, mode="walk")["minutes"] == round(12 * km, 1)
    matrix = call("distance_matrix", ids=[f"{city}:station", a.id, b.id])
    assert matrix[1][2] == matrix[2][1] == round(km, 2) and matrix[0][1] == round(distance((0, 0), (a.x, a.y)), 2)
    trains, flights = (call(f"{m}_search", start=city, end=other, date=date) for m in ("train", "flight"))
    assert len(trains) == 2 and len(flights) == 1
    assert [minutes(r["arrives"]) for r in trains] == [WORLD.rides[r["id"]].arrives for r in trains]
    prices = [h["price"] for h in call("hotel_search", city=city)]
    assert len(prices) == 5 and prices == sorted(prices)
    assert len(call("hotel_search", city=city, max_price=prices[1])) == 2
    assert call("weather", city=city, date=date)["sky"] == WORLD.sky[city, date]
    assert call("web_search", query=f"{a.name} {city}")[0]["title"] == a.name
    assert call("web_search", query="zzz") == []


@pytest.mark.parametrize(
    "name, arguments, told",
    [
        ("weather", {"city": "Atlantis", "date": "2030-03-05"}, "there is no city 'Atlantis'; cities: Velmora"),
        ("weather", {"city": "Velmora", "date": "2020-01-01"}, "dates are 2030-03-04 to 2030-03-31"),
        ("poi_detail", {"id": "P" + "9" * 10**5}, "there is no place"),
        ("poi_search", {"city": "Velmora", "filters": {"colour": 1}}, "there is no filter 'colour'"),
        ("poi_search", {"city": "Velmora", "filters": {"open_on": 10**50}}, "no data for"),
        ("poi_search", {"city": 7}, "must be a string"),
        ("distance_matrix", {"ids": []}, "1 to 10"),
        ("route", {"start": "x", "end": "y"}, "there is no place or hotel"),
        ("route", {"start": "Velmora:station", "end": "Tasken:station"}, "different cities"),
        ("hotels", {}, "unknown tool"),
    ],
)
def test_what_cannot_be_is_told_not_raised(name, arguments, told):
    result = TOOLS.call(name, arguments)
    assert result.is_error and told in result.text and len(result.text) < 400


# ---- the check ------------------------------------------------------------------------------------------------------


def change(trip, i, **changes):
    stops = list(trip.stops)
    stops[i] = dataclasses.replace(stops[i], **changes)
    return dataclasses.replace(trip, stops=tuple(stops))


def broken(wanted, trip):
    return {k for k, v in check(WORLD, wanted, trip).items() if v != 1}


def test_reference_trips_hold_every_constraint():
    for i in range(60):
        wanted, trip = trip_of(i)
        assert not broken(wanted, trip) and not made_up(WORLD, trip)
        result = score(i, trip)
        assert result.reward == 1 and result.success and result.reward_parts["veto"] == 0


def test_each_constraint_can_be_broken_alone():
    wanted, trip = trip_of(2)
    first = WORLD.pois[trip.stops[0].poi]
    last = WORLD.pois[trip.stops[-1].poi]
    spent = WORLD.rides[trip.transport].price + WORLD.hotels[trip.hotel].price
    spent += sum(WORLD.pois[s.poi].price for s in trip.stops)
    way = [(0, 0)] + [(WORLD.pois[s.poi].x, WORLD.pois[s.poi].y) for s in trip.stops]
    hotel = WORLD.hotels[trip.hotel]
    km = way_km([*way, (hotel.x, hotel.y)])
    assert broken(dataclasses.replace(wanted, budget=spent), trip) == set()
    assert broken(dataclasses.replace(wanted, budget=spent - 1), trip) == {"budget"}
    assert broken(dataclasses.replace(wanted, max_km=km), trip) == set()
    assert broken(dataclasses.replace(wanted, max_km=km - 0.01), trip) == {"distance"}
    assert broken(wanted, dataclasses.replace(trip, date="2030-03-04" if wanted.date != "2030-03-04" else "x")) == {
        "date"
    }
    late = change(trip, -1, arrive=last.closes - last.minutes + 1, leave=last.closes + 1)
    assert broken(wanted, late) == {"hours"}
    assert broken(wanted, change(trip, -1, arrive=last.closes - last.minutes, leave=last.closes)) == set()
    assert broken(wanted, change(trip, -1, leave=trip.stops[-1].leave - 1)) == {"hours"}  # too short a visit
    assert "times" in broken(wanted, change(trip, 0, arrive=WORLD.rides[trip.transport].arrives))
    assert "hours" in broken(wanted, change(trip, 0, arrive=first.opens - 1, leave=first.opens - 1 + first.minutes))
    away = next(h for h in WORLD.hotels.values() if h.city != wanted.city)
    assert "city" in broken(wanted, dataclasses.replace(trip, hotel=away.id))
    tomorrow = next(
        r for r in WORLD.rides.values() if (r.start, r.end) == (wanted.start, wanted.city) and r.date != wanted.date
    )
    assert "transport" in broken(wanted, dataclasses.replace(trip, transport=tomorrow.id))
    fewer = dataclasses.replace(trip, stops=trip.stops[:-1])
    assert check(WORLD, wanted, fewer)["themes"] == pytest.approx(2 / 3)


def test_closing_days_and_rain():
    wanted, trip = trip_of(2)
    shut = next(d for d in days() if weekday(d) == WORLD.pois[trip.stops[0].poi].closed_on)
    assert "hours" in broken(dataclasses.replace(wanted, date=shut), trip)
    outdoors = next(p for p in WORLD.pois.values() if p.outdoor and p.city == wanted.city)
    walk = dataclasses.replace(trip, stops=(Stop(outdoors.id, 600, 700),))
    rain, sun = (next(d for d in days() if WORLD.sky[wanted.city, d] == sky) for sky in ("rain", "sun"))
    assert not check(WORLD, dataclasses.replace(wanted, date=rain), walk)["weather"]
    assert check(WORLD, dataclasses.replace(wanted, date=sun), walk)["weather"]
    assert check(WORLD, dataclasses.replace(wanted, date=rain), dataclasses.replace(walk, stops=()))["weather"]


@pytest.mark.parametrize("field", ["poi", "hotel", "transport"])
def test_a_made_up_id_vetoes_everything(field):
    _, trip = trip_of(4)
    trip = change(trip, 1, poi="P00000") if field == "poi" else dataclasses.replace(trip, **{field: "X00000"})
    result = score(4, trip)
    assert (result.reward, result.success, result.reward_parts) == (0, False, {"veto": 1.0})
    assert result.metrics == {"unread_n": 0.0, "made_up_n": 1.0}


def test_reward_is_the_share_of_themes_times_the_share_of_the_rest():
    wanted, trip = trip_of(2)
    fewer = dataclasses.replace(trip, stops=trip.stops[:-1], date="2029-01-01")
    held = check(WORLD, wanted, fewer)
    others = [v for k, v in held.items() if k != "themes"]
    assert not held["date"] and score(2, fewer).reward == pytest.approx(2 / 3 * sum(others) / 8)
    assert score(2, fewer, TravelDesk(reward="strict")).reward == 0
    assert score(2, trip, TravelDesk(reward="strict")).reward == 1
    assert score(2, dataclasses.replace(trip, stops=())).reward == 0  # nothing visited, nothing earned


# ---- answers --------------------------------------------------------------------------------------------------------

TRIP = Itinerary("2030-03-05", "T1", "H1", (Stop("P1", 570, 630),))


def test_answers_are_read_wherever_they_stand():
    text = to_text(TRIP)
    assert '"arrive": "09:30"' in text and clock(570) == "09:30"
    assert read(text) == read(f"Here it is {{really}}:\n```json\n{text}\n```\nEnjoy!") == TRIP
    other = dataclasses.replace(TRIP, hotel="H2")
    assert read(text + to_text(other)) == other


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no trip",
        "{}",
        '{"stops": []}',
        "[" * 100_000,
        "{" * 10_000,
        '{"a":' * 3000,
        '{"date": ' + "9" * 9000 + "}",
        to_text(TRIP).replace("09:30", "25:30"),
        to_text(TRIP).replace("09:30", "٠٩:٣٠"),
        to_text(TRIP).replace('"P1"', "7"),
        to_text(TRIP).replace('"H1"', "null"),
        to_text(dataclasses.replace(TRIP, stops=TRIP.stops * 13)),
        " " * 20_000 + to_text(TRIP),
    ],
    ids=range(14),
)
def test_other_texts_are_no_itinerary(text):
    assert read(text) is None
    result = score(0, text)
    assert result.reward == 0 and result.terminated and result.metrics == {"unread_n": 1.0, "made_up_n": 0.0}


@given(st.text(max_size=200), st.text(max_size=200))
def test_strange_texts_around_an_answer(before, after):
    result = read(before + to_text(TRIP) + after)
    assert result is None or isinstance(result, Itinerary)


# ---- episodes -------------------------------------------------------------------------------------------------------


def test_reference_looks_everything_up_and_then_answers():
    for i in range(30):
        env = SPEC.make()
        told = [m.content for m in env.reset(SPEC.task(i))]
        assert "poi_search" in told[0] and "<tool_call>" in told[0]
        turns = []
        while len(turns) < SPEC.max_turns:
            action = env.reference_answer()
            turns.append(action)
            if "<tool_call>" not in action:
                seen = " ".join(told[1:])
                trip = read(action)
                assert all(id in seen for id in [trip.transport, trip.hotel, *(s.poi for s in trip.stops)])
            result = env.step(action)
            told += [m.content for m in result.messages]
            if result.terminated:
                break
            assert result.metrics["tool_calls_n"] == 1 and result.metrics["tool_errors_n"] == 0
        assert result.success and result.reward == 1 and len(turns) == 11
        env.close()


def test_several_calls_in_one_answer_and_errors_are_told():
    env = SPEC.make()
    env.reset(SPEC.task(0))
    good = '<tool_call>{"name": "weather", "arguments": {"city": "Velmora", "date": "2030-03-05"}}</tool_call>'
    result = env.step(f"Let me see.\n{good}\n{good.replace('Velmora', 'Rome')}\n<tool_call>{{oops</tool_call>")
    assert [m.role for m in result.messages] == ["tool"] * 3 and not result.terminated and result.reward == 0
    assert json.loads(result.messages[0].content)["sky"] in ("sun", "clouds", "rain")
    assert "no city 'Rome'" in result.messages[1].content
    assert result.metrics["tool_errors_n"] == 2


def test_uses_of_tools_come_to_an_end():
    spec = Travel(calls=10)
    env = spec.make()
    env.reset(spec.task(0))
    call = '<tool_call>{"name": "web_search", "arguments": {"query": "art"}}</tool_call>'
    for _ in range(10):
        assert not env.step(call).terminated
    assert env.step(call).terminated and spec.max_turns == 11


def test_the_request_names_no_solution():
    for i in range(30):
        env = DESK.make()
        asked = env.reset(DESK.task(i))[-1].content
        trip = read(env.reference_answer())
        assert not any(id in asked for id in [trip.transport, trip.hotel, *(s.poi for s in trip.stops)])


@pytest.mark.parametrize(
    "settings", [{}, {"num_stops": 1}, {"num_stops": 4, "num_cities": 8}, {"num_pois": 20, "seed": 3}]
)
def test_settings_make_trips_that_can_be_made(settings):
    spec = TravelDesk(**settings)
    for i in range(40):
        env = spec.make()
        env.reset(spec.task(i))
        assert env.step(env.reference_answer()).success
    assert make_spec(ref_of(Travel(**settings))) == Travel(**settings)


@pytest.mark.parametrize(
    "settings, named", [({"num_pois": 19}, "num_pois"), ({"num_cities": 9}, "num_cities"), ({"calls": 9}, "calls")]
)
def test_settings_that_cannot_work(settings, named):
    with pytest.raises(ConfigError) as e:
        Travel(**settings)
    assert e.value.setting == f"Travel.{named}"
    with pytest.raises(EnvError, match="task 1 is no request"):
        DESK.make().reset(Task("travel", 1, "[]"))


def test_an_episode_can_be_copied():
    env, twin = SPEC.make(), SPEC.make()
    env.reset(SPEC.task(7))
    for _ in range(4):
        env.step(env.reference_answer())
    twin.reset(SPEC.task(8))
    twin.restore(env.snapshot())
    while True:
        action = env.reference_answer()
        assert twin.reference_answer() == action
        result, same = env.step(action), twin.step(action)
        assert (result.messages, result.reward) == (same.messages, same.reward)
        if result.terminated:
            break
