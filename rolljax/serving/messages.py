"""Anthropic's Messages: requests as conversations in the form of chat completions, and answers as content blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rolljax.serving.generation import Choice, Encoder, Json, arguments_text, dump
from rolljax.serving.requests import Prompts, check_chat, conversation_ids, conversation_job, is_text, text_of, tool_of
from rolljax.serving.schema import (
    INT64,
    ApiError,
    Conversation,
    Job,
    SamplingBody,
    ServedModel,
    check_body,
    refuse,
    stop_texts,
)
from rolljax.types import Completion, Sampled

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"
ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
ENDS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
"""`stop_reason` by the reason for which an answer ended."""


class OutputConfig(BaseModel):
    """`output_config` of a request; the effort has no effect."""

    model_config = ConfigDict(extra="forbid")
    effort: str | None = None


class MessagesBody(SamplingBody):
    """The body of `/v1/messages`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "thinking", "diagnostics"}
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "mcp_servers": ([],),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1, lt=INT64)
    system: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_texts)] = Field((), alias="stop_sequences")


def read_messages(raw: dict[str, Any], served: ServedModel, prompt_ids: Prompts = conversation_ids) -> Job:
    """Return the job of a `/v1/messages` body."""
    body = check_body(MessagesBody, raw)
    check_chat(body.messages, served, "messages")
    return conversation_job(body, served, _conversation(body), prompt_ids, body.max_tokens, body.stop)


def read_count(raw: dict[str, Any], served: ServedModel, prompt_ids: Prompts = conversation_ids) -> Job:
    """Return the job of a `/v1/messages/count_tokens` body, whose prompt is to be counted."""
    return read_messages({"max_tokens": 1} | raw, served, prompt_ids)


def error_json(error: ApiError) -> Json:
    """Return an error in the form of Anthropic's API."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


# ---- requests


def _conversation(body: MessagesBody) -> Conversation:
    choice = body.tool_choice or {"type": "auto"}
    match choice:
        case {"type": "auto" | "none"}:
            must_call = None
        case {"type": "any"}:
            must_call = ""
        case {"type": "tool", "name": str(must_call)}:
            pass
        case _:
            raise refuse("tool_choice", "must have the type auto, none or any, or tool and a name", choice)
    messages = [] if body.system in (None, "", []) else [{"role": "system", "content": text_of("system", body.system)}]
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages[{i}]", message)
    if messages[-1]["role"] == "assistant":
        raise refuse("messages", "must end with a user's message; answers cannot be prefilled")
    tools = []
    for i, tool in enumerate([] if choice["type"] == "none" else body.tools or []):
        if tool.get("type") not in (None, "custom"):
            raise refuse(f"tools[{i}].type", "only tools of your own ('custom') are supported", tool["type"])
        tools.append(tool_of(f"tools[{i}]", tool, "input_schema"))
    return Conversation(messages, tools, {}, must_call)


def _messages(where: str, raw: dict[str, Any]) -> list[Json]:
    """Return a message in the form of chat completions: results of tools become messages of their own."""
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}.role", "must be user or assistant", role)
    if unknown := raw.keys() - {"role", "content"}:
        raise refuse(f"{where}.{min(unknown)}", "is not a known field; leave it out")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise refuse(f"{where}.content", "must be a text or a list of blocks", content)
    if role == "assistant":
        return [_answer(f"{where}.content", blocks)]
    messages: list[Json] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if role == "user" and block.get("type") == "tool_result":
            messages += _said(role, texts)
            texts = []
            messages.append(_result(f"{where}.content[{i}]", block))
        else:
            texts.append(text_of(f"{where}.content[{i}]", [block]))
    messages += _said(role, texts)
    if not messages:
        raise refuse(f"{where}.content", "is empty")
    return messages


def _said(role: str, texts: list[str]) -> list[Json]:
    return [{"role": role, "content": "\n".join(texts)}] if texts else []


def _result(where: str, block: Json) -> Json:
    if not is_text(block.get("tool_use_id")):
        raise refuse(f"{where}.tool_use_id", "must be the id of a tool_use block", block.get("tool_use_id"))
    content = block.get("content")
    text = text_of(f"{where}.content", "" if content is None else content)
    return {"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]}


def _answer(where: str, blocks: list[Json]) -> Json:
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for i, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)}:
                calls.append({"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}})
            case _:
                raise refuse(f"{where}[{i}]", "must be a complete block of text, tool_use or thinking", block)
    message: Json = {"role": "assistant", "content": "\n".join(texts)}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


# ---- answers


class MessagesEncoder(Encoder):
    """The form of `/v1/messages`: a block of text, if there is any, and one for each call."""

    prefix = "msg_"
    _open = False
    """Whether the start of the block of text was sent."""

    def body(self, done: Sequence[Completion]) -> Json:
        (choice,), (completion,) = self.choices, done
        texts = [{"type": "text", "text": choice.content}] if choice.content else []
        calls = [_block(call) | {"input": call["function"]["arguments"]} for call in choice.tool_calls]
        return self._message([*texts, *calls]) | self._end(choice, completion) | {"usage": self._usage(done)}

    def first(self) -> list[bytes]:
        prompt, _, _ = self.counts(())
        usage = {"input_tokens": prompt, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [named_event({"type": "message_start", "message": message})]

    def more(self, choice: Choice, sampled: Sampled, text: str) -> list[bytes]:
        if not text:
            return []
        start = [] if self._open else [_start(0, {"type": "text", "text": ""})]
        self._open = True
        return [*start, _delta(0, {"type": "text_delta", "text": text})]

    def end(self, choice: Choice, completion: Completion, text: str) -> list[bytes]:
        events = self.more(choice, completion.sampled, text)
        events += [_stop(0)] if self._open else []
        for index, call in enumerate(choice.tool_calls, int(self._open)):
            delta = {"type": "input_json_delta", "partial_json": arguments_text(call)}
            events += [_start(index, _block(call) | {"input": {}}), _delta(index, delta), _stop(index)]
        end = {"type": "message_delta", "delta": self._end(choice, completion), "usage": self._usage([completion])}
        return [*events, named_event(end), named_event({"type": "message_stop"})]

    def failed(self, error: ApiError) -> list[bytes]:
        return [named_event(error_json(error))]

    def _message(self, blocks: list[Json]) -> Json:
        who = {"id": self.id, "type": "message", "role": "assistant", "model": self.service.served.name}
        return who | {"content": blocks}

    def _end(self, choice: Choice, completion: Completion) -> Json:
        reason = choice.reason(completion)
        if choice.stop and reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
        return {"stop_reason": ENDS[reason], "stop_sequence": None}

    def _usage(self, done: Sequence[Completion]) -> Json:
        prompt, sampled, cached = self.counts(done)
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": sampled,
        }


def _block(call: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _start(index: int, block: Json) -> bytes:
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: Json) -> bytes:
    return named_event({"type": "content_block_delta", "index": index, "delta": delta})


def _stop(index: int) -> bytes:
    return named_event({"type": "content_block_stop", "index": index})


def named_event(value: Json) -> bytes:
    """Return a server-sent event whose name is its `type`."""
    return b"event: " + value["type"].encode() + b"\ndata: " + dump(value) + b"\n\n"
