"""Parse the policy's action from its text.

Three ways to say it: the command alone, a code block (```bash), or a tool call in the Hermes form,
`<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>`. Text before `</think>` is skipped.
"""

from __future__ import annotations

import dataclasses
import re

from rolljax.envs.text import after_thinking, code_blocks, read_json

FINISH = "finish"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_SHELLS = {"", "bash", "sh", "shell", "console"}


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramAction:
    """A command to run, or the request to finish, or a problem to report to the policy (one of the three)."""

    command: str = ""
    finish: bool = False
    problem: str = ""
    ignored: int = 0
    """Further commands in the same answer, which are not run."""


def parse_action(text: str, max_chars: int) -> ProgramAction:
    """Return the action in a text of any kind; never raises."""
    if len(text) > max_chars:
        return ProgramAction(problem=f"an answer may have {max_chars} characters, this one has {len(text)}")
    text = after_thinking(text).strip()
    if "<tool_call>" in text:
        calls = _CALL.findall(text)
        return dataclasses.replace(_call(calls[0]), ignored=len(calls) - 1)
    if "```" in text:
        shell = [body for language, body in code_blocks(text) if language.strip().lower() in _SHELLS]
        if not shell:
            return ProgramAction(problem="the code block is not marked bash")
        return dataclasses.replace(_command(shell[0]), ignored=len(shell) - 1)
    return _command(text)


def _call(text: str) -> ProgramAction:
    try:
        call = read_json(text)
    except ValueError:
        return ProgramAction(problem="the tool call is not JSON")
    if not isinstance(call, dict):
        return ProgramAction(problem="the tool call is not an object with name and arguments")
    if call.get("name") in (FINISH, "exit"):
        return ProgramAction(finish=True)
    if call.get("name") != "bash":
        return ProgramAction(problem="there are two tools: bash and finish")
    arguments = call.get("arguments")
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str):
        return ProgramAction(problem='the tool bash takes {"command": "..."}')
    return _command(command)


def _command(text: str) -> ProgramAction:
    text = text.strip()
    if text == FINISH:
        return ProgramAction(finish=True)
    if not text:
        return ProgramAction(problem="there is no command in the answer")
    if "\0" in text:
        return ProgramAction(problem="a command cannot hold a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        return ProgramAction(problem="the command holds half of a surrogate pair, which is no character")
    return ProgramAction(command=text)
