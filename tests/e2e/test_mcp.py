"""MCP with the real SDK on both sides: our client and its servers, its client and our server; servers that misbehave."""

import asyncio
import base64
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.server.mcpserver import Image, MCPServer

from rolljax.envs.tools import FunctionToolSet, McpTools, SandboxTools, ToolEnv, ToolLimits
from rolljax.envs.tools.calculator import Arithmetic, CalculatorTask
from rolljax.envs.tools.serve import mcp_server
from rolljax.errors import ConfigError, EnvError, InfraError

from .conftest import free_port

ROOT = Path(__file__).parents[2]
NASTY = """
import asyncio, os, sys, time
from mcp.server.mcpserver import MCPServer

s = MCPServer("nasty", log_level="CRITICAL")

@s.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@s.tool()
def boom() -> str:
    raise ValueError("a secret of the server")

@s.tool()
async def hang() -> str:
    await asyncio.sleep(120)

@s.tool()
def die() -> str:
    os.write(2, b"my last words\\n")
    os._exit(3)

@s.tool()
def pid() -> int:
    return os.getpid()

@s.tool(structured_output=False)
def big(n: int) -> str:
    return "x" * n

if len(sys.argv) > 1:
    s.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
s.run("stdio")
"""
RUDE = """
import json, sys, time
mode = sys.argv[1]
if mode == "silent":
    time.sleep(120)
if mode == "exits":
    sys.exit("no licence")
for line in sys.stdin:
    message = json.loads(line)
    method, number = message["method"], message.get("id")
    def answer(result):
        print(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}), flush=True)
    if method == "initialize":
        info = {"name": "rude", "version": "1"}
        answer({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list":
        tools = [{"name": n, "inputSchema": {"type": "object"}} for n in ("garbage", "endless", "broken", "fine", "tail")]
        answer({"tools": tools})
    elif method == "tools/call":
        name = message["params"]["name"]
        if name == "garbage":
            print("debug: hello\\n\\x00{{{\\n[]\\n", flush=True)
        if name == "endless":
            for _ in range(300):
                sys.stdout.write("x" * 100_000)
            print(flush=True)
        if name == "broken":
            print(json.dumps({"jsonrpc": "2.0", "id": number, "result": [[]]}).replace("[[]]", "[" * 5000), flush=True)
        if name == "tail":
            print(json.dumps({"result": "y" * 300_000, "jsonrpc": "2.0", "id": number}), flush=True)
        if name in ("garbage", "fine"):
            answer({"content": [{"type": "text", "text": "ok"}]})
    elif number is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no such method"}}), flush=True)
"""
GUEST = """
import json, os, socket, sys
def tool(arguments):
    found = {"outside": os.path.exists(arguments["path"]), "secrets": sorted(k for k in os.environ if "SECRET" in k)}
    try:
        socket.create_connection(("127.0.0.1", arguments["port"]), 2)
        found["network"] = "open"
    except OSError as e:
        found["network"] = "closed"
    return json.dumps(found)
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    info = {"name": "guest", "version": "1"}
    schema = {"type": "object", "properties": {"port": {"type": "integer"}, "path": {"type": "string"}}}
    answers = {
        "initialize": lambda p: {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info},
        "tools/list": lambda p: {"tools": [{"name": "look", "inputSchema": schema}]},
        "tools/call": lambda p: {"content": [{"type": "text", "text": tool(p["arguments"])}]},
    }
    if message["method"] in answers:
        answer = {"result": answers[message["method"]](message.get("params"))}
    else:
        answer = {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""
LIMITS = ToolLimits(call_s=20)
SHORT = ToolLimits(call_s=1)


def answers(port):
    """Return whether a process listens on `port` (a socket may also connect to itself)."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as s:
        return s.getsockname() != s.getpeername()
    return False


