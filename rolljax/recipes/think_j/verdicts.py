r"""Verdicts on two answers: prompt, parsing, writing and reward.

Three forms, and the reward of each, are those of Think-J (arXiv 2505.14268, checked against the authors' code):

    plain     Therefore, Response (a) is better.
    strength  Therefore, Response (a) is better, and the strength is [[2]].             1 slightly, 2, 3 much
    scores    Therefore, the scores are <Score 1>80</Score 1> and <Score 2>60</Score 2>.   0 to 100

A verdict is the end of the text and nothing else: a verdict in the thoughts before does not count, and a text that
ends in anything else has none. (The authors search all of the text, where a thought that names both answers is read as
one or the other.) Only the last `MAX_VERDICT` characters are searched.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal, get_args

from rolljax.errors import ConfigError

Form = Literal["plain", "strength", "scores"]
FORMS: tuple[Form, ...] = get_args(Form)
Wording = Literal["sentences", "brief"]
"""brief: a verdict alone on the last line, for models of a few thousand parameters: `a`, `a2`, `80 60`."""
Side = Literal["a", "b"]
STRENGTHS = (1, 2, 3)
MAX_VERDICT = 200
UNREAD = 0.5
"""Reward of a text without a verdict in the forms `plain` and `scores`."""

_SCORE = r"([0-9]{1,3}(?:\.[0-9]{1,4})?)"
_PLAIN = re.compile(r"Therefore, Response \((a|b)\) is better\.")
_STRENGTH = re.compile(r"Therefore, Response \((a|b)\) is better, and the strength is \[\[([0-9]{1,3})\]\]\.")
_SCORES = re.compile(rf"<Score 1>{_SCORE}</Score 1>[^<>\n]{{0,40}}<Score 2>{_SCORE}</Score 2>(?:, respectively)?\.?")
_BRIEF_PLAIN = re.compile("(a|b)")
_BRIEF_STRENGTH = re.compile("(a|b)([0-9]{1,3})")
_BRIEF_SCORES = re.compile(f"{_SCORE} {_SCORE}")
_PATTERNS = {
    ("plain", "sentences"): _PLAIN,
    ("strength", "sentences"): _STRENGTH,
    ("scores", "sentences"): _SCORES,
    ("plain", "brief"): _BRIEF_PLAIN,
    ("strength", "brief"): _BRIEF_STRENGTH,
    ("scores", "brief"): _BRIEF_SCORES,
}
_STARTS = {"plain": "Therefore, Response (", "strength": "Therefore, Response (", "scores": "<Score 1>"}


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's verdict."""

    better: Side | None
    """The better response; None for two equal scores."""
    strength: int | None = None
    """Any number that was written, in the form with strength."""
    scores: tuple[float, float] | None = None
    """Scores of responses a and b, in the form with scores."""


def check_form(form: str, setting: str) -> None:
    """Raise `ConfigError` if `form` is none of `FORMS`."""
    if form not in FORMS:
        raise ConfigError(
            "is no form of a verdict", setting=setting, value=form, remedy=f"one of {', '.join(map(repr, FORMS))}"
        )


def other(side: Side) -> Side:
    """Return the other of the two."""
    return "b" if side == "a" else "a"


def read(text: str, form: Form, wording: Wording = "sentences") -> Verdict | None:
    """Parse the verdict at the end of a text, in time linear in it; None: there is none."""
    tail = text[-2 * MAX_VERDICT :].rstrip()[-MAX_VERDICT:]
    start = tail.rfind("\n") + 1 if wording == "brief" else tail.rfind(_STARTS[form])
    found = _PATTERNS[form, wording].fullmatch(tail, max(0, start)) if start >= 0 else None
    if found is None:
        return None
    if form == "plain":
        return Verdict(_side(found[1]))
    if form == "strength":
        return Verdict(_side(found[1]), strength=int(found[2]))
    first, second = float(found[1]), float(found[2])
    if max(first, second) > 100:
        return None
    return Verdict(None if first == second else "a" if first > second else "b", scores=(first, second))


def _side(found: str) -> Side:
    return "a" if found == "a" else "b"


