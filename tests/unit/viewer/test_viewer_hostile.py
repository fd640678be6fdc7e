"""The viewer among damaged run folders and hostile requests: it answers, it never fails, and it shows what is whole."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from urllib.parse import quote

import httpx2
import pytest

from rolljax import view
from rolljax.storage.layout import METRICS, RESOLVED, SUMMARY
from rolljax.viewer.runs import Runs, ViewedRun
from tests import damage, viewing

SEED = 26


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return viewing.write_run(tmp_path_factory.mktemp("viewed") / "healthy", text=" ".join(viewing.HARMFUL))


def status_of(port, request):
    """Send bytes, and return the status and the body of what comes back; None if the connection is closed instead."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(2**16):
            answer += part
            if b"\r\ncontent-type: text/event-stream" in answer:
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else None


def connected(site):
    return socket.create_connection(("127.0.0.1", site.port), timeout=60)


def attack(healthy, folder, runs, requests):
    """Send requests to random addresses; the viewer must never fail, and always show the healthy run."""
    rng = random.Random(SEED)
    (folder / "runs").mkdir()
    paths = [healthy, *damage.damaged_runs(healthy, folder / "runs", rng, runs)]
    names, answers = [p.name for p in paths], {}
    with viewing.Viewing(healthy, folder / "runs") as site:
        first = httpx2.get(f"{site.url}/api/runs/healthy/steps/2", timeout=60).json()
        for i in range(requests):
            request = damage.hostile_head(site.port, damage.hostile_target(names, rng), rng)
            found = status_of(site.port, request)
            status = None if found is None else found[0]
            assert status is None or status < 500, (i, request[:300], found)
            if found and found[0] == 200 and request.startswith((b"GET /api", b"GET /export")):
                json.loads(found[1]) if b"/api" in request[:9] else found[1].decode()
            answers[status] = answers.get(status, 0) + 1
        for name in names:
            for address in (
                "rows",
                "config",
                "heldout",
                "search",
                "steps/1",
                "steps/2",
                "steps/3",
                "steps/2/0",
                "steps/heldout:rl/1",
            ):
                found = httpx2.get(f"{site.url}/api/runs/{name}/{address}", timeout=60)
                assert found.status_code < 500, (name, address, found.text)
        listed = httpx2.get(f"{site.url}/api/runs", timeout=60).json()["runs"]
        assert sorted(r["name"] for r in listed) == sorted(names)
        assert httpx2.get(f"{site.url}/api/runs/healthy/steps/2", timeout=60).json() == first
    assert answers[200] > requests / 10 and answers[404] > requests / 10, answers


def test_hostile_requests_and_damaged_runs_never_fail(healthy, tmp_path):
    attack(healthy, tmp_path, runs=8, requests=100)


@pytest.mark.sweep
def test_a_thousand_hostile_requests_and_sixty_damaged_runs_never_fail(healthy, tmp_path):
    attack(healthy, tmp_path, runs=60, requests=1000)


# ---- one hole each


def test_a_damaged_run_is_listed_with_what_is_wrong(healthy, tmp_path):
    """And the others as if it were not there."""
    damaged = viewing.write_run(tmp_path / "damaged")
    (damaged / RESOLVED).write_text("[" * 10_000 + "]" * 10_000)
    (damaged / SUMMARY).write_text(
        '{"steps": "many", "wall_s": [], "heldout_reward": [{"phase": "rl", "mean": "high"}, null]}'
    )
    with open(damaged / METRICS, "a") as f:
        f.write('{"step": 4, "phase": 7, "reward/mean": "high", "time/step_s": true}\n{"step": true}\nx\n')
    alone = ViewedRun("healthy", healthy).overview()
    one, two = (run.overview() for run in Runs([healthy, damaged]).all())
    assert one == alone and not one["damaged"]
    assert two["damaged"] == [f"{RESOLVED} cannot be read: it is nested too deeply", f"{METRICS}: 2 lines"]
    assert (
        two["step"] == 4
        and two["phase"] == ""
        and [e["phase"] for e in two["heldout"]] == ["start", "rl", "warm_start"]
    )
    assert set(ViewedRun("damaged", damaged).rows(3)[1][3]) == {"step", "phase"}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"turns": [{"tokens": ["x"]}]}, "turns[0].tokens is a list of 1, not a list of whole numbers"),
        ({"turns": [{"sampler_logp": []}]}, "turns[0].sampler_logp is a list of 0, not a list of"),
        ({"turns": [{"versions": [0]}]}, "turns[0].versions is a list of 1, not a list of"),
        ({"turns": [{"tokens": [-1]}]}, "turns[0].tokens is a list of 1, not a list of whole numbers"),
        ({"turns": [{"alternatives": {"ids": [[1]], "logp": [[1, 2]]}}]}, "turns[0].alternatives.ids is a list of 1"),
        ({"trained": {"advantages": [1]}}, "trained.advantages is a list of 1, not a list of"),
        ({"trained": {"entropy": "x"}}, "trained.entropy is 'x', not a number"),
        ({"expert": {"id": 3}}, "expert.id is 3, not a text"),
        ({"sample_s": "x"}, "sample_s is 'x', not a number"),
    ],
)
def test_a_damaged_trajectory_is_told_of_with_its_field(healthy, tmp_path, change, why):
    """Where only what is opened is damaged, lists show it as ever."""
    run = viewing.write_run(tmp_path / "run", steps=1)
    file = run / "rollouts" / "step_1.jsonl"
    lines = file.read_text().splitlines()
    record = json.loads(lines[1])
    if "turns" in change:
        record["turns"][0] |= change["turns"][0]
    else:
        record |= change
    file.write_text("\n".join([lines[0], json.dumps(record, separators=(",", ":")), *lines[2:]]) + "\n")
    with viewing.Viewing(run) as site:
        answer = httpx2.get(f"{site.url}/api/runs/run/steps/1/1", timeout=30)
        assert answer.status_code == 404 and f"line 1 of step 1 of run is damaged: {why}" in answer.json()["error"]
        assert httpx2.get(f"{site.url}/api/runs/run/steps/1", timeout=30).json()["total"] == len(lines)
        assert httpx2.get(f"{site.url}/export/run/1", timeout=30).status_code == 200


