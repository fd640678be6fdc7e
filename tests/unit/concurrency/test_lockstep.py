"""The channel of a run's processes: calls in one order, and no wait for processes that have ended."""

import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Client, Listener
from types import SimpleNamespace

import pytest

from rolljax.concurrency import lockstep
from rolljax.concurrency.lockstep import SINGLE_PROCESS, Follower, Leader
from rolljax.errors import ConfigError, InfraError, RolljaxError, StorageError, TrainerError
from rolljax.run.folder import RunFolder

KEY = b"key"
WAIT_S = 60


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    """Record the exit codes with which processes would have ended at once."""
    codes = []
    monkeypatch.setattr(lockstep, "_exit", codes.append)
    monkeypatch.setattr(lockstep, "GRACE_S", 1e6)
    monkeypatch.setattr(lockstep, "NOTICE_S", 0.2)
    return codes


@pytest.fixture
def pair():
    """Return a leader and two followers, and the followers' connections."""
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        made = []
        joining = threading.Thread(target=lambda: made.append(Leader(lockstep.accept(listener, 2))))
        joining.start()
        with pytest.raises(multiprocessing.AuthenticationError):
            Client(listener.address, authkey=b"another")
        connections = [lockstep.connect(listener.address, KEY, i) for i in (1, 2)]
        joining.join(WAIT_S)
    (leader,) = made
    followers = [Follower(c) for c in connections]
    yield leader, followers, connections
    for member in (leader, *followers):  # or their connections' end would be a loss, and end this process
        member._has_ended = True


def shut(connection):
    """Shut down a connection as the end of a process does."""
    with socket.socket(fileno=os.dup(connection.fileno())) as s:
        s.shutdown(socket.SHUT_RDWR)


def until_lost(member):
    assert member._is_lost.wait(WAIT_S)


class Counter:
    """What every process has one of."""

    def __init__(self):
        self.calls = []

    def add(self, name, *, number):
        self.calls.append((name, number))
        if name == "bad":
            raise TrainerError("not finite")
        return len(self.calls)


def served(follower, counter, check=lambda text: None):
    """Start a thread that executes the leader's calls; return it and the errors it ends with."""
    follower.share("counter", counter, ["add"])
    errors = []

    def serve():
        try:
            follower.serve(check)
        except RolljaxError as e:
            errors.append(e)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, errors


def test_a_single_process_uses_its_own_objects():
    counter = Counter()
    assert SINGLE_PROCESS.share("counter", counter, ["add"]) is counter
    with SINGLE_PROCESS.guard():
        assert SINGLE_PROCESS.should_stop(lambda: True)() and not SINGLE_PROCESS.should_stop(lambda: False)()


def test_everyone_makes_the_calls_of_all_threads_in_one_order(pair):
    leader, followers, _ = pair
    own, others = Counter(), [Counter() for _ in followers]
    serving = [served(f, c)[0] for f, c in zip(followers, others, strict=True)]
    counter, results = leader.share("counter", own, ["add"]), []

    def work(name):
        for i in range(50):
            results.append(counter.add(name, number=i))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    leader.end(75)
    for thread, follower, other in zip(serving, followers, others, strict=True):
        thread.join(WAIT_S)
        assert other.calls == own.calls == counter.calls
        assert follower.code == 75
    assert sorted(results) == list(range(1, 101))


def test_what_the_trainer_refuses_ends_the_leader_only(pair):
    """Every process computes the same; the leader says so and ends the run."""
    leader, followers, _ = pair
    others = [Counter() for _ in followers]
    serving = [served(f, c) for f, c in zip(followers, others, strict=True)]
    counter = leader.share("counter", Counter(), ["add"])
    with pytest.raises(TrainerError, match="not finite"):
        counter.add("bad", number=0)
    leader.end(5)
    for (thread, errors), follower, other in zip(serving, followers, others, strict=True):
        thread.join(WAIT_S)
        assert not errors and follower.code == 5 and other.calls == [("bad", 0)]


def test_a_handshake_waits_for_all(pair):
    leader, followers, _ = pair
    seen, may_go = [], threading.Event()
    serving = [
        served(followers[0], Counter(), seen.append),
        served(followers[1], Counter(), lambda text: (may_go.wait(WAIT_S), seen.append(text))),
    ]
    handshake = threading.Thread(target=leader.handshake, args=("a mark",))
    handshake.start()
    handshake.join(0.3)
    assert handshake.is_alive()
    may_go.set()
    handshake.join(WAIT_S)
    assert not handshake.is_alive() and seen == ["a mark", "a mark"]
    leader.end(0)
    for thread, _ in serving:
        thread.join(WAIT_S)


