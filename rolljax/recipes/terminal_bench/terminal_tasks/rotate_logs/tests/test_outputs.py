"""The script on folders it has not seen."""

import subprocess
import tempfile
from pathlib import Path


def rotate(before, keep, times=1):
    """The files of a folder, by name, after so many rotations."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "var log")
        folder.mkdir()
        for name, text in before.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        for _ in range(times):
            done = subprocess.run(
                ["bash", "/work/rotate.sh", str(folder), str(keep)], cwd=top, capture_output=True, timeout=10
            )
            assert done.returncode == 0
        return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_first_rotation():
    assert rotate({"app.log": "one"}, 3) == {"app.log": "", "app.log.1": "one"}


def test_old_logs_move_up_and_the_oldest_goes():
    before = {"a.log": "new", "a.log.1": "1", "a.log.2": "2", "a.log.3": "3"}
    assert rotate(before, 3) == {"a.log": "", "a.log.1": "new", "a.log.2": "1", "a.log.3": "2"}


def test_two_digits():
    before = {"a.log": "new", **{f"a.log.{i}": str(i) for i in range(1, 12)}}
    assert rotate(before, 11) == {"a.log": "", "a.log.1": "new", **{f"a.log.{i + 1}": str(i) for i in range(1, 11)}}


def test_a_smaller_keep_cleans_up():
    before = {"a.log": "new", **{f"a.log.{i}": str(i) for i in range(1, 6)}}
    assert rotate(before, 2) == {"a.log": "", "a.log.1": "new", "a.log.2": "1"}


def test_an_empty_log_stays():
    before = {"a.log": "", "a.log.1": "1", "b c.log": "x", "b c.log.1": "y"}
    assert rotate(before, 1) == {"a.log": "", "a.log.1": "1", "b c.log": "", "b c.log.1": "x"}


def test_twice_is_once():
    assert rotate({"a.log": "x"}, 5, times=2) == {"a.log": "", "a.log.1": "x"}


def test_other_files_are_left_alone():
    before = {"notes.txt": "n", "sub/s.log": "s", "a.log.bak": "b"}
    assert rotate(before, 1) == before


def test_no_folder():
    done = subprocess.run(["bash", "/work/rotate.sh", "/nowhere", "3"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and len(done.stderr.strip().split("\n")) == 1 and done.stderr.strip()
