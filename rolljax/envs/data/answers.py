r"""Final answers: where they stand in a text, and when two of them are the same.

What can be said by plain rules is said here, exactly and in time linear in the text: numbers however they are written,
letters of a choice, words. What is left over, such as `2\sqrt{2}` and `\sqrt{8}`, is for `verifier.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 8192
"""Characters at the end of a text in which its answer is looked for."""
MAX_ANSWER_CHARS = 500
"""A longer answer is none."""
MAX_DIGITS = 60
"""Digits of a number; one with more is none."""
ANSWER_FORMATS = ("any", "boxed", "last", "full")
SLOT = "{answer}"

_MARKS = (re.compile("####"), re.compile("answer:", re.IGNORECASE))


def find(text: str, where: str = "any", *, number: bool = True) -> str | None:
    r"""The final answer of a text, or None.

    where: boxed: in the last `\boxed{...}`. last: the last number. full: the text. A text with `{answer}`: between
      what stands before and behind it there, such as `<answer>{answer}</answer>`; up to the end of the line where
      nothing stands behind. any: the first that is there of a box, a line behind the last `####`, a line behind the
      last `Answer:`, and the last number.
    number: whether a number is expected; else the last line takes the last number's place.
    """
    text = text[-MAX_CHARS:]
    if SLOT in where:
        return _between(text, *(part.strip() for part in where.split(SLOT, 1)))
    if where == "full":
        return text.strip() or None
    if where in ("any", "boxed"):
        found = boxed(text)
        if found is not None or where == "boxed":
            return found
    if where == "any":
        for mark in _MARKS:
            if ends := [found.end() for found in mark.finditer(text)]:
                return _line(text[ends[-1] :])
        if not number:
            return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)
    found_numbers = _NUMBER.findall(_plain(text))
    return found_numbers[-1] if found_numbers else None


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`; None where there is none that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : i].strip()
    return None


def _line(text: str) -> str | None:
    lines = text.strip().strip("*").strip().splitlines()
    return lines[0].strip() if lines else None


def _between(text: str, before: str, behind: str) -> str | None:
    """What stands between the last `before` and `behind`, which must be there."""
    _, mark, rest = text.rpartition(before)
    if not mark:
        return None
    if not behind:
        return _line(rest)
    found, mark, _ = rest.partition(behind)
    return found.strip() if mark else None


def split_recorded(text: str) -> tuple[str, str]:
    r"""A recorded answer as its steps and the final answer: behind the last `####`, else in the last `\boxed{...}`,
    else all of it. The `<<2*3=6>>` annotations of GSM8K are taken out of the steps."""
    steps, mark, final = text.rpartition("####")
    if mark:
        return re.sub(r"<<[^<>\n]*>>", "", steps).strip(), final.strip()
    final = boxed(text) or ""
    return (text.strip(), final) if final else ("", text.strip())


def compare(gold: str, answer: str) -> bool | None:
    """Whether an answer is the recorded one; None where plain rules cannot say."""
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(gold)) or not answer.strip():
        return False
    if _tight(gold) == _tight(answer):
        return True
    gold, answer = _plain(gold), _plain(answer)
    if choice := _CHOICE.fullmatch(gold):
        found = _CHOICE_ANSWER.match(answer)
        return found is not None and found[1] == choice[1]
    if _is_words(gold):
        return _words(gold) == _words(answer)
    want = _number(gold)
    if want is None:
        return None
    got = _number(answer)
    if got is not None:
        return _same(want, got)
    return None if re.search(r"[0-9\\]", answer) else False


def canonical(answer: str) -> str:
    """One text for all ways of writing a final answer, so that equal ones can be counted: a number exactly, a choice by
    its letter, words in small letters, formulas without their white space. Formulas that only a verifier finds equal
    stay apart."""
    plain = _plain(answer)
    number = _number(plain)
    if number is not None:
        return str(number[0])
    choice = _CHOICE.fullmatch(plain)
    return choice[1] if choice else _tight(answer)


def is_number(text: str) -> bool:
    """Whether a text is one number, units aside."""
    return _number(_plain(text)) is not None


# ---- numbers --------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z)\]}}])-)?(?:{_DIGITS} (?=[0-9]{{1,9}}/[0-9]))?{_DECIMAL}(?: ?/ ?{_DECIMAL})?")
"""A number in a text."""
_WHOLE = re.compile(
    rf"(?:[A-Za-z]{{1,15}} ?= ?)?(?P<sign>[-+]?) ?(?:(?P<integer>{_DIGITS}) (?=[0-9]{{1,9}} ?/ ?[0-9]))?"
    rf"(?P<top>{_DECIMAL})(?:e(?P<power>[-+]?[0-9]{{1,2}})|(?: ?/ ?(?P<bottom>{_DECIMAL}))?)"
    r"(?P<percent> ?%| ?percent\b)?(?P<unit> [A-Za-z][A-Za-z/ ]*)?\.?"
)
"""A text that is one number: an assignment before it and a unit behind it are let pass."""
_NO_UNITS = frozenset(
    "a an and approximately billion but by choose cos dozen e exp factorial half halves hundred i inf infinity is ln "
    "log million minus mod nan no not of oo or over pi plus power quarter quarters quintillion root sin sqrt squared "
    "cubed tan tau than third thirds thousand times to trillion x".split()
)
"""Words behind a number that change it."""
_FRAC = re.compile(r"\\[dt]?frac ?(?:\{ ?(-?[0-9.,]{1,60}) ?\} ?\{ ?([0-9.,]{1,60}) ?\}|([0-9])([0-9]))")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,; ]|~)(?=[0-9]{3}(?![0-9]))")
_SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\s+")
_UNSEEN = re.compile(
    r"\\left\b|\\right\b|\\displaystyle\b|\\limits\b|\^ ?\{? ?\\circ ?\}?|\\degree\b|[°$£€¥₹]|\\(?=[$£€¥%])"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname|textit|mathit|texttt|mathsf)\s?\{([^{}]*)\}")


def _plain(text: str) -> str:
    """A text without what changes nothing: signs of currency and degrees, sizes of brackets, kinds of space."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\u00a0", " ").replace("**", "")
    text = _UNSEEN.sub("", _THOUSANDS.sub("", text))
    text = _TEXT.sub(r" \1", _FRAC.sub(_slashed, text)) if "\\" in text else text
    text = _SPACES.sub(" ", text.replace("\\!", "")).strip()
    return text[:-1].strip() if text.endswith(".") and not text.endswith("..") else text


