"""Filters of one record at a time: lengths, languages, quality, values of columns, overlap with evaluations."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from rolljax.data.base import Place, Record, RecordSource, Stage, text_of, value_of
from rolljax.data.files import FileSource
from rolljax.data.texts import normalised, word_grams
from rolljax.errors import Checked, ConfigError, Range, check_fields

Script = Literal["latin", "han", "kana", "hangul", "cyrillic", "arabic", "devanagari", "greek", "hebrew", "thai"]
_SCRIPTS: dict[str, Script] = {
    "LATIN": "latin",
    "CJK": "han",
    "HIRAGANA": "kana",
    "KATAKANA": "kana",
    "HANGUL": "hangul",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "DEVANAGARI": "devanagari",
    "GREEK": "greek",
    "HEBREW": "hebrew",
    "THAI": "thai",
}
"""Script by the first word of a letter's Unicode name."""


@dataclasses.dataclass(frozen=True)
class Length(Stage):
    """Keep records whose number of characters and words is in a range."""

    key: str = ""
    """The column; empty: `Pipeline.key`."""
    min_chars: int | None = 1
    """Minimum number of characters, inclusive; None: no minimum."""
    max_chars: int | None = None
    """Maximum number of characters, inclusive; None: no maximum."""
    min_words: int | None = None
    """Minimum number of words, inclusive; None: no minimum."""
    max_words: int | None = None
    """Maximum number of words, inclusive; None: no maximum."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            text = text_of(record, self.key)
            chars, words = len(text), len(text.split())
            place.observe("characters", chars)
            if _below(chars, self.min_chars) or _below(words, self.min_words):
                place.drop(record, "too_short")
            elif _above(chars, self.max_chars) or _above(words, self.max_words):
                place.drop(record, "too_long")
            else:
                yield record


@dataclasses.dataclass(frozen=True)
class KeepScripts(Stage):
    """Keep records whose letters are of some scripts. A script is not a language, but separates most, without a
    model."""

    key: str = ""
    """The column; empty: `Pipeline.key`."""
    scripts: tuple[Script, ...] = ("latin",)
    """Accepted scripts, such as `('latin',)` or `('han', 'kana')`."""
    min_frac: Annotated[float, Range(above=0, high=1)] = 0.8
    """Lowest share of a text's letters that must be of these scripts. Texts without letters are kept."""

    def __post_init__(self) -> None:
        check_fields(self)
        for script in self.scripts:
            if script not in _SCRIPTS.values():
                known = ", ".join(dict.fromkeys(_SCRIPTS.values()))
                raise ConfigError("is no script", setting="Language.scripts", value=script, remedy=f"of {known}")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            found = scripts(text_of(record, self.key))
            total = sum(found.values())
            if total and sum(found[s] for s in self.scripts) < self.min_frac * total:
                place.drop(record, f"script_{max(sorted(found), key=lambda s: found[s])}")
            else:
                yield record


def scripts(text: str) -> collections.Counter[str]:
    """Count the letters of a text by script; letters of all scripts that are not in `_SCRIPTS` count as `other`."""
    found: collections.Counter[str] = collections.Counter()
    for letter, num in collections.Counter(text).items():
        if letter.isalpha():
            first = unicodedata.name(letter, "").split(" ")[0]
            found[_SCRIPTS.get(first, "other")] += num
    return found


@dataclasses.dataclass(frozen=True)
class Quality(Checked, Stage):
    """Leave out texts that are broken or repeat themselves, by rules as Gopher's."""

    key: str = ""
    """The column; empty: `Pipeline.key`."""
    max_symbol_frac: Annotated[float, Range(low=0, high=1)] = 0.4
    """Largest share of a text's characters that may be neither letters, digits nor white space."""
    max_line_repeats: Annotated[float, Range(low=0, high=1)] = 0.3
    """Largest share of a text's lines that may repeat an earlier line of the text."""
    max_gram_repeats: Annotated[float, Range(low=0, high=1)] = 0.3
    """Largest share of a text's runs of `gram` words that may repeat an earlier run."""
    gram: Annotated[int, Range(low=1)] = 4
    """Number of words of a run."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            why = self.fault(text_of(record, self.key))
            if why:
                place.drop(record, why)
            else:
                yield record

    def fault(self, text: str) -> str:
        """Return the fault of a text, in a word; empty: none."""
        symbols = sum(not c.isalnum() and not c.isspace() for c in text)
        if "\ufffd" in text:
            return "broken_characters"
        if symbols > self.max_symbol_frac * len(text):
            return "symbols"
        if _repeats([line.strip() for line in text.splitlines() if line.strip()]) > self.max_line_repeats:
            return "repeated_lines"
        if _repeats(list(word_grams(text, self.gram))) > self.max_gram_repeats:
            return "repeated_words"
        return ""


@dataclasses.dataclass(frozen=True)
class Between(Stage):
    """Keep records with a number in a range. Records without one are left out as `missing`."""

    key: str = ""
    """The column; dots reach into objects (`rollouts.mu`)."""
    low: float | None = None
    """Lower bound of the range, inclusive; None: no lower bound."""
    high: float | None = None
    """Upper bound of the range, inclusive; None: no upper bound."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ConfigError("names a column, and is empty", setting="Between.key", remedy="such as 'rollouts.mu'")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            value = value_of(record, self.key)
            if not isinstance(value, int | float):
                place.drop(record, "missing")
                continue
            place.observe(self.key, value)
            if _below(value, self.low) or _above(value, self.high):
                place.drop(record, "too_low" if _below(value, self.low) else "too_high")
            else:
                yield record


@dataclasses.dataclass(frozen=True)
class Decontaminate(Stage):
    """Leave out records that share a run of words with the tasks of evaluations."""

    against: tuple[str, ...] = ()
    """Files of the evaluation tasks."""
    key: str = ""
    """The column; empty: `Pipeline.key`."""
    against_key: str = ""
    """Column of the text in the evaluation tasks; empty: the same as `key`."""
    n: Annotated[int, Range(low=1)] = 13
    """Number of words of a run (13, as for GPT-3); of a shorter task the whole text is the run, if it has
    `min_words`."""
    min_words: Annotated[int, Range(low=1)] = 5
    """Minimum number of words of a task; shorter tasks are ignored."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.against:
            raise ConfigError("names no file", setting="Decontaminate.against", remedy="files of evaluation tasks")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        against_key = self.against_key or self.key
        known: dict[int, set[bytes]] = collections.defaultdict(set)  # words of a run -> runs
        for path in self.against:
            for task in FileSource(path, "Decontaminate.against"):
                words = len(normalised(text_of(task, against_key)).split())
                if words >= self.min_words:
                    size = min(self.n, words)
                    known[size] |= {_short(g) for g in word_grams(text_of(task, against_key), size)}
        place.number("runs_of_words", sum(map(len, known.values())))
        for record in source:
            text = text_of(record, self.key)
            if any(_short(gram) in grams for size, grams in known.items() for gram in word_grams(text, size)):
                place.drop(record, "contaminated")
            else:
                yield record


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _repeats(parts: Sequence[str]) -> float:
    return 1 - len(set(parts)) / len(parts) if parts else 0.0


def _below(value: float, low: float | None) -> bool:
    return low is not None and value < low


def _above(value: float, high: float | None) -> bool:
    return high is not None and value > high
