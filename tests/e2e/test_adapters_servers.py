"""Environments over the network: OpenEnv's WebSocket and ROCK's endpoints, both ends, against real server processes."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("websockets")
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import rolljax
from rolljax.envs import checks
from rolljax.envs.adapters.openenv import OpenEnv, shown
from rolljax.envs.adapters.rock import Rock
from rolljax.envs.catalog import make_spec, ref_of, task_of
from rolljax.errors import ConfigError, EnvError, InfraError

from .conftest import free_port

ROOT = Path(rolljax.__file__).parents[1]
TOKEN = "a token for tests"
LAKE = "frozen_lake"
TAXI = "gymnasium:Taxi-v4(reward='success')"
OPENENV_PYTHON = os.environ.get("ROLLJAX_OPENENV_PYTHON", "")
"""An interpreter with openenv 0.10, for the tests against its own client and server."""


@contextlib.contextmanager
def serve(module, *arguments, token=TOKEN):
    """Start a server process on a free port; yield its address."""
    command = [sys.executable, "-m", f"rolljax.envs.adapters.{module}", *arguments, "--port", "0"]
    env = {**os.environ, "ROLLJAX_ENV_TOKEN": token}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving at "), line
        yield line.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def openenv_url():
    with serve("openenv_server", LAKE, "--sessions", "2") as url:
        yield url


@pytest.fixture(scope="module")
def gem_url():
    with serve("gem_server", LAKE, "gymnasium:*") as url:
        yield url


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("ROLLJAX_ENV_TOKEN", TOKEN)


def play(spec, index, acts):
    """Play an episode with these answers; return its opening and results."""
    env = spec.make()
    seen = [env.reset(spec.task(index))]
    for act in acts:
        seen.append(env.step(act))
        if seen[-1].terminated or seen[-1].truncated:
            break
    env.close()
    return seen


def reference(index):
    """Return a winning walk from the environment itself."""
    spec = make_spec(LAKE)
    env, acts = spec.make(), []
    env.reset(spec.task(index))
    while True:
        acts.append(env.reference_answer())
        if env.step(acts[-1]).terminated:
            return acts


@pytest.mark.parametrize("kind", ["openenv", "rock"])
def test_an_episode_over_the_network_is_the_episode_at_home(kind, openenv_url, gem_url):
    home = make_spec(LAKE)
    away = OpenEnv(openenv_url) if kind == "openenv" else Rock(gem_url, env_id=LAKE)
    for index, acts in ((3, reference(3)), (4, ["left"] * 20), (5, ["\x00", "\ud800", "x" * 100_000, "down"])):
        (here, *results), (there, *far) = play(home, index, acts), play(away, index, acts)
        assert there[-1].content == here[-1].content
        assert [(r.reward, r.terminated, r.truncated, r.success) for r in far] == [
            (r.reward, r.terminated, r.truncated, r.success) for r in results
        ]
        for a, b in zip(results, far, strict=True):
            assert [m.content for m in a.messages] == [m.content for m in b.messages]
    checks.tasks_are_their_index(away, 20)
    assert make_spec(ref_of(away)) == away
    assert task_of(ref_of(away, 3)) == (away, away.task(3))


def test_the_wire_format_of_openenv(openenv_url):
    """Messages as OpenEnv 0.10 sends them, and the expected replies."""
    with connect(
        openenv_url.replace("http", "ws") + "/ws", additional_headers={"Authorization": f"Bearer {TOKEN}"}
    ) as s:

        def ask(message):
            s.send(message if isinstance(message, str) else json.dumps(message))
            return json.loads(s.recv(timeout=30))

        initial_messages = ask({"type": "reset", "data": {"seed": 3, "episode_id": "mine"}})
        grid = make_spec(LAKE).make().reset(make_spec(LAKE).task(3))[0].content
        about = {"env": LAKE, "index": 3}
        assert initial_messages == {
            "type": "observation",
            "data": {
                "observation": {
                    "message": grid,
                    "messages": [{"role": "user", "content": grid}],
                    "metadata": about,
                },
                "reward": None,
                "done": False,
                "metadata": about,
            },
        }
        assert ask({"type": "state"}) == {"type": "state", "data": {"episode_id": "mine", "step_count": 0}}
        *early, last = [ask({"type": "step", "data": {"message": act}})["data"] for act in reference(3)]
        assert not any(d["done"] for d in early) and last["done"] and last["reward"] == 1
        assert last["metadata"]["success"] is True and last["metadata"]["truncated"] is False
        for bad, code in [
            ({"type": "step", "data": {"message": "up"}}, "EXECUTION_ERROR"),
            ({"type": "step", "data": {"move": "up"}}, "VALIDATION_ERROR"),
            ({"type": "step", "data": {"message": 5}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": {"seed": "1"}}, "VALIDATION_ERROR"),
            ({"type": "reset", "data": []}, "VALIDATION_ERROR"),
            ({"type": "dance"}, "UNKNOWN_TYPE"),
            ("[", "INVALID_JSON"),
            ("[" * 100_000, "INVALID_JSON"),
            ("[]", "VALIDATION_ERROR"),
        ]:
            answer = ask(bad)
            assert (answer["type"], answer["data"]["code"]) == ("error", code), bad
        assert ask({"type": "reset", "data": {}})["type"] == "observation"
        s.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed):
            s.recv(timeout=30)


def test_a_full_server_is_the_infrastructures_fault(openenv_url):
    spec = OpenEnv(openenv_url)
    held = [spec.make() for _ in range(2)]
    for env in held:
        env.reset(spec.task(0))
    with pytest.raises(InfraError, match="CAPACITY_REACHED"):
        spec.make().reset(spec.task(0))
    held[0].close()
    for _ in range(100):  # the server notices that the connection is gone
        with contextlib.suppress(InfraError):
            env = spec.make()
            env.reset(spec.task(1))
            env.close()
            break
        time.sleep(0.1)
    else:
        pytest.fail("the session was not freed")
    held[1].close()


def test_a_wrong_token_opens_nothing(openenv_url, gem_url, monkeypatch):
    with pytest.raises(InvalidStatus):
        connect(openenv_url.replace("http", "ws") + "/ws")
    assert post(gem_url, "/apis/v1/envs/gem/make", {"env_id": LAKE}, token="")[0] == 401
    monkeypatch.setenv("ROLLJAX_ENV_TOKEN", "another")
    for spec in (OpenEnv(openenv_url), Rock(gem_url, env_id=LAKE)):
        with pytest.raises(ConfigError, match="token"):
            spec.make().reset(spec.task(0))


def test_a_server_that_is_not_there_or_dies_is_the_infrastructures_fault():
    for spec in (OpenEnv("http://127.0.0.1:9"), Rock("http://127.0.0.1:9")):
        with pytest.raises(InfraError):
            spec.make().reset(spec.task(0))
    command = [sys.executable, "-m", "rolljax.envs.adapters.openenv_server", LAKE, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    spec = OpenEnv(process.stdout.readline().split()[-1])
    env = spec.make()
    env.reset(spec.task(0))
    process.kill()
    process.wait()
    with pytest.raises(InfraError, match="step"):
        env.step("left")
    env.close()


def test_a_silent_client_loses_its_session():
    with serve("openenv_server", LAKE, "--idle_s", "0.3") as url:
        spec = OpenEnv(url)
        env = spec.make()
        env.reset(spec.task(0))
        time.sleep(1)
        with pytest.raises(InfraError, match="nothing was received|step"):
            env.step("left")
        env.close()


def post(url, path, body, token=TOKEN):
    """Send a request; return its status and JSON."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    connection.request("POST", path, data, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_the_endpoints_of_rock(gem_url):
    gem = "/apis/v1/envs/gem/"
    status, made = post(gem_url, gem + "make", {"env_id": TAXI})
    assert status == 200 and list(made) == ["sandbox_id"]
    spec = make_spec(TAXI)
    box = made["sandbox_id"]
    status, initial_messages = post(gem_url, gem + "reset", {"sandbox_id": box, "seed": 5})
    env = spec.make()
    (message,) = env.reset(spec.task(5))
    assert status == 200 and initial_messages["observation"] == message.content
    assert initial_messages["info"]["messages"] == [{"role": "user", "content": message.content}]
    while True:
        act = env.reference_answer()
        status, answer = post(gem_url, gem + "step", {"sandbox_id": box, "action": act})
        assert status == 200 and set(answer) == {"observation", "reward", "terminated", "truncated", "info"}
        if env.step(act).terminated:
            break
    assert (answer["reward"], answer["terminated"], answer["truncated"]) == (1.0, True, False)
    assert answer["info"]["success"] is True
    status, answer = post(gem_url, gem + "step", {"sandbox_id": box, "action": "north"})
    assert status == 409 and "after the episode's end" in answer["detail"]
    assert post(gem_url, gem + "close", {"sandbox_id": box}) == (200, {"sandbox_id": box})
    for path, body, want in [
        ("step", {"sandbox_id": box, "action": "north"}, 400),
        ("make", {"env_id": "sokoban"}, 400),
        ("make", {"env_id": "os.path"}, 400),
        ("make", {"env_id": "gymnasium:NoSuch-v0"}, 400),
        ("make", {"env_id": "rg:chain_sum"}, 400),
        ("make", {"env_id": "rolljax.envs.records.Records(path='/etc/passwd')"}, 400),
        ("make", {}, 400),
        ("make", [], 400),
        ("make", "{", 400),
        ("reset", {"sandbox_id": "none"}, 400),
        ("make", b" " * (2**20 + 1), 400),
    ]:
        status, answer = post(gem_url, gem + path, body)
        assert status == want and "Traceback" not in answer["detail"], (path, answer)


