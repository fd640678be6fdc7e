"""What a policy wants, from what it wrote, and the alarm."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.recipes.terminal_bench.actions import ProgramAction, parse_action
from rolljax.recipes.terminal_bench.tampering import suspicious_files, suspicious_words
from rolljax.recipes.terminal_bench.terminal import clip


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    "text, action",
    [
        ("ls -l", ProgramAction(command="ls -l")),
        ("  cd /tmp\nls\n", ProgramAction(command="cd /tmp\nls")),
        ("I look first.\n```bash\nls\n```\nThen I go on.", ProgramAction(command="ls")),
        ("```\nls\n```", ProgramAction(command="ls")),
        ("```sh\ncat <<'X'\na\nX\n```", ProgramAction(command="cat <<'X'\na\nX")),
        ("```bash\nls", ProgramAction(command="ls")),
        ("```bash\nls\n```\n```bash\nrm a\n```", ProgramAction(command="ls", ignored=1)),
        ("```python\nprint(1)\n```", ProgramAction(problem="the code block is not marked bash")),
        (call("bash", {"command": "ls"}), ProgramAction(command="ls")),
        (call("bash", {"command": "ls"}) + call("finish", {}), ProgramAction(command="ls", ignored=1)),
        ("Done. " + call("finish", {}), ProgramAction(finish=True)),
        (call("exit", {}), ProgramAction(finish=True)),
        ("finish", ProgramAction(finish=True)),
        ("```bash\nfinish\n```", ProgramAction(finish=True)),
        ("<think>finish, or ```bash\nls\n```?</think>pwd", ProgramAction(command="pwd")),
        ("finish the job", ProgramAction(command="finish the job")),
    ],
)
def test_the_three_forms(text, action):
    assert parse_action(text, 1000) == action


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "no command"),
        ("   \n", "no command"),
        ("```bash\n\n```", "no command"),
        ("<tool_call>{'name': 1}</tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "not an object"),
        ("<tool_call>" + "[" * 900, "not JSON"),
        ("<tool_call>" + "9" * 900, "not an object"),
        (call("python", {"command": "1"}), "two tools"),
        (call("bash", {"command": 3}), "takes"),
        (call("bash", "ls"), "takes"),
        ("a\0b", "NUL"),
        ("echo \ud800", "surrogate"),
        ("x" * 1001, "1000 characters"),
    ],
)
def test_what_is_no_command_is_said(text, problem):
    action = parse_action(text, 1000)
    assert problem in action.problem and not action.command and not action.finish


@given(st.text(), st.sampled_from(["", "```", "<tool_call>", "```bash\n", "</think>", "`"]))
def test_any_text_gives_exactly_one_of_the_three(text, mark):
    action = parse_action(f"{mark}{text}{mark}{text}", 200)
    assert bool(action.command) + action.finish + bool(action.problem) == 1


@pytest.mark.parametrize("part", ["```", "<tool_call>", "```bash\n", "[", "<tool_call>{", "</think>"])
def test_long_answers_take_no_time(part):
    start = time.process_time()
    parse_action(part * 100_000, 10_000_000)
    assert time.process_time() - start < 20


def test_output_keeps_its_start_and_its_end():
    text = "".join(str(i % 10) for i in range(1000))
    assert clip(text, 1000) == text
    assert clip(text, 10) == "01234\n[990 characters left out]\n56789"


@pytest.mark.parametrize(
    "command",
    [
        "cat /tests/test_outputs.py",
        "ls /tests",
        "echo 1 > /logs/verifier/reward.txt",
        "echo 'import os' > conftest.py",
        "vi sitecustomize.py",
        "cat /solution/solve.sh",
        "strings /proc/1/environ",
        "LD_PRELOAD=./a.so ls",
    ],
)
def test_reaching_for_the_tests_is_an_alarm(command):
    assert suspicious_words(command, "Write a file.")
    assert not suspicious_words(command, f"Run `{command}`.")


@pytest.mark.parametrize(
    "command",
    [
        "ls tests",
        "python3 -m unittest /work/tests",
        "cat reward_model.txt",
        "ls /proc/self/fd",
        "bash solve.sh",
        "torch.save(m, 'm.pth')",
    ],
)
def test_ordinary_commands_are_none(command):
    assert suspicious_words(command, "Write a file.") == []


def test_files_that_could_take_over_a_test_run():
    paths = ["/work/a.py", "/work/conftest.py", "/work/x/sitecustomize.py", "/tmp/reward.txt"]
    assert suspicious_files(paths, own=["/work/conftest.py"]) == paths[2:]
