"""The interface of chat models for their users: judges, data pipelines, simulated users.

A `ChatModelConfig` is a frozen dataclass of settings; its `open` makes the model, with its connections or its weights.
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
    """The parameters of one request."""

    temperature: float = 0.0
    """0 is greedy."""
    max_tok: int = 1024
    """Maximum number of tokens in the answer."""
    seed: int = 0
    """Equal seeds, messages and weights give equal answers, as far as the model's server keeps to that."""


def seed_of(address: str) -> int:
    """Return the seed of a request, 31 bits, from its address; other requests do not change it."""
    return int.from_bytes(hashlib.sha256(address.encode()).digest()[:4]) >> 1


@dataclasses.dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A model's answer."""

    text: str
    finish_reason: FinishReason
    """`length` where `max_tok` cut it."""
    num_tok: int = 0
    """Number of tokens in the answer; 0 if unknown."""

    @property
    def is_whole(self) -> bool:
        """True if the model ended the answer itself. No verdict is read from an answer that was cut: the rest could
        have changed it."""
        return self.finish_reason == "stop"


class ChatModel(Protocol):
    """An open model. It may answer many requests concurrently, on one event loop."""

    async def ask(self, messages: Sequence[Message], how: Asking) -> ChatAnswer:
        """Return the answer to a conversation that ends with a message to the model.

        Raises:
          InfraError: there is none, after the configured retries. ChatTooLong: the conversation leaves no room for
            an answer in the model's context.
        """

    def counts(self) -> Mapping[str, int]:
        """Return the counts since opening: requests, answers, and every fault under its kind."""

    async def close(self) -> None:
        """Release connections or weights."""


class ChatTooLong(Exception):
    """A conversation does not fit into a model's context."""


class ChatModelConfig(abc.ABC):
    """Settings of a chat model. Subclasses are frozen dataclasses."""

    def check(self) -> None:  # noqa: B027  # of a server nothing can be said before it is asked
        """Check the settings before anything is allocated, loaded or requested.

        Raises:
          ConfigError: there is no such folder, or the devices do not divide.
        """

    @abc.abstractmethod
    def open(self) -> ChatModel:
        """Open the model. Weights are loaded here, connections made when they are needed.

        Raises:
          ConfigError: there is no such folder or server.
        """

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Return the model's identity, for caches and reports: if possible the same text for the same weights."""
