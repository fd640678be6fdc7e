"""Critiques as rewards: a thinking judge compares the policy's answer with the recorded one.

Its verdict is mapped by the reward functions that train such judges (Think-J, arXiv 2505.14268; `think_j.verdicts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

from rolljax.envs.text import after_thinking
from rolljax.errors import Range, check_fields
from rolljax.judging.prompts import quoted
from rolljax.judging.verdict import Unreadable
from rolljax.recipes.think_j import verdicts
from rolljax.recipes.think_j.verdicts import Form
from rolljax.rewards.base import Reward
from rolljax.rewards.judge import PairJudge, Verdict


@dataclasses.dataclass(frozen=True)
class Critique(PairJudge):
    """A thinking judge that compares the policy's answer with the task's reference answer and ends with a verdict.

    The reward depends on the form of the verdict:

    - `plain`: 1 if the verdict prefers the policy's answer, else 0.
    - `strength`: if it does, 1 less an eighth for each step between its strength and the setting `strength`, else 0.
    - `scores`: 1 + d/100 if the policy's answer has the higher score, else -d/100, where d is the distance of the
      scores; 0 for equal scores.

    A critique without a verdict, with an invalid strength or with scores beyond 100 is requested again: it gives no
    reward.
    """

    verdict: Form = "strength"
    """Form of the judge's verdict."""
    strength: Annotated[int, Range(low=min(verdicts.STRENGTHS), high=max(verdicts.STRENGTHS))] = 3
    """Margin by which the policy's answer must be better for the full reward, 1 to 3."""
    _: dataclasses.KW_ONLY
    part: str = "critique"
    max_tok: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        verdicts.check_form(self.verdict, "Critique.verdict")
        check_fields(self)

    def text(self, mark: str, question: str, a: str, b: str) -> str:
        asked = f"Question:\n{quoted(mark, question)}\n\nResponse (a):\n{a}\n\nResponse (b):\n{b}"
        return f"{asked}\n\n{verdicts.request(self.verdict)}"

    def read(self, text: str) -> Verdict:
        found = verdicts.read(after_thinking(text), self.verdict)
        if found is None:
            raise Unreadable(f"the critique does not end with a verdict of the form {self.verdict!r}")
        if found.strength is not None and found.strength not in verdicts.STRENGTHS:
            raise Unreadable(f"the strength is {found.strength}, not 1, 2 or 3")
        return dataclasses.asdict(found)

    def write(self, verdict: Verdict) -> str:
        return verdicts.write(verdicts.Verdict(**verdict), self.verdict)

    def worth(self, verdict: Verdict, side: str) -> float:
        return verdicts.reward(verdicts.Verdict(**verdict), self.verdict, "a" if side == "a" else "b", self.strength)

    def reward(self, verdicts: Mapping[str, Sequence[Verdict]]) -> Reward:
        found = super().reward(verdicts)
        wins = [self.preference(v, side) for side, every in verdicts.items() for v in every]
        return dataclasses.replace(found, parts={"wins": sum(wins) / len(wins), **found.parts})
