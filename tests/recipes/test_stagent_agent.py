"""STAgent's cascade at the small travel desk: the desk, its rubric and veto, and the way of requests to SFT2 and RL."""

import collections
import json

import numpy as np
import pytest

from rolljax import cli
from rolljax.data import pipeline
from rolljax.data.attempts import FromRollouts
from rolljax.data.base import Place
from rolljax.data.pipeline import Pipeline
from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.records import Records
from rolljax.envs.tasks import is_held_out
from rolljax.errors import ConfigError, DataError
from rolljax.recipes.stagent.episodes import HELD_OUT_FRAC, SolvedEpisodes, conversation, main, records_of
from rolljax.recipes.stagent.itinerary import check, ids_of, is_complete, made_up, read_ids, scheduled
from rolljax.recipes.stagent.stagent import Learnability
from rolljax.recipes.stagent.travel import TINY, Travel, request_of, request_text, rubric
from rolljax.recipes.stagent.travel_tools import in_lines
from rolljax.types import Key, Task, Trajectory, Turn

DESK = Travel(**TINY)


def answers_of(task, spec=DESK):
    """Return the answers of the reference player."""
    env, answers = spec.make(), []
    env.reset(task)
    while True:
        answers.append(env.reference_answer())
        if env.step(answers[-1]).terminated:
            return answers


def last(task, answers, spec=DESK):
    env = spec.make()
    env.reset(task)
    return [env.step(a) for a in answers][-1]


def of_level(level):
    return next(t for t in map(DESK.task, range(100)) if DESK.category(t) == f"level {level}")


# ---- the small desk -------------------------------------------------------------------------------------------------


def test_reference_episodes_earn_everything_in_few_bytes():
    levels = collections.Counter()
    for i in range(150):
        task = DESK.task(i)
        wanted, trip = request_of(task)
        said = conversation(DESK, task, answers_of(task))
        level = int(DESK.category(task)[-1])
        levels[level] += 1
        assert sum(m["role"] == "assistant" for m in said) == level + 1
        assert sum(len(m["content"]) for m in said) < 480 and len(said[0]["content"]) < 80
        result = last(task, answers_of(task))
        assert result.reward == 1 and result.success and is_complete(wanted, trip)
        assert (wanted.hotel, wanted.ride, wanted.dry) == (level >= 2, level >= 3, level < 4)
    assert min(levels.values()) > 20 and sorted(levels) == [1, 2, 3, 4]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_an_id_that_no_tool_gave_makes_it_worth_nothing(level):
    task = of_level(level)
    *calls, answer = answers_of(task)
    told = last(task, [*calls, answer])
    assert told.reward == 1 and told.reward_parts["veto"] == 0
    untold = last(task, [answer])  # the ids exist, but nothing was looked up
    invented = last(task, [*calls, answer.replace(answer.split()[-1], answer[0] + "FFFF")])
    for result in (untold, invented):
        assert (result.reward, result.success, result.reward_parts) == (0, False, {"veto": 1.0})
        assert result.metrics == {"unread_n": 0.0, "made_up_n": 1.0}
    lenient = Travel(**TINY | {"veto": "world"})
    assert last(task, [answer], lenient).reward == 1


def test_a_tools_error_gives_no_id():
    task = of_level(1)
    *calls, answer = answers_of(task)
    assert last(task, [f"poi_detail({answer})", answer]).reward == 1  # it exists, and its details are told
    wrong = "P" + next(x for x in ("00", "01", "02", "03") if f"P{x}" not in DESK.world.pois)
    assert last(task, [f"poi_detail({wrong})", wrong]).reward_parts == {"veto": 1.0}


def test_the_rubric_weighs_its_dimensions():
    task = of_level(2)
    *calls, answer = answers_of(task)
    place, hotel = answer.split()
    no_hotel = last(task, [*calls, place])
    assert no_hotel.reward_parts["service"] == 0 and no_hotel.reward_parts["information"] == pytest.approx(2 / 3)
    assert not no_hotel.success and no_hotel.reward == pytest.approx(0.4 + 0.4 * 2 / 3)
    assert last(task, [*calls, hotel]).reward_parts["planning"] == 0
    planned = Travel(**TINY | {"weights": (1.0, 0.0, 0.0)})
    assert last(task, [*calls, place], planned).reward == 1
    held = check(DESK.world, *request_of(task))
    assert rubric(held, complete=True) == {"planning": 1.0, "information": 1.0, "service": 1.0}
    assert rubric(held | {"budget": False}, complete=False)["planning"] == pytest.approx(0.8)


def test_a_copy_of_an_episode_knows_what_the_tools_told():
    task = of_level(3)
    *calls, answer = answers_of(task)
    env, twin = DESK.make(), DESK.make()
    env.reset(task)
    for call in calls[:2]:
        env.step(call)
    twin.reset(DESK.task(1))
    twin.restore(env.snapshot())
    assert [twin.step(a) for a in [*calls[2:], answer]][-1].reward == 1
    env.reset(task)  # a new episode has been told nothing
    assert env.step(answer).reward_parts["veto"] == 1


