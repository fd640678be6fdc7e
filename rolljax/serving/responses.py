"""OpenAI's Responses: requests as conversations in the form of chat completions, and answers as items.

Nothing is stored: a request holds its whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rolljax.serving.generation import Choice, Encoder, Json, arguments_text
from rolljax.serving.messages import named_event
from rolljax.serving.requests import (
    Prompts,
    call_of,
    check_chat,
    conversation_ids,
    conversation_job,
    is_text,
    text_of,
    tool_of,
    unnamed_tool,
)
from rolljax.serving.schema import INT64, ApiError, Conversation, Job, SamplingBody, ServedModel, check_body, refuse
from rolljax.types import Completion, Sampled

ROLES = ("system", "developer", "user", "assistant")
PARTS = ("input_text", "output_text", "text")
"""Types of text parts."""
FIELDS = {
    "message": {"type", "id", "status", "role", "content", "phase"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments", "namespace"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "custom_tool_call": {"type", "id", "status", "call_id", "name", "input", "namespace"},
    "custom_tool_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}
"""Fields of the items that are read."""
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "tool_search")
"""Tools that OpenAI's servers run. The model is not told of them, because nothing here runs them."""
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool, whose input is a text; a grammar for it is not enforced."""


class TextFormat(BaseModel):
    """The form of answers."""

    type: Literal["text"]


class TextOptions(BaseModel):
    """`text` of a request; the verbosity has no effect."""

    model_config = ConfigDict(extra="forbid")
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(SamplingBody):
    """The body of `/v1/responses`."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
            "prompt_cache_options", "prompt_cache_retention", "user", "reasoning", "stream_options", "client_metadata",
        }
    )  # fmt: skip
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    previous_response_id: Any = None
    text: TextOptions | None = None


def read_responses(raw: dict[str, Any], served: ServedModel, prompt_ids: Prompts = conversation_ids) -> Job:
    """Return the job of a `/v1/responses` body."""
    body = check_body(ResponsesBody, raw)
    if body.previous_response_id is not None:
        raise refuse("previous_response_id", "nothing is stored here; send the whole conversation as input")
    check_chat(body.input if isinstance(body.input, list) else (), served, "input")
    conversation = _conversation(body)
    repeated = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"strict": False, "parameters": {}} | tool if tool["type"] == "function" else tool
            for tool in body.tools or []
        ],
        "top_p": body.top_p,
    }
    return conversation_job(
        body, served, conversation, prompt_ids, body.max_output_tokens, where="input", repeated=repeated
    )


# ---- requests


def _conversation(body: ResponsesBody) -> Conversation:
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    answering = False
    for i, item in enumerate(items):
        message = _message(f"input[{i}]", item)
        if message["role"] == "assistant" and answering:
            _join(messages[-1], message)
        else:
            messages.append(message)
        answering = message["role"] == "assistant"
    if not items:
        raise refuse("input", "is empty")
    tools: dict[str, Json] = {}
    for where, tool, _ in _offered("tools", body.tools or []):
        parameters = FREE_TEXT if tool["type"] == "custom" else tool.get("parameters")
        offered = tool_of(where, tool | {"parameters": parameters}, "parameters")
        if tools.setdefault(tool["name"], offered) is not offered:
            raise refuse(f"{where}.name", "is the name of another tool too", tool["name"])
    match body.tool_choice:
        case {"type": "function" | "custom", "name": str(name)}:
            must_call: str | None = name
        case choice:
            must_call = unnamed_tool(choice, '{"type": "function", "name": ...}')
    return Conversation(messages, [] if body.tool_choice == "none" else [*tools.values()], {}, must_call)


def _offered(where: str, tools: Sequence[Any], namespace: str = "") -> Iterator[tuple[str, Json, str]]:
    """Yield the tools that the client runs, with their places and namespaces."""
    for i, tool in enumerate(tools):
        place, kind = f"{where}[{i}]", tool.get("type") if isinstance(tool, dict) else None
        if kind in ("function", "custom"):
            yield place, tool, namespace
        elif kind == "namespace" and not namespace and tool.get("name") and isinstance(tool.get("tools"), list):
            yield from _offered(f"{place}.tools", tool["tools"], str(tool["name"]))
        elif kind not in HOSTED:
            raise refuse(f"{place}.type", "only 'function', 'custom' and 'namespace' are supported", kind)


def _join(answer: Json, more: Json) -> None:
    """Add an item of an answer to the items before it: they are one message."""
    answer["content"] = "\n".join(text for text in (answer["content"], more["content"]) if text)
    if calls := [*answer.get("tool_calls", ()), *more.get("tool_calls", ())]:
        answer["tool_calls"] = calls
    if thoughts := [m["reasoning_content"] for m in (answer, more) if "reasoning_content" in m]:
        answer["reasoning_content"] = "\n".join(thoughts)


