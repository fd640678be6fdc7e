r"""Find final answers in texts, and compare them.

Plain rules decide what they can, exactly and in time linear in the text: numbers in any notation,
letters of a choice, words, lists. The rest, such as `2\sqrt{2}` and `\sqrt{8}`, is for `verifier.py`.

An answer states one thing. Where it states several, all of them must be right, so that no second guess is rewarded:

- `a = b = c`: a first side that is a name or holds a variable is ignored; every other side must be right;
- `a \approx b`: `a` is the answer, and `b` is ignored; a name before it is allowed;
- `a, b`, `a; b`, `a and b`, `a or b`: a list of values in any order; it is right if the recorded answer lists the same;
- `a < b`, `a \to b`, `a \cup b` of values that are neither sets nor intervals: not an answer to a question for a value.

docs/my_model.md has the rules for users; tests/data/answer_pairs.py has a table of pairs with their verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARS = 8192
"""Characters at the end of a text that are searched for its answer."""
MAX_ANSWER_CHARS = 500
"""Most characters of an answer; a longer text is not an answer."""
MAX_DIGITS = 60
"""Most digits of a number; a longer one is not a number."""
ANSWER_FORMATS = ("any", "boxed", "last", "full")
SLOT = "{answer}"

_SEVERAL_LETTERS = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2}")
_MARKS = (re.compile("####"), re.compile("answer:", re.IGNORECASE))


def find(text: str, where: str = "any", *, number: bool = True) -> str | None:
    r"""Return the final answer of a text, or None.

    where: boxed: in the last `\boxed{...}`. last: the last number. full: the text. A text with `{answer}`: between
      the parts before and after it, such as `<answer>{answer}</answer>`; up to the end of the line if nothing follows
      `{answer}`. any: the first that exists of a box, a line after the last `####`, a line after the
      last `Answer:`, a text that is one line without words, and the last number.
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
        if _is_formula(text.strip()):
            return text.strip()
    found_numbers = _NUMBER.findall(_plain(text))
    return found_numbers[-1] if found_numbers else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{...}`; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : i].strip()
    return None


def _is_formula(text: str) -> bool:
    """Return whether a text is one line with digits and without words: all of it is the answer, `2**3` or `1 000`."""
    has_words = "\n" in text or "\\boxed" in text or _SEVERAL_LETTERS.search(text)
    return not has_words and len(text) <= MAX_ANSWER_CHARS and re.search("[0-9]", text) is not None


def _line(text: str) -> str | None:
    lines = text.strip().strip("*").strip().splitlines()
    return lines[0].strip() if lines else None


def _between(text: str, before: str, behind: str) -> str | None:
    """Return the text between the last `before` and the next `behind` (empty: the end of the line); None if one is
    missing."""
    _, mark, rest = text.rpartition(before)
    if not mark:
        return None
    if not behind:
        return _line(rest)
    found, mark, _ = rest.partition(behind)
    return found.strip() if mark else None


def split_recorded(text: str) -> tuple[str, str]:
    r"""Split a recorded answer into its steps and the final answer: after the last `####`, else in the last
    `\boxed{...}`, else all of it. The `<<2*3=6>>` annotations of GSM8K are taken out of the steps."""
    steps, mark, final = text.rpartition("####")
    if mark:
        return re.sub(r"<<[^<>\n]*>>", "", steps).strip(), final.strip()
    final = boxed(text) or ""
    return (text.strip(), final) if final else ("", text.strip())


def compare(reference: str, answer: str) -> bool | None:
    """Return whether an answer equals the recorded one; None where plain rules cannot decide."""
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(reference)) or not answer.strip():
        return False
    if _tight(reference) == _tight(answer):
        return True
    verdicts = [_compare_one(*pair) for pair in to_verify(reference, answer)]
    if not verdicts or False in verdicts:
        return False
    return None if None in verdicts else True


def to_verify(reference: str, answer: str) -> Sequence[tuple[str, str]]:
    """Return pairs of reference and answer that must all be equal for the answer to be right; no pair: the answer is
    wrong."""
    reference, answer = _tidy(reference), _tidy(answer)
    if _is_words(_plain(reference)) or _CHOICE.fullmatch(_plain(reference)):
        return [(reference, answer)]
    want, got = _items(reference), _items(answer)
    if len(want) > 1 or len(got) > 1:
        return _listed(want, got)
    reference, answer = _before_approx(reference), _before_approx(answer)
    left, right = _split(reference, _EQUAL), _split(answer, _EQUAL)
    if len(left) > 1 and (not _is_name(left[0]) or _has_variable(left[-1])):
        return _equation(left, right)
    return [(left[-1], side) for side in _values(right, left[-1])]


def _equation(left: Sequence[str], right: Sequence[str]) -> Sequence[tuple[str, str]]:
    """Match against a recorded equation: the answer is an equation too, or the value of the same name."""
    is_named = _is_name(left[0])
    if len(right) == 1:
        return [(left[-1], right[0])] if is_named else []
    if is_named and _tight(left[0]) == _tight(right[0]):
        return [(left[-1], side) for side in right[1:]]
    return [("=".join(left), "=".join(right))] if len(right) == 2 and all(right) else []


def _values(sides: Sequence[str], reference: str) -> Sequence[str]:
    """Return the sides of an answer's equation that must be right; none if one is missing."""
    if len(sides) > 1 and (
        not sides[0] or _is_name(sides[0]) or (_has_variable(sides[0]) and not _has_variable(reference))
    ):
        sides = sides[1:]
    return sides if len(sides) <= MAX_SIDES and all(sides) else ()


