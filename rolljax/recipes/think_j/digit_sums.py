"""A task for judges that a tiny model can learn and a script can check: which of two numbers has the larger digit
sum."""

from __future__ import annotations

import dataclasses
import random
from typing import Annotated

from rolljax.errors import Range, check_fields
from rolljax.recipes.think_j import verdicts
from rolljax.recipes.think_j.judging import JudgeQuestion, Judging, PreferencePair
from rolljax.recipes.think_j.verdicts import Form, Side, Verdict, Wording
from rolljax.types import Message

INSTRUCTION = "Write a number whose digits add up to as much as possible."
_TRIES = 1000


@dataclasses.dataclass(frozen=True)
class DigitSums(Judging):
    """Two numbers of `digits` digits; the better one has the larger digit sum (never equal).

    In one half of the pairs it is the smaller number, so that comparing numbers instead of sums is right half of the
    time. The strength is 1 for a difference of at most `2 x digits`, 2 for one of twice that, else 3. The reference
    answer
    thinks: it writes both sums, then the verdict. Reward: that of the verdict's form (`verdicts`).
    """

    digits: Annotated[int, Range(low=2, high=9)] = 2
    """Number of digits of each number."""
    verdict: Form = "strength"
    """Form of the verdict: plain, strength or scores."""
    brief: bool = True
    """Prompts like `38 41` and verdicts like `a2`, for models of a few thousand parameters; else the sentences of every
    judging environment."""
    critic_frac: Annotated[float, Range(low=0, high=1)] = 0.0
    """Share of tasks that tell which number is better, half of them wrongly (`38 41 b`), and ask for thoughts that lead
    there: this trains a critic. The thoughts of a reference critic with the wrong label exchange the sums."""
    num_pairs: Annotated[int, Range(low=0)] = 0
    """Number of pairs; 0: no limit."""
    seed: int = 0
    """Seed of the pairs and their order."""

    def __post_init__(self) -> None:
        check_fields(self)
        verdicts.check_form(self.verdict, "DigitSums.verdict")

    @property
    def name(self) -> str:
        return "digit_sums"

    @property
    def wording(self) -> Wording:
        return "brief" if self.brief else "sentences"

    def pair(self, number: int) -> PreferencePair:
        if self.num_pairs:
            number %= self.num_pairs
        rng = random.Random(f"{self.seed} {number}")
        bigger_wins = rng.random() < 0.5
        for _ in range(_TRIES):
            better, worse = ("".join(rng.choices("0123456789", k=self.digits)) for _ in range(2))
            gain = digit_sum(better) - digit_sum(worse)
            if gain > 0 and (better > worse) == bigger_wins:
                return PreferencePair(INSTRUCTION, better, worse, self._strength(gain))
        raise AssertionError("chance")

    def question(self, index: int) -> JudgeQuestion:
        question = super().question(index)
        rng = random.Random(f"{self.seed} critic {index}")
        if rng.random() >= self.critic_frac:
            return question
        return self.critic(question, "a" if rng.random() < 0.5 else "b")

    def prompt(self, question: JudgeQuestion) -> tuple[Message, ...]:
        if not self.brief:
            return super().prompt(question)
        return (Message("user", f"{question.a} {question.b}" + (f" {question.told}" if question.told else "")),)

    def answer(self, question: JudgeQuestion, better: Side) -> str:
        sums = digit_sum(question.a), digit_sum(question.b)
        if better != question.better:
            sums = sums[::-1]
        if self.brief:
            return f"{sums[0]} {sums[1]}\n{super().answer(question, better)}"
        return f"(a) adds up to {sums[0]}, (b) to {sums[1]}. {super().answer(question, better)}"

    def _verdict(self, question: JudgeQuestion, better: Side) -> Verdict:
        sums = digit_sum(question.a), digit_sum(question.b)
        if better != question.better:
            sums = sums[::-1]
        first, second = (round(100 * s / (9 * self.digits)) for s in sums)
        return Verdict(better, self._strength(abs(sums[0] - sums[1])), (float(first), float(second)))

    def _strength(self, gain: int) -> int:
        return min(3, 1 + (gain - 1) // (2 * self.digits))


def digit_sum(number: str) -> int:
    """Return the sum of the decimal digits of a number."""
    return sum(map(int, number))