@contextlib.contextmanager
def http_server(command, port):
    """Run a server process that listens on `port`, which must be free before."""
    deadline = time.monotonic() + 60
    while answers(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        while not answers(port):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    (folder / "nasty.py").write_text(NASTY)
    (folder / "rude.py").write_text(RUDE)
    (folder / "guest.py").write_text(GUEST)
    return folder


@pytest.fixture(scope="module", params=["stdio", "http"])
def nasty(request, scripts):
    """Return the settings of a server, and a context that restarts it."""
    command = (sys.executable, str(scripts / "nasty.py"))
    if request.param == "stdio":
        yield McpTools(command=command, where="process"), contextlib.nullcontext
    else:
        port = free_port()
        with http_server((*command, str(port)), port):
            yield McpTools(url=f"http://127.0.0.1:{port}/mcp"), lambda: http_server((*command, str(port)), port)


def test_our_client_and_a_server_that_misbehaves(nasty):
    tools, again = nasty
    episode = tools.open()
    assert [s.name for s in episode.list()] == ["add", "boom", "hang", "die", "pid", "big"]
    assert episode.list()[0].description == "Add two numbers." and list(episode.list()[0].parameters) == ["a", "b"]

    def call(name, limits=LIMITS, **arguments):
        return episode.call(name, arguments, limits)

    assert (call("add", a=1, b=2).text, call("add", a=1, b=2).structured) == ("3", {"result": 3})
    for arguments in ({"a": 1}, {"a": "x", "b": 2}, {"a": [[[]]], "b": {}}):
        result = call("add", **arguments)
        assert (result.is_error, result.kind) == (True, "exception") and "validation error" in result.text
    assert call("nope").kind == "unknown_tool"
    assert call("boom").is_error and "boom" in call("boom").text
    result = call("hang", SHORT)
    assert (result.kind, result.text) == ("timeout", "hang gave no result within 1 s")
    assert call("add", a=2, b=2).text == "4"
    deep = 1
    for _ in range(100):
        deep = [deep]
    for value in ("\ud800", deep, float("inf"), "x" * 300_000, {"\udfff": "\x00"}):
        assert call("add", a=value, b=1).is_error
    assert call("add", a=10**4000, b=1).text == str(10**4000 + 1)
    result = call("big", n=3_000_000)
    assert result.truncated and result.bytes == 3_000_000 and len(result.text) <= LIMITS.kept_bytes
    result = call("big", n=20_000_000)
    assert result.kind == "limit" and "bytes" in result.text and result.bytes < 1000
    assert call("add", a=2, b=3).text == "5"
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        sums = [*threads.map(lambda i: tools.open().call("add", {"a": i, "b": i}, LIMITS).text, range(60))]
    assert sums == [str(2 * i) for i in range(60)]
    first = call("pid").text
    with pytest.raises(InfraError, match="MCP server .*(my last words|onnection|isconnect)"):
        call("die")
    with pytest.raises(InfraError):
        call("add", a=1, b=1)
    with again():
        episode = tools.open()
        assert call("add", a=1, b=1).text == "2" and call("pid").text != first


@pytest.mark.slow
def test_an_http_server_of_an_older_protocol(scripts, monkeypatch):
    """A server over HTTP keeps sessions, and answers with streams of events."""
    monkeypatch.setattr("mcp.client.Client", functools.partial(Client, mode="legacy"))
    port = free_port()
    command = (sys.executable, str(scripts / "nasty.py"), str(port))
    tools = McpTools(url=f"http://127.0.0.1:{port}/mcp")
    with http_server(command, port):
        episode = tools.open()
        assert episode.call("add", {"a": 1, "b": 2}, LIMITS).text == "3"
        assert episode.call("big", {"n": 3_000_000}, LIMITS).bytes == 3_000_000
        assert episode.call("big", {"n": 8_000_000}, LIMITS).kind == "limit"
        assert episode.call("hang", {}, SHORT).kind == "timeout"
        assert episode.call("add", {"a": 2, "b": 2}, LIMITS).text == "4"
    with http_server(command, port):
        with pytest.raises(InfraError, match="forgotten this session|onnection closed"):
            episode.call("add", {"a": 1, "b": 2}, LIMITS)
        assert tools.open().call("add", {"a": 1, "b": 2}, LIMITS).text == "3"


def test_a_server_that_died_between_episodes_costs_none(scripts):
    tools = McpTools(command=(sys.executable, str(scripts / "nasty.py")), where="process", max_bytes=10**6)
    episode = tools.open()
    pid = int(episode.call("pid", {}, LIMITS).text)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not episode._connection.gone:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert int(tools.open().call("pid", {}, LIMITS).text) != pid


def test_a_dead_server_costs_one_episode(scripts):
    tools = McpTools(command=(sys.executable, str(scripts / "nasty.py")), where="process", shared=False)
    spec = ToolEnv(Arithmetic(), tools, parser="compact", limits=SHORT)
    assert spec.runs == "thread"
    env = spec.make()
    env.reset(spec.task(0))
    pid = int(env.step("pid()").messages[0].content)
    assert env.step("hang()").messages[0].content == "hang gave no result within 1 s"
    assert env.step("add(a=1, b=2)").messages[0].content == "3"
    with pytest.raises(InfraError, match="exit code 3; its last words: my last words"):
        env.step("die()")
    env.reset(spec.task(0))
    other = int(env.step("pid()").messages[0].content)
    assert other != pid
    env.close()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("mode, said", [("exits", "exit code 1; its last words: no licence"), ("silent", "within 1 s")])
def test_servers_that_do_not_start(scripts, mode, said):
    command = (sys.executable, "-S", str(scripts / "rude.py"), mode)
    with pytest.raises(InfraError, match=said):
        McpTools(command=command, where="process", start_s=1 if mode == "silent" else 30).open()


def test_servers_that_are_not_there():
    with pytest.raises(InfraError, match="MCP server no-such-program: .*no-such-program"):
        McpTools(command=("no-such-program",), where="process").open()
    with pytest.raises(InfraError, match="MCP server http"):
        McpTools(url=f"http://127.0.0.1:{free_port()}/mcp").open()
    with pytest.raises(ConfigError, match="no_such"):
        McpTools(server="rolljax.envs.tools.calculator_server.no_such").open()
    for wrong in (
        {},
        {"command": ("a",), "url": "b"},
        {"url": "b", "files": (("a", "b"),)},
        {"command": "a", "where": "x"},
    ):
        with pytest.raises(ConfigError):
            McpTools(**wrong)


def test_many_episodes_hear_of_a_server_that_is_down_at_once():
    tools = McpTools(url=f"http://127.0.0.1:{free_port()}/mcp")

    def why(_):
        with pytest.raises(InfraError) as e:
            tools.open()
        return str(e.value)

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(why, range(64)))) == 1