def _listed(want: Sequence[str], got: Sequence[str]) -> Sequence[tuple[str, str]]:
    """Match two lists of values, or of values by name, in any order."""
    parts = []
    for items in (want, got):
        sides = [_split(_before_approx(item), _EQUAL) for item in items]
        if any(len(s) > 2 or not all(s) for s in sides) or len(items) > MAX_ITEMS:
            return ()
        parts.append([(s[0] if len(s) == 2 and _has_variable(s[0]) else "", s) for s in sides])
    named = [{_tight(name): value[-1] for name, value in found} for found in parts]
    if all(len(names) == len(found) > 1 and "" not in names for names, found in zip(named, parts, strict=True)):
        return [(named[0][n], named[1][n]) for n in named[0]] if named[0].keys() == named[1].keys() else ()
    left, right = ({canonical(side): side for name, sides in found for side in sides[bool(name) :]} for found in parts)
    if len(left) != len(right):
        return ()
    only_left, only_right = ([side for c, side in a.items() if c not in b] for a, b in ((left, right), (right, left)))
    if not only_left:
        return [(side, side) for side in left.values()]
    if len(only_left) == 1:
        return [(only_left[0], only_right[0])]
    return [(", ".join(only_left), ", ".join(only_right))]


def _compare_one(reference: str, answer: str) -> bool | None:
    """Return whether two texts that each state one value are equal; None if plain rules cannot decide."""
    if _tight(reference) == _tight(answer):
        return True
    if _BASE.search(reference) or _BASE.search(answer):
        return False
    hides = _hides_a_value(answer) and not _hides_a_value(reference)
    reference, answer = _plain(reference), _plain(answer)
    if choice := _CHOICE.fullmatch(reference):
        found = _CHOICE_ANSWER.match(answer)
        return found is not None and found[1] == choice[1] and not _CHOICE_TOO.match(answer, found.end(1))
    if _is_words(reference):
        return _words(reference) == _words(answer)
    is_set = _SET.match(reference) is not None or _RELATION.search(reference) is not None
    if (
        hides
        or not answer
        or (not is_set and _RELATION.search(answer))
        or (_OR.search(answer) and not _OR.search(reference))
    ):
        return False
    joined = _split(answer[found.end() :] if (found := _MEMBER.match(answer)) else answer, _JOINED)
    if len(joined) > 1 and not all(map(_SET.match, joined)):
        return False
    want = _number(reference)
    if want is None:
        return None
    got = _number(answer)
    if got is not None:
        return _same(want, got)
    if _POWERS.fullmatch(answer):
        return want[0] == _power(answer)
    return None if re.search(r"[0-9\\]", answer) else False


def canonical(answer: str) -> str:
    """Normalize a final answer, so that equal ones can be counted: a number exactly, a choice by
    its letter, words in small letters, formulas without their white space; of `x = 3` and `1 + 2 = 3` the last side.
    Formulas that only a verifier finds equal stay apart."""
    text = _before_approx(_tidy(answer))
    sides = _split(text, _EQUAL)
    if len(sides) > 1 and (_is_name(sides[0]) or not any(map(_has_variable, sides))):
        text = sides[-1]
    plain = _plain(text)
    number = _number(plain)
    if number is not None:
        return str(number[0])
    choice = _CHOICE.fullmatch(plain)
    return choice[1] if choice else _tight(plain)


