"""The script on folders it has not seen."""

import os
import subprocess
import tempfile
from pathlib import Path


def report(files, limit, links=()):
    """The lines for files, a dict of path -> (size, time), and links, pairs of path and target."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "home dir")
        folder.mkdir()
        for name, (size, changed) in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)
            os.utime(path, (changed, changed))
        for name, target in links:
            (folder / name).symlink_to(folder / target)
        command = ["bash", "/work/report.sh", str(folder), str(limit)]
        done = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=10)
        assert done.returncode == 0
        return [tuple(line.split("\t")) for line in done.stdout.splitlines()]


def test_only_folders_above_the_limit():
    files = {"a/x": (10, 1), "b/x": (11, 1), "c/d/e": (30, 1), "loose": (99, 1)}
    assert report(files, 10) == [("c", "30", "d/e"), ("b", "11", "x")]


def test_newest_file_and_sums():
    files = {"a/old": (5, 100), "a/sub/new": (6, 300), "a/mid": (7, 200)}
    assert report(files, 0) == [("a", "18", "sub/new")]


def test_equal_sizes_are_sorted_by_name():
    files = {"b/x": (5, 1), "a/x": (5, 1), "c/x": (6, 1)}
    assert [line[0] for line in report(files, 1)] == ["c", "a", "b"]


def test_spaces_and_hidden_names():
    files = {"my files/a b.txt": (5, 1), ".cache/.x": (6, 1)}
    assert report(files, 1) == [(".cache", "6", ".x"), ("my files", "5", "a b.txt")]


def test_links_do_not_count():
    files = {"a/x": (5, 1), "b/x": (50, 1)}
    assert report(files, 4, [("a/link", "b/x"), ("c", "b")]) == [("b", "50", "x"), ("a", "5", "x")]


def test_no_folder():
    done = subprocess.run(["bash", "/work/report.sh", "/nowhere", "3"], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2 and len(done.stderr.strip().split("\n")) == 1 and done.stderr.strip()