def test_a_server_with_bad_manners(scripts):
    """Lines that are no messages, too long, or nested too deeply cost at most the call that they answer."""
    command = (sys.executable, "-S", str(scripts / "rude.py"), "run")
    episode = McpTools(command=command, where="process", max_bytes=200_000).open()
    assert episode.call("garbage", {}, LIMITS).text == "ok"
    assert episode.call("broken", {}, LIMITS).is_error
    result = episode.call("tail", {}, LIMITS)
    assert result.kind == "limit" and "the limit is 200000" in result.text
    assert episode.call("endless", {}, SHORT).kind == "timeout"
    assert episode.call("fine", {}, LIMITS).text == "ok"


@pytest.mark.parametrize("via", ["mcp", "mcp-stdio"])
def test_the_calculator_task_over_mcp(via):
    spec, plain = CalculatorTask(via=via), CalculatorTask()

    def play(spec, index):
        env = spec.make()
        said = [env.reset(spec.task(index))]
        said += [env.step(env.reference_answer()), env.step(env.reference_answer())]
        env.close()
        return said

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        episodes = [*threads.map(lambda i: play(spec, i), range(40))]
    assert episodes == [play(plain, i) for i in range(40)] and all(e[-1].success for e in episodes)
    env = spec.make()
    env.reset(spec.task(0))
    assert "division by zero" in env.step("calc(1//0)").messages[0].content


# ---- our server, the SDK's client


