"""Countdown: reach a target with given numbers."""

from __future__ import annotations

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product
from typing import Annotated

from rolljax.envs.base import Env, EnvSpec
from rolljax.envs.games.game import Game, Outcome, unboxed
from rolljax.errors import ConfigError, DataError, EnvError, Range, check_fields
from rolljax.types import Task

MAX_EXPRESSION = 200
"""Maximum number of characters of an expression."""
MAX_DEPTH = 16
"""Maximum depth of nested parentheses."""
_TOKENS = re.compile(r"[0-9]{1,6}|[-+*/()]")
_TASK = re.compile(r"(?P<numbers>[0-9]{1,6}( [0-9]{1,6})*)=(?P<target>[0-9]{1,9})")
_TRIES = 1000


@dataclasses.dataclass(frozen=True)
class Countdown(EnvSpec):
    r"""`count` numbers from 1 to `largest`; combine them to a target (the game of arXiv 2404.03683 and of TinyZero).

    Observation: numbers and target, `3 5 8=16`. Actions: an expression of numbers, `+ - * /` and parentheses, such as
    `(5-3)*8`, in which each given number stands at most once; division is exact, in fractions. Any expression of the
    right value is right. Reward: 1 for one. With more than one turn a wrong expression is answered with its value, and
    what is no expression of these numbers with the task again.
    """

    runs = "inline"

    count: Annotated[int, Range(low=2, high=6)] = 3
    """Number of given numbers."""
    largest: Annotated[int, Range(low=3, high=999)] = 9
    """Largest value of the given numbers."""
    max_target: Annotated[int, Range(low=10, high=10**6)] = 99
    """Largest possible target."""
    max_turns: Annotated[int, Range(low=1)] = 1
    """Expressions before the episode is cut."""
    use_all: bool = False
    """Whether every number must be used."""
    format_reward: float = 0.0
    """Reward for an expression of the given numbers with a wrong value."""
    boxed: bool = False
    r"""Whether to read the expression from `\boxed{}`."""
    seed: int = 0
    """Seed of the tasks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.format_reward * self.max_turns < 1:
            raise ConfigError(
                "must be at least 0, and less than 1 over all turns",
                setting="Countdown.format_reward",
                value=self.format_reward,
            )

    @property
    def name(self) -> str:
        return "countdown"

    def task(self, index: int) -> Task:
        return Task(self.name, index, _draw(self, random.Random(f"{self.seed} {index}")))

    def make(self) -> Env:
        return CountdownEnv(self)

    def bad_actions(self) -> Sequence[str]:
        return (
            *super().bad_actions(),
            *("1/0", "9**9**9**9", "(" * 90 + "1" + ")" * 90, "1+", "()", "1 2", "\u0661+\u0662", "9" * 5000),
            *("0*1", "__import__('os')", "1+1+1+1+1+1+1", "-1", "1e9"),
        )


class CountdownEnv(Game[Countdown]):
    """One target."""

    def _begin(self, task: Task) -> str:
        found = _TASK.fullmatch(task.content)
        if not found:
            raise EnvError(f"task {task.index} is no game of Countdown")
        self._text = task.content
        self._numbers = tuple(map(int, found["numbers"].split()))
        self._target = int(found["target"])
        return self._text

    def _play(self, action: str) -> Outcome:
        text = unboxed(action, self._spec.boxed)
        value = evaluate(text or "", self._numbers, self._spec.use_all)
        if value is None:
            return Outcome(self._text, over=self._last, legal=False)
        right = value == self._target
        parts = {"right": 1.0} if right else {"format": self._spec.format_reward}
        return Outcome(f"={value}", sum(parts.values()), over=right or self._last, success=right, parts=parts)

    @property
    def _last(self) -> bool:
        """Whether the only answer of an episode ends it, right or wrong, so that the episode is never cut."""
        return self._spec.max_turns == 1

    def _reference_answer(self) -> str:
        found = solve(self._numbers, self._target, self._spec.use_all)
        if found is None:
            raise EnvError(f"{self._text} has no solution")
        return self._say(found)

    def _random(self, rng: random.Random) -> str:
        return self._say(_combine(list(self._numbers), rng)[0])

    def _say(self, expression: str) -> str:
        return f"\\boxed{{{expression}}}" if self._spec.boxed else expression


def evaluate(text: str, numbers: Sequence[int], use_all: bool = False) -> Fraction | None:
    """Evaluate an expression over these numbers, each used at most once (`use_all`: exactly once). Return None if it is
    no such expression, or divides by zero."""
    if len(text) > MAX_EXPRESSION:
        return None
    tokens = _TOKENS.findall(text)
    if "".join(tokens) != text.replace(" ", "") or any(a.isdigit() and b.isdigit() for a, b in pairwise(tokens)):
        return None
    used, available = Counter(int(t) for t in tokens if t.isdigit()), Counter(numbers)
    if used - available or (use_all and used != available):
        return None
    try:
        value, rest = _sum(tokens, 0, 0)
    except (_NoExpression, ZeroDivisionError):
        return None
    return value if rest == len(tokens) else None


class _NoExpression(Exception):
    pass


def _sum(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    """Return the value of the sum of products that begins at token `i`, and the index of the token after it."""
    value, i = _product(tokens, i, depth)
    while i < len(tokens) and tokens[i] in "+-":
        right, after = _product(tokens, i + 1, depth)
        value, i = (value + right if tokens[i] == "+" else value - right), after
    return value, i


def _product(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    value, i = _atom(tokens, i, depth)
    while i < len(tokens) and tokens[i] in "*/":
        right, after = _atom(tokens, i + 1, depth)
        value, i = (value * right if tokens[i] == "*" else value / right), after
    return value, i


def _atom(tokens: list[str], i: int, depth: int) -> tuple[Fraction, int]:
    if i < len(tokens) and tokens[i].isdigit():
        return Fraction(int(tokens[i])), i + 1
    if i < len(tokens) and tokens[i] == "(" and depth < MAX_DEPTH:
        value, i = _sum(tokens, i + 1, depth + 1)
        if i < len(tokens) and tokens[i] == ")":
            return value, i + 1
    raise _NoExpression


Term = tuple[str, int]
"""An expression in parentheses where it needs some, and its value."""


def solve(numbers: Sequence[int], target: int, use_all: bool = False) -> str | None:
    """Return an expression with the target's value and few numbers, whose intermediate results are positive whole
    numbers; None if there is none."""
    everything = (1 << len(numbers)) - 1
    known: dict[int, dict[int, str]] = {1 << i: {n: str(n)} for i, n in enumerate(numbers)}
    for subset in sorted(range(1, everything + 1), key=lambda s: (s.bit_count(), s)):
        wanted = not use_all or subset == everything
        values = known.setdefault(subset, {})
        if wanted and target in values:
            return values[target]
        half = (subset - 1) & subset
        while half > subset ^ half:  # each split in two once
            for (a, x), (b, y) in product(known[half].items(), known[subset ^ half].items()):
                for text, value in _joined(x, a, y, b):
                    if wanted and value == target:
                        return text
                    values.setdefault(value, text)
            half = (half - 1) & subset
    return None


def _joined(x: str, a: int, y: str, b: int) -> Iterator[Term]:
    """Yield the two terms joined by each operation that gives a positive whole number."""
    if a < b:
        x, a, y, b = y, b, x, a
    yield f"{x}+{y}", a + b
    if a > b:
        yield f"{x}-{_wrap(y, '+-')}", a - b
    yield f"{_wrap(x, '+-')}*{_wrap(y, '+-')}", a * b
    if a % b == 0:
        yield f"{_wrap(x, '+-')}/{_wrap(y, '+-*/')}", a // b


def _wrap(text: str, operators: str) -> str:
    """Put an expression in parentheses if one of the operators is outside of its parentheses."""
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth == 0 and char in operators:
            return f"({text})"
    return text


def _combine(numbers: list[int], rng: random.Random) -> Term:
    """Return a random expression of all numbers, with positive whole intermediate results."""
    terms = [(str(n), n) for n in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        (x, a), (y, b) = terms.pop(), terms.pop()
        terms.append(rng.choice(list(_joined(x, a, y, b))))
    return terms[0]


def _draw(spec: Countdown, rng: random.Random) -> str:
    """Generate numbers, and as target the value of a random expression of them that is none of them and not too
    large."""
    for _ in range(_TRIES):
        numbers = [rng.randint(1, spec.largest) for _ in range(spec.count)]
        target = _combine(list(numbers), rng)[1]
        if target not in numbers and target <= spec.max_target:
            return f"{' '.join(map(str, numbers))}={target}"
    raise DataError(f"numbers up to {spec.largest} make no target up to {spec.max_target}: raise Countdown.max_target")
