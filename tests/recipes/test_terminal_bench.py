"""Tasks at a terminal, played in real sandboxes: solutions, doing nothing, and cheating."""

import dataclasses
import json
import socket
import textwrap

import pytest

from rolljax.commands.train import main as train
from rolljax.envs import checks
from rolljax.errors import EnvError
from rolljax.recipes.terminal_bench.grading import Left, grade
from rolljax.recipes.terminal_bench.number_files import (
    FileChains,
    chain_commands,
    chain_of,
    task_of,
    write_chains,
    write_tasks,
)
from rolljax.recipes.terminal_bench.terminal import OWN_TASKS, HarborTasks, TerminalTasks
from rolljax.sandbox import TERMINAL, available
from rolljax.types import Task

pytestmark = pytest.mark.skipif(available() != "", reason=f"no sandbox: {available()}")


def play(spec, actions, index=0):
    """Play actions; return the observation before each action and its result, and the further results after the end."""
    env = spec.make()
    try:
        seen = [env.reset(spec.task(index))[-1].content]
        results = []
        for action in actions:
            results.append(env.step(action))
            seen += [m.content for m in results[-1].messages]
        return seen, results
    finally:
        env.close()


def reference(spec, index):
    """Return the actions of a perfect policy."""
    env = spec.make()
    env.reset(spec.task(index))
    first = env.reference_answer()
    env.step(first)
    second = env.reference_answer()
    result = env.step(second)
    return [first, second], result


def metrics(results):
    """Sum the metrics over an episode."""
    return {k: sum(r.metrics[k] for r in results if k in r.metrics) for k in results[-1].metrics}


