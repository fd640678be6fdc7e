"""The APIs that the server speaks: what reads a request of each, and what writes its answer."""

from __future__ import annotations

import dataclasses

from rolljax.serving.completions import ChatEncoder, CompletionsEncoder
from rolljax.serving.generation import Encoder
from rolljax.serving.messages import PATH, MessagesEncoder, read_messages
from rolljax.serving.requests import Reader, read_chat, read_completion
from rolljax.serving.responses import ResponsesEncoder, read_responses
from rolljax.serving.token_ids import TokenIdsEncoder, read_generate


@dataclasses.dataclass(frozen=True)
class Api:
    """One API: the path of its requests, and their two translations."""

    path: str
    read: Reader
    encoder: type[Encoder]


COMPLETIONS = Api("/v1/completions", read_completion, CompletionsEncoder)
CHAT = Api("/v1/chat/completions", read_chat, ChatEncoder)
APIS = (
    COMPLETIONS,
    CHAT,
    Api("/v1/responses", read_responses, ResponsesEncoder),
    Api(PATH, read_messages, MessagesEncoder),
    Api("/inference/v1/generate", read_generate, TokenIdsEncoder),
)