def test_answers_are_ids_alone():
    assert read_ids("T0A P3C PFF H6E") == ("T0A", ("P3C", "PFF"), "H6E")
    assert read_ids("P3C") == ("", ("P3C",), "") and read_ids("H01 H02") == ("", (), "H02")
    for text in ("", " ", "my trip: P3C", "p3c", "P3C,", "P" * 99, "P3C " * 13, "Pxy"):
        assert read_ids(text) is None
    trip = scheduled(DESK.world, "2030-03-05", "TZZ", ["PZZ"], "")
    assert made_up(DESK.world, trip) and ids_of(trip) == ["TZZ", "PZZ"]
    assert in_lines([{"id": "P1", "x": 3, "price": 7}, {"id": "P2", "price": 0}]) == "P1 7\nP2 0"
    assert in_lines([]) == "none" and in_lines({"sky": "rain", "degrees_c": 3}) == "rain" and in_lines([[1.5]]) == "1.5"


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"num_pois": 10}, "num_pois"),
        ({"num_cities": 3}, "id_digits"),
        ({"levels": (7,), "calls": 9}, "num_themes"),
        ({"calls": 3}, "calls"),
        ({"num_days": 1}, "num_days"),
        ({"weights": (0.5, 0.5, 0.5)}, "weights"),
        ({"path": "nowhere.jsonl"}, "path"),
    ],
)
def test_settings_of_small_desks_that_cannot_work(settings, named):
    with pytest.raises(ConfigError) as e:
        Travel(**TINY | settings)
    assert e.value.setting == f"Travel.{named}"


def test_larger_settings_work_too():
    spec = Travel(levels=(2, 5, 7), veto="tools", reward="rubric", calls=13)
    for i in range(5):
        assert last(spec.task(i), answers_of(spec.task(i), spec), spec).reward == 1
    assert make_spec(ref_of(DESK)) == DESK


# ---- requests as records, episodes as conversations -----------------------------------------------------------------


def test_records_are_requests_that_are_not_held_out(tmp_path):
    rows = records_of(DESK, 40)
    tasks = [Task("travel", i, row["task"]) for i, row in enumerate(rows)]
    assert len({t.id for t in tasks}) == 40 and not any(is_held_out(t, HELD_OUT_FRAC) for t in tasks)
    assert rows[0]["prompt"] == request_text(request_of(tasks[0])[0], "short") and rows[0]["level"].startswith("level ")
    path = tmp_path / "requests.jsonl"
    main([str(path), "--num", "40"])
    some = Travel(**TINY | {"path": str(path)})
    assert [some.task(i).content for i in range(41)] == [*(row["task"] for row in rows), rows[0]["task"]]
    assert some.num_tasks == 40 and some.location(3).endswith("requests.jsonl, line 4")
    assert last(some.task(5), answers_of(some.task(5), some), some).reward == 1
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="no text in the column task"):
        Travel(**TINY | {"path": str(path)}).task(0)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def played(task, answers, sibling):
    """Return an episode as a run writes it."""
    result = last(task, answers)
    tokens, logp = np.zeros(1, np.int32), np.zeros(1, np.float32)
    turns = tuple(Turn(tokens, tokens, logp, tokens, "stop", 0.0, a) for a in answers)
    return Trajectory(Key(0, task.index, sibling), task, turns, result.reward, {}, result.success, "ok")


def test_requests_are_routed_and_own_episodes_become_conversations(tmp_path):
    """Eight attempts: all right, seven right, half right, none."""
    rights, tasks = (8, 7, 4, 0), [DESK.task(i) for i in range(4)]
    lines = []
    for task, right in zip(tasks, rights, strict=True):
        good = answers_of(task)
        bad = [*good[:-1], "P"]
        lines += [json.dumps(played(task, good if n < right else bad, n).to_json()) for n in range(8)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "requests.jsonl").write_text(
        "".join(json.dumps({"prompt": "?", "task": t.content}) + "\n" for t in tasks)
    )
    paths = (str(tmp_path / "answers.jsonl"),)
    stages = (FromRollouts(paths, key="task"), Learnability(keep_attempts=False))
    routed = Pipeline(stages=stages, split_by="route")
    pipeline.run(routed, str(tmp_path / "requests.jsonl"), tmp_path / "routed", fresh=True)
    sft, rl = (rows(tmp_path / "routed" / f"{name}.jsonl") for name in ("sft", "rl"))
    assert [r["task"] for r in sft] == [tasks[1].content] and [r["task"] for r in rl] == [tasks[2].content]
    own = Pipeline(stages=(SolvedEpisodes(DESK, paths),))
    pipeline.run(own, str(tmp_path / "routed" / "sft.jsonl"), tmp_path / "own", fresh=True)
    (row,) = rows(tmp_path / "own" / "data.jsonl")  # seven equal episodes are one
    assert row["messages"] == conversation(DESK, tasks[1], answers_of(tasks[1]))
    records = Records(str(tmp_path / "own" / "data.jsonl"))
    assert answers_of(records.task(0), records) == answers_of(tasks[1])


def test_what_was_never_solved_is_left_out(tmp_path):
    task = DESK.task(0)
    (tmp_path / "a.jsonl").write_text(json.dumps(played(task, ["P"], 0).to_json()) + "\n")
    stage = SolvedEpisodes(DESK, (str(tmp_path / "a.jsonl"),))
    place = Place("01", 0, tmp_path)
    assert not list(stage.run([{"task": task.content}], place)) and place.ledger.dropped == {"never_solved": 1}


# ---- the shipped settings -------------------------------------------------------------------------------------------


def test_gin_files_play_at_the_tiny_desk(tmp_path):
    (tmp_path / "rl.jsonl").write_text(json.dumps(records_of(DESK, 1)[0]) + "\n")
    path = f"Travel.path = {tmp_path / 'rl.jsonl'}"
    env = cli.load_recipe(["stagent_agent"], [path]).value.env
    assert env == Travel(**TINY | {"path": str(tmp_path / "rl.jsonl")})
    assert cli.load_recipe(["stagent_agent_seed"], []).value.env == DESK