def drive(target, do):
    async def run():
        async with Client(target, cache=None) as client:
            return await do(client)

    return asyncio.run(asyncio.wait_for(run(), 60))


async def through_our_server(client):
    tools = (await client.list_tools()).tools
    assert [t.name for t in tools] == ["calc"] and tools[0].input_schema["required"] == ["expression"]
    assert tools[0].description.startswith("Work out whole numbers")
    good = await client.call_tool("calc", {"expression": "4817*93"})
    assert (good.content[0].text, good.is_error) == ("447981", False)
    for name, arguments, said in [
        ("calc", {"expression": "1//0"}, "division by zero"),
        ("calc", {"expression": 3}, "must be a string"),
        ("calc", {}, "is missing"),
        ("nope", {}, "unknown tool"),
    ]:
        bad = await client.call_tool(name, arguments)
        assert bad.is_error and said in bad.content[0].text
    many = await asyncio.gather(*(client.call_tool("calc", {"expression": f"{i}*{i}"}) for i in range(30)))
    assert [m.content[0].text for m in many] == [str(i * i) for i in range(30)]


def test_our_server_over_stdio():
    args = ["-m", "rolljax.envs.tools.serve", "calculator"]
    drive(StdioServerParameters(command=sys.executable, args=args, env={"PYTHONPATH": str(ROOT)}), through_our_server)


def test_the_calculators_own_server_over_http():
    port = free_port()
    with http_server([sys.executable, "-m", "rolljax.envs.tools.calculator_server", "--http", str(port)], port):
        calculator = McpTools(url=f"http://127.0.0.1:{port}/mcp").open()
        assert calculator.call("calc", {"expression": "6*7"}, LIMITS).text == "42"
        assert calculator.call("calc", {"expression": "6*"}, LIMITS).is_error


def test_our_server_over_http():
    command = [sys.executable, "-m", "rolljax.envs.tools.serve", "calculator", "--http", "0"]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        drive(url, through_our_server)
        ours = McpTools(url=url).open()
        assert ours.call("calc", {"expression": "2*21"}, LIMITS).text == "42"
        assert ours.call("calc", {"expression": 1}, LIMITS).text == "calc: argument 'expression' must be a string"
    finally:
        process.kill()
        process.wait()


def shout(times: int) -> str:
    return "é" * times


def hang() -> str:
    time.sleep(3)
    return "late"


def odd(kind: str) -> Any:
    if kind == "raises":
        raise RuntimeError("odd")
    return {"half": {"x": "a\ud800"}, "list": [1], "endless": {"x": float("inf")}, "dict": {"a": {"b": 1}}}[kind]


def test_our_server_bounds_what_it_says():
    tools = FunctionToolSet([shout, hang, odd], waits=True)
    limits = ToolLimits(kept_bytes=100_000, call_s=0.5)

    async def do(client):
        big = await client.call_tool("shout", {"times": 10_000_000})
        assert len(big.content[0].text.encode()) <= 100_000 and "20000000 bytes" in big.content[0].text
        hung, fine = await asyncio.gather(client.call_tool("hang"), client.call_tool("shout", {"times": 2}))
        assert (
            hung.is_error
            and hung.content[0].text == "hang gave no result within 0.5 s"
            and fine.content[0].text == "éé"
        )
        raised = await client.call_tool("odd", {"kind": "raises"})
        assert raised.is_error and raised.content[0].text == "RuntimeError: odd"
        half = await client.call_tool("odd", {"kind": "half"})
        assert (half.content[0].text, half.structured_content) == ('{"x": "a?"}', {"x": "a?"})
        assert (await client.call_tool("odd", {"kind": "list"})).structured_content is None
        assert (await client.call_tool("odd", {"kind": "endless"})).structured_content is None
        assert (await client.call_tool("odd", {"kind": "dict"})).structured_content == {"a": {"b": 1}}

    drive(mcp_server(tools, limits=limits), do)