def is_number(text: str) -> bool:
    """Return whether a text is one number, units aside."""
    return _number(_plain(text)) is not None


# ---- what an answer states ------------------------------------------------------------------------------------------

MAX_SIDES, MAX_ITEMS = 6, 64
"""Maximum number of sides of an equation, and of values in a list; an answer with more is wrong."""
_SIGNS = str.maketrans(
    dict.fromkeys("\u00a0\u2009\u202f\u2003", " ")
    | {"\u2212": "-", "\u2013": "-", "\u2044": "/", "\u00b2": "^2", "\u00b3": "^3", "\u221a": "\\sqrt "}
    | {"\u00bd": " 1/2", "\u00bc": " 1/4", "\u00be": " 3/4", "\u00d7": "\\times ", "\u00f7": "\\div "}
    | {"\u2248": "\\approx ", "\u2243": "\\simeq ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne "}
    | {"\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u2192": "\\to ", "\u21d2": "\\to ", "\u00b1": "\\pm "}
    | {"\u221e": "\\infty ", "\u03c0": "\\pi ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in "}
    | {"\u2205": "\\emptyset "}
)
"""Signs of mathematics as LaTeX writes them."""
_BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=[^\s*])([^*\n]{1,200})\*\*(?![\w(\[{*])")
_BRACE = re.compile(r"(?<!\\)[{}]")
_TEXT_GROUP = re.compile(r"\\(?:text|mbox|textrm|textbf|textit|textnormal) ?\{([^{}]*)\}")
_TEXT_VALUE = re.compile(r"\\(?:text|mbox|textrm|textbf|textit|textnormal) ?\{[^{}0-9\\]{0,200}[0-9{\\]")
_POWER = re.compile(r"^ ?\^ ?\{? ?-?[0-9] ?\}?")
_BASE = re.compile(r"[0-9]\}? ?_")
"""A subscript after a digit: the base of a numeral. Answers with a base are compared as texts."""
_NO_SPACE = re.compile(r"(?<!\\)\\! ?")
_SPACED_OUT = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))")
_NEGATIVE = re.compile(r"\^ ?(-[0-9]{1,9})")
_AND = re.compile(r"\\(?:text|mathrm|mbox|textrm) ?\{ ?,? ?(and|or) ?\}")
_EQUAL = re.compile(
    r"(?<![<>!:=])={1,2}(?!=)|\\(?:to|rightarrow|Rightarrow|implies|iff|Leftrightarrow|longrightarrow)\b|=>|->"
)
_APPROX = re.compile(r"\\(?:approx|approxeq|thickapprox|simeq|sim|cong|doteq)\b|~=")
_JOINED = re.compile(r"\\(?:cup|cap|setminus|vee|wedge|lor|land|uplus|sqcup|oplus|bigcup|bigcap|triangle)\b")
_ITEM = re.compile(r",|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_OR = re.compile(r"(?<![A-Za-z])(?:and|or)(?![A-Za-z])")
_BRACES = re.compile(r"\\\{([^{}]*)\\\}")
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_MEMBER = re.compile(r"[A-Za-z](?:_\{?[0-9A-Za-z]\}?)? ?\\in(?![A-Za-z])")
_RELATION = re.compile(
    r"[<>]|!=|\\(?:le|ge|leq|geq|leqslant|geqslant|lt|gt|ne|neq|not|in|notin|ni|subset|subseteq|supset|supseteq|equiv|mid|nmid|"
    r"parallel|perp|propto|prec|succ|ll|gg|asymp|leftrightarrow|mapsto|vdash|models)\b"
)
_SET = re.compile(r"\s*(?:[\[({]|\\\{|\\(?:emptyset|varnothing|mathbb|mathbf|mathcal|left|R|N|Z|Q|C)\b|[RNZQC]\b)")
_NAME = re.compile(
    r"\s*(?:[|\\]{0,2}[A-Za-z][A-Za-z0-9_{}\\'|: ]{0,60}(?:\([^()]{0,60}\))?\|?|"
    r"\\frac ?\{[A-Za-z]{1,9}\} ?\{[A-Za-z]{1,9}\}|"
    r"\( ?[A-Za-z](?:_\{?[0-9]\}?)?(?: ?, ?[A-Za-z](?:_\{?[0-9]\}?)?){0,9} ?\))\s*"
)
"""A name that is given a value: `x`, `f(2)`, `AB`, `a_{37}`, `\angle ABC`, `(p, q)`, `V_1:V_2`."""
_LETTERS = re.compile(
    r"\\(?:[dt]?frac|sqrt|pi|cdot|times|div|pm|mp|circ|infty|left|right|degree|displaystyle|%|\$)(?![A-Za-z])"
)


def _hides_a_value(text: str) -> bool:
    """Return whether a reader of LaTeX would leave out a part of a text that may be a value: text after a bracket that
    closes nothing, text with digits in it, values after text."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return True
    behind = text[found.end() :] if (found := _TEXT_GROUP.search(text)) else ""
    return bool(depth or _TEXT_VALUE.search(text) or re.search(r"[0-9\\]", _POWER.sub("", behind)))


def _tidy(text: str) -> str:
    """Return a text with LaTeX's signs, `^` for Python's `**`, and without marks of bold type."""
    text = _AND.sub(r" \1 ", _BOLD.sub(r"\1", text.translate(_SIGNS)).strip().strip("$"))
    text = text.replace("\\boxed", "").replace("\\fbox", "")
    text = _SPACED_OUT.sub(" ", _THOUSANDS.sub("", _NO_SPACE.sub("", text)))
    while text.startswith("**"):
        text = text[2:].lstrip()
    while text.endswith("**"):
        text = text[:-2].rstrip()
    return _NEGATIVE.sub(r"^{\1}", text.replace("**", "^")).strip()


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at separators outside of brackets."""
    if separator.search(text) is None:
        return [text.strip()]
    depth, done, start, parts = 0, 0, 0, []
    for found in separator.finditer(text):
        between = text[done : found.start()]
        depth = max(0, depth + sum(map(between.count, "([{")) - sum(map(between.count, ")]}")))
        done = found.end()
        if depth == 0:
            parts.append(text[start : found.start()].strip())
            start = done
    return [*parts, text[start:].strip()]


def _items(text: str) -> Sequence[str]:
    """Return the values in a list or a set. A comma between groups of three digits is part of a number; `\\pm` is two
    values."""
    if found := _BRACES.fullmatch(text):
        text = found[1]
    text = _GROUPED.sub(lambda m: m[0].replace(",", ""), text)
    items = [item for item in _split(text, _ITEM) if item] or [text]
    return [each for item in items for each in (_PLUS_MINUS.sub(sign, item) for sign in "+-"[: 1 + ("\\pm" in item)])]


def _before_approx(text: str) -> str:
    """Return the part before a sign of rounding, or the part after it if the first is a name or empty."""
    parts = _split(text, _APPROX)
    while len(parts) > 1 and (not parts[0] or _is_name(parts[0])):
        parts = parts[1:]
    return parts[0]


def _is_name(side: str) -> bool:
    return _NAME.fullmatch(side) is not None and _has_variable(side)


def _has_variable(side: str) -> bool:
    """Return whether a side of an equation holds letters that are no unit of a number."""
    plain = _plain(side)
    return _number(plain) is None and re.search(r"[A-Za-z]", _LETTERS.sub("", side)) is not None


# ---- numbers --------------------------------------------------------------------------------------------------------

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?:(?<![0-9A-Za-z)\]}}])-)?(?:{_DIGITS} (?=[0-9]{{1,9}}/[0-9]))?{_DECIMAL}(?: ?/ ?{_DECIMAL})?")
"""A number in a text."""
_WHOLE = re.compile(
    rf"(?:[A-Za-z]{{1,15}} ?= ?)?(?P<sign>[-+]?) ?(?:(?P<integer>{_DIGITS}) (?=[0-9]{{1,9}} ?/ ?[0-9]))?"
    rf"(?P<top>{_DECIMAL})(?:e(?P<power>[-+]?[0-9]{{1,2}})|(?: ?/ ?(?P<bottom>{_DECIMAL}))?)"
    r"(?P<percent> ?%| ?(?:percent|percentage|pct)\b)?(?P<unit> [A-Za-z][A-Za-z/ ]*)?\.?"
)
"""A text that is one number; an assignment before the number and a unit after it are allowed."""
_GROUPED = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_SPACED = re.compile(r"[-+]? ?[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| ?/)")
"""A number at the beginning of a text whose digits are in groups of three, with commas or with spaces between."""
_SCIENTIFIC = re.compile(
    r"(?<![0-9.])([0-9]{1,30}(?:\.[0-9]{1,30})?) ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?(-?[0-9]{1,2})(?![0-9]) ?\}?"
)
MAX_POWER = 1000
"""2 to a higher power has more than `MAX_DIGITS` digits."""
_POWERS = re.compile(r"[0-9]{1,20}(?: ?\^ ?\{? ?[0-9]{1,20} ?\}?){1,20}")
_NO_UNITS = frozenset(
    "a an and approximately billion but by choose cos dozen e exp factorial half halves hundred i inf infinity is ln "
    "log million minus mod nan no not of oo or over pi plus power quarter quarters quintillion root sin sqrt squared "
    "cubed tan tau than third thirds thousand times to trillion x".split()
)
"""Words after a number that are no unit, because they change its value."""
_FRAC = re.compile(r"\\[dt]?frac ?(?:\{ ?(-?[0-9.,]{1,60}) ?\} ?\{ ?([0-9.,]{1,60}) ?\}|([0-9])([0-9]))")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,; ]|~)(?=[0-9]{3}(?![0-9]))")
_SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\s+")
_UNSEEN = re.compile(
    r"\\left\b|\\right\b|\\displaystyle\b|\\limits\b|\^ ?\{? ?\\circ ?\}?|\\degree\b|[°$£€¥₹]|\\(?=[$£€¥%])"
)
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname|textit|mathit|texttt|mathsf)\s?\{([^{}]*)\}")


