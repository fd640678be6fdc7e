"""The grid keeps what was given, and every row, column and block holds each digit once."""

from pathlib import Path

GIVEN = """16.9.43.8
.9.......
8.....49.
..9..7..2
25..4....
....26.8.
7...658..
9.82...4.
...3...27""".split("\n")


def solved():
    return Path("/work/solved.txt").read_text().split()


def test_nine_lines_of_nine_digits():
    assert len(solved()) == 9
    assert all(len(row) == 9 and set(row) <= set("123456789") for row in solved())


def test_what_was_given_is_kept():
    grid = solved()
    assert all(GIVEN[y][x] in (".", grid[y][x]) for y in range(9) for x in range(9))


def test_rows_columns_and_blocks():
    grid = solved()
    for k in range(9):
        assert len(set(grid[k])) == 9
        assert len({grid[y][k] for y in range(9)}) == 9
        assert len({grid[k // 3 * 3 + i // 3][k % 3 * 3 + i % 3] for i in range(9)}) == 9