def test_the_leader_collects_what_all_say(pair):
    leader, followers, connections = pair
    for round_of in ("a", "b"):
        for i, follower in enumerate(followers):
            assert follower.collect("read", f"{round_of}{i}") == []
        assert sorted(leader.collect("read", round_of)) == [round_of, f"{round_of}0", f"{round_of}1"]
    shut(connections[0])
    with pytest.raises(InfraError, match="process 1 ended before"):
        leader.collect("read", "")


def test_a_process_with_nothing_to_save_ends_at_once(exits):
    ours, theirs = multiprocessing.Pipe()
    follower = Follower(theirs, at_once=True)
    ours.close()
    until_lost(follower)
    while not exits:
        time.sleep(0.01)
    assert exits == [InfraError.exit_code]


def test_whoever_is_told_to_stop_tells_the_leader(pair):
    leader, followers, _ = pair
    assert not leader.should_stop(lambda: False)()
    followers[1].ask_to_stop()
    assert leader._stop.wait(WAIT_S)
    assert leader.should_stop(lambda: False)()


def test_the_leader_notices_a_lost_follower(pair, exits):
    leader, _, connections = pair
    shut(connections[1])
    with pytest.raises(InfraError, match="process 2 ended before the run did"), leader.guard():
        until_lost(leader)
        raise ValueError("what a collective says then")
    for call in (
        leader.should_stop(lambda: False),
        lambda: leader.share("counter", Counter(), ["add"]).add("a", number=1),
    ):
        with pytest.raises(InfraError, match="process 2 ended"):
            call()
    leader.end(3)
    assert exits == [3]  # at once: others are not waited for


def test_a_failure_of_a_follower_is_the_leaders(pair):
    leader, followers, _ = pair
    with pytest.raises(ConfigError), followers[0].guard():
        raise ConfigError("is odd", setting="A.b")
    until_lost(leader)
    with pytest.raises(InfraError, match="process 1 failed: A.b is odd"):
        leader.should_stop(lambda: False)()


def test_an_error_of_another_thread_of_a_follower_ends_it_and_is_the_leaders(pair):
    leader, followers, _ = pair
    threading.Thread(target=followers[1].fail, args=(StorageError("weights cannot be written"),)).start()
    with pytest.raises(StorageError), followers[1].guard():
        followers[1].serve(print)
    until_lost(leader)
    with pytest.raises(InfraError, match="process 2 failed: weights cannot be written"):
        leader.should_stop(lambda: False)()


def test_followers_notice_a_lost_leader(pair, exits):
    leader, followers, _ = pair
    for connection in leader._connections.values():
        shut(connection)
    for follower in followers:
        with pytest.raises(InfraError, match="process 0 ended before the run did"), follower.guard():
            follower.serve(print)
        follower.end(3)
    assert exits == [3, 3]


def test_what_cannot_be_read_is_a_loss(pair):
    leader, followers, _ = pair
    leader._connections[1].send_bytes(b"no pickle")
    with pytest.raises(InfraError, match="what process 0 said cannot be read"):
        followers[0].serve(print)


def test_a_process_that_cannot_end_in_order_is_cut_off(pair, exits, monkeypatch):
    leader, followers, _ = pair
    cut = threading.Event()
    monkeypatch.setattr(lockstep, "GRACE_S", 0.01)
    monkeypatch.setattr(lockstep, "_exit", lambda code: (exits.append(code), cut.set()))
    leader.end(5)
    assert cut.wait(WAIT_S)
    assert exits == [5]


def test_other_processes_share_folder_and_settings(tmp_path, monkeypatch):
    config, another = (SimpleNamespace(operative="", resolved={"seed": seed}) for seed in (1, 2))
    folder, elsewhere = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    monkeypatch.setattr("rolljax.run.folder.FOUND_S", 0.2)
    with folder.lock():
        folder.prepare(config, fresh=False)
        mark = folder.mark()
        folder.check_shared(config, mark)
        with pytest.raises(ConfigError, match="seed is 2 here, but 1 in the first process"):
            folder.check_shared(another, mark)
        elsewhere.prepare(config, fresh=False)
        with pytest.raises(ConfigError, match="--run_dir"):
            elsewhere.check_shared(config, mark)
