"""Files of JSON lines: what a torn or damaged line does to readers, to writers and to a journal."""

import json
import os
import random

import pytest

from rolljax.errors import CheckpointError, StorageError
from rolljax.storage import journal
from rolljax.storage.journal import Journal, JsonLines, append, parse, read_lines


def filled(path, **values):
    kept = Journal(path)
    for key, value in values.items():
        kept.put(key, value)
    kept.close()
    return path.read_bytes()


def test_a_reader_passes_over_torn_and_damaged_lines_and_counts_the_damaged(tmp_path):
    path = tmp_path / "lines"
    assert read_lines(path, int) == []
    path.write_bytes(b'1\n"x"\n\n[' + b"[" * 100_000 + b"\n2\n\xff\n3")
    assert read_lines(path, int) == [1, 2]
    assert parse(path.read_bytes(), int).damaged == 3
    for name in ("folder", "pipe", "link"):
        {"folder": os.mkdir, "pipe": os.mkfifo, "link": lambda p: os.symlink("nowhere", p)}[name](tmp_path / name)
        with pytest.raises(CheckpointError, match=r"leads nowhere|cannot be read"):
            read_lines(tmp_path / name, int)


@pytest.mark.parametrize("torn", ["", "[3, 4", "x" * 200_000], ids=["none", "short", "longer than a block"])
def test_a_writer_removes_a_torn_line_before_it_adds_one(tmp_path, torn):
    path = tmp_path / "lines"
    path.write_text("1\nno JSON\n" + torn)
    append(path, 2)
    assert path.read_text() == "1\nno JSON\n2\n"
    path.write_text(torn)
    append(path, 2)
    assert path.read_text() == "2\n"


def test_a_line_that_the_disk_does_not_take_leaves_the_file_as_it_was(tmp_path):
    import resource

    path = tmp_path / "lines"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path) as lines:
        lines.add(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(StorageError, match="ulimit -f"):
                lines.add("x" * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lines.add(2)
    assert path.read_bytes() == b"1\n2\n"


def test_a_journal_gives_back_what_was_put_and_the_last_line_of_a_key_counts(tmp_path):
    path, odd = tmp_path / "folder" / "journal", "ü \ud800\n\0" * 30_000
    kept = Journal(path)
    assert len(kept) == 0 and "a" not in kept and kept.get("a") is None and not path.parent.exists()
    kept.put("a", {"text": odd})
    kept.put(odd, [1, None])
    kept.put("a", {"text": "newer"})
    for one in (kept, Journal(path)):
        assert len(one) == 2 and odd in one and one.get(odd) == [1, None] and one.get("a") == {"text": "newer"}
    kept.close()
    in_memory = Journal(None)
    in_memory.put("a", 1)
    assert in_memory.get("a") == 1 and "a" in in_memory and len(in_memory) == 1
    in_memory.discard("a")
    assert "a" not in in_memory and in_memory.damaged == 1
    in_memory.close()


def test_a_torn_line_of_a_journal_is_requested_again(tmp_path):
    path = tmp_path / "journal"
    whole = filled(path, a={"text": "ü" * 100_000}, b=1)
    path.write_bytes(whole[:-3])
    kept = Journal(path)
    assert len(kept) == 1 and kept.get("a") == {"text": "ü" * 100_000} and kept.get("b") is None and kept.damaged == 1
    kept.put("b", 1)
    kept.close()
    assert path.read_bytes() == whole and Journal(path).damaged == 0


def test_no_value_of_a_damaged_line_is_returned(tmp_path):
    """Whatever bytes of a line are changed, a key has its own value or none."""
    rng, path = random.Random(0), tmp_path / "journal"
    values = {f"key {i}": {"n": i, "text": "x" * i} for i in range(8)}
    whole = filled(path, **values)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        kept = Journal(path)
        found = {key: kept.get(key) for key in values}
        assert all(found[key] in (None, value) for key, value in values.items())
        lost = sum(value is None for value in found.values())
        assert len(kept) == 8 - lost and (lost == 0) == (kept.damaged == 0)


def test_a_line_that_changes_while_the_journal_is_open_is_counted_and_not_returned(tmp_path):
    path = tmp_path / "journal"
    filled(path, a=1, b=2)
    kept = Journal(path)
    path.write_bytes(path.read_bytes().replace(b'"value":2', b'"value":7'))
    assert (kept.get("a"), kept.get("b"), kept.damaged, "b" in kept) == (1, None, 1, False)


@pytest.mark.parametrize("line", [b"", b"no JSON", b"3", b"[]", b'"sum"', b'{"key": 3, "value": 1}', b"[" * 9999])
def test_a_line_that_no_journal_wrote_is_counted(tmp_path, line):
    path = tmp_path / "journal"
    path.write_bytes(line + b"\n" + journal.sealed("a", 1))
    kept = Journal(path)
    assert kept.get("a") == 1 and kept.damaged == 1


def test_a_value_that_no_file_takes_stays_in_memory(tmp_path):
    path = tmp_path / "journal"
    path.mkdir()
    kept = Journal(path)
    for value in (1, 2):
        with pytest.raises(StorageError, match="it is a folder|Is a directory"):
            kept.put("a", value)
        assert kept.get("a") == value and len(kept) == 1
    path.rmdir()
    kept.put("a", 3)
    kept.close()
    assert json.loads(path.read_bytes())["value"] == 3
