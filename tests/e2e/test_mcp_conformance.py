"""MCP's own conformance suite against our server and our client; skipped by name where npm cannot install it."""

import json
import shutil
import subprocess
import sys

import pytest

from .conftest import ROOT, free_port
from .test_mcp import http_server

PACKAGES = ("@modelcontextprotocol/conformance@0.1.16", "node@22.12.0")
"""The suite, and a Node that is new enough for it."""
OF_A_SERVER = (
    "server-initialize",
    "ping",
    "tools-list",
    "tools-call-simple-text",
    "tools-call-error",
    "json-schema-2020-12",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
)
"""All scenarios of servers that have tools of text and nothing else: no pictures, prompts, resources, logs or questions."""
OF_A_CLIENT = ("initialize", "tools_call", "sse-retry")
"""All scenarios of clients without OAuth and questions to a person."""
OF_THE_CLOCK = {"client-sse-retry-timing"}
"""Checks that fail on a machine that is busy."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return a function that runs a scenario of the suite, and asserts that each of its checks succeeds."""
    folder = tmp_path_factory.mktemp("suite")
    if shutil.which("npm") is None:
        pytest.skip("MCP's conformance suite needs npm")
    install = ["npm", "install", "--silent", *PACKAGES]
    try:
        subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=600, check=True)
    except subprocess.SubprocessError as e:
        pytest.skip(f"MCP's conformance suite cannot be installed: {str(e.stderr)[-300:]}")
    program = (
        folder / "node_modules/.bin/node",
        folder / "node_modules/@modelcontextprotocol/conformance/dist/index.js",
    )

    def run(kind, scenario, *arguments):
        out = folder / "checks" / f"{kind} {scenario}"
        command = [*program, kind, "--scenario", scenario, "--output-dir", out, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        checks = [check for file in out.rglob("checks.json") for check in json.loads(file.read_text())]
        found = {c["id"]: c["status"] for c in checks if c["status"] != "INFO" and c["id"] not in OF_THE_CLOCK}
        assert found and set(found.values()) == {"SUCCESS"}, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def server():
    """Return the URL of our server with the tools that the suite wants."""
    port = free_port()
    command = [sys.executable, "-m", "rolljax.envs.tools.serve", "tests.mcp_suite.TOOLS", "--http", str(port)]
    with http_server(command, port):
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", OF_A_SERVER)
def test_our_server_passes(suite, server, scenario):
    suite("server", scenario, "--url", server)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", OF_A_CLIENT)
def test_our_client_passes(suite, scenario):
    suite("client", scenario, "--command", f"{sys.executable} -m tests.mcp_suite")
