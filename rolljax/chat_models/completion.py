"""A completion, of a chat or of a prompt, from the bytes of a response.

It is read strictly, because its text becomes a verdict or an answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from rolljax.envs.http_body import BadBody
from rolljax.envs.text import clean, read_json
from rolljax.types import FinishReason

MAX_BODY_BYTES = 1 << 24
"""Bytes of a chat completion, as they arrive and unpacked: 128 thousand tokens with their log-probs."""
MAX_PARTS = 1 << 20
"""Most commas, colons and opening brackets of a body; they bound the memory and time of its values."""
SMALL = 1 << 15
"""Bytes up to which a body is parsed on the event loop; a longer one would stall it and is parsed in a thread."""
MAX_TOKEN = 2**31
LOGP = (-1e6, 1e-2)
"""Range of a log-prob; servers round, and write -9999 for a token that is next to impossible."""
FINISH: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete"), "stop"),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "model_length"), "length"),
    **dict.fromkeys(("content_filter", "refusal", "safety", "recitation"), "abort"),
}
"""Values of `finish_reason` that servers send, in lower case. Another word (`error`, `abort`) is a fault of the
server."""
_CHARSET = re.compile(r";\s{0,8}charset\s{0,8}=\s{0,8}\"?([^\s\";]{1,64})", re.IGNORECASE)
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


@dataclasses.dataclass(frozen=True)
class Reply:
    """A completion, of a chat or of a prompt."""

    text: str
    finish_reason: FinishReason
    """`stop` also if it is not sent."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt; empty if the server does not send them."""
    token_ids: tuple[int, ...]
    """Token ids of the answer; empty if the server does not send them."""
    sampler_logp: tuple[float, ...]
    """The sampler's log-probs of the answer's tokens; empty if the server does not send them."""
    tokens: int
    """Number of the answer's tokens, 0 if not sent;."""
    seconds: float
    thinking: str = ""
    """The server's `reasoning_content`, or `reasoning`."""


async def reply_of(body: bytes, content_type: str, seconds: float, *, of_prompt: bool = False) -> Reply:
    """Return the completion of a body without keeping the event loop busy.

    Args:
      content_type: the header of this name. seconds: that the answer took. of_prompt: a prompt was sent, and no chat.

    Raises:
      BadBody: it is none.
    """
    if len(body) <= SMALL:
        return read_reply(body, content_type, seconds, of_prompt=of_prompt)
    return await asyncio.to_thread(read_reply, body, content_type, seconds, of_prompt=of_prompt)


def read_reply(body: bytes, content_type: str = "", seconds: float = 0.0, *, of_prompt: bool = False) -> Reply:
    """Return the completion of a body; see `reply_of`.

    Raises:
      BadBody: it is none; the message shows how it begins.
    """
    try:
        return _reply(read_object(body, content_type), seconds, of_prompt)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        start = body[:800].decode(errors="replace")[:200]
        raise BadBody(f"no completion ({type(e).__name__}: {e}): {start!r}") from e


def read_object(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the JSON object of a body: UTF-8, finite numbers, no key twice.

    Raises:
      BadBody: it is none. ValueError: its JSON is none.
    """
    named = _CHARSET.search(content_type)
    if named and named[1].lower() not in _CHARSETS:
        raise BadBody(f"the charset is {named[1]!r}, and JSON is UTF-8")
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > MAX_PARTS:
        raise BadBody(f"the body has more than {MAX_PARTS} values")
    found = read_json(body.decode("utf-8-sig"), unique=True)
    if not isinstance(found, dict):
        raise BadBody("the body is no JSON object")
    return found


def _reply(reply: Mapping[str, Any], seconds: float, of_prompt: bool) -> Reply:
    choices = _typed(reply["choices"], list, "choices")
    choice = _typed(choices[0], dict, "choices[0]")
    message = {"content": choice["text"]} if of_prompt else _typed(choice["message"], dict, "message")
    text = _given(message.get("content"), str, "content")
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    ids = _ids(choice.get("token_ids"), "token_ids")
    logp = _logp(choice.get("logprobs"))
    usage = _given(reply.get("usage"), dict, "usage")
    tokens = _whole(usage.get("completion_tokens") or len(ids), "completion_tokens")
    prompt = _ids(reply.get("prompt_token_ids"), "prompt_token_ids") if ids else ()
    return Reply(
        clean(text),
        _finish_reason(choice.get("finish_reason")),
        prompt,
        ids,
        logp if len(logp) == len(ids) else (),
        tokens,
        seconds,
        clean(thought) if isinstance(thought, str) else "",
    )


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise BadBody(f"{name} is a {type(value).__name__}, no {kind.__name__}")
    return value


def _given(value: Any, kind: type, name: str) -> Any:
    """Return the value of a field; an empty one if it is missing or null."""
    return kind() if value is None else _typed(value, kind, name)


def _finish_reason(value: Any) -> FinishReason:
    if value is None:
        return "stop"
    found = FINISH.get(_typed(value, str, "finish_reason").lower())
    if found is None:
        raise BadBody(f"finish_reason is {value[:40]!r}")
    return found


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise BadBody(f"{name} is {str(value)[:40]!r}, no whole number")
    if not 0 <= value < MAX_TOKEN:
        raise BadBody(f"{name} is out of range")
    return int(value)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    return tuple(_whole(i, name) for i in _given(value, list, name))


def _logp(value: Any) -> tuple[float, ...]:
    told = _given(value, dict, "logprobs")
    entries = [_typed(entry, dict, "a log-prob")["logprob"] for entry in _given(told.get("content"), list, "logprobs")]
    found = []
    for logp in entries or _given(told.get("token_logprobs"), list, "token_logprobs"):
        if isinstance(logp, bool) or not isinstance(logp, (int, float)) or not LOGP[0] <= logp <= LOGP[1]:
            raise BadBody(f"a log-prob is {str(logp)[:40]!r}, not from {LOGP[0]:g} to 0")
        found.append(float(logp))
    return tuple(found)
