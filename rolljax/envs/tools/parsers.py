"""Tool calls in the text of a policy, in the ways that models are taught to write them.

`PARSERS` holds one reader per format. All skip `<think>...</think>` and take time linear in the text.
A call that cannot be parsed is a `ToolCall` with a `problem`.
"""

from __future__ import annotations

import abc
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rolljax.envs.text import bounded, json_at, read_json
from rolljax.envs.tools.base import ToolCall, ToolSpec

MAX_CALLS = 256
"""Maximum number of calls that are read from one answer."""
MAX_CALL = 2**18
"""Maximum number of characters of one call; a longer one is rejected."""
MAX_LINE = 2**14
"""Maximum number of characters of one call in the compact format."""

_THINK, _UNTHINK = "<think>", "</think>"
_NEVER = "(?!)"


class Parser(abc.ABC):
    """Reads the calls of one format, and writes them."""

    style: ClassVar[str] = "lines"
    """Default form of the description of tools (`ToolEnv.style`)."""
    tag: ClassVar[str] = "<tool_call>"
    """The beginning of each call in the formats of chat templates."""
    how: ClassVar[str]
    """Sentence that tells the policy how to write a call."""

    def parse(self, text: str, specs: Sequence[ToolSpec]) -> Iterator[ToolCall]:
        """Yield the calls in `text`, in order. A text without a call yields none; see `scan`."""
        for _, _, call in self.scan(text, specs):
            yield call

    def scan(self, text: str, specs: Sequence[ToolSpec]) -> Iterator[tuple[int, int, ToolCall]]:
        """Yield start, end and call of each call in `text`, in order.

        Thoughts may have been opened by the chat template: text before a first `</think>` without an opening tag is a
        thought too.
        """
        text = bounded(text)
        opening = _opening(self.opening(specs))
        position = text.find(_UNTHINK)
        position = 0 if position < 0 or text.find(_THINK, 0, position) >= 0 else position + len(_UNTHINK)
        calls = 0
        while calls < MAX_CALLS and (found := opening.search(text, position)):
            if found[0] == _THINK:
                position = text.find(_UNTHINK, found.end())
                if position < 0:
                    return
                position += len(_UNTHINK)
            else:
                calls += 1
                call, position = self.read(text, found, specs)
                yield found.start(), position, call

    @abc.abstractmethod
    def opening(self, specs: Sequence[ToolSpec]) -> str:
        """Return a regular expression for the beginning of a call."""

    @abc.abstractmethod
    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        """Return the call that begins at `found`, and the position after it (past `found`)."""

    @abc.abstractmethod
    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        """Return a call as a policy would write it.

        Raises:
          ValueError: this format cannot express the call.
        """


@functools.lru_cache(maxsize=256)
def _opening(pattern: str) -> re.Pattern[str]:
    return re.compile(f"{_THINK}|{pattern}", re.MULTILINE)


class Hermes(Parser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    style = "json"
    how = (
        "To call a tool, write a JSON object with its name and its arguments between tags, a pair of tags per call:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )

    def opening(self, specs: Sequence[ToolSpec]) -> str:
        return "</?tool_call>"

    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        start = found.end()
        if found[0] != "<tool_call>":
            return ToolCall("", problem="</tool_call> without <tool_call> before it"), start
        try:
            value, end = _bounded_json(text, start)
        except ValueError as e:
            problem = f"what stands after <tool_call> is not a JSON object: {e}"
            return ToolCall("", problem=problem), self._behind(text, start)
        closed = _CLOSE.match(text, end)
        if not closed:
            return ToolCall("", problem="after the JSON object there must be </tool_call>"), self._behind(text, end)
        return _call_of(value), closed.end()

    @staticmethod
    def _behind(text: str, start: int) -> int:
        end = text.find("</tool_call>", start)
        return len(text) if end < 0 else end + len("</tool_call>")

    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


_CLOSE = re.compile(r"\s*(</tool_call>|\Z)")


class QwenXml(Parser):
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, as Qwen3-Coder writes it. Values of
    arguments that the schema does not call strings are JSON."""

    style = "json"
    how = (
        "To call a tool, write its name and each argument in tags of their own, with a pair of outer tags per call:\n"
        "<tool_call>\n<function=...>\n<parameter=...>\n...\n</parameter>\n</function>\n</tool_call>"
    )
    _FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>")
    _PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>")
    _END = re.compile(r"\s*</function>\s*(</tool_call>|\Z)")

    def opening(self, specs: Sequence[ToolSpec]) -> str:
        return "<tool_call>"

    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        function = self._FUNCTION.match(text, found.end())
        if not function:
            return ToolCall("", problem="after <tool_call> there must be <function=...>"), found.end()
        name, position = function[1], function.end()
        schemas = next((s.parameters for s in specs if s.name == name), {})
        arguments: dict[str, Any] = {}
        while opened := self._PARAMETER.match(text, position):
            end = text.find("</parameter>", opened.end())
            if end < 0:
                return ToolCall(name, problem=f"{opened[0].strip()} is not closed"), len(text)
            if opened[1] in arguments:
                return ToolCall(name, problem=f"argument {opened[1]!r} is given twice"), end
            value = text[opened.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[opened[1]] = self._value(value, schemas.get(opened[1], {}))
            position = end + len("</parameter>")
        closed = self._END.match(text, position)
        if not closed:
            return ToolCall(name, problem="after the arguments there must be </function> and </tool_call>"), position
        if closed.end() - found.start() > MAX_CALL:
            return ToolCall(name, problem=f"it is longer than {MAX_CALL} characters"), closed.end()
        return ToolCall(name, arguments), closed.end()

    @staticmethod
    def _value(text: str, schema: Mapping[str, Any]) -> Any:
        if schema.get("type", "string") == "string":
            return text
        try:
            return read_json(text)
        except ValueError:
            return text  # which the check of the arguments names

    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        lines = [f"<parameter={k}>\n{v}\n</parameter>" for k, v in values.items()]
        call = "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])
        if [(c.name, c.arguments) for c in self.parse(call, specs)] != [(name, dict(arguments))]:
            raise ValueError(f"{name}: this format cannot write these arguments")
        return call


def _bounded_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at `start`, and where it ends. Raises `ValueError` if there is none, or a too long one."""
    value, end = json_at(text, start)
    if end - start > MAX_CALL:
        raise ValueError(f"it is longer than {MAX_CALL} characters")
    return value, end


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", problem='a call is a JSON object like {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError as e:
            return ToolCall(value["name"], problem=f'"arguments" is not a JSON object: {e}')
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], problem='"arguments" must be a JSON object')
    return ToolCall(value["name"], arguments)


