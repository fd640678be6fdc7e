"""The report against sums that were taken when the data was made."""

import csv
from pathlib import Path

WANTED = [['Japan', '16', '91875'], ['Estonia', '6', '42975'], ['Chile', '6', '35075'], ['unknown', '5', '19475'], ['Ghana', '2', '3200']]


def rows():
    with open(Path("/work/report.csv"), newline="") as f:
        return [[cell.strip() for cell in row] for row in csv.reader(f) if row]


def test_header():
    assert rows()[0] == ["country", "orders", "total_cents"]


def test_every_country_is_there_once():
    assert sorted(row[0] for row in rows()[1:]) == sorted(row[0] for row in WANTED)


def test_sums_and_order():
    assert rows()[1:] == WANTED
