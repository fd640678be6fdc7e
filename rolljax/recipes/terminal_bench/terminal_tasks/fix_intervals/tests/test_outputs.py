"""The repaired program on inputs it has not seen."""

import subprocess
import sys


def answer(text):
    done = subprocess.run(
        [sys.executable, "-I", "/work/merge.py"], input=text, capture_output=True, text=True, timeout=5, env={}
    )
    assert done.returncode == 0
    return done.stdout.split("\n")[:-1]


def test_unsorted_input():
    assert answer("10 12\n1 3\n2 4\n") == ["1 4", "10 12"]


def test_an_interval_inside_another():
    assert answer("1 20\n2 3\n19 25\n") == ["1 25"]


def test_a_shared_point_joins_and_neighbours_do_not():
    assert answer("1 3\n3 5\n6 8\n") == ["1 5", "6 8"]


def test_numbers_are_compared_as_numbers():
    assert answer("9 11\n100 101\n-5 -2\n") == ["-5 -2", "9 11", "100 101"]


def test_empty_lines_and_empty_input():
    assert answer("\n4 4\n\n4 4\n") == ["4 4"]
    assert answer("") == []


def test_many():
    text = "".join(f"{7 * i % 1000 * 10} {7 * i % 1000 * 10 + 4}\n" for i in range(1000))
    assert answer(text) == [f"{10 * i} {10 * i + 4}" for i in range(1000)]
