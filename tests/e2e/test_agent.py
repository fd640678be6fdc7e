"""Agents that bring their own loop: their calls become trajectories, and every failure is attributed correctly."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest

from rolljax.commands.train import main as train
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.errors import ConfigError
from rolljax.recipe import Phase, Recipe
from rolljax.recipes.terminal_bench.terminal import TerminalTasks
from rolljax.rollout.agents.host import AgentHost, AgentRollouts
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.episodes import SamplerPolicy
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.sandbox import Sandbox
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.trainer.publish import make_publish
from rolljax.types import Message, SamplingParams, Task

from .conftest import ROOT, rows
from .sandbox_support import needs_sandbox

CONTEXT = 200
VERSION = 3
ANSWER_TOK = 12
LIMITS = {"max_calls": 3, "max_restarts": 1, "deadline_s": 60.0, "concurrency": 4}

PROGRAM = '''
"""An agent that does what its task's first message says. It speaks HTTP itself, which starts faster than a client."""
import http.client, json, os, sys, time, urllib.parse


class Refused(Exception):
    pass


def post(task, body, key=None, path="/chat/completions"):
    url = urllib.parse.urlsplit(task["base_url"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or task['api_key']}"}
    connection.request("POST", url.path + path, content, headers)
    return connection, connection.getresponse()


def call(task, messages, **fields):
    connection, reply = post(task, {"model": "gpt-9", "messages": messages, **fields})
    body = json.loads(reply.read())
    if reply.status != 200:
        raise Refused(f"{reply.status} {body['error']['code']}")
    return {"role": "assistant", "content": body["choices"][0]["message"]["content"]}


def user(text):
    return {"role": "user", "content": text}


def plain(task, talk):
    for _ in range(2):
        talk += [call(task, talk, temperature=0), user("more")]
    return "right"


def compact(task, talk):
    call(task, talk)
    return "right" if call(task, [user("in short")]) else ""


def crash(task, talk):
    call(task, talk)
    raise ValueError("no such door")


def silent(task, talk):
    return "right"


def flood(task, talk):
    call(task, talk)
    print("x" * 3_000_000, flush=True)
    time.sleep(600)


def hang(task, talk):
    call(task, talk)
    time.sleep(600)


def content_with_less(task, talk):

    try:
        while True:
            talk += [call(task, talk), user("more")]
    except Refused as e:
        return f"right {e}"


def too_many(task, talk):
    while True:
        talk += [call(task, talk), user("more")]


def too_long(task, talk):
    call(task, talk)
    call(task, talk + [user("x" * 1000)])


def go_on(task, talk):
    call(task, talk)
    return "go on"


def stranger(task, talk):
    call(task, talk)
    seen = []
    for key, body in (("session-guess", {}), (None, "{"), (None, {"messages": []}), (None, {"messages": talk, "n": 2})):
        connection, reply = post(task, body, key)
        seen.append(reply.status)
        reply.read()
    return f"right {seen}"


def stream(task, talk):
    connection, reply = post(task, {"messages": talk, "stream": True})
    events = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    text = "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1])
    call(task, talk + [{"role": "assistant", "content": text}, user("more")])
    return "right"


def hang_up(task, talk):
    url = urllib.parse.urlsplit(task["base_url"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
    connection.request("POST", url.path + "/chat/completions", json.dumps({"messages": talk}), headers)
    connection.close()
    call(task, talk)
    return "right"


def give_back_ids(task, talk):
    ids = [65, 66, 67]
    for _ in range(2):
        connection, reply = post(task, {"prompt": ids, "max_tokens": 5, "return_token_ids": True}, path="/completions")
        ids += json.loads(reply.read())["choices"][0]["token_ids"] + [70]
    return "right"


def process(task, talk):
    call(task, talk)
    return f"right {os.getpid()}"


def keys(task, talk):
    call(task, talk)
    return f"right {os.environ['OPENAI_BASE_URL'] == task['base_url']} {os.environ['OPENAI_API_KEY'] == task['api_key']}"


for line in sys.stdin:
    task = json.loads(line)
    with open(os.environ["KEYS"], "a") as f:
        f.write(json.dumps({"pid": os.getpid(), **task}) + "\\n")
    answer = globals()[task["messages"][0]["content"]](task, task["messages"])
    print(json.dumps({"id": task["id"], "answer": answer}), flush=True)
'''


@dataclasses.dataclass(frozen=True)
class Modes(EnvSpec):
    """Tasks whose text tells the program what to do. An answer that starts with "right" is right; the rest is kept."""

    runs = "inline"

    @property
    def name(self):
        return "modes"

    def task(self, index):
        return Task(self.name, index, str(index))

    def make(self):
        return Mode()


class Mode(PureEnv):
    def reset(self, task):
        return (Message("user", task.content),)

    def step(self, action):
        right = action.startswith("right")
        parts = {action.removeprefix("right").strip() or "answer": float(right)}
        more = (Message("user", "and then?"),) if action == "go on" else ()
        return StepResult(more, float(right), not more, success=right, reward_parts=parts, metrics={"judged_n": 1})

    def reference_answer(self):
        return "right"


@pytest.fixture(scope="module")
def start_sampler(model, params, chat):
    mesh = MeshSpec().build(jax.devices()[:1])
    cfg = SamplerConfig(slots=8, max_context=CONTEXT, steps_per_dispatch=4, prefill_chunk=64)
    engine, weights = Engine(model, cfg, mesh, BATCH_AXES), make_publish(mesh, model)(params)
    return lambda: Sampler(engine, weights, VERSION, vocabulary=chat.vocabulary, longest_prompt=0)


@pytest.fixture
def sampler(start_sampler):
    """Return a sampler that records its requests: `asked` maps address -> (prompt ids, pending)."""
    sampler = start_sampler()
    sampler.asked = {}
    submit = sampler.submit

    def remembering(prompt_ids, params, address, **options):
        pending = submit(prompt_ids, params, address, **options)
        sampler.asked[address] = (prompt_ids, params, pending)
        return pending

    sampler.submit = remembering
    yield sampler
    sampler.close()


@contextlib.asynccontextmanager
async def playing(program, spec, sampler, chat, pool=None):
    """Open the host and the pool of a program's episodes."""
    host, pool = AgentHost(program, sampler, chat, CONTEXT), EnvPool(pool or PoolConfig(), spec)
    policy = SamplerPolicy(sampler, SamplingParams(0.9, ANSWER_TOK, chat.stop_ids), 5)
    try:
        yield AgentRollouts(pool, chat, policy, 1, CONTEXT, ANSWER_TOK, host=host)
    finally:
        await host.close()
        pool.close()


@pytest.fixture
def play(sampler, chat, tmp_path):
    """Play modes concurrently; return their trajectories and the texts that the programs received."""
    source = tmp_path / "agent.py"
    source.write_text(PROGRAM)
    told = tmp_path / "told.jsonl"

    def run(*modes, siblings=1, then=None, **settings):
        command = (sys.executable, str(source))
        program = AgentProgram(command, sandbox="none", env={"KEYS": str(told)}, **LIMITS | settings)

        async def all_of_them():
            async with playing(program, Modes(), sampler, chat) as rollouts:
                work = [
                    rollouts.group(Task("modes", i, mode), stream=0, prompt_index=i, group_size=siblings)
                    for i, mode in enumerate(modes)
                ]
                groups = await asyncio.gather(*work) if then is None else await then(work)
                return [t for g in groups for t in g.trajectories]

        trajectories = asyncio.run(asyncio.wait_for(all_of_them(), 120))
        return trajectories, [json.loads(line) for line in told.read_text().splitlines()]

    return run


def same_as_sampled(sampler, trajectory):
    """Check that every call of the trajectory holds the sampler's tokens, and its prompt is the stream before it."""
    key = trajectory.key
    address = (5, key.stream, key.prompt_index, key.sibling)
    asked = [(prompt, p.completion.result()) for a, (prompt, _, p) in sampler.asked.items() if a[:-1] == address]
    answered = [(prompt, completion) for prompt, completion in asked if completion.finish_reason != "abort"]
    stream = np.zeros(0, np.int32)
    for turn in trajectory.turns:
        stream = turn.prompt_ids if turn.restart else np.concatenate([stream, turn.prompt_ids])
        (completion,) = [c for prompt, c in answered if np.array_equal(prompt, stream)]
        assert np.array_equal(turn.tokens, completion.tokens) and len(turn.tokens)
        assert np.array_equal(turn.sampler_logp, completion.sampler_logp)
        assert np.array_equal(turn.versions, completion.versions) and set(turn.versions) == {VERSION}
        assert turn.finish_reason == completion.finish_reason
        stream = np.concatenate([stream, turn.tokens])
    assert len(answered) == len(trajectory.turns)
    return len(answered)


def test_calls_become_trajectories(play, sampler, chat):
    (plain, compact, stream, ids), _ = play("plain", "compact", "stream", "give_back_ids")
    for t, num_calls, restarts in ((plain, 2, 0), (compact, 2, 1), (stream, 2, 0), (ids, 2, 0)):
        assert (t.reward, t.success, t.reward_parts) == (1.0, True, {"answer": 1.0}), t.fault
        assert t.status == ("ok" if t.turns[-1].finish_reason == "stop" else "truncated")
        assert same_as_sampled(sampler, t) == num_calls
        assert [turn.reward for turn in t.turns] == [0.0] * (num_calls - 1) + [1.0]
        assert [turn.restart for turn in t.turns] == [False] * (num_calls - restarts) + [True] * restarts
        assert t.metrics["agent_calls_n"] == num_calls and t.metrics["agent_restarts_n"] == restarts
        assert t.metrics["judged_n"] == 1 and t.sample_s > 0 and t.env_s > 0
    assert all(a[1].temperature == 0.9 for a in sampler.asked.values())
    assert plain.metrics["agent_overridden_n"] == 2 and compact.metrics["agent_overridden_n"] == 0
    first, second = plain.turns
    assert first.prompt_ids.tolist() == chat.prompt_ids([Message("user", "plain")]).tolist()
    closed = first.tokens[-1] in chat.stop_ids
    assert second.prompt_ids.tolist() == chat.delta_ids([Message("user", "more")], closed=closed).tolist()
    assert compact.turns[1].prompt_ids.tolist() == chat.prompt_ids([Message("user", "in short")]).tolist()
    assert len(ids.turns[0].tokens) <= 5


def test_siblings_differ_and_come_out_the_same_again(play, sampler):
    first, told = play("plain", siblings=4)
    assert len({t["api_key"] for t in told}) == 4 and len({t["pid"] for t in told}) == 4
    again, _ = play("plain", siblings=4)
    streams = [[turn.tokens.tolist() for turn in t.turns] for t in first]
    assert streams == [[turn.tokens.tolist() for turn in t.turns] for t in again]
    assert len({str(s) for s in streams}) == 4


def test_failures_have_an_owner(play, sampler):
    modes = ["crash", "silent", "flood", "too_many", "content_with_less", "too_long", "go_on", "stranger", "hang_up"]
    trajectories, told = play(*modes)
    crash, silent, flood, many, less, long, go_on, stranger, hang_up = trajectories
    for t, says in (
        (crash, "(?s)ended with exit code 1 before it answered.*no such door"),
        (silent, "made no call"),
        (flood, "printed more than"),
    ):
        assert (t.status, t.fault.kind, t.fault.stage, t.fault.retryable) == ("failed", "env", "program", False)
        assert re.search(says, t.fault.detail)
        assert t.reward == 0 and not t.success
    for t, num_calls, says in ((many, 3, "had had its 3 calls"), (long, 1, f"the context of {CONTEXT} tokens")):
        assert (t.status, t.fault.kind) == ("truncated", "limit") and says in t.fault.detail
        assert (t.reward, t.metrics["judged_n"]) == (0.0, 1) and same_as_sampled(sampler, t) == num_calls
    assert less.success and less.reward_parts == {"403 max_calls": 1.0}, "what answers in spite of a limit has answered"
    assert (go_on.status, go_on.fault.kind) == ("truncated", "agent"), go_on.fault
    assert stranger.reward_parts == {"[401, 400, 400, 400]": 1.0} and stranger.metrics["agent_calls_n"] == 1
    assert hang_up.success and same_as_sampled(sampler, hang_up) == 1
    assert hang_up.metrics["agent_dropped_n"] + 1 == len([a for a in sampler.asked if a[2] == modes.index("hang_up")])
    assert all(gone(t["pid"]) for t in told)


def test_out_of_time(play, sampler):
    (hang,), (told,) = play("hang", deadline_s=4.0)
    assert (hang.status, hang.fault.kind, hang.fault.stage) == ("truncated", "limit", "time")
    assert (hang.reward, hang.metrics["judged_n"]) == (0.0, 1) and same_as_sampled(sampler, hang) == 1
    assert gone(told["pid"])


def test_a_cancelled_program_is_ended(play, sampler):
    async def cancel(work):
        running = [asyncio.ensure_future(w) for w in work]
        while not sampler.asked:
            await asyncio.sleep(0.01)
        for r in running:
            r.cancel()
        await asyncio.wait(running)
        return []

    trajectories, told = play("hang", then=cancel)
    assert not trajectories and all(gone(t["pid"]) for t in told)


def test_programs_get_their_endpoint_by_environment_variables(play):
    (t,), _ = play("keys")
    assert t.reward_parts == {"True True": 1.0}


def test_one_process_plays_many_episodes(play, sampler):
    trajectories, told = play("process", siblings=6, reuse=True, concurrency=2)
    pids = {p for t in trajectories for p in t.reward_parts}
    assert len(pids) <= 2 and len({t["api_key"] for t in told}) == 6
    assert all(same_as_sampled(sampler, t) == 1 for t in trajectories)
    assert all(gone(t["pid"]) for t in told)


def test_a_process_that_failed_is_replaced(play):
    async def one_after_the_other(work):
        return [await w for w in work]

    (crash, process), told = play("crash", "process", then=one_after_the_other, reuse=True, concurrency=1)
    assert crash.status == "failed" and process.success
    assert len({t["pid"] for t in told}) == 2


def test_a_sampler_that_stops_is_not_the_programs_fault(play, sampler):
    async def close(work):
        running = [asyncio.ensure_future(w) for w in work]
        while not sampler.asked:
            await asyncio.sleep(0.01)
        await asyncio.get_running_loop().run_in_executor(None, sampler.close)
        return await asyncio.gather(*running)

    (t,), _ = play("too_many", then=close, max_calls=1000)
    assert (t.status, t.fault.kind, t.fault.stage) == ("failed", "infra", "sampler")


def gone(pid):
    """Return whether a process has ended, or ends soon."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


# ---- inside the sandbox of a task


INSIDE = """
import json, os, subprocess, sys, time, urllib.request

task = json.loads(sys.stdin.readline())
assert task["base_url"] == os.environ["OPENAI_BASE_URL"] and task["api_key"] == os.environ["OPENAI_API_KEY"]
assert "access.log" in sys.argv[1] and sys.argv[1] == task["messages"][-1]["content"] and os.getcwd() == "/work"


def call(talk):
    body = json.dumps({"messages": talk}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
    asked = urllib.request.Request(task["base_url"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


talk = [{"role": "user", "content": "go"}]
talk += [{"role": "assistant", "content": call(talk)}, {"role": "user", "content": "more"}]
call(talk)
SOLVE = os.environ["SOLUTION"]
exec(os.environ["REST"])
"""
SOLVED = "subprocess.run(['bash', '-c', SOLVE], check=True)"
REST = {
    "gold": SOLVED,
    "nothing": "",
    "forged reward": "os.makedirs('/logs/verifier'); open('/logs/verifier/reward.txt', 'w').write('1')",
    "own tests": "os.makedirs('/tests'); open('/tests/test_outputs.py', 'w').write('def test(): pass')",
    "gold, then exit 3": f"{SOLVED}; sys.exit(3)",
    "gold, then hangs": f"{SOLVED}; time.sleep(1000)",
    "gold, then kills its sandbox": f"{SOLVED}; os.kill(-1, 9)",
    "gold, without a call": "",
}


@pytest.fixture(scope="module")
def log_errors():
    return TerminalTasks(only=("log_errors",), prompt="{instruction}")


@pytest.fixture
def play_inside(sampler, chat, log_errors):
    """Play an episode of a task at a terminal, by a program inside its sandbox that does one of `REST`."""

    def run(rest, source=INSIDE, pool=None, **settings):
        env = {"REST": rest, "SOLUTION": log_errors.tasks()[0].solution}
        program = AgentProgram(("python", "-c", source, "{task}"), sandbox="task", env=env, **LIMITS | settings)

        async def one():
            async with playing(program, log_errors, sampler, chat, pool) as rollouts:
                group = await rollouts.group(log_errors.task(0), stream=0, prompt_index=0, group_size=1)
                return group.trajectories[0]

        return asyncio.run(asyncio.wait_for(one(), 120))

    return run


@needs_sandbox
@pytest.mark.parametrize(
    ("what", "reward"), [("gold", 1.0), ("nothing", 0.0), ("forged reward", 0.0), ("own tests", 0.0)]
)
def test_a_program_works_inside_the_sandbox_of_its_task(play_inside, sampler, what, reward):
    """Its files are scored in another sandbox; the trained tokens are the sampled ones."""
    t = play_inside(REST[what])
    assert t.fault is None or t.turns[-1].finish_reason != "stop", t.fault
    assert (t.reward, t.success, t.reward_parts) == (reward, reward == 1, {"tests": reward})
    assert same_as_sampled(sampler, t) == 2 and [turn.reward for turn in t.turns] == [0.0, reward]
    assert t.metrics["program_failed_n"] == t.metrics["program_timeouts_n"] == t.metrics["sandbox_lost_n"] == 0
    assert (t.metrics["tamper_n"] > 0) == (what in ("forged reward", "own tests"))


@needs_sandbox
def test_a_program_works_the_same_where_episodes_run_in_processes(play_inside, sampler):
    t = play_inside(REST["gold"], pool=PoolConfig(where="process", workers=1))
    assert t.reward == 1 and same_as_sampled(sampler, t) == 2


@needs_sandbox
def test_a_program_that_fails_in_its_sandbox_is_scored_by_its_files(play_inside, sampler):
    failed = play_inside(REST["gold, then exit 3"])
    assert failed.success and failed.metrics["program_failed_n"] == 1
    hung = play_inside(REST["gold, then hangs"], deadline_s=5.0)
    assert (hung.status, hung.fault.kind) == ("truncated", "limit")
    assert hung.reward == 1 and hung.metrics["program_timeouts_n"] == 1 and same_as_sampled(sampler, hung) == 2


@needs_sandbox
def test_a_program_that_ends_its_own_sandbox_leaves_nothing(play_inside, sampler):
    t = play_inside(REST["gold, then kills its sandbox"])
    assert (t.reward, t.success, t.metrics["sandbox_lost_n"]) == (0.0, False, 1) and len(t.turns) == 2


@needs_sandbox
def test_a_sandbox_that_the_machine_kills_is_not_the_policys_loss(play_inside, sampler, monkeypatch):
    """The episode is played again, in a new sandbox."""
    boxes, open_box = [], Sandbox.open

    def remembering(*args, **settings):
        boxes.append(open_box(*args, **settings))
        return boxes[-1]

    def kill():
        while not sampler.asked:
            time.sleep(0.01)
        os.kill(boxes[0].handle.pid, signal.SIGKILL)

    monkeypatch.setattr(Sandbox, "open", remembering)
    killer = threading.Thread(target=kill)
    killer.start()
    t = play_inside(f"time.sleep(2)\n{SOLVED}")
    killer.join()
    assert len(boxes) == 2 and t.success and t.status in ("ok", "truncated"), t.fault
    assert t.metrics["sandbox_lost_n"] == 0 and len(t.turns) == 2


@needs_sandbox
def test_a_program_without_a_call_is_no_episode(play_inside):
    t = play_inside("", source="import os, subprocess; subprocess.run(['bash', '-c', os.environ['SOLUTION']])")
    assert (t.status, t.fault.kind, t.reward) == ("failed", "env", 0.0) and "made no call" in t.fault.detail


def test_a_sandbox_for_programs_needs_an_environment_that_has_one():
    phase, program = Phase("rl", Grpo(), steps=1, group_size=2), AgentProgram(("python", "agent.py"), sandbox="task")
    with pytest.raises(ConfigError, match=r"AgentProgram.sandbox.*frozen_lake has none"):
        Recipe(FrozenLake(), (phase,), agent=program)
    Recipe(TerminalTasks(), (phase,), agent=program)
    with pytest.raises(ConfigError, match=r"PoolConfig.where.*on this host only"):
        Recipe(TerminalTasks(), (phase,), agent=program, pool=PoolConfig(where="ray"))
    with pytest.raises(ConfigError, match=r"TerminalTasks\.readable is no folder"):
        TerminalTasks(readable=("/no/such",))


SETTINGS = {
    "MeshSpec.data": 1,
    "AgentProgram.concurrency": 2,
    "Evaluation.tasks": 8,
    "warm_start/Phase.steps": 50,
    "warm_start/Phase.eval_every": 0,
    "warm_start/Phase.stop_at_reward": None,
    "rl/Phase.steps": 3,
    "rl/Phase.eval_every": 0,
    "rl/Phase.prompts_per_step": 4,
    "rl/Phase.group_size": 4,
}


@pytest.mark.slow
def test_an_unmodified_client_is_trained(monkeypatch, tmp_path):
    """The example agent in separate processes: stored and trained tokens are the sampled ones, call by call."""
    asked, submit = {}, Sampler.submit

    def remembering(sampler, prompt_ids, params, address, **options):
        pending = submit(sampler, prompt_ids, params, address, **options)
        asked[address] = (prompt_ids, pending)
        return pending

    monkeypatch.setattr(Sampler, "submit", remembering)
    monkeypatch.chdir(ROOT)
    argv = ["--gin", "configs/agent_program.gin", "--run_dir", str(tmp_path / "run")]
    assert train(argv + [a for k, v in SETTINGS.items() for a in ("--set", f"{k} = {v}")]) == 0
    steps = [r for r in rows(tmp_path / "run") if r["phase"] == "rl"]
    assert len(steps) == 3 and all(r["rollout/fail_frac"] == 0 for r in steps)
    assert any(r["groups/trained_n"] for r in steps)
    assert all(r["mismatch/abs_max_nat"] <= 5e-5 for r in steps if r["groups/trained_n"])
    calls = {}
    for r in steps:
        for line in (tmp_path / "run" / "rollouts" / f"step_{r['step']}.jsonl").read_text().splitlines():
            trajectory = json.loads(line)
            key, stream = trajectory["key"], []
            assert 1 <= len(trajectory["turns"]) <= 2
            for i, turn in enumerate(trajectory["turns"]):
                assert not turn["restart"]
                stream += turn["prompt_ids"]
                calls[key["stream"], key["prompt_index"], key["sibling"], i] = [*stream], turn
                stream += turn["tokens"]
    assert calls.keys() == {a[1:] for a in asked if a[1] == 1}, "every call is stored, and nothing else"
    assert len(calls) > 3 * 4 * 4, "the tool was used"
    for (_, *address), (prompt_ids, pending) in asked.items():
        if address[0] == 1:
            sampled, (prompt, turn) = pending.completion.result(), calls[tuple(address)]
            assert prompt == prompt_ids.tolist() and turn["tokens"] == sampled.tokens.tolist()
            assert np.array_equal(np.float32(turn["sampler_logp"]), sampled.sampler_logp)
            assert turn["versions"] == sampled.versions.tolist() == [50 + address[1] // 4] * len(sampled.tokens)