def _plain(text: str) -> str:
    """Remove marks without meaning from a text: signs of currency and degrees, sizes of brackets, kinds of space."""
    text = _tidy(text).replace("{,}", ",")
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
    """Return the number in a plain text, and whether it is in per cent; None if the text is no number."""
    text = _SCIENTIFIC.sub(r"\1e\2", text)
    if spaced := _SPACED.match(text):
        text = spaced[0].replace(" ", "") + text[spaced.end() :]
    found = _WHOLE.fullmatch(text) if len(text) <= MAX_ANSWER_CHARS else None
    if found is None or len(found["top"]) > MAX_DIGITS or not _is_unit(found["unit"] or ""):
        return None
    integer, top, bottom = ((found[k] or "").replace(",", "").rstrip(".") for k in ("integer", "top", "bottom"))
    if len(bottom) > MAX_DIGITS or (bottom and Fraction(bottom) == 0):
        return None
    value = Fraction(top) / Fraction(bottom or 1) + Fraction(integer or 0)
    value *= Fraction(10) ** int(found["power"] or 0)
    return (-value if found["sign"] == "-" else value), bool(found["percent"])


def _power(text: str) -> int | None:
    """Return the value of a power or a power tower of whole numbers; None if it has more digits than any number
    here."""
    *bases, value = map(int, re.findall("[0-9]+", text))
    for base in reversed(bases):
        if base > 1 and value > MAX_POWER:
            return None
        value = base**value
    return value


