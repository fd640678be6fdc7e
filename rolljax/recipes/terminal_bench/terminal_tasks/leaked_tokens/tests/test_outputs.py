"""The list against the tokens that were hidden."""

from pathlib import Path

HIDDEN = ['app/client.py:3:tok_428ed48b7fdbda3bf6d3', 'data/dump.txt:28:tok_fb2b86177e6c1134bbf8', 'deploy/notes/2024.txt:2:tok_93d982fb10aa4ff76db2', 'deploy/settings.ini:3:tok_4f776b42dec0d1744c77', 'deploy/settings.ini:4:tok_fe85d8b6b47f611b9a07']


def leaks():
    return [line for line in Path("/work/leaks.txt").read_text().split("\n") if line]


def test_every_token_is_found():
    assert set(HIDDEN) <= set(leaks())


def test_nothing_else_is_reported_and_the_order_is_right():
    assert leaks() == HIDDEN