def test_sessions_of_rock_are_counted_and_reaped():
    gem = "/apis/v1/envs/gem/"
    with serve("gem_server", LAKE, "--sessions", "2", "--idle_s", "1") as url:
        spec = Rock(url, env_id=LAKE)
        assert [post(url, gem + "make", {"env_id": LAKE})[0] for _ in range(3)] == [200, 200, 429]
        with pytest.raises(InfraError, match="429"):
            spec.make().reset(spec.task(0))
        for _ in range(100):
            if post(url, gem + "make", {"env_id": LAKE})[0] == 200:
                return
            time.sleep(0.1)
    pytest.fail("no session was reaped")


def test_shells_by_rocklets_verbs():
    sandbox = pytest.importorskip("rolljax.sandbox")
    if sandbox.available():
        pytest.skip(sandbox.available())
    with serve("gem_server", LAKE, "--shells", "--sessions", "1") as url:
        box = {"sandbox_id": "mine"}
        assert post(url, "/is_alive", box) == (200, {"is_alive": False})
        assert post(url, "/create_session", {**box, "session": "one"})[0] == 200
        say = {**box, "session": "one", "command": "cd /tmp; x=5", "timeout": 20}
        assert post(url, "/run_in_session", say)[1]["exit_code"] == 0
        told = post(url, "/run_in_session", {**say, "command": "echo $x; pwd; false"})[1]
        assert (told["output"].split(), told["exit_code"]) == (["5", "/tmp"], 1)
        assert post(url, "/write_file", {**box, "path": "note", "content": "é\n"})[1] == {
            "success": True,
            "message": "",
        }
        assert post(url, "/read_file", {**box, "path": "note"}) == (200, {"content": "é\n"})
        told = post(url, "/execute", {**box, "command": ["cat", "note"], "timeout": 20})[1]
        assert (told["stdout"], told["exit_code"]) == ("é\n", 0)
        assert post(url, "/is_alive", box) == (200, {"is_alive": True})
        assert post(url, "/read_file", {**box, "path": "nothing"})[0] == 409
        assert post(url, "/execute", {**box, "command": 5})[0] == 400
        assert post(url, "/execute", {"sandbox_id": "another", "command": "true"})[0] == 400
        assert post(url, "/close", box)[0] == 200
        assert post(url, "/is_alive", box) == (200, {"is_alive": False})