def _slashed(found: re.Match[str]) -> str:
    top, bottom = found[1] or found[3], found[2] or found[4]
    if top.startswith("-") or not top.strip(".,") or not bottom.strip(".,"):
        return f"({top})/({bottom})"
    return f" {top}/{bottom}"


def _number(text: str) -> tuple[Fraction, bool] | None:
    """The number that a plain text is, and whether it is in per cent."""
    found = _WHOLE.fullmatch(text) if len(text) <= MAX_ANSWER_CHARS else None
    if found is None or len(found["top"]) > MAX_DIGITS or not _is_unit(found["unit"] or ""):
        return None
    integer, top, bottom = ((found[k] or "").replace(",", "").rstrip(".") for k in ("integer", "top", "bottom"))
    if len(bottom) > MAX_DIGITS or (bottom and Fraction(bottom) == 0):
        return None
    value = Fraction(top) / Fraction(bottom or 1) + Fraction(integer or 0)
    value *= Fraction(10) ** int(found["power"] or 0)
    return (-value if found["sign"] == "-" else value), bool(found["percent"])


def _is_unit(text: str) -> bool:
    words = re.split(r"[/ ]+", text.strip().lower()) if text.strip() else []
    return not words or (len(words) <= 4 and len(words[0]) > 1 and _NO_UNITS.isdisjoint(words))


def _same(want: tuple[Fraction, bool], got: tuple[Fraction, bool]) -> bool:
    """Equal numbers; where one of them is in per cent, it may also be meant as its hundredth."""
    (a, a_percent), (b, b_percent) = want, got
    if a == b:
        return True
    return a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)


# ---- words ----------------------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_ANSWER = re.compile(r"\(?([A-J])(?:\)|[.:]|$)")
_WORD = re.compile(r"[^\W\d_]+")
_LOOSE = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")
"""A space that separates nothing: `1 1/2` keeps its own."""


def _tight(text: str) -> str:
    """A text without white space and signs of its setting; words in small letters."""
    plain = _plain(text)
    return _words(plain) if _is_words(plain) else _LOOSE.sub("", plain).replace("\\dfrac", "\\frac")


def _is_words(text: str) -> bool:
    """Whether a text is words, not a formula: letters, with three in a row at least."""
    return bool(re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ '.,:-])*", text)) and any(len(w) > 2 for w in _WORD.findall(text))


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))
