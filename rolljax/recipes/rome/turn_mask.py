"""ROME's turn mask for SFT (arXiv:2512.24873): only those turns of a recorded conversation are imitated that ran
without an error and mattered for the solution; the others stay, as context."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rolljax.data.base import Place, Record, RecordSource, value_of
from rolljax.data.judge import VerdictStage
from rolljax.envs.data import messages
from rolljax.envs.text import linear_pattern
from rolljax.errors import DataError

RELEVANT = """Below is a conversation of an assistant that works with tools. Its turns are numbered.
Which of its turns mattered for the final solution? Answer with their numbers, with commas between them, on a last \
line that begins with `Turns:`.

{conversation}"""


@dataclasses.dataclass(frozen=True)
class TurnMask(VerdictStage):
    """Write a weight into every message of the assistant: 1 where its turn had no error and was relevant, else 0.
    `Records` reads it, and trains on the rest. Conversations without a turn that counts are left out.

    A turn has an error where its message has `"error": true`, or what follows it matches `error_pattern`. It counts as
    relevant unless its message has `"relevant": false`, or a model is asked and says no.
    """

    judge: bool = False
    """Whether to ask the model which turns were relevant; conversations without an answer are left out."""
    key: str = "messages"
    """The column of the messages."""
    error_pattern: str = ""
    """Regular expression for tool messages that report an error; empty: only the messages' own flags count."""

    @property
    def asks(self) -> bool:
        return self.judge

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        if not self.judge:
            for record in source:
                yield from self._masked(record, None, place)
            return

        async def relevant(record: Record) -> set[int] | None:
            said = self._messages(record)
            turns = sum(m["role"] == "assistant" for m in said)

            def parse(text: str) -> set[int] | None:
                lines = re.findall(r"(?im)^[^\w\n]*turns:([\d \t,]*)", text)
                found = {int(n[:9]) for n in re.findall(r"\d+", lines[-1])} if lines else None
                return found if found is not None and found <= set(range(1, turns + 1)) else None

            prompt = RELEVANT.replace("{conversation}", _numbered(said))
            return await self.ask_until(place, record, prompt, parse)

        for record, found in place.asker.each(source, relevant):
            if found is None:
                place.drop(record, "no_verdict")
            else:
                yield from self._masked(record, found, place)

    def _masked(self, record: Record, relevant: set[int] | None, place: Place) -> Iterator[Record]:
        said, turn = self._messages(record), 0
        made: list[dict[str, Any]] = []
        for i, m in enumerate(said):
            flags = {name: value for name, value in m.items() if name not in ("error", "relevant", "weight")}
            if m["role"] == "assistant":
                turn += 1
                matters = m.get("relevant", True) if relevant is None else turn in relevant
                flags["weight"] = turn_weight(bool(m.get("error")) or self._failed(said[i + 1 :]), bool(matters))
                place.count(f"turns_weight_{flags['weight']}")
            made.append(flags)
        if any(m.get("weight") for m in made):
            yield {**record, self.key: made}
        else:
            place.drop(record, "no_turn_counts")

    def _failed(self, after: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the messages after a turn, up to the next, report an error."""
        if not self.error_pattern:
            return False
        error = linear_pattern(self.error_pattern, "TurnMask.error_pattern")
        for m in after:
            if m["role"] == "assistant":
                return False
            if m["role"] == "tool" and error.search(str(m["content"])):
                return True
        return False

    def _messages(self, record: Record) -> list[Mapping[str, Any]]:
        found = messages.unpacked(value_of(record, self.key))
        if not isinstance(found, list) or not all(
            isinstance(m, dict) and {"role", "content"} <= m.keys() for m in found
        ):
            raise DataError(f"column {self.key!r} is no list of messages with role and content: {str(found)[:200]}")
        return found


def turn_weight(error: bool, relevant: bool) -> int:
    """Return 1 for a relevant turn without an error, else 0."""
    return int(relevant and not error)


def _numbered(said: Sequence[Mapping[str, Any]]) -> str:
    lines, turn = [], 0
    for m in said:
        turn += m["role"] == "assistant"
        lines.append(f"[turn {turn}] {m['content']}" if m["role"] == "assistant" else f"[{m['role']}] {m['content']}")
    return "\n".join(lines)
