"""A chat model without weights: a function of the conversation. It takes a judge model's place where runs are tiny."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from rolljax.chat_models.base import Asking, ChatAnswer, ChatModelConfig
from rolljax.types import Message

ChatRule = Callable[[Sequence[Message]], str]
"""`rule(messages)`: the answer to a conversation; the same answer each time."""


@dataclasses.dataclass(frozen=True)
class RuleModel(ChatModelConfig):
    """A chat model whose answers a function computes."""

    rule: ChatRule
    """The function of the conversation."""

    @property
    def identity(self) -> str:
        return f"the rule {self.rule.__module__}.{self.rule.__qualname__}"

    def open(self) -> RuleChat:
        return RuleChat(self)


class RuleChat:
    """An open `RuleModel`."""

    def __init__(self, cfg: RuleModel) -> None:
        self._rule, self._num = cfg.rule, 0

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """Return the rule's answer, and pass on its errors."""
        self._num += 1
        return ChatAnswer(self._rule(messages), "stop")

    def counts(self) -> Mapping[str, int]:
        return {"requests": self._num, "answers": self._num}

    async def close(self) -> None:
        pass
