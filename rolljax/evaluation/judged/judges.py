"""Run judges: every question about an answer goes to every judge, votes are counted, faults are kept apart."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping

from rolljax.chat_models.base import Asking, ChatModel, ChatTooLong, seed_of
from rolljax.errors import InfraError
from rolljax.evaluation.judged.base import Ask, JudgedEvaluation
from rolljax.evaluation.judged.labels import majority, read_label

ALL_FAILED = 32
"""Verdicts that fail without a single one, after which an evaluation ends."""


class Judges:
    """The judges of an evaluation, open. They live on one event loop.

    counts: verdicts, and the reasons for votes without one: `unreadable`, `cut`, `too_long`,
    `unreachable`.
    """

    def __init__(self, cfg: JudgedEvaluation) -> None:
        self._cfg = cfg
        self._models: list[ChatModel] = [judge.open() for judge in cfg.judges]
        self.counts: collections.Counter[str] = collections.Counter()

    async def verdict(self, ask: Ask, address: str) -> tuple[str | None, list[str | None], dict[str, int], list[str]]:
        """Return the verdict on an answer.

        Args:
          address: of the answer: equal addresses and seeds give equal requests.

        Returns:
          The label of the majority, or None; the votes; faults by kind; the texts of the judges.

        Raises:
          InfraError: no judge has ever answered, after `ALL_FAILED` attempts.
        """
        if ask.known is not None:
            return ask.known, [], {}, []
        jobs = [(model, n, v) for n, model in enumerate(self._models) for v in range(self._cfg.votes)]
        asked = await asyncio.gather(*(self._vote(model, ask, f"{address}/{ask.name}/{n}/{v}") for model, n, v in jobs))
        votes = [label for label, _, _ in asked]
        faults = collections.Counter(fault for _, fault, _ in asked if fault)
        self.counts["verdicts"] += sum(label is not None for label in votes)
        self.counts.update(faults)
        lost = faults["unreachable"] and self.counts["unreachable"]
        if lost >= ALL_FAILED and not any(self.counts[kind] for kind in ("verdicts", "unreadable", "cut")):
            raise InfraError(f"no judge answers: {lost} verdicts were asked for", stage="judge")
        return majority(votes), votes, dict(faults), [text for _, _, text in asked]

    async def _vote(self, model: ChatModel, ask: Ask, address: str) -> tuple[str | None, str, str]:
        """Return label, fault and text of one judge."""
        seed = seed_of(f"{self._cfg.seed}/{address}")
        how = Asking(self._cfg.judge_temperature, self._cfg.judge_max_tok, seed)
        try:
            answer = await model.ask(ask.messages, how)
        except InfraError:
            return None, "unreachable", ""
        except ChatTooLong:
            return None, "too_long", ""
        if not answer.is_whole:
            return None, "cut", answer.text
        try:
            return read_label(answer.text, ask.field, ask.labels), "", answer.text
        except ValueError:
            return None, "unreadable", answer.text

    def requests(self) -> Mapping[str, int]:
        """Return the judges' faults, by kind."""
        total: collections.Counter[str] = collections.Counter()
        for model in self._models:
            total.update(model.counts())
        return total

    async def close(self) -> None:
        """Release connections or weights."""
        for model in self._models:
            await model.close()