def write(verdict: Verdict, form: Form, wording: Wording = "sentences") -> str:
    """Return the text that `read` parses as this verdict.

    Raises:
      ValueError: the verdict lacks a part that the form requires.
    """
    if form == "scores":
        if verdict.scores is None:
            raise ValueError("no scores")
        first, second = (f"{x:.4f}".rstrip("0").rstrip(".") for x in verdict.scores)
        brief = wording == "brief"
        text = f"<Score 1>{first}</Score 1> and <Score 2>{second}</Score 2>"
        return f"{first} {second}" if brief else f"Therefore, the scores are {text}."
    if verdict.better is None or (form == "strength" and verdict.strength is None):
        raise ValueError("no side, or no strength")
    strength = "" if form == "plain" else str(verdict.strength)
    if wording == "brief":
        return f"{verdict.better}{strength}"
    how = f", and the strength is [[{strength}]]" if strength else ""
    return f"Therefore, Response ({verdict.better}) is better{how}."


def request(form: Form) -> str:
    """Return the instructions for a judge on the form of its verdict."""
    if form == "plain":
        ends = "with exactly one of these sentences: {} or {}".format(
            *(repr(write(Verdict(side), "plain")) for side in get_args(Side))
        )
    elif form == "strength":
        ends = (
            f"with a sentence like {write(Verdict('b', strength=1), form)!r}, where (a) or (b) is the better response "
            "and the number says by how much: 1 slightly better, 2 better, 3 much better"
        )
    else:
        ends = (
            f"with a sentence like {write(Verdict('b', scores=(30, 80)), form)!r}: a number from 0 (wrong, unclear or "
            "beside the point) to 100 (perfect) for response (a), then one for response (b)"
        )
    return f"Explain first what is good and bad about each response. Then end {ends}. Write nothing after it."


# ---- rewards --------------------------------------------------------------------------------------------------------


def strength_reward(verdict: Verdict | None, truth: float) -> float:
    """Return the reward of a verdict with strength, 0 to 1.

    A wrong or missing verdict gets 0. A right one gets 1 minus an eighth for each step between the strengths, and one
    half if its strength is not 1, 2 or 3.

    Args:
      truth: signed strength; below 0: a is better. Not 0.
    """
    if verdict is None or verdict.better != _better(truth) or verdict.strength is None:
        return 0.0
    if verdict.strength not in STRENGTHS:
        return 0.5
    return 1.0 - abs(abs(truth) - verdict.strength) / 8


def cot_reward(verdict: Verdict | None, better: Side) -> float:
    """Return the reward of a plain verdict: 1 for the right one, 0 for the wrong one, `UNREAD` for none.

    A policy that is right less than half of the time is better off saying nothing: prefer `strength_reward` there.
    """
    if verdict is None or verdict.better is None:
        return UNREAD
    return float(verdict.better == better)


def score_reward(verdict: Verdict | None, better: Side) -> float:
    """Return the reward of two scores with the distance d, 0 to 100: 1 + d/100 if the better answer has the higher
    score, else -d/100 (0 for equal scores); `UNREAD` without scores."""
    if verdict is None or verdict.scores is None:
        return UNREAD
    share = min(abs(verdict.scores[0] - verdict.scores[1]) / 100, 1.0)
    return 1.0 + share if verdict.better == better else 0.0 - share


def reward(verdict: Verdict | None, form: Form, better: Side, strength: float | None = None) -> float:
    """Return the reward of a verdict in this form.

    Args:
      better: the better response. strength: by how much, 1 to 3; None: unknown, so any strength from 1 to 3 is right.
    """
    if form == "plain":
        return cot_reward(verdict, better)
    if form == "scores":
        return score_reward(verdict, better)
    if strength is None:
        said = verdict.strength if verdict is not None and verdict.strength in STRENGTHS else None
        strength = said or STRENGTHS[0]
    return strength_reward(verdict, -strength if better == "a" else strength)


def best_reward(form: Form) -> float:
    """Return the highest reward of a verdict of this form."""
    return 2.0 if form == "scores" else 1.0


def _better(truth: float) -> Side:
    if not truth:
        raise ValueError("a truth of strength 0 is a draw")
    return "a" if truth < 0 else "b"
