"""Inputs of trackers, and that no tracker can stop a run."""

import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import pytest

from rolljax import cli
from rolljax.errors import ConfigError
from rolljax.run import tracking
from rolljax.trackers import RunInfo, TensorBoard, TrackerConfig, WandB, feed
from rolljax.trackers.base import flat, numbers
from rolljax.trackers.feed import Feed, Trackers
from rolljax.trackers.trackio import config_of
from tests.file_tracker import FileTracker, given

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.gin")
SETTINGS = {"seed": 0, "env.name": "lake", "phases[0].steps": 3, "model": None, "lr": 0.5}


def row(step):
    return {
        "step": step,
        "phase_step": step,
        "version": step,
        "phase": "rl",
        "reward/mean": step / 7,
        "time/step_s": 0.1,
    }


class Fed:
    """A tracker with its feed, and rows as in a run folder."""

    def __init__(self, tmp_path, config, done=0):
        self.config, self.path, self.rows, self.said = config, tmp_path / "t", [row(s) for s in range(1, done + 1)], []
        info = RunInfo("lake", "ab" * 8, tmp_path, self.path, SETTINGS, done)
        self.feed = Feed("filetracker", config, info, lambda: list(self.rows), self.said.append)

    def log(self, *steps):
        for step in steps:
            self.rows.append(row(step))
            self.feed.put("log", step, row(step))

    def given(self, kind="log"):
        path = self.path / "given.jsonl"
        return [what[1:] for what in given(path) if what[0] == kind] if path.exists() else []

    def wait(self, until):
        end_s = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end_s, (self.said, self.given())
            time.sleep(0.01)


@pytest.fixture
def fed(tmp_path):
    opened = []

    def make(config=None, done=0):
        opened.append(Fed(tmp_path, config or FileTracker(), done))
        return opened[-1]

    yield make
    for one in opened:
        one.feed.close("failed", deadline_s=0)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(feed, "RESTARTS_S", (0.0, 0.0))


def test_what_is_handed_over_arrives_once_in_its_order(fed):
    one = fed()
    one.log(1, 2)
    one.feed.put("text", 2, "heldout/answers", "\x1b[31m\ud800 ok")
    one.feed.put("figure", 2, "curves", b"\x89PNG")
    one.log(3)
    one.feed.close("done", 60)
    assert one.given() == [[s, row(s)] for s in (1, 2, 3)]
    assert one.given("text") == [[2, "heldout/answers", "\x1b[31m\ud800 ok"]] and one.given("figure") == [
        [2, "curves", 4]
    ]
    assert one.given("close") == [["done"]] and one.given("open") == [["lake", "ab" * 8, 0]]
    assert one.feed.lost == 0 and not one.said


def test_a_run_that_goes_on_gives_what_is_missing_and_nothing_twice(fed):
    one = fed()
    one.log(1, 2, 3)
    one.feed.close("stopped", 60)
    two = fed(done=2)  # step 3 was of a process that was killed: it comes again
    two.log(3, 4)
    two.feed.close("done", 60)
    assert [step for step, _ in two.given()] == [1, 2, 3, 4]


def test_a_tracker_that_is_added_later_gets_all_rows(fed):
    one = fed(done=5)
    one.log(6)
    one.feed.close("done", 60)
    assert [step for step, _ in one.given()] == [1, 2, 3, 4, 5, 6]


def test_a_row_that_is_refused_is_counted_and_said_once(fed):
    one = fed(FileTracker("raise", once=False))
    one.log(1, 2, 3, 4)
    one.wait(lambda: len(one.given()) == 3)
    one.feed.close("done", 60)
    assert [step for step, _ in one.given()] == [1, 2, 4] and one.feed.lost == 1
    [said] = one.said
    assert "tracker filetracker refused" in said and "I do not want\\nthis row" in said and "\n" not in said


LOST = {
    "die": "ended with exit code 3 before it answered; see ",
    "kill": "was killed (SIGKILL) before it answered; see ",
    "hang": "has not answered for 0.5 s (asked to log)",
}


@pytest.mark.parametrize("fault", LOST)
def test_a_process_that_is_lost_is_started_again_and_loses_nothing(fed, monkeypatch, fault):
    monkeypatch.setattr(feed, "TAKE_S", 0.5 if fault == "hang" else 60.0)
    one = fed(FileTracker(fault))
    one.log(1, 2, 3, 4, 5)
    one.wait(lambda: len(one.given()) == 5)
    one.feed.close("done", 60)
    assert [step for step, _ in one.given()] == [1, 2, 3, 4, 5] and len(one.given("open")) == 2
    assert one.feed.lost == 1 and len(one.said) == 1
    assert one.said[0].startswith(f"tracker filetracker {LOST[fault]}")


def test_a_package_that_refuses_everything_is_opened_again(fed):
    one = fed(FileTracker("break"))
    one.log(1, 2, 3, 4, 5, 6)
    one.wait(lambda: len(one.given()) == 6)
    one.feed.close("done", 60)
    assert [step for step, _ in one.given()] == [1, 2, 3, 4, 5, 6] and len(one.given("open")) == 2
    assert [("in a row" in said) for said in one.said] == [False, True]


@pytest.mark.parametrize("fault", ["open", "die"])
def test_one_that_never_works_is_given_up_and_its_rows_are_counted(fed, fault):
    one = fed(FileTracker(fault, once=False))
    one.log(1, 2, 3)
    one.wait(lambda: not one.feed._thread.is_alive())
    lost = one.feed.lost
    one.log(4, 5)
    assert one.feed.lost == lost + 2 and len(one.said) == 1 and len(one.given("open")) == 3
    one.feed.close("done", 60)


