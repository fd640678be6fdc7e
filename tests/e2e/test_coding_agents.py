"""Codex and Claude Code, unmodified, with answers that this test writes: they run the tool call of an answer, and their
next request continues its tokens. Skipped by name where they are not installed (`npm install -g @openai/codex`,
`@anthropic-ai/claude-code`)."""

import http.server
import json
import os
import shutil
import subprocess
import threading
import types

import numpy as np
import pytest

from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.serving.apis import APIS
from rolljax.serving.generation import Choice
from rolljax.serving.schema import ServedModel
from rolljax.serving.session import Session, SessionRules
from rolljax.types import Completion, Sampled, SamplingParams

pytestmark = pytest.mark.slow
CODEX = """model = "policy"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "http://127.0.0.1:{port}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
TASK = "write 7 into the file out"
COMMANDS = {
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
    "claude": ["-p", TASK, "--dangerously-skip-permissions"],
}
CALLS = {
    "codex": {"name": "exec_command", "arguments": {"cmd": "echo 7 > out"}},
    "claude": {"name": "Bash", "arguments": {"command": "echo 7 > out", "description": "write"}},
}
ANSWER_TOK = 2000


def sampled(tokens):
    n = len(tokens)
    return Sampled.of(np.array(tokens, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))


class Scripted(http.server.ThreadingHTTPServer):
    """A server whose answers are texts of the test; one session holds all calls."""

    def __init__(self, texts):
        chat = Chat(byte_tokenizer())
        self.served = ServedModel("policy", chat.tokenizer, chat, 264, 400_000)
        params = SamplingParams(max_tokens=ANSWER_TOK, stop_ids=chat.stop_ids)
        self.session = Session(SessionRules(params, (0,), max_calls=9, max_restarts=9))
        self.answers = [chat.answer_ids(text).tolist() for text in texts]
        self.refused = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, api, body):
        """Return the events of the next answer."""
        job = self.session.begin(self.session.read(body, api.read, self.served))
        tokens = self.answers[min(job.call.index, len(self.answers) - 1)]
        service = types.SimpleNamespace(served=self.served, sampler=types.SimpleNamespace(version=0))
        choice, completion = Choice(service, job, 0), Completion(sampled(tokens), "stop")
        encoder = api.encoder(service, job, [choice])
        events = encoder.first()
        for i in range(0, len(tokens), 7):
            part = sampled(tokens[i : i + 7])
            events += encoder.more(choice, part, choice.add(part, last=False))
        events += encoder.end(choice, completion, choice.add(sampled([]), last=True)) + encoder.last([completion])
        job.call.answered(completion, choice.text, choice.message)
        return b"".join(events)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        api = next((api for api in APIS if api.path == path), None)
        try:
            status, answer = 200, self.server.answer(api, body)
        except Exception as e:  # what is refused shows in the test
            self.server.refused.append(f"{path}: {e}")
            status, answer = 400, b"{}"
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self):
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_):
        """Say nothing."""


@pytest.mark.parametrize("agent", COMMANDS)
def test_an_agent_runs_its_call_and_goes_on_with_the_sampled_tokens(tmp_path, agent):
    program = shutil.which(agent)
    if program is None:
        pytest.skip(f"{agent} is not installed")
    call = f"I write it.\n<tool_call>\n{json.dumps(CALLS[agent])}\n</tool_call>"
    server, home, work = Scripted([call, "Done."]), tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CODEX.format(port=server.server_port))
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_API_KEY": "key",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }
    try:
        done = subprocess.run(
            [program, *COMMANDS[agent]], cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=300
        )
    finally:
        server.shutdown()
        server.server_close()
    said = done.stdout.decode() + done.stderr.decode()
    assert not server.refused and done.returncode == 0, (server.refused, said)
    assert (work / "out").read_text() == "7\n" and "Done." in said
    first, *others = server.session.calls
    assert first.before is None and others and all(c.before is not None and not c.overridden for c in others)
    assert len(server.session.streams()) == 1
