"""Predictions against the labels that the points were drawn with, here by their first letters."""

from pathlib import Path

TRUE = (
    "bgbbbrbrbrggbbggbbbggrrrbgbbrggggrrrrrbbgbrrggbbrbrgbrgrrrbgbbrgggrrrbrrbbr"
    "rrbbbgbgbgggbggrrrgrbggggggrrbgbgggbrbbrbrgbrrrrrbbrrbgggrgbbgbbbbggrgrggrr"
)


def predictions():
    return Path("/work/predictions.txt").read_text().split()


def test_one_known_label_for_each_point():
    assert len(predictions()) == len(TRUE) == 150
    assert set(predictions()) <= {"red", "green", "blue"}


def test_accuracy():
    assert sum(label[0] == true for label, true in zip(predictions(), TRUE, strict=True)) >= 0.95 * len(TRUE)
