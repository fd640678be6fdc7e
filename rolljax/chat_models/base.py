"""What a chat model is to those who ask it: judges, data pipelines, simulated users.

A `ChatModelConfig` is a setting, a frozen dataclass; `open` makes the model of it, with its connections or its weights.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from rolljax.types import FinishReason, Message


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """How one question is asked.

    temperature: 0 is greedy. max_tok: most tokens of the answer. seed: equal seeds, messages and weights give equal
      answers, as far as the model's server keeps to that.
    """

    temperature: float = 0.0
    max_tok: int = 1024
    seed: int = 0


def seed_of(address: str) -> int:
    """The seed of one request, 31 bits, from its address: whatever else is asked changes nothing about it."""
    return int.from_bytes(hashlib.sha256(address.encode()).digest()[:4]) >> 1


@dataclasses.dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a model said. finish_reason: `length` where `max_tok` cut it. num_tok: its tokens, 0 where nobody says."""

    text: str
    finish_reason: FinishReason
    num_tok: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the model ended the answer itself. No verdict is read from an answer that was cut: the rest might
        have changed it."""
        return self.finish_reason == "stop"


class ChatModel(Protocol):
    """A model that is open. It may be asked many things at a time, on one event loop."""

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """The answer to a conversation that ends with a message to the model.

        Raises:
          InfraError: there is none, after the retries of the settings. ChatTooLong: the conversation leaves no room for
            an answer in the model's context.
        """

    def counts(self) -> Mapping[str, int]:
        """Requests, answers, and every fault under its kind, since it was opened."""

    async def close(self) -> None:
        """Let go of connections or weights."""


class ChatTooLong(Exception):
    """A conversation does not fit into a model's context."""


class ChatModelConfig(abc.ABC):
    """Settings of a chat model. Subclasses are frozen dataclasses."""

    def check(self) -> None:  # noqa: B027  # of a server nothing can be said before it is asked
        """Look for what is wrong before anything is allocated, loaded or asked.

        Raises:
          ConfigError: there is no such folder, or the devices do not divide.
        """

    @abc.abstractmethod
    def open(self) -> ChatModel:
        """The model. Weights are loaded here, connections made when they are needed.

        Raises:
          ConfigError: there is no such folder or server.
        """

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Which model answers, for caches and reports: the same text for the same weights, as far as can be told."""
