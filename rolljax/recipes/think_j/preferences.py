"""Preference pairs from custom files, as questions to a judge.

{"prompt": "...", "chosen": "...", "rejected": "...", "subset": "xstest-should-refuse"}                (RewardBench)
{"prompt": "...", "response_1": "...", "response_2": "...", "preference_strength": -2}                 (HelpSteer2)
{"instruction": "...", "response1": "...", "response2": "...", "better": 1}                           (Think-J)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from rolljax.envs.data import columns, messages
from rolljax.envs.data.columns import Columns, Role
from rolljax.envs.data.rows import BadRow, InMemoryRows, Row, Rows, in_memory
from rolljax.envs.data.table import BadRows, Table, Taken, check_source, table
from rolljax.errors import ConfigError
from rolljax.recipes.think_j import verdicts
from rolljax.recipes.think_j.judging import Judging, PreferencePair
from rolljax.recipes.think_j.verdicts import Form

USUAL_PROMPTS = (("prompt", "instruction", "question", "query", "input"), ("messages", "context"))
USUAL_FIRST = (("response_1", "response1", "response_a", "answer_a", "completion_a", "output_1"),)
USUAL_SECOND = (("response_2", "response2", "response_b", "answer_b", "completion_b", "output_2"),)
USUAL_LABELS = (("better", "label", "winner", "preference"),)
USUAL_STRENGTHS = (("preference_strength", "strength", "overall_preference"),)
USUAL_SUBSETS = (("subset", "category", "domain"),)
"""Usual names of columns, in tiers (`columns.Role`)."""
_LABELS = {
    **dict.fromkeys(("1", "a", "model_a", "response_a", "response_1", "response1", "first"), True),
    **dict.fromkeys(("2", "b", "model_b", "response_b", "response_2", "response2", "second"), False),
}


@dataclasses.dataclass(frozen=True)
class Preferences(Judging):
    """Preference pairs from local files: JSON Lines (also gzip), a JSON array, Parquet, Arrow, or a folder of one of
    these. The policy reads an instruction and two responses, thinks, and ends with a verdict.

    A row has chosen and rejected, or two responses with a label (1, 2, a, b, ...) or a signed strength (below 0: the
    first is better). Tasks 2k and 2k + 1 are pair k modulo their number, in both orders, of which a random one is
    first. Reward: that of the verdict's form (`verdicts`). Solved: the right response. An evaluation asks in both
    orders.
    """

    path: str = ""
    """A file, a folder, a pattern (`data/train-*.parquet`), or the name of a file that comes with rolljax."""
    records: InMemoryRows | Sequence[Row] | None = None
    """The rows themselves, as dicts, instead of a path."""
    verdict: Form = "strength"
    """Form of a verdict: plain, strength (1 to 3), or scores (0 to 100). Where a row states no strength, every strength
    from 1 to 3 is right."""
    prompt_key: str = ""
    """Column of the prompt; dots reach into objects. Empty: found by its usual names."""
    chosen_key: str = ""
    """Column of the chosen response; dots reach into objects. Empty: found by its usual names."""
    rejected_key: str = ""
    """Column of the rejected response; dots reach into objects. Empty: found by its usual names."""
    first_key: str = ""
    """Column of the first response; dots reach into objects. Empty: found by its usual names."""
    second_key: str = ""
    """Column of the second response; dots reach into objects. Empty: found by its usual names."""
    label_key: str = ""
    """Column of the label; dots reach into objects. Empty: found by its usual names."""
    strength_key: str = ""
    """Column of the strength; dots reach into objects. Empty: found by its usual names. Strengths above 3 count as
    3."""
    subset_key: str = ""
    """Column of the subset; dots reach into objects. Empty: found by its usual names."""
    bad_rows: BadRows = "error"
    """Handling of rows that are not a pair with a better answer, including ties: `error` raises an error that names
    them, `skip` leaves them out with a warning."""
    domain: str = "preferences"
    """Name of these tasks in metrics."""
    seed: int = 0
    """Seed of the order of the responses."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "records", in_memory(self.records))
        check_source(self, "Preferences")
        verdicts.check_form(self.verdict, "Preferences.verdict")

    @property
    def name(self) -> str:
        return self.domain

    @property
    def num_pairs(self) -> int:
        """Number of pairs in the files."""
        return len(self._table())

    def warnings(self) -> Sequence[str]:
        complaint = self._table().complaint
        return (complaint,) if complaint else ()

    def pair(self, number: int) -> PreferencePair:
        """Return pair `number` modulo their number.

        Raises:
          DataError: a row is no pair. ConfigError: columns are not found.
        """
        return self._table().record(number)

    def warm(self) -> None:
        self._table()

    def _table(self) -> Table[PreferencePair]:
        return table(self, "Preferences", self._reader)

    def location(self, index: int) -> str:
        return self._table().location(index // 2)

    def columns_taken(self) -> str:
        return self._table().columns_taken

    def _reader(self, rows: Rows, path: str) -> tuple[Callable[[Row], PreferencePair], Taken]:
        names = Columns.of(rows)
        role = lambda name, usual: Role(f"Preferences.{name}_key", getattr(self, f"{name}_key"), usual)  # noqa: E731
        prompt = columns.need(role("prompt", USUAL_PROMPTS), names, path)
        subset = columns.find(role("subset", USUAL_SUBSETS), names, path)
        strength = columns.find(role("strength", USUAL_STRENGTHS), names, path)
        chosen, rejected = role("chosen", (("chosen",),)), role("rejected", (("rejected",),))
        taken = {"prompt": prompt, "subset": subset, "strength": strength}
        if names.has_usual(chosen) and names.has_usual(rejected):
            good, bad = columns.need(chosen, names, path), columns.need(rejected, names, path)
            read = lambda row: _chosen(row, prompt, good, bad, strength, subset)  # noqa: E731
            return read, {**taken, "chosen": good, "rejected": bad}
        first = columns.need(role("first", USUAL_FIRST), names, path)
        second = columns.need(role("second", USUAL_SECOND), names, path)
        label = columns.find(role("label", USUAL_LABELS), names, path)
        if label is None and strength is None:
            raise ConfigError(
                f"is not set, and {path} has no column that says which response is better",
                setting="Preferences.label_key",
                remedy=f"name it, or Preferences.strength_key; columns: {names}",
            )
        read = lambda row: _labelled(row, prompt, (first, second), label, strength, subset)  # noqa: E731
        return read, {**taken, "first": first, "second": second, "label": label}


def _chosen(
    row: Row, prompt: str, chosen: str, rejected: str, strength: str | None, subset: str | None
) -> PreferencePair:
    said = _number(row, strength)
    return _pair(row, prompt, (chosen, rejected), None if said is None else abs(said), subset)


def _labelled(
    row: Row, prompt: str, keys: tuple[str, str], label: str | None, strength: str | None, subset: str | None
) -> PreferencePair:
    said = _number(row, strength)
    if label is not None:
        name = str(messages.written(columns.value(row, label), label)).strip().lower()
        if name not in _LABELS:
            raise BadRow(f"{label} is {name[:40]!r}, which names neither response: 1, 2, a or b do")
        first_wins = _LABELS[name]
        if said is not None and said < 0 and not first_wins:
            raise BadRow(f"{label} names the second response, {strength} = {said:g} the first")
    elif not said:
        raise BadRow(f"{strength} is 0 or missing: neither response is better")
    else:
        first_wins = said < 0
    how_much = None if said is None else abs(said)
    return _pair(row, prompt, keys if first_wins else keys[::-1], how_much, subset)


def _pair(row: Row, prompt: str, keys: tuple[str, str], strength: float | None, subset: str | None) -> PreferencePair:
    better, worse = (_response(columns.value(row, key), key) for key in keys)
    if better == worse:
        raise BadRow(f"{keys[0]} and {keys[1]} are the same text")
    of = "" if subset is None else str(columns.value(row, subset))
    asked = _instruction(columns.value(row, prompt), prompt)
    return PreferencePair(asked, better, worse, None if strength is None else min(3.0, max(1.0, strength)), of)


def _number(row: Row, key: str | None) -> float | None:
    value = None if key is None else columns.value(row, key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRow(f"{key} is {messages.kind(value)}, not a finite number")
    return float(value)


def _instruction(value: Any, key: str) -> str:
    """Return a text, or a conversation as text."""
    said = messages.prompt(value, key)
    if len(said) == 1:
        return said[0].content
    return "\n\n".join(f"{m.role.capitalize()}: {m.content}" for m in said)


def _response(value: Any, key: str) -> str:
    """Return a text, or the last message of a list."""
    if not messages.is_list(value):
        return messages.text(messages.written(value, key), key)
    found = messages.messages(value, key)
    if found[-1].role != "assistant":
        raise BadRow(f"{key} does not end with a message of the assistant")
    return found[-1].content
