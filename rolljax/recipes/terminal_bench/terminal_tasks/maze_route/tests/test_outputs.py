"""The way is walked through the maze as it was, and must be as short as the shortest."""

from pathlib import Path

MAZE = """###############################
#S....#...........#...........#
#####..####.#######.###.#####.#
#...#...#...#.......#.#.......#
#.###.#.#.###.#######.#...#####
#...#...#.....#.......#.#.#...#
#.#.#.#######.#.###.#.#.#.#.#.#
#...#.#.......#.#...#.#.#...#.#
###.#.#.###.#.###.###.#.###.#.#
#...#.#.#...#.....#...#.#...#.#
#.#.#.#.#.##..####.####.#.###.#
#...#...#.#.......#...#.#.#...#
#.#######.#####.#.#.#.#.#.#.#.#
#...................#...#...#E#
###############################""".split("\n")
SHORTEST = 64
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def route():
    return Path("/work/route.txt").read_text().strip()


def test_only_the_four_letters():
    assert route() and set(route()) <= set(STEPS)


def test_it_leads_from_start_to_exit():
    y, x = 1, 1
    assert MAZE[y][x] == "S"
    for letter in route():
        y, x = y + STEPS[letter][0], x + STEPS[letter][1]
        assert MAZE[y][x] != "#"
    assert MAZE[y][x] == "E"


def test_it_is_a_shortest():
    assert len(route()) == SHORTEST
