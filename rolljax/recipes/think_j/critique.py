"""Critiques as rewards: a thinking judge compares the policy's answer with the recorded one.

Its verdict is mapped by the reward functions that train such judges (Think-J, arXiv 2505.14268;
`envs.judging.verdicts`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rolljax.chat_models.base import ChatModelConfig
from rolljax.envs.text import after_thinking
from rolljax.errors import check_range
from rolljax.recipes.think_j import verdicts
from rolljax.recipes.think_j.verdicts import Form, Side
from rolljax.rewards.base import Reward, RewardContext
from rolljax.rewards.calls import CallLimits, Calls, Unreadable, digest
from rolljax.rewards.judge import GUARD, Asked, all_of, ask, counted, identity, mark_of, quoted, reference_of
from rolljax.types import Message, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Critique(Asked):
    """A thinking judge that compares the policy's answer with the task's reference answer and ends with a verdict.

    The reward depends on the form of the verdict:

    - `plain`: 1 if the verdict prefers the policy's answer, else 0.
    - `strength`: if it does, 1 less an eighth for each step between its strength and the setting `strength`, else 0.
    - `scores`: 1 + d/100 if the policy's answer has the higher score, else -d/100, where d is the distance of the
      scores; 0 for equal scores.

    A critique without a verdict, with an invalid strength or with scores beyond 100 is requested again: it gives no
    reward.
    """

    model: ChatModelConfig
    """The judge model, for instance one that `think_j.gin` trained."""
    verdict: Form = "strength"
    """Form of the judge's verdict."""
    strength: int = 3
    """Margin by which the policy's answer must be better for the full reward, 1 to 3."""
    orders: Literal["both", "random"] = "both"
    """`both`: asked twice, the policy's answer first and second, and the mean taken; `random`: once, in an order that
    the answer's hash decides. A judge that always says the same then gives every answer the same."""
    solved_at: float | None = None
    """Reward from which on the task counts as solved; None: the judge does not decide."""
    part: str = "critique"
    """Name of this reward in `reward_parts`."""
    num: int = 1
    """Number of times that the judge is asked in each order; the mean is taken."""
    temperature: float = 0.0
    """Sampling temperature of the judge's answers."""
    max_tok: int = 2048
    """Maximum number of tokens in an answer of the judge."""
    max_chars: int = 20_000
    """Maximum number of characters of an answer that the judge is shown."""
    limits: CallLimits = CallLimits()
    """Limits on the judge's calls, in addition to the limits of its model."""

    def __post_init__(self) -> None:
        self.check_fields()
        verdicts.check_form(self.verdict, "Critique.verdict")
        check_range(self, "strength", low=min(verdicts.STRENGTHS), high=max(verdicts.STRENGTHS))

    @property
    def name(self) -> str:
        return self.part

    def check(self, around: RewardContext) -> None:
        self.model.check()
        reference_of(around, around.env.task(0), "Critique", whole=True)

    def open(self, around: RewardContext) -> CritiqueScorer:
        return CritiqueScorer(self, around)

    def messages(self, task: Task, a: str, b: str, seed: int) -> tuple[Message, ...]:
        """Return the judge's prompt about two answers."""
        mark = mark_of(seed, task, f"{a}\0{b}")
        text = (
            f"Question:\n{quoted(mark, task.content)}\n\nResponse (a):\n{quoted(mark, self.shown(a))}\n\n"
            f"Response (b):\n{quoted(mark, self.shown(b))}\n\n{verdicts.request(self.verdict)}"
        )
        return (Message("system", GUARD.format(mark=mark)), Message("user", text))

    def read(self, text: str) -> dict[str, Any]:
        """Parse the verdict of a critique.

        Raises:
          Unreadable: there is none of the expected form.
        """
        found = verdicts.read(after_thinking(text), self.verdict)
        if found is None:
            raise Unreadable(f"the critique does not end with a verdict of the form {self.verdict!r}")
        if found.strength is not None and found.strength not in verdicts.STRENGTHS:
            raise Unreadable(f"the strength is {found.strength}, not 1, 2 or 3")
        return {"better": found.better, "strength": found.strength, "scores": found.scores}

    def write(self, verdict: Mapping[str, Any]) -> str:
        """Return the sentence that `read` parses as this verdict."""
        return verdicts.write(verdicts.Verdict(**verdict), self.verdict)

    def worth(self, verdict: Mapping[str, Any], side: Side) -> float:
        """Return the reward of one verdict. side: which response is the policy's."""
        return verdicts.reward(verdicts.Verdict(**verdict), self.verdict, side, self.strength)


class CritiqueScorer:
    """An open thinking judge."""

    def __init__(self, cfg: Critique, around: RewardContext) -> None:
        self._cfg, self._around = cfg, around
        self._model = cfg.model.open()
        self._calls = Calls(cfg.name, identity(cfg, cfg.verdict), cfg.limits, around)

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        other = reference_of(self._around, task, "Critique", whole=True)
        return await self.compare(task, trajectory.turns[-1].text, other)

    async def compare(self, task: Task, answer: str, other: str) -> Reward:
        """Return the reward of an answer compared with another one."""
        cfg = self._cfg
        drawn: Side = "a" if int(digest(f"{self._around.seed} {task.id} {answer}"), 16) % 2 else "b"
        sides: list[Side] = ["a", "b"] if cfg.orders == "both" else [drawn]
        asked = await all_of([self._ask(task, answer, other, side, i) for side in sides for i in range(cfg.num)])
        worths = [cfg.worth(found, asked_side) for asked_side, found in asked]
        value = sum(worths) / len(worths)
        wins = [float(found["better"] == asked_side) for asked_side, found in asked]
        parts = {"wins": sum(wins) / len(wins)}
        if cfg.orders == "both":
            parts["orders_agree"] = float(sum(wins[: cfg.num]) == sum(wins[cfg.num :]))
        return Reward(value, parts, None if cfg.solved_at is None else value >= cfg.solved_at)

    async def _ask(self, task: Task, answer: str, other: str, side: Side, i: int) -> tuple[Side, dict[str, Any]]:
        pair = (answer, other) if side == "a" else (other, answer)
        messages = self._cfg.messages(task, *pair, self._around.seed)
        return side, await ask(self._calls, self._model, self._cfg, messages, self._cfg.read, self._cfg.write, i)

    def counts(self) -> Mapping[str, int]:
        """Calls, answers from the cache, and every fault under its kind."""
        return counted(self._calls, self._model)

    async def close(self) -> None:
        """Release the model and the cache."""
        await self._calls.close()
        await self._model.close()
