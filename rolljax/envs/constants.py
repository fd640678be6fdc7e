"""Constant answers, and how often they win: a task that they solve more often than chance has a loophole.

An answer that equals the reference answer is legitimate: `yes` wins half of a yes-or-no family. A win without
being the reference answer is compared with the wins of a player who knows the form of the answers and nothing of the
task.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

_SHORT = """
. , ? - _ * % é ☃ ٣ 0 1 -1 2 10 100 0.0 0.5 1/3 1/0 0/0 0,0 1j 0x0 0% $0 1e308 -1e308 1e-308 1e999 nan NaN -nan nan+nanj
inf Infinity -inf -Infinity [NaN] [Infinity] [1e999] yes no Yes No YES true false True False None null A B x x=0 unknown
impossible infeasible answer [] {} () "" '' [[]] [0] [[0]] [null] \\boxed{} \\boxed{0} <answer></answer> P∨Q (P→P)
""".split()
_SPACED = (
    "",
    " ",
    "\n",
    "\t",
    "\x00",
    "\ufeff",
    "\ud800",
    "0 0",
    "(0, 0)",
    "yes no",
    "True False",
    "NaN, NaN",
    "[NaN, NaN, NaN]",
)
CONSTANTS: Mapping[str, str] = {
    **{ascii(text): text for text in (*_SHORT, *_SPACED, '{"a": 1}', "```\n```", "I do not know")},
    "4000 digits": "9" * 4000,
    "8000 letters": "x" * 8000,
    "4000 zeros": "0 " * 4000,
    "4000 line ends": "\n" * 4000,
    "1000 brackets": "[" * 500 + "]" * 500,
}
"""Constant answers by name: numbers, non-numbers, words that answer many tasks, empty values of several languages, long
texts."""

SURE = 1e-6
"""Lowest probability at which wins without the reference answer are taken for luck: with a hundred answers and a
thousand environments, nothing is reported by accident."""

MUCH_REWARD = 0.2
"""Excess over the reward of other wrong answers from which on a wrong answer is reported."""

_OPTION = re.compile(
    r"\"([^\"\n]{1,60})\"|'([^'\n]{1,60})'|`([^`\n]{1,60})`|\[([^][\n]{1,60})\]|\*\*([^*\n]{1,60})\*\*"
)
_CHOICE = re.compile(r"\b(\w{1,40}(?:, \w{1,40}){0,9}),? or (\w{1,40})")
_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?")
_WORD = re.compile(r"[^\W\d_]{1,40}")
_TOKEN = re.compile(r"-?\d{1,40}(?:[.,]\d{1,40})*|[^\W\d_]+|[^\s\w.,;:]")
_MAX_PICKS = 12


@dataclasses.dataclass(frozen=True)
class Wins:
    """The wins of one constant answer."""

    name: str
    reference: float
    """Share of tasks whose reference answer it is."""
    hollow: float
    """Share of tasks that it solves without being the reference answer."""
    reward: float
    """Mean reward over the tasks that the answer does not solve."""

    @property
    def share(self) -> float:
        """Share of tasks that the answer solves."""
        return self.reference + self.hollow


def from_prompt(prompt: str) -> dict[str, str]:
    """Return the prompt itself, its lines, and its options in quotes or brackets, numbers, first and last words."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()] or [""]
    found = {"the prompt": prompt, "its first line": lines[0], "its last line": lines[-1]}
    listed = [m[1] for line in lines if (m := re.match(r"(?:[-*]|\.?\d{1,3}[.)])\s+(.*)", line))]
    options = [next(filter(None, m), "") for m in _OPTION.findall(prompt)]
    options += [word for several, last in _CHOICE.findall(prompt) for word in (*several.split(", "), last)]
    numbers, words = _NUMBER.findall(prompt), _WORD.findall(prompt)
    for what, texts in (("listed line", listed), ("option", options), ("number", numbers), ("word", words)):
        half = _MAX_PICKS // 2
        found |= {f"its {what} {i + 1}": text for i, text in enumerate(texts[:half])}
        found |= {f"its {what} {-i - 1} from the end": text for i, text in enumerate(reversed(texts[-half:]))}
    if numbers:
        found |= {"its largest number": max(numbers, key=float), "its smallest number": min(numbers, key=float)}
    return found