class LlamaJson(Parser):
    """`{"name": "f", "parameters": {...}}` at the beginning of a line, as Llama 3.1 and later ones write it."""

    style = "json"
    tag = "{"
    how = (
        "To call a tool, write a JSON object with its name and its arguments, alone on a line:\n"
        '{"name": "...", "parameters": {...}}'
    )

    def opening(self, specs: Sequence[ToolSpec]) -> str:
        return r'^[ \t]*(?=\{\s*"name"\s*:)'

    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        start = found.end()
        try:
            value, end = _bounded_json(text, start)
        except ValueError as e:
            return ToolCall("", problem=f"it is not a JSON object: {e}"), start + 1
        if not {"parameters", "arguments"} & value.keys():
            return ToolCall("", problem='it has no "parameters"'), end
        return _call_of(value), end

    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)


class _Body(Parser):
    """Formats whose call is one text: the tool's text argument."""

    def opening(self, specs: Sequence[ToolSpec]) -> str:
        names = [w for s in specs if s.text_parameter for w in self.words(s.name)]
        return self.start("|".join(map(re.escape, names))) if names else _NEVER

    def words(self, name: str) -> Sequence[str]:
        return (name,)

    @abc.abstractmethod
    def start(self, words: str) -> str: ...

    @abc.abstractmethod
    def end(self, word: str) -> re.Pattern[str]: ...

    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        spec = next(s for s in specs if s.text_parameter and found["word"] in self.words(s.name))
        closed = self.end(found["word"]).search(text, found.end())
        if not closed:
            return ToolCall(spec.name, problem=f"{found[0].strip()} is not closed"), len(text)
        body = text[found.end() : closed.start()]
        if len(body) > MAX_CALL:
            return ToolCall(spec.name, problem=f"it is longer than {MAX_CALL} characters"), closed.end()
        return ToolCall(spec.name, {str(spec.text_parameter): body.removesuffix("\n")}), closed.end()

    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        spec = next(s for s in specs if s.name == name)
        if list(arguments) != [spec.text_parameter]:
            raise ValueError(f"{name} takes more than one text: this format cannot call it")
        call = self.wrap(name, str(arguments[str(spec.text_parameter)]))
        if [c.arguments for c in self.parse(call, specs)] != [arguments]:
            raise ValueError(f"{name}: this format cannot write that text")
        return call

    @abc.abstractmethod
    def wrap(self, name: str, body: str) -> str: ...


class Fenced(_Body):
    """A fenced block whose language is the tool: three backticks and `python`, the code, three backticks."""

    how = "To call a tool, write a fenced block with its name and its input:\n```name\ninput\n```"
    ALIASES: ClassVar[Mapping[str, Sequence[str]]] = {
        "python": ("python", "py", "python3"),
        "bash": ("bash", "sh", "shell"),
    }
    _END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)

    def words(self, name: str) -> Sequence[str]:
        return self.ALIASES.get(name, (name,))

    def start(self, words: str) -> str:
        return rf"^[ \t]*```[ \t]*(?P<word>{words})[ \t]*\n"

    def end(self, word: str) -> re.Pattern[str]:
        return self._END

    def wrap(self, name: str, body: str) -> str:
        return f"```{name}\n{body}\n```"