def _message(where: str, item: dict[str, Any]) -> Json:
    """Return an item in the form of chat completions."""
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise refuse(f"{where}.type", f"must be one of {', '.join(FIELDS)}", kind)
    if unknown := [n for n, value in item.items() if n not in FIELDS[kind] and value is not None]:
        raise refuse(f"{where}.{min(unknown)}", "is not supported; leave it out", item[min(unknown)])
    if kind == "reasoning":
        return _reasoning(where, item)
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
        content = text_of(f"{where}.content", item.get("content"), PARTS)
        return {"role": "system" if role == "developer" else role, "content": content}
    if not is_text(item.get("call_id")):
        raise refuse(f"{where}.call_id", "must be the id of a call", item.get("call_id"))
    if kind.endswith("_output"):
        output = text_of(f"{where}.output", item.get("output"), PARTS)
        return {"role": "tool", "content": output, "tool_call_id": item["call_id"]}
    given = "input" if kind == "custom_tool_call" else "arguments"
    if not is_text(item.get("name")) or not is_text(item.get(given)):
        raise refuse(where, f'must have "name" and "{given}", both texts', item)
    function = {"name": item["name"], "arguments": {"input": item["input"]} if given == "input" else item[given]}
    call = call_of(where, {"id": item["call_id"], "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _reasoning(where: str, item: dict[str, Any]) -> Json:
    content = item.get("content") or item.get("summary") or []
    text = text_of(f"{where}.content", content, ("reasoning_text", "summary_text"))
    return {"role": "assistant", "content": ""} | ({"reasoning_content": text} if text else {})


# ---- answers


class ResponsesEncoder(Encoder):
    """The form of `/v1/responses`: a message, unless there are only calls, and an item for each call."""

    prefix = "resp_"
    _open = False
    """Whether the start of the message was sent."""
    _events = 0

    def body(self, done: Sequence[Completion]) -> Json:
        (completion,) = done
        return self._complete(completion)

    def first(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def more(self, choice: Choice, sampled: Sampled, text: str) -> list[bytes]:
        return [*self._begin(), self._in_part("output_text.delta", delta=text, logprobs=[])] if text else []

    def end(self, choice: Choice, completion: Completion, text: str) -> list[bytes]:
        response = self._complete(completion)
        message = [item for item in response["output"] if item["type"] == "message"]
        events = self.more(choice, completion.sampled, text) or (self._begin() if message else [])
        if message:
            (part,) = message[0]["content"]
            events.append(self._in_part("output_text.done", text=part["text"], logprobs=[]))
            events.append(self._in_part("content_part.done", part=part))
            events.append(self._event("response.output_item.done", output_index=0, item=message[0]))
        for index, item in enumerate(response["output"][len(message) :], len(message)):
            at = {"output_index": index, "item_id": item["id"]}
            kind, given, done = "function_call_arguments", "arguments", {"name": item["name"]}
            if item["type"] == "custom_tool_call":
                kind, given, done = "custom_tool_call_input", "input", {}
            started = item | {given: "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", output_index=index, item=started),
                self._event(f"response.{kind}.delta", delta=item[given], **at),
                self._event(f"response.{kind}.done", **{given: item[given]}, **done, **at),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: ApiError) -> list[bytes]:
        response = self._response("failed", [], None) | {"error": {"code": "server_error", "message": error.message}}
        return [self._event("response.failed", response=response)]

    def _begin(self) -> list[bytes]:
        """Return the events that start the message, unless they were sent."""
        if self._open:
            return []
        self._open = True
        item = self._message("in_progress", [])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=0, item=item)
        return [added, self._in_part("content_part.added", part=part)]

    def _complete(self, completion: Completion) -> Json:
        (choice,) = self.choices
        status = "incomplete" if choice.reason(completion) == "length" else "completed"
        offered = {tool["name"]: (tool, space) for _, tool, space in _offered("", self.job.repeated["tools"])}
        calls = [_item(call, *offered.get(call["function"]["name"], ({}, ""))) for call in choice.tool_calls]
        part = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}
        message = [self._message(status, [part])] if choice.content or not calls else []
        return self._response(status, [*message, *calls], completion)

    def _message(self, status: str, parts: list[Json]) -> Json:
        return {"id": f"msg_{self.id}", "type": "message", "status": status, "role": "assistant", "content": parts}

    def _response(self, status: str, items: list[Json], completion: Completion | None) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "metadata": {},
            "model": self.service.served.name,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **({"usage": self._usage(completion)} if completion else {}),  # OpenAI's schema has no null here
            **self.job.repeated,
        }

    def _usage(self, completion: Completion) -> Json:
        prompt, sampled, cached = self.counts([completion])
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }

    def _in_part(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the text of the message."""
        return self._event(f"response.{kind}", item_id=f"msg_{self.id}", output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return named_event({"type": kind, "sequence_number": self._events - 1} | fields)


def _item(call: Json, tool: Json, namespace: str) -> Json:
    """Return the item of a call. tool, namespace: as the request has them; the model may call what was not offered."""
    item = {"status": "completed", "call_id": call["id"], "name": call["function"]["name"]}
    item |= {"namespace": namespace} if namespace else {}
    if tool.get("type") != "custom":
        return item | {"id": f"fc_{call['id']}", "type": "function_call", "arguments": arguments_text(call)}
    match call["function"]["arguments"]:
        case {"input": str(text)}:
            pass
        case _:
            text = arguments_text(call)
    return item | {"id": f"ctc_{call['id']}", "type": "custom_tool_call", "input": text}
