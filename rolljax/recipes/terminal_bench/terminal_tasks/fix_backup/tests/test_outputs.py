"""The repaired script on folders it has not seen."""

import subprocess
import tempfile
from pathlib import Path


def backup(files, *, source="from", target="to", make_target=False, current=()):
    """What the script prints, and the files of the target by name."""
    with tempfile.TemporaryDirectory() as top:
        here = Path(top)
        (here / source).mkdir(parents=True)
        for name in files:
            (here / source / name).parent.mkdir(parents=True, exist_ok=True)
            (here / source / name).write_text(f"content of {name}")
        for name in current:
            (here / name).write_text("not for the backup")
        if make_target:
            (here / target).mkdir(parents=True)
        done = subprocess.run(
            ["bash", "/work/backup.sh", source, target], cwd=here, capture_output=True, text=True, timeout=10
        )
        assert done.returncode == 0
        copies = {p.name: p.read_text() for p in (here / target).iterdir()}
        return done.stdout.strip(), copies


def expected(*names):
    return str(len(names)), {name.replace("/", "_"): f"content of {name}" for name in names}


def test_plain_names():
    assert backup(["a.txt", "sub/b.txt", "sub/deep/c.txt", "no.md"]) == expected("a.txt", "sub/b.txt", "sub/deep/c.txt")


def test_spaces_stars_quotes_and_commas():
    names = ["my notes.txt", "a*b.txt", "it's.txt", 'q"q.txt', "x,y/z .txt", "two  spaces.txt"]
    assert backup(names) == expected(*names)


def test_folders_with_spaces():
    assert backup(["a.txt"], source="old, files", target="new place/here") == expected("a.txt")


def test_target_that_exists():
    assert backup(["a.txt"], make_target=True) == expected("a.txt")


def test_text_files_in_the_current_folder():
    assert backup(["a.txt", "k/a.txt"], current=["one.txt", "two.txt"]) == expected("a.txt", "k/a.txt")


def test_nothing_to_copy():
    assert backup(["a.md"]) == ("0", {})