class Tags(_Body):
    """`<python>...</python>`: the tag is the tool, as in GEM."""

    how = "To call a tool, write its input between tags of its name: <name>input</name>"

    def start(self, words: str) -> str:
        return f"<(?P<word>{words})>\n?"

    def end(self, word: str) -> re.Pattern[str]:
        return re.compile(re.escape(f"</{word}>"))

    def wrap(self, name: str, body: str) -> str:
        return f"<{name}>{body}</{name}>"


class Compact(Parser):
    """`calc(17*3)` or `search("Rome", nights=2)` alone on a line; for models that are too small for JSON.

    A tool with one text argument takes the text between the parentheses unchanged. Unknown names are not calls.
    """

    how = "To call a tool, write its name and its arguments on a line of its own: name(argument, other=argument)"

    def opening(self, specs: Sequence[ToolSpec]) -> str:
        names = "|".join(re.escape(s.name) for s in specs)
        return rf"^[ \t]*(?P<word>{names})[ \t]*\(" if names else _NEVER

    def read(self, text: str, found: re.Match[str], specs: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
        spec = next(s for s in specs if s.name == found["word"])
        end = text.find("\n", found.end())
        end = len(text) if end < 0 else end
        line = text[found.end() : end].rstrip()
        if not line.endswith(")"):
            return ToolCall(spec.name, problem=f"{spec.name}( is not closed on its line"), end
        if len(line) > MAX_LINE:
            return ToolCall(spec.name, problem=f"it is longer than {MAX_LINE} characters"), end
        try:
            return ToolCall(spec.name, _arguments(line[:-1].strip(), spec)), end
        except ValueError as e:
            return ToolCall(spec.name, problem=str(e)), end

    def write(self, name: str, arguments: Mapping[str, Any], specs: Sequence[ToolSpec]) -> str:
        spec = next(s for s in specs if s.name == name)
        values = {k: json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        calls = [f"{name}({', '.join(f'{k}={v}' for k, v in values.items())})"]
        if len(arguments) == 1 and spec.text_parameter in arguments:
            calls.insert(0, f"{name}({arguments[str(spec.text_parameter)]})")
        for call in calls:
            if [c.arguments for c in self.parse(call, specs)] == [arguments]:
                return call
        raise ValueError(f"{name}: this format cannot write these arguments")


def _arguments(text: str, spec: ToolSpec) -> dict[str, Any]:
    """Parse the arguments between the parentheses of a compact call."""
    if spec.text_parameter and len(spec.parameters) == 1:
        named = re.match(rf"{re.escape(spec.text_parameter)}\s*=(?!=)\s*", text)
        text = text[named.end() :] if named else text
        return {spec.text_parameter: _unquoted(text) if _QUOTED.fullmatch(text) else text} if text or named else {}
    found: dict[str, Any] = {}
    names, in_order = list(spec.parameters), True
    for i, piece in enumerate(_pieces(text)):
        named = re.match(r"([A-Za-z_]\w*)\s*=(?!=)\s*", piece)
        if not named and i >= len(names):
            raise ValueError(f"{spec.name} takes {len(names)} arguments: {', '.join(names) or 'none'}")
        in_order = in_order and not named
        if not named and not in_order:
            raise ValueError("an argument without a name stands after one with a name")
        key = named[1] if named else names[i]
        if key in found:
            raise ValueError(f"argument {key!r} is given twice")
        found[key] = _value(piece[named.end() :] if named else piece, spec.parameters.get(key, {}))
    return found


_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\'', re.DOTALL)
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*+"?|\'(?:[^\'\\]|\\.)*+\'?|[\[{(]|[\])}]|,|[^"\'\[\](){},]+', re.DOTALL)


def _pieces(text: str) -> list[str]:
    """Split at commas outside of quotes and brackets."""
    pieces, piece, depth = [], "", 0
    for part in _PIECE.findall(text):
        depth += (part in "[{(") - (part in "])}")
        if part == "," and depth == 0:
            pieces.append(piece.strip())
            piece = ""
        else:
            piece += part
    return [*pieces, piece.strip()] if pieces or piece.strip() else []


def _unquoted(text: str) -> str:
    if text[0] == "'":
        inner = re.sub(r"\\.|\"", lambda m: {"\\'": "'", '"': '\\"'}.get(m[0], m[0]), text[1:-1], flags=re.DOTALL)
        text = f'"{inner}"'
    return str(read_json(text))


_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    if _QUOTED.fullmatch(text):
        return _unquoted(text)
    if schema.get("type") == "string":
        return text
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] in ("[", "{") or re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?", text):
        return read_json(text)
    return text


PARSERS: Mapping[str, Parser] = {
    "hermes": Hermes(),
    "qwen_xml": QwenXml(),
    "llama_json": LlamaJson(),
    "fenced": Fenced(),
    "tags": Tags(),
    "compact": Compact(),
}
"""Format -> its parser."""
