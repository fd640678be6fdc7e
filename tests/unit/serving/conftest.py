"""A served model and a session, for tests of what is read and written without a server."""

import pytest

from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.serving.schema import ServedModel
from rolljax.serving.session import Session, SessionRules
from rolljax.types import SamplingParams


@pytest.fixture(scope="module")
def served():
    chat = Chat(byte_tokenizer())
    return ServedModel("policy", chat.tokenizer, chat, 264, 1000)


@pytest.fixture
def session(served):
    params = SamplingParams(max_tokens=200, stop_ids=served.chat.stop_ids)
    return Session(SessionRules(params, (1, 0, 7, 3), max_calls=6, max_restarts=1))