def test_our_server_refuses_names_it_does_not_know():
    done = subprocess.run(
        [sys.executable, "-m", "rolljax.envs.tools.serve", "no.such"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "calculator" in done.stderr and "Traceback" not in done.stderr


# ---- in memory


def pictures():
    server = MCPServer("pictures", log_level="CRITICAL")

    @server.tool()
    def draw() -> Image:
        return Image(data=b"12345678", format="png")

    @server.tool()
    def wait() -> str:
        time.sleep(3)
        return "late"

    return server


def test_results_that_are_no_text_and_a_server_in_memory():
    episode = McpTools(server=f"{__name__}.pictures").open()
    size = len(base64.b64encode(b"12345678"))
    assert episode.call("draw", {}, LIMITS).text == f"[image: image/png {size} characters]"
    assert episode.call("wait", {}, ToolLimits(call_s=0.2)).kind == "timeout"
    assert episode.call("draw", {}, LIMITS).text.startswith("[image")
    limits = ToolLimits(call_s=1, concurrency=1)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        results = [*threads.map(lambda _: episode.call("draw", {}, limits).kind, range(10))]
    assert results == ["ok"] * 10


# ---- in the sandbox


@pytest.fixture(scope="module")
def sandbox():
    sandbox = pytest.importorskip("rolljax.sandbox")
    if why := sandbox.available():
        pytest.skip(why)


def test_a_server_in_the_sandbox_sees_no_network_and_no_files(sandbox, scripts, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    guest = str(scripts / "guest.py")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        asked = {"port": listening.getsockname()[1], "path": guest}
        outside = McpTools(command=(sys.executable, guest), where="process").open()
        assert json.loads(outside.call("look", asked, LIMITS).text) == {
            "network": "open",
            "outside": True,
            "secrets": [],
        }
        tools = McpTools(command=("/usr/bin/python3", "guest.py"), files=(("guest.py", guest),))
        inside = tools.open()
        assert json.loads(inside.call("look", asked, LIMITS).text) == {
            "network": "closed",
            "outside": False,
            "secrets": [],
        }
        assert tools.open().call("look", asked | {"path": "/work/guest.py"}, LIMITS).text.count("true") == 1


def test_the_verbs_of_a_sandbox(sandbox):
    verbs = SandboxTools(files=(("data/a.txt", "hello\n"),)).open()
    try:

        def call(name, limits=LIMITS, **arguments):
            return verbs.call(name, arguments, limits)

        assert [s.name for s in verbs.list()] == ["bash", "python", "read_file", "write_file"]
        assert call("bash", command="cat data/a.txt; cd data; X=3").text.strip() == "hello"
        assert call("bash", command="pwd; echo $X").text.split() == ["/work/data", "3"]
        failed = call("bash", command="ls nowhere")
        assert failed.is_error and failed.text.endswith("[exit code 2]") and "nowhere" in failed.text
        assert call("python", code="print(6*7)").text.strip() == "42"
        assert call("python", code="1/0").is_error and "ZeroDivisionError" in call("python", code="1/0").text
        assert not call("write_file", path="b.txt", text="é\n").is_error
        assert call("read_file", path="b.txt").text == "é\n"
        assert call("read_file", path="no.txt").is_error and call("bash").kind == "bad_arguments"
        assert call("bash", ToolLimits(call_s=1), command="sleep 60").kind == "timeout"
        assert call("python", ToolLimits(call_s=1), code="while True: pass").kind == "timeout"
        assert call("bash", command="echo $X").text.strip() == "3"
        assert call("bash", command="head -c 3000000 /dev/zero | tr '\\0' x").bytes < 4_000_000
    finally:
        verbs.close()


def test_an_episode_with_a_sandbox(sandbox):
    spec = ToolEnv(Arithmetic(), SandboxTools(verbs=("python",)), parser="fenced", limits=LIMITS)
    env = spec.make()
    env.reset(spec.task(0))
    assert spec.runs == "thread"
    result = env.step(f"```python\nprint({spec.task(0).content})\n```").messages[0].content
    assert env.step(result).success
    with pytest.raises(EnvError, match="cannot be copied"):
        env.snapshot()
    env.close()
