"""Tool calls in answers: the text that a model writes becomes content and `tool_calls` of the chat API."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rolljax.envs.tools.base import ToolCall, ToolSpec
from rolljax.envs.tools.parsers import PARSERS, Parser
from rolljax.model.tokenizer import CALL, Chat

FORMATS = ("hermes", "qwen_xml", "llama_json")
"""Formats of chat templates, names in `PARSERS`."""


def parser_of(chat: Chat) -> Parser | None:
    """Return the parser that reads the calls which a chat template writes; None: there is none."""
    expected = ToolCall(**CALL["function"])  # type: ignore[arg-type]
    text = chat.written_call(expected.name, expected.arguments)
    parsers = [PARSERS[name] for name in FORMATS]
    return next((p for p in parsers if [*p.parse(text, ())] == [expected]), None)


def call_prefill(chat: Chat, parser: Parser, name: str = "") -> str:
    """Return the text with which every call of a tool begins, as the template writes it; without a name, every call of
    any tool. It ends with a word, so that the sampled tokens after it are those of an answer without a prefill."""
    names = (name, name) if name else ("f", "g")
    written = [chat.written_call(names[0], {}), chat.written_call(names[1], {"x": 1} if name else {})]
    start, _, _ = next(parser.scan(written[0], ()))
    text = os.path.commonprefix(written)[start:]
    return text[: max(text.rfind(" "), text.rfind("\n") + 1)]


def split_calls(text: str, parser: Parser, specs: Sequence[ToolSpec]) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of a whole answer.

    The content is the text outside of calls, without white space in front of the first one and between calls. A call
    that cannot be parsed stays content.
    """
    found = [one for one in parser.scan(text, specs) if not one[2].problem]
    if not found:
        return text, []
    starts, ends = [start for start, _, _ in found], [end for _, end, _ in found]
    first, *others = (text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True))
    return first.rstrip() + "".join(part for part in others if part.strip()), [call for _, _, call in found]


class AnswerParts:
    """Content and calls of a growing answer. Content is never taken back.

    Attributes:
      content: what was returned so far. calls: known after the last text.
    """

    def __init__(self, parser: Parser, specs: Sequence[ToolSpec]) -> None:
        self._parser, self._specs = parser, specs
        self._text, self.content = "", ""
        self.calls: list[ToolCall] = []

    def add(self, text: str, *, last: bool) -> str:
        """Take more text; return the content that can be shown now, all of it if this is the last."""
        self._text += text
        shown = len(self.content)
        if last:
            self.content, self.calls = split_calls(self._text, self._parser, self._specs)
        else:
            self.content += self._text[shown : self._call_begins()].rstrip()
        return self.content[shown:]

    def _call_begins(self) -> int:
        """Return the position of the first call, or of text that may become its beginning."""
        tag = self._parser.tag
        at = self._text.find(tag, len(self.content))
        if at >= 0:
            return at
        halves = (n for n in range(len(tag) - 1, 0, -1) if self._text.endswith(tag[:n]))
        return len(self._text) - next(halves, 0)
