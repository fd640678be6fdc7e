"""Periods against the complete elliptic integral, by the arithmetic-geometric mean."""

import math
import subprocess
import sys


def true_s(angle, length):
    a, b = 1.0, math.cos(math.radians(angle) / 2)
    while abs(a - b) > 1e-15:
        a, b = (a + b) / 2, math.sqrt(a * b)
    return 2 * math.pi * math.sqrt(length / 9.81) / a


def printed_s(angle, length):
    command = [sys.executable, "-I", "/work/period.py", str(angle), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    words = done.stdout.split()
    assert done.returncode == 0 and len(words) == 1
    return float(words[0])


def check(angle, length):
    assert abs(printed_s(angle, length) / true_s(angle, length) - 1) < 1e-6


def test_small_angle():
    check(1, 0.25)


def test_right_angle():
    check(90, 1)


def test_large_angles():
    check(150, 2.5)
    check(178, 1)