def _is_unit(text: str) -> bool:
    words = re.split(r"[/ ]+", text.strip().lower()) if text.strip() else []
    return not words or (len(words) <= 4 and len(words[0]) > 1 and _NO_UNITS.isdisjoint(words))


def _same(want: tuple[Fraction, bool], got: tuple[Fraction, bool]) -> bool:
    """Return whether two numbers are equal; if exactly one is in per cent, it may also mean its hundredth."""
    (a, a_percent), (b, b_percent) = want, got
    if a == b:
        return True
    return a_percent != b_percent and (a / 100 == b if a_percent else a == b / 100)


# ---- words ----------------------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_ANSWER = re.compile(r"\(?([A-J])(?:\)|[.:]|$)")
_WORD = re.compile(r"[^\W\d_]+")
_CHOICE_TOO = re.compile(r"[).:]?\s*(?:,|;|/|&|or\b|and\b)\s*\(?[A-J](?![A-Za-z])")
"""A second letter after the first."""
_SINGLE = re.compile(r"([_^]) ?\{([0-9A-Za-z])\}")
"""Brackets around one character, which need not be there."""
_LOOSE = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")
"""A space that separates nothing: `1 1/2` keeps its own."""


def _tight(text: str) -> str:
    """Return a text without white space and typesetting marks; words in lower case."""
    plain = _plain(text)
    if _is_words(plain):
        return _words(plain)
    return _LOOSE.sub("", _SINGLE.sub(r"\1\2", plain)).replace("\\dfrac", "\\frac")


def _is_words(text: str) -> bool:
    """Return whether a text is words, not a formula: letters, with at least three in a row."""
    return bool(re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ '.,:-])*", text)) and any(len(w) > 2 for w in _WORD.findall(text))


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.casefold()))
