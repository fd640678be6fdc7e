"""Prices against those that the flats were drawn with."""

import math
from pathlib import Path

TRUE = [107.2, 288.7, 79.7, 111.8, 196.8, 165.6, 346.3, 275.9, 307.3, 251.4, 169.4, 132.0, 160.9, 317.1, 170.1, 225.9, 97.8, 212.5, 278.9, 105.0, 239.3, 250.8, 95.7, 136.5, 263.2, 182.5, 207.0, 115.2, 266.5, 167.2, 187.9, 222.0, 159.5, 157.2, 221.5, 165.0, 136.8, 100.9, 252.5, 297.0]


def prices():
    return [float(word) for word in Path("/work/prices.txt").read_text().split()]


def test_one_price_for_each_flat():
    assert len(prices()) == len(TRUE) and all(map(math.isfinite, prices()))


def test_mean_absolute_error():
    assert sum(abs(p - t) for p, t in zip(prices(), TRUE, strict=True)) / len(TRUE) < 2.5
