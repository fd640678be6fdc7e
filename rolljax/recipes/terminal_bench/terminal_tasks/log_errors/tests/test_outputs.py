"""The table against counts that were taken when the log was made."""

WANTED = [['/cart', '16', '09:02:43', '09:50:50'], ['/', '11', '09:12:16', '09:50:21'], ['/admin', '9', '09:11:20', '09:49:02'], ['/search', '9', '09:00:35', '09:47:13'], ['/login', '8', '09:01:06', '09:42:36']]


def table():
    with open("/work/errors.tsv") as f:
        return [line.rstrip("\n").split("\t") for line in f if line.strip()]


def test_four_fields_each():
    assert table() and all(len(row) == 4 for row in table())


def test_counts():
    assert {row[0]: row[1] for row in table()} == {row[0]: row[1] for row in WANTED}


def test_times_and_order():
    assert table() == WANTED