def same(answer: str, reference: str) -> bool:
    """Return whether two answers are the same: equal words, numbers and signs, apart from case and punctuation."""
    if answer.strip() == reference.strip():
        return True
    return (
        bool(_tokens(reference)) and len(answer) <= 10 * len(reference) + 100 and _tokens(answer) == _tokens(reference)
    )


def _tokens(text: str) -> list[object]:
    return [_read(token) for token in _TOKEN.findall(text.casefold())]


def _read(token: str) -> object:
    try:
        return float(token.replace(",", ""))
    except ValueError:
        return token


@dataclasses.dataclass(frozen=True)
class ConstantAnswerResults:
    """The results of all of them on some tasks."""

    wins: tuple[Wins, ...]
    num_tasks: int
    chance: float
    """Share of tasks solved by a player who knows the form of an answer but nothing about the task."""
    chance_reward: float
    """Mean reward for a wrong answer of a player who knows the form of an answer but nothing about the task."""

    @property
    def best(self) -> Wins:
        """The answer that solves most tasks."""
        return max(self.wins, key=lambda w: w.share)

    @property
    def hole(self) -> Wins | None:
        """The answer that solves most tasks without being the reference answer; None if luck can explain its wins."""
        worst = max(self.wins, key=lambda w: w.hollow)
        luck = at_least(round(worst.hollow * self.num_tasks), self.num_tasks, max(self.chance, 1 / self.num_tasks))
        return worst if luck < SURE else None

    @property
    def pays(self) -> Wins | None:
        """The answer with the largest mean reward when wrong; None if that is not much more than for other wrong
        answers."""
        best = max(self.wins, key=lambda w: w.reward)
        return best if best.reward > self.chance_reward + MUCH_REWARD else None

    def __str__(self) -> str:
        told = [f"{len(self.wins)} on {self.num_tasks} tasks; {self.best.name} solves most: {self.best.share:.0%}"]
        if self.hole is not None:
            told.append(
                f"{self.hole.name} solves {self.hole.hollow:.0%} without being the reference answer, "
                f"chance is {self.chance:.0%}"
            )
        if self.pays is not None:
            told.append(
                f"{self.pays.name} earns {self.pays.reward:.2f} where it is wrong, others {self.chance_reward:.2f}"
            )
        return "; ".join(told)


class AnswerCounts:
    """Adds up each answer's results, task by task."""

    def __init__(self) -> None:
        self.num_tasks = 0
        self._won: dict[str, tuple[int, int, float, int]] = {}

    def task(self, prompt: str, play: Callable[[str], tuple[bool, bool, float]]) -> None:
        """Play one task with every constant answer. play: whether an answer solves it, whether it is the reference
        answer, and its reward."""
        self.num_tasks += 1
        seen: dict[str, tuple[bool, bool, float]] = {}
        for name, text in {**CONSTANTS, **from_prompt(prompt)}.items():
            if text not in seen:
                seen[text] = play(text)
            solves, is_reference, reward = seen[text]
            reference, hollow, total, wrong = self._won.get(name, (0, 0, 0.0, 0))
            self._won[name] = (
                reference + (solves and is_reference),
                hollow + (solves and not is_reference),
                total + (0.0 if solves else reward),
                wrong + (not solves),
            )

    def wins(self) -> tuple[Wins, ...]:
        """Return the result of every answer."""
        n = self.num_tasks
        return tuple(Wins(name, g / n, h / n, total / max(1, m)) for name, (g, h, total, m) in self._won.items())


def at_least(wins: int, n: int, p: float) -> float:
    """Return the probability of `wins` or more wins in `n` tries of chance `p`."""
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(wins, n + 1))