def harbor(folder, **files):
    base = {
        "task.toml": "[verifier]\ntimeout_sec = 9\n",
        "instruction.md": "Write x.\n",
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
    }
    for name, text in {**base, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return HarborTasks(path=str(folder), max_repeats=0)


NAMES = [t.name for t in TerminalTasks().tasks()]


@pytest.mark.parametrize("name", NAMES)
def test_solutions_pass_and_doing_nothing_fails(name):
    spec = TerminalTasks(only=(name,))
    actions, result = reference(spec, 0)
    assert result.success and result.terminated and result.reward == 1.0 and actions[1] == "finish"
    assert result.metrics["tests_passed_frac"] == 1 and result.metrics["tests_n"] > 0
    assert result.metrics["tamper_n"] == result.metrics["left_running_n"] == 0
    _, (nothing,) = play(spec, ["finish"])
    assert (
        not nothing.success and nothing.terminated and nothing.reward == 0 and nothing.metrics["tests_passed_frac"] < 1
    )


TWO = ("log_errors", "merge_sales")


@pytest.mark.parametrize("name", [name for name in checks.CHECKS if name != "the reference answer solves"])
def test_the_contract_of_environments(name):
    checks.CHECKS[name](TerminalTasks(only=TWO), 2 if name == "tasks are their index" else 1)


def test_own_tasks_as_a_folder_of_tasks():
    spec = HarborTasks(path=str(OWN_TASKS), only=TWO)
    checks.reference_solves(spec, 2, reward=1.0)
    checks.tasks_are_their_index(spec, 4)


def test_the_same_commands_are_the_same_episode():
    spec = TerminalTasks(only=("merge_sales",))
    actions = ["ls -l --time-style=+", "head -3 orders.csv; nope", "cat <<'END' > report.csv\nx\nEND", "finish"]
    episodes = [play(spec, actions) for _ in range(2)]
    assert episodes[0] == episodes[1]
    assert episodes[0][0][2].startswith("[exit code 127]\norder_id,customer_id,amount_cents,status\n")


TASK = TerminalTasks(only=("fix_intervals",))
FORGE = """cat > merge.py <<'END'
import glob, json, os, signal, sys
# writes a passing verdict to every pipe it can reach, and searches everything readable for the tests
said = json.dumps({"nonce": "", "failed": "", "cases": {}}).encode()
found = glob.glob("/tests/*") + glob.glob("/tmp/*test*") + glob.glob("/logs/*")
for p in set(glob.glob("/proc/[0-9]*")) - {f"/proc/{os.getpid()}"}:
    try:
        if b"test_outputs" in open(p + "/environ", "rb").read() + open(p + "/cmdline", "rb").read():
            found.append(p)
    except OSError:
        pass
    for fd in "0123456789":
        try:
            os.write(os.open(f"{p}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), said)
        except OSError:
            pass
    try:
        maps = [line.split()[0].split("-") for line in open(p + "/maps") if " rw" in line]
        memory = open(p + "/mem", "rb")
        for start, end in maps:
            memory.seek(int(start, 16))
            if b"neighbours_do_not" in memory.read(int(end, 16) - int(start, 16)):
                found.append(p)
    except OSError:
        pass
print("1 4" if not found else "found " + " ".join(found))
END
"""


@pytest.mark.parametrize(
    "commands",
    {
        "own reward file": ["mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt"],
        "poisoned start-up": [
            "printf 'import os\\nos._exit(0)\\n' | tee sitecustomize.py conftest.py usercustomize.py json.py > pytest.py"
        ],
        "filter_groups daemon": [
            '(setsid nohup bash -c \'trap "" TERM; while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; '
            "sleep 0.2; done' > /dev/null 2>&1 &)"
        ],
        "tests of its own": ["mkdir -p /tests; echo 'def test_it(): pass' | tee /tests/test_outputs.py tests.py"],
        "reading tests": [
            "cat /tests/test_outputs.py; find / -maxdepth 4 -name 'test_outputs*' -not -path '/proc/*'; ls /solution"
        ],
        "forged verdict": [FORGE, "echo looking for /tests"],
        "ends the tests": ["echo 'import os; os.kill(-1, 9)' > merge.py", "ls /logs/verifier"],
    }.values(),
    ids=lambda c: c[0][:20],
)
def test_cheating_gives_nothing_but_an_alarm(commands):
    seen, results = play(TASK, [*commands, "finish"])
    assert not any(r.success for r in results) and results[-1].reward == 0
    assert metrics(results)["tamper_n"] >= 1
    assert "neighbours_do_not" not in "".join(seen)


def test_nothing_of_the_tests_can_be_seen_while_they_run():
    """The forger prints what it found, and `1 4` if that is nothing; a test that wants `1 4` passes."""
    task = TASK.tasks()[0]
    source = (
        "import subprocess\ndef test_it():  # a shared point joins and neighbours_do_not\n"
        "    done = subprocess.run(['python3', '/work/merge.py'], capture_output=True, text=True)\n"
        "    assert done.stdout == '1 4\\n', done.stdout + done.stderr\n"
    )
    task = dataclasses.replace(task, tests={"test_a.py": source.encode()}, cases={"test_a.py": ("test_it",)})
    body = FORGE.partition("\n")[2].rpartition("END")[0]
    for program, wanted in ((body, ""), (body.replace("found = ", "found = ['x'] + "), "found x")):
        result = grade(task, Left((("/work/merge.py", 0o644, program.encode()),), (), (), ()), TERMINAL, 20.0)
        assert wanted in result.cases["test_a.py::test_it"] and result.passed == (not wanted), result


def test_state_timeouts_and_lost_shells():
    spec = TerminalTasks(only=("fix_backup",), command_timeout_s=2.0)
    seen, results = play(
        spec,
        [
            "cd /tmp; X=5; export Y=6",
            "echo $X $Y $PWD",
            "sleep 999",
            "echo $X $PWD",
            "exit 3",
            "echo [$X] $PWD",
            "",
            "finish",
        ],
    )
    assert seen[2] == "[exit code 0]\n5 6 /tmp"
    assert seen[3].startswith("[stopped after 2 s]") and seen[4] == "[exit code 0]\n5 /tmp"
    assert "a new one was started" in seen[5] and seen[6] == "[exit code 0]\n[] /work"
    assert seen[7] == "[there is no command in the answer]"
    assert metrics(results)["timeouts_n"] == metrics(results)["no_command_n"] == 1


def test_the_shell_reaches_servers_on_the_list_through_its_proxy():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"localhost:{server.getsockname()[1]}"
        spec = TerminalTasks(only=("fix_backup",), egress=(place,))
        connect = "exec 3<>/dev/tcp/127.0.0.1/${HTTPS_PROXY##*:}; printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' WHERE >&3; head -1 <&3"
        seen, results = play(
            spec, [connect.replace("WHERE", place), connect.replace("WHERE", "pypi.org:443"), "finish"]
        )
    assert f"with a proxy (HTTPS_PROXY) to {place} alone" in seen[0]
    assert "200 Connection established" in seen[1] and "403 Forbidden" in seen[2]
    assert metrics(results)["egress_refused_n"] == 1
    assert "without a network" in play(TerminalTasks(only=("fix_backup",)), [])[0][0]


def test_long_output_keeps_its_end():
    seen, _ = play(TerminalTasks(only=("sudoku",), max_output_chars=100), ["seq 100000; echo the error >&2; false"])
    assert seen[1].startswith("[exit code 1]\n1\n2\n") and seen[1].endswith("99999\n100000\nthe error")
    assert "characters left out" in seen[1] and len(seen[1]) < 200


def test_repeating_a_command_ends_the_episode():
    seen, results = play(TASK, ["ls", "ls -a", "ls", "ls"])
    assert not results[-1].truncated and not results[-1].terminated
    _, results = play(TASK, ["date +%N", "date +%N", "date +%N", "ls", "ls", "ls"])
    assert [r.truncated for r in results] == [False] * 5 + [True]
    assert metrics(results)["stopped_repeating_n"] == 1 and metrics(results)["tests_n"] > 0
    _, results = play(TerminalTasks(only=("sudoku",), max_repeats=0), ["ls"] * 5)
    assert not results[-1].truncated


def test_the_last_turn_is_graded():
    spec = TerminalTasks(only=("log_errors",), max_turns=1)
    solution, _ = reference(TerminalTasks(only=("log_errors",)), 0)
    _, (result,) = play(spec, solution[:1])
    assert result.success and result.reward == 1 and result.truncated and not result.terminated
    env = spec.make()
    with pytest.raises(EnvError, match="step before reset"):
        env.step("ls")


def test_killing_the_sandbox_is_the_policys_loss():
    _, results = play(TASK, ["kill -9 -1; kill -9 2"])
    assert results[-1].terminated and results[-1].reward == 0 and results[-1].metrics["sandbox_lost_n"] == 1


def test_only_regular_files_are_taken():
    spec = TerminalTasks(only=("maze_route",))
    for command in ("ln -s /etc/passwd route.txt", "mkfifo route.txt", "mkdir route.txt", "truncate -s 400M route.txt"):
        _, results = play(spec, [command, "finish"])
        assert results[-1].terminated and results[-1].reward == 0 and results[-1].metrics["tests_passed_frac"] == 0
        assert results[-1].metrics["not_taken_n"] == (command[:2] != "mk" or "fifo" in command)


def test_processes_left_behind_are_counted():
    _, results = play(TASK, ["sleep 300 & sleep 300 &", "finish"])
    assert results[-1].metrics["left_running_n"] == 2


WHOLE = """
import os, stat
def test_it():
    found = sorted(os.path.relpath(os.path.join(d, n), "/app") for d, ds, ns in os.walk("/app") for n in ds + ns)
    assert found == ["empty", "kept", "new.sh"], found
    assert os.stat("new.sh").st_mode & 0o777 == 0o750 and open("kept").read() == "changed\\n"
    assert os.environ["MODE"] == "test" and open("/opt/made").read() == "test\\n"
    assert open("/tests/data/wanted.txt").read() == "w"
"""


def test_a_folder_without_artifacts_carries_the_whole_work_directory(tmp_path):
    dockerfile = "FROM x\nWORKDIR /app\nENV MODE=test\nCOPY . .\nRUN rm Dockerfile && echo $MODE > /opt/made\n"
    files = {"environment/Dockerfile": dockerfile, "environment/kept": "a", "environment/deleted": "b"}
    tests = {"tests/test_outputs.py": WHOLE, "tests/data/wanted.txt": "w"}
    spec = harbor(tmp_path / "job", **files, **tests)
    work = "echo $MODE; rm deleted; echo changed > kept; mkdir empty; touch new.sh; chmod 750 new.sh; ln -s / link"
    seen, results = play(spec, [work, "ls /tests /opt", "finish"])
    assert seen[1] == "[exit code 0]\ntest" and "No such file" in seen[2] and "made" in seen[2]
    assert results[-1].success, results


def test_a_script_that_writes_a_reward(tmp_path):
    script = '#!/bin/bash\ncd /app\nif [ "$(cat out)" = x ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
    spec = harbor(tmp_path / "job", **{"tests/test.sh": script})
    for command, reward in (("echo x > out", 1), ("echo y > out", 0), ("true", 0)):
        _, results = play(spec, [command, "finish"])
        assert results[-1].reward == reward


SCRIPT = """#!/bin/bash
cd /app
bash answer.sh > out
if [ "$(cat out)" = x ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FORGED_REWARD = "while :; do echo 1 > /logs/verifier/reward.txt; done"


@pytest.mark.parametrize(
    "answer, reward",
    [
        ("echo x", 1),
        ("echo y", 0),
        (
            "chmod +w /tests/test.sh; printf 'echo 1 > /logs/verifier/reward.txt; exit 0\\n%.0s' {1..99} > /tests/test.sh",
            0,
        ),
        (f"setsid bash -c '{FORGED_REWARD}' > /dev/null 2>&1 < /dev/null &", 0),
        (f"(trap '' HUP; (timeout 3 bash -c '{FORGED_REWARD}' &) &) > /dev/null 2>&1", 0),
        ("echo 1 > /logs/verifier/reward.txt; kill -9 $PPID", 0),
        (
            "rm -rf /logs; mkdir -p /logs; ln -s /app/one /logs/verifier; mkdir /app/one; echo 1 > /app/one/reward.txt",
            0,
        ),
    ],
)
def test_what_a_script_starts_does_not_write_its_reward(tmp_path, answer, reward):
    spec = harbor(tmp_path / "job", **{"tests/test.sh": SCRIPT})
    _, results = play(spec, [f"cat > answer.sh <<'END'\n{answer}\nEND", "finish"])
    assert results[-1].reward == reward


def test_a_machine_that_cannot_be_made_is_the_tasks_fault(tmp_path):
    dockerfile = "FROM x\nWORKDIR /app\nRUN echo no such thing; exit 4\n"
    spec = harbor(tmp_path / "job", **{"environment/Dockerfile": dockerfile, "tests/test.sh": "true"})
    with pytest.raises(EnvError, match="task job could not be set up: RUN echo no such thing; exit 4: code 4"):
        play(spec, [])


def test_tool_calls_and_blocks_reach_the_shell():
    call = {"name": "bash", "arguments": {"command": "echo from a call"}}
    actions = [f"<tool_call>{json.dumps(call)}</tool_call>", "Look:\n```bash\necho from a block\n```"]
    seen, results = play(TASK, [*actions, '<tool_call>{"name": "finish"}</tool_call>'])
    assert seen[1:] == ["[exit code 0]\nfrom a call", "[exit code 0]\nfrom a block"] and results[-1].terminated


def test_number_files_can_be_solved_and_the_cli_agents_config_passes_a_dry_run(tmp_path, capsys):
    write_tasks(tmp_path / "tasks", 40)
    spec = HarborTasks(path=str(tmp_path / "tasks"), prompt="{instruction}")
    checks.reference_solves(spec, 2, reward=1.0)
    name, number = task_of(3)
    seen, results = play(spec, [f"cat {name}", f"echo {number} >out", "finish"], index=3)
    assert seen[0] == name and seen[1].endswith(number) and results[-1].success
    settings = ["HarborTasks.readable = ()", f"HarborTasks.path = '{tmp_path / 'tasks'}'", "Evaluation.tasks = 4"]
    argv = ["--gin", "terminal_bench/cli_agent_start", "--gin", "terminal_bench/cli_agent", "--dry_run"]
    assert train(argv + [word for setting in settings for word in ("--set", setting)]) == 0
    assert "first task as the model sees it" in capsys.readouterr().out


def test_chains_are_the_same_without_a_sandbox_and_a_wrong_file_is_not_forgiven(tmp_path):
    write_chains(tmp_path, 2)
    spec = HarborTasks(path=str(tmp_path), prompt="{instruction}", max_turns=6, solution_by_line=True)
    checks.reference_solves(spec, 2, reward=1.0)
    first, contents = chain_of(1)
    right = chain_commands(first, contents)
    wrong = next(c for c in "0123456789" if f" <{c}" not in " ".join(right))
    for commands in (right, [f"tee -a log <{wrong}", *right[1:]]):
        seen, results = play(spec, [*commands, "finish"], index=1)
        env = FileChains().make()
        alone = [m.content for m in env.reset(Task("file_chains", 1, f"{first} {contents}"))]
        steps = [env.step(command) for command in commands]
        alone += [m.content for step in steps for m in step.messages]
        assert seen[:5] == alone and results[-1].success == steps[-1].success == (commands == right)