def test_servers_say_what_is_wrong_at_the_start():
    for module, arguments, said in [
        ("openenv_server", ["frozen_lak"], "did you mean frozen_lake"),
        ("gem_server", [LAKE, "--sessions", "0"], "must be at least 1"),
    ]:
        command = [sys.executable, "-m", f"rolljax.envs.adapters.{module}", "--port", "0", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "observation, key, text",
    [
        ({"message": "m", "text": "t"}, "", "m"),
        ({"message": "", "text": "t"}, "", "t"),
        ({"board": [1, 2], "metadata": {}}, "", '{"board": [1, 2]}'),
        ({"board": "b", "text": "t"}, "board", "b"),
        ("plain", "", "plain"),
        ({"messages": [{"role": "tool", "content": "c"}], "text": "t"}, "", "c"),
    ],
)
def test_observations_of_other_servers_become_text(observation, key, text):
    assert shown(observation, key)[-1].content == text


@pytest.mark.parametrize("make", [lambda: OpenEnv("127.0.0.1:8000"), lambda: Rock("ftp://host")])
def test_what_is_no_address_is_refused(make):
    with pytest.raises(ConfigError, match="no address"):
        make()


CLIENT = """
import json, sys
from openenv import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]}).sync() as env:
    opening = env.reset(seed=3)
    results = [env.step({"message": act}) for act in json.loads(sys.argv[3])]
    state = env.state()
print(json.dumps([opening.observation["message"], [[r.reward, r.done] for r in results], results[-1].metadata, state]))
"""

SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kw):
        self.seed, self.count = seed, 0
        return Heard(text=f"say {seed}")
    def step(self, action, timeout_s=None, **kw):
        self.count += 1
        if action.message == "fail":
            raise ValueError("on purpose")
        done = action.message == str(self.seed)
        return Heard(text=action.message, reward=float(done), done=done)
    @property
    def state(self):
        return State(step_count=self.count)

uvicorn.run(create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.mark.skipif(not OPENENV_PYTHON, reason="ROLLJAX_OPENENV_PYTHON names no interpreter with openenv 0.10")
def test_openenvs_own_client_plays_on_our_server(openenv_url):
    done = subprocess.run(
        [OPENENV_PYTHON, "-c", CLIENT, openenv_url, TOKEN, json.dumps(reference(3))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    initial_messages, results, about, state = json.loads(done.stdout.splitlines()[-1])
    assert initial_messages == make_spec(LAKE).task(3).content.replace("S", "P")
    assert results[-1] == [1.0, True] and not any(over for _, over in results[:-1])
    assert about["success"] is True and state["step_count"] == len(reference(3))


@pytest.mark.skipif(not OPENENV_PYTHON, reason="ROLLJAX_OPENENV_PYTHON names no interpreter with openenv 0.10")
def test_our_client_plays_on_openenvs_own_server():
    port = free_port()
    process = subprocess.Popen([OPENENV_PYTHON, "-c", SERVER, str(port)])
    try:
        spec = OpenEnv(f"http://127.0.0.1:{port}")
        for _ in range(300):
            with contextlib.suppress(InfraError):
                env = spec.make()
                env.reset(spec.task(7))
                break
            time.sleep(0.1)
        assert env.step("6").messages[0].content == "6"
        with pytest.raises(EnvError, match="on purpose"):
            env.step("fail")
        result = env.step("7")
        assert (result.reward, result.terminated, result.success) == (1, True, True)
        env.close()
    finally:
        process.kill()
        process.wait()