def test_a_step_says_how_many_of_its_lines_are_damaged(tmp_path):
    run = viewing.write_run(tmp_path / "run", steps=1)
    file = run / "rollouts" / "step_1.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(["{}", lines[1], lines[2].replace('"reward":0.0', '"reward":"low"'), *lines[3:]]) + "\n")
    with viewing.Viewing(run) as site:
        found = httpx2.get(f"{site.url}/api/runs/run/steps/1", timeout=30).json()
        assert found["damaged"] == {"n": 2, "line": 0, "why": "key is missing"} and found["total"] == len(lines) - 2
        # an address is a line of the file, whatever is damaged before it
        assert httpx2.get(f"{site.url}/api/runs/run/steps/1/3", timeout=30).json()["sibling"] == 3


def test_no_address_leads_to_another_host(healthy):
    """A path that begins with two slashes is the name of a host to a browser."""
    with viewing.Viewing(healthy, token="sesame") as site:
        for path in (
            "//evil.example",
            "///evil.example/x",
            "/\\evil.example",
            "/%2f%2fevil.example",
            "//evil.example/%2e%2e",
            "/api/runs/",
        ):
            for host in ("127.0.0.1", "[", "evil.example", ""):
                request = f"GET {path}?token=sesame HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                with socket.create_connection(("127.0.0.1", site.port), timeout=30) as connection:
                    connection.sendall(request)
                    answer = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
                assert answer.split()[1] == "303", answer
                location = re.search(r"(?im)^location: (.*?)\r?$", answer)[1]
                assert re.match(r"/(?![/\\])", location) and "token" not in location, location
    with viewing.Viewing(healthy) as site:
        assert httpx2.get(f"{site.url}/api/runs/", timeout=30).status_code == 404


@pytest.mark.parametrize("token", ["sesame", "sésame☃", "a&b#c%/ "])
def test_a_token_of_any_characters_lets_in(healthy, token):
    with viewing.Viewing(healthy, token=token) as site, httpx2.Client(base_url=site.url) as browser:
        assert browser.get("/", params={"token": token}).status_code == 303
        assert browser.get("/api/runs").status_code == 200
        assert token not in dict(browser.cookies).values()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_a_head_has_a_deadline(healthy, sent):
    """A client that sends a part of a request, or nothing, is disconnected after the deadline."""
    with viewing.Viewing(healthy, head_s=0.2) as site, connected(site) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answer.split()[1:2] == ([b"408"] if sent else [])


def test_a_watcher_is_no_late_head(healthy):
    with viewing.Viewing(healthy, head_s=0.2) as site, connected(site) as connection:
        connection.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = b""
        while b": here" not in heard:
            heard += connection.recv(4096)
        with connected(site) as late:
            assert late.recv(1) == b""  # the deadline is over
        os.utime(healthy / SUMMARY, (0, 0))
        while b"data: " not in heard:
            heard += connection.recv(4096)
    assert b'data: ["healthy"]' in heard


def test_the_verb_listens_before_it_prints_its_address(healthy):
    """Whoever reads the address may open it at once."""
    command = [sys.executable, "-m", "rolljax.view", str(healthy), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r"http://127\.0\.0\.1:(\d+)/$", process.stdout.readline().strip())[1])
            assert status_of(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 200
        finally:
            process.terminate()
    assert process.returncode in (0, -15)


def test_names_of_runs_cannot_speak_to_the_terminal(healthy, tmp_path, monkeypatch, capsys):
    """Folders may be called anything: controls are written out, and what is no UTF-8 can still be asked for."""
    names = ["a\x1b]0;owned\x07", "b\nhttp:", os.fsdecode(b"c\xff"), "d\u202eexe"]
    for name in names:
        (tmp_path / name).symlink_to(healthy)
    with monkeypatch.context() as instead:
        instead.setattr("uvicorn.Server.run", lambda self, sockets: None)
        assert view.main([str(tmp_path), "--port", "0"]) == 0
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and told[:-1].isprintable() and "a\\x1b]0;owned\\x07, b\\nhttp" in told
    assert view.main([str(tmp_path / names[0]), "--export", str(tmp_path / "x.html"), "--trajectory", "99"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    with viewing.Viewing(tmp_path) as site:
        found = [run["name"] for run in httpx2.get(f"{site.url}/api/runs", timeout=30).json()["runs"]]
        assert found == [*names[:2], "c\\xff", names[3]]
        for name in found:
            assert httpx2.get(f"{site.url}/api/runs/{quote(name)}/steps/1", timeout=30).json()["total"]


def test_a_run_is_called_by_its_own_folder(healthy, monkeypatch):
    monkeypatch.chdir(healthy / "rollouts")
    assert [run.name for run in Runs([".."]).all()] == ["healthy"]
