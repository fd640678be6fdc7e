"""Agent programs as processes: what they get, what they answer, and every way they fail."""

import asyncio
import json
import os
import sys

import pytest

from rolljax.concurrency.child import LAST_WORDS
from rolljax.errors import ConfigError, EnvError, InfraError
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.agents.worker import GRACE_S, AgentProcess, check_machine, read_answer, resolve

TASK = {
    "id": "0-1-2-3",
    "messages": [{"role": "user", "content": "é\n\x00"}],
    "base_url": "http://x/v1",
    "api_key": "k",
}
READ = "import json, os, sys, time\ntask = json.loads(sys.stdin.readline())\n"


def program(code, **settings):
    return AgentProgram((sys.executable, "-c", READ + code), sandbox="none", **settings)


def play(code, *, tasks=(TASK,), variables=None, **settings):
    """Return the answers of one process."""

    async def run():
        worker = AgentProcess(program(code, **settings), variables or {})
        grace_s = 0.0
        try:
            answers = [await worker.ask(task) for task in tasks]
            grace_s = GRACE_S
            return answers
        finally:
            await worker.child.astop(grace_s)
            assert not worker.child.alive

    return asyncio.run(asyncio.wait_for(run(), 60))


def gone(pid, seconds=20):
    """Return whether a process ends soon (a zombie has ended)."""

    async def wait():
        while True:
            try:
                with open(f"/proc/{pid}/stat") as f:
                    if f.read().rsplit(")", 1)[1].split()[0] == "Z":
                        return True
            except OSError:
                return True
            await asyncio.sleep(0.01)

    return asyncio.run(asyncio.wait_for(wait(), seconds))


def test_the_task_goes_in_and_the_answer_comes_out():
    code = "print('thinking'); print('{}'); print('[1]'); print(json.dumps({'answer': task['messages'][0]['content']}))"
    assert play(code) == ["é\n\x00"]


def test_an_answer_without_a_line_break():
    assert play("sys.stdout.write(json.dumps({'answer': 'x'}))") == ["x"]


def test_one_process_plays_many_episodes():
    code = """
n = 0
while True:
    n += 1
    print(json.dumps({'id': 'an earlier one', 'answer': 'late'}))
    print(json.dumps({'answer': 'without a name'}))
    print(json.dumps({'id': task['id'], 'answer': f"{task['id']} {n} {os.getpid()}"}), flush=True)
    task = json.loads(sys.stdin.readline())
"""
    first, second = play(code, tasks=(TASK, TASK | {"id": "b"}), reuse=True)
    assert first.split()[:2] == ["0-1-2-3", "1"] and second.split()[:2] == ["b", "2"]
    assert first.split()[2] == second.split()[2]


def test_only_named_variables_reach_the_program(monkeypatch):
    monkeypatch.setenv("ROLLJAX_API_KEY", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    code = "print(json.dumps({'answer': json.dumps(dict(os.environ))}))"
    (env,) = map(json.loads, play(code, variables={"OPENAI_API_KEY": "k"}, env={"MODE": "fast"}))
    assert env["OPENAI_API_KEY"] == "k" and env["MODE"] == "fast" and env["LANG"] == "C.UTF-8"
    assert env["PATH"] == os.environ["PATH"] and "ROLLJAX_API_KEY" not in env


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "raise ValueError('no such door')",
            "ended with exit code 1 before it answered; its last words: .*no such door",
        ),
        ("sys.exit(0)", "ended with exit code 0 before it answered"),
        ("os.kill(os.getpid(), 9)", "was killed .SIGKILL. before it answered"),
        ("sys.stdout.close(); os.close(1); time.sleep(60)", "closed its output before it answered"),
        ("print(json.dumps({'answer': 51}), flush=True); time.sleep(60)", "answered with 51, which is no text"),
        ("print(json.dumps({'answer': None}), flush=True); time.sleep(60)", "answered with None"),
        ("print('x' * 5000, flush=True); time.sleep(60)", "printed more than 4096 bytes"),
        ("[print('x' * 50, flush=True) for _ in range(100)]; time.sleep(60)", "printed more than 4096 bytes"),
        ("print('x' * 5000000, end='', flush=True); time.sleep(60)", "printed more than 4096 bytes"),
    ],
)
def test_failures_say_what_happened(code, says):
    with pytest.raises(EnvError, match=f"(?s){says}") as e:
        play(code, output_bytes=4096)
    assert e.value.stage == "program" and not isinstance(e.value, InfraError)


def test_a_flood_of_errors_is_cut_and_blocks_nothing():
    with pytest.raises(EnvError, match="the end") as e:
        play("sys.stderr.write('x' * 3000000 + 'the end'); sys.exit(3)")
    assert len(str(e.value)) < LAST_WORDS + 100


def test_what_cannot_be_started_is_the_machines_fault():
    with pytest.raises(InfraError, match="could not be started"):
        AgentProcess(AgentProgram((sys.executable, "-c", "\x00"), sandbox="none"), {})


def test_the_end_of_a_program_is_the_end_of_what_it_started():
    code = """
import subprocess
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print(json.dumps({'answer': str(child.pid)}), flush=True)
time.sleep(600)
"""

    async def run():
        worker = AgentProcess(program(code), {})
        pid = int(await worker.ask(TASK))
        os.kill(pid, 0)
        await worker.child.astop(0.01)
        assert not worker.child.alive
        return pid

    assert gone(asyncio.run(run()))


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b'{"answer": "x"}', "x"),
        (b'{"id": "a", "answer": "x", "more": 1}\n', "x"),
        (b'{"answer": "\\ud83d!"}', "?!"),
        (b'{"id": "b", "answer": "x"}', None),
        (b'{"answer": "x"} trailing', None),
        (b'{"answer": "\xff"}', None),
        (b'{"answer": ' + b"[" * 100_000, None),
        (b'["answer"]', None),
        (b'"answer"', None),
        (b'{"answers": 1, "x": "answer"}', None),
        (b'{"answer": "x", "n": ' + b"9" * 10_000 + b"}", None),
        (b"", None),
    ],
)
def test_lines_that_are_answers(line, answer):
    assert read_answer(line, "a", own=True) == answer


def test_programs_of_many_episodes_must_name_the_one_they_answer():
    assert read_answer(b'{"answer": "x"}', "a", own=False) is None
    assert read_answer(b'{"id": "a", "answer": "x"}', "a", own=False) == "x"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"command": ("",)}, "command"),
        ({"sandbox": ""}, "sandbox"),
        ({"sandbox": "docker"}, "sandbox"),
        ({"sandbox": "task", "reuse": True}, "reuse"),
        ({"command": ("agent", "-t", "{task}"), "reuse": True}, "reuse"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_calls": 0}, "max_calls"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"output_bytes": 10}, "output_bytes"),
    ],
)
def test_settings_that_cannot_work(settings, name):
    with pytest.raises(ConfigError, match=f"AgentProgram.{name}"):
        AgentProgram(**{"command": ("python",), "sandbox": "none"} | settings)


def test_the_task_in_a_command_line():
    program = AgentProgram(("agent", "--task={task}", "-y"), sandbox="none")
    assert program.command_of("a {task} b") == ("agent", "--task=a {task} b", "-y")


def test_commands():
    assert resolve(("python", "a.py")) == [sys.executable, "a.py"]
    assert os.path.isabs(resolve(("sh",))[0])
    with pytest.raises(ConfigError, match="is not a program on this machine"):
        check_machine(AgentProgram(("no-such-program-here",), sandbox="none"))
