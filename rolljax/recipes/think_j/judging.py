"""Shared base of judging environments: ordered pairs of answers, prompts, episodes of one verdict.

Task 2k and task 2k + 1 ask about pair k, one in each order; which comes first is drawn from the seed and k. Both have
the same content, so that a pair is held out in both orders or in none.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.errors import EnvError
from rolljax.recipes.think_j import verdicts
from rolljax.recipes.think_j.verdicts import Form, Side, Verdict, Wording
from rolljax.types import Key, Message, Task, Trajectory

if TYPE_CHECKING:
    from rolljax.evaluation.settings import Attempts
    from rolljax.recipes.think_j.pair_table import PairTable

SYSTEM = "You are an impartial judge. You compare two responses of assistants to the question of a user."


@dataclasses.dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to an instruction, of which one is better."""

    instruction: str
    better: str
    worse: str
    strength: float | None = None
    """Strength of the preference, from 1 to 3; None: unknown."""
    subset: str = ""
    """The subset of a benchmark that the pair belongs to."""

    @property
    def content(self) -> str:
        """Return the identity of the pair, whichever answer is called better."""
        return json.dumps([self.instruction, *sorted((self.better, self.worse))], ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """A question to a judge about a pair."""

    pair: PreferencePair
    better: Side
    """Label of the better response."""
    told: Side | None = None
    """The label in a critic's prompt, right or wrong; None for a judge's question."""

    @property
    def a(self) -> str:
        """Response (a)."""
        return self.pair.better if self.better == "a" else self.pair.worse

    @property
    def b(self) -> str:
        """Response (b)."""
        return self.pair.worse if self.better == "a" else self.pair.better

    @property
    def conclusion(self) -> Side:
        """The correct conclusion: for a judge the truth, for a critic the label in its prompt."""
        return self.told or self.better


class Judging(EnvSpec):
    """Settings of a family of pairs. Subclasses define the pairs (`pair`) and the fields `verdict` and `seed`."""

    runs = "inline"

    verdict: Form
    seed: int

    @abc.abstractmethod
    def pair(self, number: int) -> PreferencePair:
        """Return pair `number`, from 0."""

    @property
    def wording(self) -> Wording:
        """The wording of verdicts."""
        return "sentences"

    def prompt(self, question: JudgeQuestion) -> tuple[Message, ...]:
        """Return the prompt of the judge or critic."""
        hint = f"It is known that Response ({question.told}) is better. " if question.told else ""
        text = (
            f"[Question]\n{question.pair.instruction}\n[End of the question]\n\n"
            f"[Response (a)]\n{question.a}\n[End of response (a)]\n\n"
            f"[Response (b)]\n{question.b}\n[End of response (b)]\n\n{hint}{verdicts.request(self.verdict)}"
        )
        return (Message("system", SYSTEM), Message("user", text))

    def answer(self, question: JudgeQuestion, better: Side) -> str:
        """Return an answer with this conclusion; it is a good answer if that is the truth, or for a critic the label in
        its prompt."""
        return verdicts.write(self._verdict(question, better), self.verdict, self.wording)

    def critic(self, question: JudgeQuestion, told: Side) -> JudgeQuestion:
        """Return the question with a label for the critic."""
        return dataclasses.replace(question, told=told)

    def question(self, index: int) -> JudgeQuestion:
        """Return the question of task `index`."""
        flip = random.Random(f"{self.seed} order {index // 2}").random() < 0.5
        return JudgeQuestion(self.pair(index // 2), "a" if flip ^ bool(index % 2) else "b")

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.pair(index // 2).content)

    def variants(self, task: Task) -> Sequence[Task]:
        first = task.index - task.index % 2
        return tuple(dataclasses.replace(task, index=i) for i in (first, first + 1))

    def make(self) -> JudgingEnv:
        return JudgingEnv(self)

    def read(self, text: str) -> Verdict | None:
        """Parse the verdict of an answer; None if it has none."""
        return verdicts.read(text, self.verdict, self.wording)

    def final_answer(self, task: Task, text: str) -> str | None:
        verdict = self.read(text)
        return None if verdict is None else verdict.better

    def reference(self, task: Task) -> str | None:
        question = self.question(task.index)
        return self.answer(question, question.better)

    def evaluation_table(
        self, trajectories: Sequence[Trajectory], keys: Sequence[Key], attempts: Attempts
    ) -> PairTable:
        """Return the table of an evaluation's attempts in both orders, for its report."""
        from rolljax.recipes.think_j import pair_table

        return pair_table.pair_table(self, *pair_table.score(self, trajectories, keys), attempts)

    def reward(self, verdict: Verdict | None, question: JudgeQuestion) -> float:
        """Return the reward of a verdict. A critic's is compared with the label in its prompt; a wrong label has no
        known strength."""
        strength = question.pair.strength if question.conclusion == question.better else None
        return verdicts.reward(verdict, self.verdict, question.conclusion, strength)

    def _verdict(self, question: JudgeQuestion, better: Side) -> Verdict:
        strength = round(question.pair.strength or 2)
        high_low = (50.0 + 50 * strength / 3, 50.0 - 50 * strength / 3)
        return Verdict(better, strength, high_low if better == "a" else high_low[::-1])


class JudgingEnv(PureEnv):
    """One pair, one verdict. Metrics: `no_verdict_n` answers without one; `said_a_n` verdicts for Response (a)."""

    def __init__(self, spec: Judging) -> None:
        self._spec = spec
        self._question: JudgeQuestion | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        question = self._spec.question(task.index)
        if question.pair.content != task.content:
            raise EnvError(f"pair {task.index // 2} is not the task that was asked for: was its file changed?")
        self._question = question
        return self._spec.prompt(question)

    def step(self, action: str) -> StepResult:
        question = self._open()
        self._question = None
        verdict = self._spec.read(action)
        worth = self._spec.reward(verdict, question)
        return StepResult(
            (),
            worth,
            terminated=True,
            success=verdict is not None and verdict.better == question.conclusion,
            reward_parts={self._spec.verdict: worth},
            metrics={
                "no_verdict_n": float(verdict is None),
                "said_a_n": float(verdict is not None and verdict.better == "a"),
            },
        )

    def reference_answer(self) -> str:
        question = self._open()
        return self._spec.answer(question, question.conclusion)

    def rejected(self) -> str:
        question = self._open()
        return self._spec.answer(question, verdicts.other(question.conclusion))

    def _open(self) -> JudgeQuestion:
        if self._question is None:
            raise EnvError("step before reset, or after the episode's end")
        return self._question
