"""The viewer's server: reading run folders, and access control. `e2e/test_view_browser.py` tests its page."""

import http.client
import json
import re
import socket
import subprocess
import sys

import httpx2
import numpy as np
import pytest

from rolljax import view
from rolljax.model.tokenizer import byte_core
from rolljax.model.vocabulary import Vocabulary
from rolljax.run.folder import RunFolder
from rolljax.storage.layout import METRICS
from rolljax.trainer.algorithms.base import Needs
from rolljax.trainer.credit.episodes import Credit, token_columns
from rolljax.types import Trajectory
from rolljax.viewer import answers, records
from rolljax.viewer.app import ASSETS, HEADERS, dump
from rolljax.viewer.export import bundle, page_of
from rolljax.viewer.filters import BadFilter, Filter
from rolljax.viewer.runs import Runs, ViewedRun
from rolljax.viewer.tokens import TokenTexts, _Core
from tests import viewing
from tests.synthetic import episodes_of, groups_of

HARM = " ".join(viewing.HARMFUL)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return viewing.write_run(tmp_path_factory.mktemp("viewed") / "run", text=HARM)


@pytest.fixture(scope="module")
def site(run_dir):
    with viewing.Viewing(run_dir) as served:
        yield served


def get(site, path, **headers):
    return httpx2.get(site.url + path, headers=headers, timeout=30)


# ---- files of trajectories


def test_outlines_say_what_the_files_say(run_dir):
    """Texts that look like arrays of tokens change nothing."""
    data = (run_dir / "rollouts" / "step_2.jsonl").read_bytes()
    full = [json.loads(line) for line in data.splitlines()]
    found = records.scan(data)
    assert list(found.found) == list(range(len(full))) == list(range(18)) and not found.damaged
    for record, whole in zip(found.found.values(), full, strict=True):
        of = records.summary(record)
        assert records.read(run_dir / "rollouts" / "step_2.jsonl", record).to_json() == whole
        assert of["sampled_tok"] == sum(len(t["tokens"]) for t in whole["turns"])
        assert of["prompt_tok"] == sum(len(t["prompt_ids"]) for t in whole["turns"])
        assert list(record.texts)[1 : 1 + len(whole["turns"])] == [t["text"] for t in whole["turns"]]
        assert Trajectory.from_json(whole).to_json() == whole


