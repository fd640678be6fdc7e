"""The number against the half-life that the counts were drawn with."""

from pathlib import Path

TRUE_S = 7.3


def test_one_number_within_two_percent():
    text = Path("/work/half_life.txt").read_text().split()
    assert len(text) == 1
    assert abs(float(text[0]) / TRUE_S - 1) < 0.02
