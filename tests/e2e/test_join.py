"""The two terminals of docs/cluster.md: a run that waits, and a sampler started by hand."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from rolljax.concurrency.waits import Watchdog
from rolljax.run.remote_samplers import RemoteRun, open_samplers

from .test_remote_samplers import (  # noqa: F401  # a fixture
    REMOTE,
    assert_equal,
    checked,
    expected,
    sampled,
    weights_of,
)


@pytest.mark.slow
def test_a_sampler_that_joins_gives_the_tokens_of_one_in_this_process(tmp_path, expected):  # noqa: F811
    joining = ["Remote.launcher = @Join()", "Join.host = '127.0.0.1'", "Join.port = 0", "MeshSpec.data = 1"]
    found = checked(tmp_path, *REMOTE, *joining)
    params, started = weights_of(found), threading.Event()
    processes = []

    def say(line):
        """Do what the run tells people to do."""
        command = line.partition("waiting for samplers: python ")[2].split()
        if command and not started.is_set():
            started.set()
            env = {name: value for name, value in os.environ.items() if name != "ROLLJAX_SAMPLER_KEY"}
            processes.append(subprocess.Popen([sys.executable, *command, "--name", "mine"], env=env))

    run = RemoteRun(tmp_path, 1, say)
    group, _ = open_samplers(found, lambda: params, run, Watchdog(lambda text: None), lambda: False, 0)
    try:
        assert_equal(asyncio.run(sampled(group)), expected)
        assert list(group._members) == ["mine"]
    finally:
        group.close()
    assert processes[0].wait(timeout=60) == 0
