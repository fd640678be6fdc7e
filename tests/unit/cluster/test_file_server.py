"""Snapshots over HTTP, and what a server of files does not give away."""

import http.client
import os
import secrets
import socket
import threading
from urllib.parse import urlsplit

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rolljax.cluster import file_server
from rolljax.cluster.adapters import AdapterReader, AdapterWriter
from rolljax.cluster.file_server import FileServer
from rolljax.cluster.snapshots import SnapshotReader, SnapshotWriter
from rolljax.errors import SamplerError, StorageError
from rolljax.model.lora import Adapted
from rolljax.trainer.publish import checksums, differing


def weights(version):
    params = {"a": np.arange(40_000, dtype=np.float32).reshape(200, 200), "b": np.full((3,), 0.5, np.float32)}
    params["a"][version] = -1
    return jax.device_put(params)


def push(writer, version):
    return writer.write(weights(version), version, checksums(weights(version)))


def reader(url, **settings):
    like = jax.eval_shape(lambda: weights(0))
    here = SingleDeviceSharding(jax.devices()[1])
    return SnapshotReader(url, like, jax.tree.map(lambda _: here, like), **settings)


def is_right(read, version):
    found = read.read(1, version)[0]
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), found, weights(version))))


@pytest.fixture
def served(tmp_path):
    """Serve a store; return its writer and the server."""
    folder = tmp_path / "store"
    folder.mkdir()
    with FileServer(folder) as server:
        yield SnapshotWriter(str(folder), 1, chunk_bytes=10_000), server


def test_a_reader_without_the_folder(served):
    writer, server = served
    read = reader(server.url)
    for version, base in enumerate([None, 0, 1]):
        assert push(writer, version).base == base
        assert read.newest() == (1, version) and is_right(read, version)
    assert is_right(reader(server.url), 2)
    with pytest.raises(
        SamplerError, match="version 7 of epoch 1 are not in http://.*the newest there are of version 2"
    ):
        read.read(1, 7)
    with pytest.raises(StorageError, match="does not support writing"):
        push(SnapshotWriter(server.url, 2), 0)


def test_adapters_are_read_next_to_their_base(served):
    _, server = served
    params = Adapted(weights(0), {"a": weights(1)["a"]})
    AdapterWriter(str(server.folder), 1, stores=[server.url]).write(params, 3, checksums(params))
    like, here = jax.eval_shape(lambda: params), SingleDeviceSharding(jax.devices()[1])
    read, sums = AdapterReader(server.url, like, jax.tree.map(lambda _: here, like)).read(1, 3)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), read, params))
    assert differing(sums, checksums(params)) == []


def test_a_server_that_is_away_is_waited_for(served, monkeypatch):
    """It is closed in front of a reader, and comes back."""
    writer, server = served
    push(writer, 0)
    read = reader(server.url, timeout_s=60.0)
    assert read.newest() == (1, 0)
    server.close()
    with pytest.raises(SamplerError, match=r"(?s)cannot be read from http.* within 0\.5 s: "):
        reader(server.url, timeout_s=0.5).read(1, 0)
    done = []
    thread = threading.Thread(target=lambda: done.append(is_right(read, 0)))
    thread.start()
    url = urlsplit(server.url)
    monkeypatch.setattr(secrets, "token_urlsafe", lambda length: url.path.strip("/"))
    with FileServer(writer._store.url, port=url.port) as again:
        thread.join(timeout=60)
        assert again.url == server.url and done == [True]


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/key/"
        with pytest.raises(SamplerError, match=r"within 0\.5 s: it does not answer"):
            reader(url, timeout_s=0.5).newest()


# ---- strangers


def ask(server, path, method="GET"):
    """Return status and body of a request whose path is sent as it is."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_only_files_below_the_folder_to_who_has_the_key(served, tmp_path):
    _, server = served
    key, store = urlsplit(server.url).path.strip("/"), tmp_path / "store"
    (store / "sub").mkdir()
    (store / "sub/a file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (store / "link").symlink_to(tmp_path / "secret")
    (store / "up").symlink_to(tmp_path)
    os.mkfifo(store / "pipe")
    assert ask(server, f"/{key}/sub/a%20file") == ask(server, f"/{key}/sub/a%20file?x=1#y") == (200, b"inside")
    inside = "sub", "sub/", "", "none", "sub/a%20file/", "sub//a%20file", "./sub/a%20file", "pipe", "link", "up/secret"
    outside = "../secret", "..%2fsecret", "%2e%2e/secret", "sub/../../secret", f"/{tmp_path}/secret", "a%00b", "%ff"
    for path in (f"/{key}/{name}" for name in inside + outside):
        assert ask(server, path) == (404, b""), path
    for path in ("/", "*", "//", f"/{key}", "/sub/a%20file", f"/{key[:-1]}/sub/a%20file", f"/{key}x/sub/a%20file"):
        assert ask(server, path) == (404, b""), path
    assert ask(server, f"/{key}/sub/a%20file", "PUT")[0] == ask(server, f"/{key}/new", "DELETE")[0] == 501
    assert (store / "sub/a file").read_text() == "inside"


def test_connections_are_limited(served, monkeypatch):
    monkeypatch.setattr(file_server, "MAX_CONNECTIONS", 2)
    _, server = served
    url = urlsplit(server.url)
    idle = [socket.create_connection((url.hostname, url.port)) for _ in range(2)]
    with socket.create_connection((url.hostname, url.port)) as third:
        assert third.recv(1) == b""
    idle.pop().close()
    while True:  # until the server has noticed
        try:
            assert ask(server, "/")[0] == 404
            break
        except (http.client.RemoteDisconnected, ConnectionError):
            pass
    idle.pop().close()
