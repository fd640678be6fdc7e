"""Tasks of verifiers, in a virtual environment of their own: played by its harness, scored by its rewards, trained.
Skipped by name where verifiers cannot be installed, or cannot install the libraries of its harness."""

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import rolljax
from rolljax.envs import checks
from rolljax.envs.adapters.verifiers import Verifiers
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError, EnvError
from rolljax.model import hf
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.rollout.agents.program import AgentProgram, own_program
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.serving.schema import ServedModel
from rolljax.serving.server import ServerLimits
from rolljax.storage.run_reader import RunReader
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.publish import make_publish

from .conftest import ROOT
from .serving import KEY, Running

VERSION = "0.4.0"
PASSED = {k: v for k, v in os.environ.items() if k.startswith(("UV_", "SSL_", "PIP_"))}
"""Variables by which the harness finds packages, on machines that need them."""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return a Python with verifiers and the taskset `sums`."""
    folder = tmp_path_factory.mktemp("verifiers")
    install = [folder / "bin/python", "-m", "pip", "install", "-q", f"verifiers=={VERSION}"]
    for command in ([sys.executable, "-m", "venv", folder], install):
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            pytest.skip(f"verifiers {VERSION} cannot be installed: {done.stderr[-300:]}")
    packages = next(folder.glob("lib/python*/site-packages"))
    shutil.copy(ROOT / "tests/verifiers_sums.py", packages / "sums.py")
    return str(folder / "bin/python")


class Sevens(http.server.BaseHTTPRequestHandler):
    """A model that always says 7."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        for delta, reason in (({"role": "assistant", "content": "7"}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            self.wfile.write(f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def played(python):
    """Return what verifiers' program says of three tasks, 0+0, 0+7 and 7+0, with a model that says 7."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sevens)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    orders = [
        {"id": f"0-{i}-0", "messages": [{"role": "user", "content": f"{i}\n?"}], "base_url": url, "api_key": "k"}
        for i in (0, 7, 70)
    ]
    sent = "".join(json.dumps(order) + "\n" for order in orders)
    program = Verifiers(id="sums", python=python).program
    done = subprocess.run(program, input=sent, capture_output=True, text=True, timeout=600)
    server.shutdown()
    if "prepare uv script" in done.stderr:
        pytest.skip(f"verifiers' harness cannot be installed: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_program_of_verifiers_scores_as_its_rewards_say(python, played):
    assert [line["id"] for line in played] == ["0-0-0", "0-7-0", "0-70-0"]
    answers = [json.loads(line["answer"]) for line in played]
    assert [a["reward"] for a in answers] == [0.5, 1.5, 1.5]
    assert answers[1]["parts"] == {"right": 1.0, "short": 0.5} and answers[1]["metrics"]["chars"] == 1.0
    spec = Verifiers(id="sums", python=python)
    assert spec.num_tasks == 100 and spec.task(107).content == "7\n0+7="
    env = spec.make()
    env.reset(spec.task(7))
    result = env.step(played[1]["answer"])
    assert (result.reward, result.success, result.terminated) == (1.5, True, True)
    env.reset(spec.task(7))
    assert env.step("").reward == 0.0
    env.reset(spec.task(7))
    with pytest.raises(EnvError, match="verifiers' program"):
        env.step("{}")
    with pytest.raises(EnvError, match="after the episode's end"):
        env.step("{}")
    checks.tasks_are_their_index(spec, 20)
    with pytest.raises(ConfigError, match="cannot list"):
        Verifiers(id="no_such_taskset", python=python).task(0)


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_trained_token_for_token(python, played, tmp_path):
    phase = Phase("rl", Grpo(), steps=2, prompts_per_step=2, group_size=2, optimizer=AdamW(lr=1e-3), eval_every=0)
    recipe = Recipe(
        env=Verifiers(id="sums", python=python, max_tasks=20),
        agent=AgentProgram(sandbox="none", reuse=True, concurrency=2, env=PASSED),
        phases=(phase,),
        model=Qwen3Config(init_std=0.1),
        max_answer_tok=4,
        sampler=SamplerConfig(slots=8, max_context=64),
        evaluation=Evaluation(tasks=2, held_out_frac=0.5),
        wait_s=900.0,
    )
    rolljax.train(recipe, run_dir=tmp_path / "run", progress=False)
    reader = RunReader(tmp_path / "run")
    trajectories = [t for step in reader.rollout_steps() for t in reader.trajectories(step)]
    assert len(trajectories) == 8 and all(t.fault is None or t.status == "truncated" for t in trajectories)
    for t in trajectories:
        (turn,) = t.turns
        a, b = t.task.content.split("\n")[1].rstrip("=").split("+")
        right = turn.text.strip() == str(int(a) + int(b))
        assert t.reward == right + 0.5 * (len(turn.text) < 3)
    assert [row["mismatch/abs_max_nat"] < 1e-4 for row in reader.rows()] == [True, True]


@pytest.fixture(scope="module")
def running(model, params, chat):
    """Return our server over a real engine."""
    cfg = SamplerConfig(slots=8, max_context=256, prefill_chunk=64)
    mesh = MeshSpec().build(jax.devices()[:1])
    weights = make_publish(mesh, model)(params)
    with contextlib.ExitStack() as stack:
        sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), weights, 3, vocabulary=chat.vocabulary)
        stack.callback(sampler.close)
        served = ServedModel("policy", chat.tokenizer, chat, model.cfg.vocab_size, 256)
        running = Running(sampler, served, ServerLimits(keys=(KEY,)))
        stack.callback(running.close)
        yield running, sampler


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eval", "train"])
def test_verifiers_own_evaluation_uses_our_server(python, played, running, model, params, tmp_path, kind):
    """`vf-eval`, over chat completions, and over its client for training, which sends and gets tokens."""
    server, sampler = running
    hf.save(tmp_path / "model", model, params, byte_tokenizer())
    command = [Path(python).with_name("vf-eval"), "sums", "-n", "3", "-r", "2", "-m", "policy"]
    command += ["--no-push", "--no-rich", "-o", tmp_path / "out", "--sampling.max-tokens", "4"]
    command += [
        "--env.agent.harness.id",
        "null",
        "--env.agent.runtime.type",
        "subprocess",
        "--sampling.temperature",
        "1",
    ]
    command += ["--client.type", kind, "--client.base-url", f"{server.url}/v1", "--client.api-key-var", "OUR_KEY"]
    command += ["--client.renderer-model-name", tmp_path / "model"] if kind == "train" else []
    env = os.environ | {"OUR_KEY": KEY}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [path] = (tmp_path / "out").rglob("traces.jsonl")
    episodes = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(episodes) == 6 and all(episode["ok"] for episode in episodes)
    for episode in episodes:
        [trace] = episode["traces"]
        asked, answered = trace["nodes"]
        text = answered["message"]["content"] or ""
        right = text.strip() == str(trace["task"]["data"]["total"])
        assert trace["rewards"]["right"]["score"] == right
        assert trace["rewards"]["short"]["score"] in (len(text) < 3, len(text.strip()) < 3)  # its reply may be stripped
        if kind == "train":
            ids = np.array(asked["token_ids"] + answered["token_ids"], np.int32)
            own = len(asked["token_ids"]) + np.flatnonzero(answered["mask"])
            assert len(own) == len(answered["logprobs"]) > 0
            wanted = asyncio.run(sampler.score(ids))[own]
            np.testing.assert_allclose(answered["logprobs"], wanted, atol=2e-4)  # the client rounds to four digits


def test_a_taskset_without_its_program_or_its_python_is_refused():
    with pytest.raises(ConfigError, match="Verifiers.python"):
        Verifiers(id="sums", python="/no/python")
    spec = Verifiers(id="sums", python=sys.executable)
    phase = Phase("rl", Grpo(), steps=1)
    with pytest.raises(ConfigError, match="program that the environment brings"):
        Recipe(env=spec, phases=(phase,), model=Qwen3Config())
    assert own_program(spec).for_env(spec).command == spec.program and own_program(FrozenLake()) is None
    own = AgentProgram(command=("python", "mine.py"), sandbox="none")
    with pytest.raises(ConfigError, match="brings its own"):
        Recipe(env=spec, phases=(phase,), model=Qwen3Config(), agent=own)
    with pytest.raises(ConfigError, match=r"AgentProgram\.command"):
        Recipe(env=FrozenLake(), phases=(phase,), model=Qwen3Config(), agent=AgentProgram(sandbox="none"))
