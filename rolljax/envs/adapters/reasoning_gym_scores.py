"""Score answers to reasoning-gym's families: by the library after a check of the answer, or exactly here.

No text of an answer is executed. What the library would execute is read as a literal (`LITERALS`), computed exactly
(`ARITHMETIC`) or passed on only if it is a plain expression, and scored in a child process with limits (`ALGEBRA`).
Where the library accepts texts that are not answers, the answer must have the family's own form (`FORMS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rolljax.envs.adapters.expressions import exact, is_plain
from rolljax.envs.bounded import TooMuch, or_default, scored

LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers execute an answer to see whether it is a list; here it is read as a Python literal instead."""

ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Their scorers execute the answer, and puzzle24's takes any four numbers for right. Scored here, exactly."""

ALGEBRA = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Their scorers hand the answer to SymPy, which executes it and may never end: only plain expressions get there, in a
child process with limits."""

EXACT = frozenset({"game_of_life_halting"})
"""The library's scorer takes any text for right; here the answer must equal the reference."""

WHOLE = frozenset({"prime_factorization"})
"""Part of the score goes to whoever copies the question; here it is all or nothing."""

SOLVED_AT: Mapping[str, float] = {"complex_arithmetic": 0.99, "polynomial_equations": 1 - 2e-5}
"""Scores that fall with the distance from the right number, and the score within which it is rounding. Elsewhere only a
full score is solved."""

MAX_ANSWER_CHARS = 8192
"""A longer answer is no answer, unless the reference is long itself (4 times its length is then the limit)."""

_REAL = r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})"
_MOVE = r"\d?[A-Za-z]w?[\d']{0,2}"
_SAID = r"[A-Za-z]+\s+is\s+an?\s+[A-Za-z]+"
FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.ASCII)
    for name, form in {
        "coin_flip": r"[-+]?[\d,.]{1,40}(?:[eE][-+]?\d{1,3})?(?:\s*/\s*[\d,]{1,40})?",
        "complex_arithmetic": r"[-+\d.,()ij*\s]{1,100}",
        "knights_knaves": rf"{_SAID}(?:[,;.\s]+(?:and\s+)?{_SAID})*\.?",
        "polynomial_equations": rf'(?:{_REAL}(?:\s*,\s*{_REAL})*)?|""',
        "rubiks_cube": rf"{_MOVE}(?:\s+{_MOVE})*",
        "rush_hour": r"[A-Z][-+]\d(?:[\s,]+[A-Z][-+]\d)*",
    }.items()
}
"""What an answer must look like where the library takes more, and is right, stuck or out of memory by it."""

_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf(?:inity)?)j?(?![a-z])", re.IGNORECASE)


def solved(family: str, score: float) -> bool:
    """Whether an answer of this score is right."""
    return score >= SOLVED_AT.get(family, 1.0)


def score(family: str, dataset: Any, answer: str, entry: Mapping[str, Any]) -> float | TooMuch:
    """0 to 1. An answer that a scorer cannot read is wrong.

    Raises:
      EnvError, InfraError: it could not be scored, and not by the answer's doing.
    """
    reference = entry["answer"]
    if not _has_form(family, answer, reference):
        return 0.0
    if family in EXACT:
        return float(answer.strip() == reference)
    if family in ARITHMETIC:
        return float(_reaches(answer, entry["metadata"]))
    if family == "coin_flip":
        return float(_is_chance(answer, entry["metadata"]["rational"]))
    if family in ALGEBRA:
        return scored(lambda text: _library(dataset, text, entry), answer, str(reference)) if is_plain(answer) else 0.0
    found = _library(dataset, answer, entry)
    return float(found == 1.0) if family in WHOLE else found


def _has_form(family: str, answer: str, reference: str | None) -> bool:
    if len(answer) > max(MAX_ANSWER_CHARS, 4 * len(str(reference))):
        return False
    if family in FORMS and not FORMS[family].fullmatch(answer.strip()):
        return False
    numbers = reference is not None and any(c.isdigit() for c in str(reference))
    return not (numbers and _NOT_FINITE.search(answer))


def _library(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    found = or_default(lambda: float(dataset.score_answer(answer, entry)), 0.0)
    return found if 0 <= found <= 1 else 0.0


def _reaches(answer: str, metadata: Mapping[str, Any]) -> bool:
    found = exact(answer)
    target = metadata.get("target", 24)
    return found is not None and sorted(found[1]) == sorted(metadata["numbers"]) and abs(found[0] - target) < 1e-6


def _is_chance(answer: str, right: Mapping[str, int]) -> bool:
    """Within 1e-4 of the right probability, and within a thousandth of it."""
    try:
        said = Fraction(answer.replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return False
    p = Fraction(right["numerator"], right["denominator"])
    return abs(said - p) <= min(Fraction(1, 10_000), p / 1000)