def test_lines_that_are_not_whole_keep_their_places(run_dir):
    first, second = (run_dir / "rollouts" / "step_1.jsonl").read_bytes().splitlines()[:2]
    broken = [first, b"{", b"null", first[: len(first) // 2], b'{"task":{"content":"x"}}', b"", second, first[:40]]
    found = records.scan(b"\n".join(broken))
    assert {line: r.outline["key"]["sibling"] for line, r in found.found.items()} == {0: 0, 6: 1}
    assert list(found.damaged) == [1, 2, 3, 4] and found.damaged[4] == "key is missing"  # the last is being written


def test_groups_whose_rewards_differ_most_come_first(run_dir):
    found = answers.step(ViewedRun("run", run_dir), 1, Filter())["groups"]
    spreads = [g["spread"] for g in found]
    assert spreads == sorted(spreads, reverse=True) and spreads[0] == 0.5 and spreads[-1] == 0
    assert [t["sibling"] for t in found[0]["trajectories"]] == [0, 1, 2, 3]
    failed = next(g for g in found if any(t["status"] == "failed" for t in g["trajectories"]))
    assert failed["mean"] == 0.25  # of the one that did not fail


@pytest.mark.parametrize(
    "text, number",
    [
        ("", 18), ("reward>=1", 6), ("reward<1 status:ok", 10), ("status:failed", 1), ("fault:infra", 1), ("-fault:none", 2),
        ("fault:limit stage:answer", 1), ("success:yes", 6), ("success:no", 12), ("env:count", 1), ("turns>1", 16), ("turns=0", 1),
        ("len>100000", 0), ('"leave room 9"', 4), ("SERVER", 1), ('-"leave room"', 2), ("prompt_index=8 sibling<2", 2),
        ("part:score>0.5", 6), ("héllo", 1), ('"<script>"', 16),
    ],
)  # fmt: skip
def test_searches_find(run_dir, text, number):
    assert answers.step(ViewedRun("run", run_dir), 2, Filter.parse(text))["found"] == number


@pytest.mark.parametrize("text", ["colour:red", "reward>high", "env>3", "part:score", "status<ok"])
def test_searches_that_mean_nothing_are_refused(text):
    with pytest.raises(BadFilter):
        Filter.parse(text)


def test_a_search_goes_through_all_steps_from_the_newest(run_dir, monkeypatch):
    run = ViewedRun("run", run_dir)
    found = answers.search(run, Filter.parse("status:failed"), None)
    assert [h["step"] for h in found["hits"]] == [3, 2, 1] and found["next"] is None
    monkeypatch.setattr(answers, "SEARCH_S", -1)  # the page goes on where time ran out
    steps, newest = [], None
    while newest != 0:
        part = answers.search(run, Filter.parse("status:failed"), newest)
        steps += [h["step"] for h in part["hits"]]
        newest = part["next"] or 0
    assert steps == [3, 2, 1]


# ---- tokens


def test_tokens_join_to_their_text():
    vocabulary = Vocabulary(_Core(byte_core()))
    texts, ids = TokenTexts(vocabulary), viewing.encode("a é🙂\n")
    assert texts.texts(ids) == ["a", " ", "", "é", "", "", "", "🙂", "\n"]
    assert texts.texts(ids[:3]) == ["a", " ", "�"]
    told = [viewing.USER, *viewing.encode("<|us"), *viewing.encode("er|> hi"), viewing.ASSISTANT]
    assert texts.segments(told) == [("<|user|>", True), ("<|user|> hi", False), ("<|assistant|>", True)]
    assert TokenTexts(None).texts([5, 6]) == ["⟨5⟩", "⟨6⟩"]


def test_a_trajectory_has_what_training_made_of_it(run_dir):
    found = answers.trajectory(ViewedRun("run", run_dir), 2, 1)
    for turn in found["turns"]:
        assert "".join(turn["texts"]).endswith("<|end|>") and turn["special"] == [len(turn["texts"]) - 1]
        assert turn["advantages"] == -0.5 and len(turn["logp"]) == len(turn["ids"]) and turn["versions"] == 1
    assert answers._part([1.0, None, 3.0], slice(1, 3)) == [None, 3.0] and answers._part(None, slice(0, 1)) is None


def test_columns_of_tokens_are_small():
    """A number where all are equal, none where a token takes no part."""
    e = episodes_of(np.random.default_rng(0), groups_of(np.random.default_rng(0), 2, 2), Needs(trainer_logp=True))
    advantages = np.arange(e.num)[:, None] + np.where(np.arange(e.mask.shape[1]) == 1, 0.5, 0.0)
    keep = np.array([True, False, True, True])
    found = token_columns(
        e, Credit(np.where(np.arange(e.num)[:, None] == 2, 7.0, advantages), mask=e.mask & (e.turns == 0), keep=keep)
    )
    assert found[1]["advantages"] is None and [len(f["trainer_logp"]) for f in found] == list(e.lengths)
    first = found[0]["advantages"]
    assert first == 0.0 or [v is not None for v in first] == list(e.turns[0, : e.lengths[0]] == 0)
    np.testing.assert_allclose(found[3]["trainer_logp"], e.trainer_logp[3, : e.lengths[3]], atol=1e-6)
    assert found[3]["entropy"] == e.entropy[3, 0]


# ---- runs that grow


def test_rows_are_read_where_they_were_left(tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=2)
    run = ViewedRun("run", path)
    generation, rows = run.rows(0)
    assert [r["step"] for r in rows] == [1, 2]
    with open(path / METRICS, "a") as f:
        f.write('{"step": 3, "phase"')  # half a line
    assert run.rows(2, generation) == (generation, [])
    with open(path / METRICS, "a") as f:
        f.write(': "rl"}\n')
    assert [r["step"] for r in run.rows(2, generation)[1]] == [3]
    viewing.rewrite(path, steps=1)
    again, rows = run.rows(3, generation)
    assert again != generation and [r["step"] for r in rows] == [1]


def test_a_run_that_goes_on_after_its_end_is_not_over(tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=2)
    run = ViewedRun("run", path)
    assert run.overview()["stop_reason"] == "all phases done" and len(run.overview()["heldout"]) == 2
    viewing.add_step(path, 3)
    assert run.overview()["stop_reason"] is None and [e["mean"] for e in run.overview()["heldout"]] == [0, 0.25, 0.5]


def test_rollouts_written_anew_are_read_anew(tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=1)
    run = ViewedRun("run", path)
    before = len(run.records(1).found)
    RunFolder(path).write_rollouts(1, viewing.step_of(1, groups=1))
    assert len(run.records(1).found) < before


def test_runs_are_found_as_they_appear(tmp_path):
    viewing.write_run(tmp_path / "a" / "run", steps=1)
    viewing.write_run(tmp_path / "b" / "run", steps=1)
    runs = Runs([tmp_path / "a", tmp_path / "b" / "run"])
    assert [r.name for r in runs.all()] == ["run", "run-2"]
    viewing.write_run(tmp_path / "a" / "later", steps=1)
    assert sorted(r.name for r in runs.all()) == ["later", "run", "run-2"]


# ---- over HTTP


def test_every_address_answers(site):
    listed = get(site, "/api/runs").json()
    assert [r["name"] for r in listed["runs"]] == ["run"] and listed["metrics"]["reward/mean"]["unit"] == "reward"
    rows = get(site, "/api/runs/run/rows").json()
    assert len(rows["rows"]) == 3 and rows["all"]
    assert get(site, f"/api/runs/run/rows?after=3&generation={rows['generation']}").json()["rows"] == []
    assert get(site, "/api/runs/run/steps/3?q=status:failed").json()["found"] == 1
    assert get(site, "/api/runs/run/steps/3/0").json()["task"].startswith("Leave room 12 by the door")
    assert get(site, "/api/runs/run/steps/heldout:start/1").json()["task"] == "held out 1"
    held = get(site, "/api/runs/run/heldout").json()
    assert held["evaluations"] == ["start", "warm_start", "rl"] and len(held["tasks"]) == 4
    assert held["tasks"][1]["answers"]["rl"]["reward"] == 1
    assert get(site, "/api/runs/run/config").json()["phases[1].name"] == "rl"
    assert "attachment" in get(site, "/export/run/1").headers["content-disposition"]
    for asset in ASSETS.iterdir():
        assert get(site, f"/assets/{asset.name}").status_code == 200


@pytest.mark.parametrize(
    "path, status",
    [
        ("/api/runs/none/rows", 404), ("/api/runs/run/steps/99", 404), ("/api/runs/run/steps/1/99", 404), ("/api/runs/run/steps/1/-1", 404),
        ("/api/runs/run/steps/heldout:..%2F..%2Fconfig/0", 404), ("/api/runs/run/steps/x/0", 404), ("/api/runs/run/rows?after=x", 404),
        ("/api/runs/run/steps/1?q=colour:red", 400), ("/assets/..%2fapp.py", 404), ("/assets/none.js", 404), ("/etc/passwd", 404),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(site, path, status):
    answer = get(site, path)
    assert answer.status_code == status and "Traceback" not in answer.text


def test_every_answer_holds_the_page_to_its_own_files(site):
    for path in ("/", "/assets/main.js", "/api/runs", "/api/runs/none/rows", "/nowhere", "/export/run/1/0"):
        headers = get(site, path).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_the_viewer_allows_reading_only(site):
    connection = http.client.HTTPConnection("127.0.0.1", site.port)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        connection.request(method, "/api/runs")
        answer = connection.getresponse()
        assert answer.status == 405
        answer.read()


@pytest.mark.parametrize(
    "host, status",
    [("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421), ("localhost:1", 200), ("[::1]:80", 200)],
)
def test_a_page_elsewhere_that_takes_our_address_is_turned_away(site, host, status):
    assert get(site, "/api/runs", host=host).status_code == status


def test_a_token_lets_in(run_dir):
    with viewing.Viewing(run_dir, token="sésame") as site, httpx2.Client(base_url=site.url) as browser:
        for path in ("/", "/api/runs", "/assets/main.js", "/api/events", "/export/run/1", "/?token=wrong"):
            assert browser.get(path).status_code == 401
        assert browser.get("/api/runs", headers={"authorization": "Bearer wrong"}).status_code == 401
        answer = browser.get("/?token=s%C3%A9same&x=1")
        assert answer.status_code == 303 and answer.headers["location"] == "/?x=1"
        assert (
            "httponly" in answer.headers["set-cookie"].lower()
            and "samesite=strict" in answer.headers["set-cookie"].lower()
        )
        assert browser.get("/api/runs").status_code == 200  # it brings the cookie


def test_numbers_that_are_not_finite_arrive_as_null():
    assert json.loads(dump({"a": [float("nan"), 1.5, (float("inf"),)], "b": "\u2028"})) == {
        "a": [None, 1.5, [None]],
        "b": "\u2028",
    }


def test_news_arrive(tmp_path):
    path = viewing.write_run(tmp_path / "run", steps=1)
    with viewing.Viewing(path) as site, socket.create_connection(("127.0.0.1", site.port), timeout=30) as connection:
        connection.sendall(b"GET /api/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        heard = b""
        while b": here" not in heard:
            heard += connection.recv(4096)
        viewing.add_step(path, 2)
        while b"data: " not in heard:
            heard += connection.recv(4096)
    assert b'data: ["run"]' in heard


# ---- what is sent to a colleague


@pytest.mark.parametrize("step, line", [(2, None), (2, 3), ("start", 1)])
def test_an_exported_page_is_whole_and_runs_nothing_of_the_run(run_dir, step, line):
    html = page_of(ViewedRun("run", run_dir), step, line).decode()
    assert len(re.findall(r"<script", html)) == 2 and len(re.findall(r"<style", html)) == 1
    assert not re.search(r"\b(src|href)=", re.sub(r"<script.*?</script>|<style.*?</style>", "", html, flags=re.S))
    assert "default-src 'none'" in html and "unsafe" not in html
    block = re.search(r'<script type="application/json" id="frozen">(.*?)</script>', html, re.S)[1]
    assert "<" not in block
    frozen = json.loads(block)
    assert str(run_dir) not in html  # nor anything else of the machine
    where = frozen["start"].removeprefix("#/run/")
    assert f"api/runs/run/steps/{where}" in frozen["answers"]


def test_the_page_makes_no_markup_of_text():
    code = bundle()
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "setAttribute('on",
        "DOMParser",
        "createContextualFragment",
        "http://",
        "https://",
        "srcdoc",
    )
    found = [name for name in banned if name in code.replace("http://www.w3.org/2000/svg", "")]
    assert not found
    assert all(len(f.read_text().splitlines()) <= 450 for f in ASSETS.iterdir())


# ---- the verb


def test_the_verb_says_what_is_wrong(run_dir, tmp_path, capsys):
    for argv, word in (
        ([str(tmp_path)], "is not a run folder"),
        ([str(run_dir), "--port", "99999"], "0 to 65535"),
        ([str(run_dir), "--step", "1"], "add --export"),
        ([str(run_dir), "--export", str(tmp_path / "x.html"), "--step", "77"], "rollouts of steps 1 to 3"),
        ([str(run_dir), "--export", str(tmp_path / "none" / "x.html")], "cannot be written"),
        ([str(run_dir), "--token", ""], "is empty"),
    ):
        assert view.main(argv) == 2
        assert word in capsys.readouterr().err
    assert view.main([str(run_dir), "--export", str(tmp_path / "x.html"), "--trajectory", "2"]) == 0
    assert (tmp_path / "x.html").stat().st_size > 50_000


def test_the_verb_serves_without_jax(run_dir):
    """And asks for a token where others reach it."""
    code = (
        "import sys, threading, rolljax.view as v\n"
        "import uvicorn\n"
        "uvicorn.Server.run = lambda self, sockets: print(*sys.modules)\n"
        f"v.main([{str(run_dir)!r}, '--host', '0.0.0.0', '--port', '0'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"run at http://0\.0\.0\.0:\d+/\?token=\S{20,}", done.stdout)
    assert not {"jax", "flax", "transformers"} & set(done.stdout.split())
