"""Uploads while the caller works: one at a time, whose failure and delay are the next one's."""

import threading

import pytest

from rolljax.concurrency.uploads import Uploads
from rolljax.errors import HangError, StorageError


def test_an_upload_runs_beside_the_caller_and_the_next_one_waits_for_it():
    uploads, go_on, order = Uploads("the store", 60.0), threading.Event(), []

    def first():
        assert go_on.wait(60)
        order.append(("first", threading.get_ident()))

    uploads.start(first)  # returns although the upload cannot have ended
    order.append(("caller", threading.get_ident()))
    threading.Timer(0.05, go_on.set).start()
    uploads.start(lambda: order.append(("second", threading.get_ident())))
    uploads.wait()
    uploads.wait()  # nothing is under way
    assert [name for name, _ in order] == ["caller", "first", "second"]
    assert order[0][1] not in (order[1][1], order[2][1])


def test_the_failure_of_an_upload_is_raised_once_and_stops_the_next_one():
    uploads, started = Uploads("the store", 60.0), []

    def fails():
        raise StorageError("no space")

    uploads.start(fails)
    with pytest.raises(StorageError, match="no space"):
        uploads.start(lambda: started.append(1))
    uploads.start(lambda: started.append(2))
    uploads.wait()
    assert started == [2]


def test_an_upload_past_its_deadline_is_named():
    uploads, go_on, done = Uploads("weights to be stored", 0.05), threading.Event(), []
    uploads.start(lambda: done.append(go_on.wait(60)))
    for _ in range(2):  # it is still under way the second time
        with pytest.raises(HangError, match="weights to be stored"):
            uploads.wait()
    go_on.set()
    patient = threading.Event()
    while not done:
        patient.wait(0.01)
    uploads.wait()
    assert done == [True]


def test_an_error_that_is_a_timeout_is_the_uploads_own():
    uploads = Uploads("the store", 60.0)

    def fails():
        raise TimeoutError("the server's")

    uploads.start(fails)
    with pytest.raises(TimeoutError, match="the server's"):
        uploads.wait()