def test_rows_of_a_tracker_that_cannot_be_opened_count_at_their_step(fed, monkeypatch):
    """Not only when the run gives up on it, minutes later."""
    monkeypatch.setattr(feed, "RESTARTS_S", (300.0,))
    one = fed(FileTracker("open", once=False))
    trackers = Trackers([one.feed])
    one.log(1)
    one.wait(lambda: one.said)
    lost = [trackers.row()["trackers/lost_n"]]
    for step in (2, 3):
        one.log(step)
        lost.append(trackers.row()["trackers/lost_n"])
    assert lost == [1.0, 1.0, 1.0] and "cannot be opened" in one.said[0]
    one.feed.close("done", 60)
    assert one.feed.lost == 3 and len(one.said) == 1


def test_rows_that_come_late_arrive_nevertheless(fed, monkeypatch):
    monkeypatch.setattr(feed, "RESTARTS_S", (0.0, 300.0))
    one = fed(FileTracker("open"))
    one.log(1, 2)
    one.wait(lambda: len(one.given()) == 2)
    one.log(3)
    one.feed.close("done", 60)
    assert [step for step, _ in one.given()] == [1, 2, 3] and one.feed.lost <= 2


def test_the_queue_has_an_end(fed, monkeypatch):
    monkeypatch.setattr(feed, "QUEUE", 4)
    one = fed(FileTracker("hang", at=1, once=False))
    one.feed.put("log", 1, row(1))
    one.wait(one.feed._waiting.empty)
    one.log(*range(2, 12))
    assert one.feed.lost == 6 and [("4 wait" in s) for s in one.said] == [True]


@pytest.mark.parametrize("fault", ["hang", "close"])
def test_closing_ends_by_its_deadline_and_leaves_no_process(fed, fault):
    one = fed(FileTracker(fault, at=1, once=False))
    one.log(1, 2)
    one.wait(lambda: one.given("open"))
    one.feed.close("done", deadline_s=0.5)
    assert len(one.said) == 1 and "did not end within" in one.said[0]
    one.feed._thread.join(30)
    assert not one.feed._thread.is_alive() and one.feed._process.code is not None


def test_a_tracker_of_a_run_that_was_killed_closes_as_stopped(tmp_path):
    process = feed.start(tmp_path / "log.txt")
    feed.ask(process, ("open", FileTracker(), RunInfo("lake", "ab", tmp_path, tmp_path, SETTINGS)), 60)
    feed.ask(process, ("log", 1, row(1)), 60)
    process.stop(60)  # its input ends, as at the end of the run's process
    assert process.code == 0
    assert given(tmp_path / "given.jsonl")[-1] == ["close", "stopped"]


def test_a_row_tells_how_many_were_lost_since_the_last(tmp_path):
    assert Trackers().row() == {} and not Trackers()
    gone = Fed(tmp_path, FileTracker())
    gone.feed.close("done", 60)
    trackers = Trackers([gone.feed])
    assert trackers.row() == {"trackers/lost_n": 0.0}
    trackers.log(1, row(1))
    trackers.text(1, "t", "x")
    assert trackers.row() == {"trackers/lost_n": 2.0} and trackers.row() == {"trackers/lost_n": 0.0}


def test_all_of_them_close_together_in_one_deadline(fed, monkeypatch):
    trackers = Trackers([fed(FileTracker("close")).feed])
    start = threading.active_count()
    trackers.close("done", deadline_s=0.2)
    assert threading.active_count() <= start


# ---- settings


@dataclasses.dataclass(frozen=True)
class Absent(TrackerConfig):
    package = "no_such_package"
    extra = "aim"

    def open(self, run):
        raise AssertionError


def test_a_package_that_is_not_there_is_named_before_the_run():
    with pytest.raises(ConfigError, match="no_such_package") as e:
        tracking.check([Absent()])
    assert "rolljax[aim]" in e.value.remedy


def test_a_class_that_another_process_cannot_import_is_refused():
    local = dataclasses.make_dataclass("Local", [], bases=(FileTracker,), frozen=True)
    with pytest.raises(ConfigError, match="another process"):
        tracking.check([local()])


def test_trackio_takes_the_settings_of_a_real_run():
    """It refuses a run, and with it every row, for one name that begins with `_`."""
    settings = cli.load_recipe([QUICKSTART], []).resolved
    assert "__class__" in settings
    found = config_of(settings)
    assert len(found) == len(settings) and not any(name.startswith("_") for name in found)
    assert all(found[name.lstrip("_")] == value for name, value in flat(settings).items())


def test_names_are_told_apart():
    assert tracking.names([WandB(), TensorBoard(), TensorBoard("x")]) == ["wandb", "tensorboard_0", "tensorboard_1"]


def test_rows_and_settings_as_trackers_take_them():
    assert numbers(row(2)) == {"phase_step": 2, "version": 2, "reward/mean": 2 / 7, "time/step_s": 0.1}
    assert flat(SETTINGS) == SETTINGS | {"model": "None"}


def test_the_id_of_a_run_stays(tmp_path):
    from rolljax.run.folder import RESOLVED, RunFolder

    (tmp_path / RESOLVED).write_text(json.dumps(SETTINGS))
    one, two = (tracking._info(RunFolder(tmp_path), name, 0) for name in ("aim", "wandb"))
    assert (
        one.id == two.id and len(one.id) == 16 and one.settings == SETTINGS and one.folder.parent == two.folder.parent
    )
    assert os.listdir(tmp_path / "trackers")
