"""Convert the checked fields of a request to a sampler request: token ids and sampling settings."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rolljax.errors import ConfigError
from rolljax.model.tokenizer import Chat
from rolljax.sampler.arrays import MAX_STOP_IDS
from rolljax.serving.schema import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    Conversation,
    Job,
    SamplingBody,
    ServedModel,
    TokenizedPrompt,
    check_body,
    parse_json,
    refuse,
    short,
)
from rolljax.serving.tool_calls import call_prefill
from rolljax.types import SamplingParams

Prompts = Callable[[Chat, Conversation], np.ndarray]
"""Makes the prompt of a conversation."""
Reader = Callable[[dict[str, Any], ServedModel, Prompts], Job]
"""Makes the job of a body."""
MAX_CHOICES = 4096
"""Most prompts times `n` of one request."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[\w.-]+")
"""Names of tools that can be demanded: the prompt then ends with them, where other text could spell special tokens."""
THOUGHT_TOK = 16
"""Last tokens of a prompt in which a template may open a thought."""
TEMPLATE_OWN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not variables of the template."""


def conversation_ids(chat: Chat, conversation: Conversation) -> np.ndarray:
    """Tokenize a conversation's text to ids."""
    return chat.conversation_ids(conversation.messages, conversation.tools, conversation.options)


def read_completion(raw: dict[str, Any], served: ServedModel, _: Prompts = conversation_ids) -> Job:
    """Return the job of a `/v1/completions` body, which holds no conversation."""
    body = check_body(CompletionBody, raw)
    prompts = _prompts(body.prompt, served)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise refuse("max_tokens", "must be at least 1 (0 only scores the prompt, with echo)", 0)
    fields = choice_fields(body, len(prompts), body.logprobs)
    return make_job(body, served, prompts, max_tokens, body.stop, echo=bool(body.echo), **fields)


def read_chat(raw: dict[str, Any], served: ServedModel, prompt_ids: Prompts = conversation_ids) -> Job:
    """Return the job of a `/v1/chat/completions` body, whose prompt is made by `prompt_ids` from the conversation."""
    body = check_body(ChatBody, raw)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true", body.top_logprobs)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens", "differs from max_completion_tokens; leave it out", body.max_tokens)
    if body.max_tokens == 0:
        raise refuse("max_tokens", "must be at least 1", 0)
    max_tokens = body.max_completion_tokens or body.max_tokens
    fields = choice_fields(body, 1, (body.top_logprobs or 0) if body.logprobs else None)
    check_chat(body.messages, served, "messages")
    return conversation_job(body, served, _conversation(body), prompt_ids, max_tokens, body.stop, **fields)


def check_chat(messages: Sequence[Any], served: ServedModel, where: str) -> None:
    """Refuse a conversation of more messages than the context has tokens, and a model without a chat template."""
    if served.chat is None:
        raise ApiError(400, f"{where}: this model has no chat template; use /v1/completions", param=where)
    if len(messages) > served.max_context:
        raise _too_long(where, f"{len(messages)} messages", served)


def conversation_job(
    body: SamplingBody,
    served: ServedModel,
    conversation: Conversation,
    prompt_ids: Prompts,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    *,
    where: str = "messages",
    **fields: Any,
) -> Job:
    """Return the job of a conversation, whose messages are the field `where`; see `make_job`.

    max_tokens: None means all that fit.
    """
    assert served.chat is not None
    _check_size(where, "".join(_texts([conversation.messages, conversation.tools, conversation.options])), served)
    try:
        ids = prompt_ids(served.chat, conversation)
    except ConfigError as e:
        raise refuse("tools" if conversation.tools else where, str(e).replace("\n", " ")) from None
    prefill = ""
    if conversation.must_call is not None:
        prefill = _call_prefill(conversation, ids, served)
        ids = np.concatenate([ids, served.vocabulary.encode_inside(prefill)])
    prompt = TokenizedPrompt(check_length(where, ids, served), "")
    job = make_job(body, served, (prompt,), max_tokens or served.max_context, stop, **fields)
    parser = served.tool_parser if conversation.tools else None
    return dataclasses.replace(job, conversation=conversation, tool_parser=parser, prefill=prefill)


def unnamed_tool(choice: Any, form: str) -> str | None:
    """Return `Conversation.must_call` for a `tool_choice` that names no tool. form: of one that does, for the error."""
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return ""
    raise refuse("tool_choice", f"must be 'auto', 'none', 'required' or {form}", choice)


def _call_prefill(conversation: Conversation, prompt: np.ndarray, served: ServedModel) -> str:
    """Return the beginning of the call that a request demands."""
    name = conversation.must_call or ""
    known = [spec.name for spec in conversation.tool_specs if TOOL_NAME.fullmatch(spec.name)]
    if not known or (name and name not in known):
        raise refuse("tool_choice", f"must name one of the tools {known}" if known else "needs tools", name or ...)
    if served.tool_parser is None:
        raise refuse("tool_choice", "must be 'auto' or 'none': calls are not read in this model's format")
    if served.vocabulary.text(prompt[-THOUGHT_TOK:]).rstrip().endswith("<think>"):
        raise refuse("tool_choice", "must be 'auto' or 'none': this template begins every answer with a thought")
    assert served.chat is not None
    return call_prefill(served.chat, served.tool_parser, name)


def choice_fields(body: Body, prompts: int, alternatives: int | None) -> dict[str, Any]:
    """Return the fields of a job that say what is answered to each prompt, and how."""
    n = body.n or 1
    if body.best_of not in (None, n):
        raise refuse("best_of", f"must equal n = {n}; choose among the answers yourself", body.best_of)
    if prompts * n > MAX_CHOICES:
        raise refuse("n", f"{prompts} prompts x {n} are more than {MAX_CHOICES} answers; send several requests")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "needs stream: true")
    return {
        "n": n,
        "alternatives": alternatives,
        "raw_logprobs": body.logprobs_mode == "raw_logprobs",
        "return_token_ids": bool(body.return_token_ids),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
    }


def make_job(
    body: SamplingBody,
    served: ServedModel,
    prompts: tuple[TokenizedPrompt, ...],
    max_tokens: int,
    stop: tuple[str, ...],
    **fields: Any,
) -> Job:
    """Return the job of prompts with the sampling settings of a body; `fields` are further ones of the job."""
    if body.model not in (None, served.name):
        message = f"model: {short(body.model)} is not served here; the model is {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    temperature = 1.0 if body.temperature is None else body.temperature
    if 0 < temperature < 1e-3:
        raise refuse("temperature", "is too small to divide by; 0 is greedy", temperature)
    params = SamplingParams(
        temperature=temperature,
        max_tokens=min(max_tokens, served.max_context),
        stop_ids=_stop_ids(body, served),
        stop=stop,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        top_logprobs=fields.get("alternatives") or 0,
    )
    return Job(prompts, params, body.seed, body.priority or 0, bool(body.stream), **fields)


def _stop_ids(body: SamplingBody, served: ServedModel) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    check_ids("stop_token_ids", asked, served)
    ids = {*asked, *(() if body.ignore_eos else served.stop_ids)}
    if len(ids) > MAX_STOP_IDS:
        own = f"; the model's own are {list(served.stop_ids)} (ignore_eos leaves them out)"
        raise refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids can end an answer{own}", asked)
    return tuple(sorted(ids))


def check_ids(where: str, ids: list[Any], served: ServedModel) -> None:
    """Refuse what is no token id of the model."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < served.vocab_size:
            raise refuse(f"{where}[{i}]", f"must be a token id from 0 to {served.vocab_size - 1}", token)


def check_length(where: str, ids: Sequence[int] | np.ndarray, served: ServedModel) -> np.ndarray:
    """Return a prompt `[P]` int32 that fits into the context."""
    if not 0 < len(ids) < served.max_context:
        raise _too_long(where, f"{len(ids)} tokens", served, code="context_length_exceeded" if len(ids) else None)
    return np.asarray(ids, np.int32)


def _check_size(where: str, text: str, served: ServedModel) -> None:
    """Refuse a text that is certainly too long before all of it is tokenised."""
    if served.vocabulary.exceeds(text, served.max_context):
        raise _too_long(where, f"{len(text)} characters, which are too many tokens", served)


def _too_long(where: str, has: str, served: ServedModel, code: str | None = "context_length_exceeded") -> ApiError:
    message = f"{where}: has {has}, and 1 to {served.max_context - 1} fit: "
    message += f"the context is {served.max_context} tokens and an answer takes at least one"
    return ApiError(400, message, param=where, code=code)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value if isinstance(value, list) else [*value, *value.values()]:
            yield from _texts(item)


def _prompts(value: Any, served: ServedModel) -> tuple[TokenizedPrompt, ...]:
    """Tokenize a text, texts, ids, or lists of ids."""

    def one(where: str, prompt: Any) -> TokenizedPrompt:
        if isinstance(prompt, str):
            _check_size(where, prompt, served)
            ids = served.vocabulary.encode(prompt, special=True)
            return TokenizedPrompt(check_length(where, ids, served), prompt)
        if not isinstance(prompt, list):
            raise refuse(where, "must be a text, a list of texts, a list of token ids or a list of such lists", prompt)
        if len(prompt) < served.max_context:
            check_ids(where, prompt, served)
        return TokenizedPrompt(check_length(where, prompt, served), served.vocabulary.text(prompt))

    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > MAX_CHOICES:
            raise refuse("prompt", f"holds {len(value)} prompts, at most {MAX_CHOICES}; send several requests")
        return tuple(one(f"prompt[{i}]", prompt) for i, prompt in enumerate(value))
    return (one("prompt", value),)


def _conversation(body: ChatBody) -> Conversation:
    messages = [_message(f"messages[{i}]", m) for i, m in enumerate(body.messages)]
    match body.tool_choice:
        case {"type": "function", "function": {"name": str(name)}}:
            must_call: str | None = name
        case choice:
            must_call = unnamed_tool(choice, '{"type": "function", "function": {"name": ...}}')
    tools = [] if body.tool_choice == "none" else body.tools or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not is_text(function.get("name")):
            raise refuse(f"tools[{i}]", 'must be {"type": "function", "function": {"name": ..., ...}}', tool)
        if not isinstance(function.get("parameters") or {}, dict):
            raise refuse(f"tools[{i}].function.parameters", "must be a JSON schema", function["parameters"])
    options = body.chat_template_kwargs or {}
    taken = TEMPLATE_OWN & options.keys()
    if taken:
        raise refuse(f"chat_template_kwargs.{min(taken)}", "cannot be set here")
    return Conversation(messages, tools, options, must_call)


def _message(where: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: text content, tool arguments as objects, no empty fields."""
    role = raw.get("role")
    if role not in ROLES:
        raise refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = raw.get("tool_calls") or []
    content = raw.get("content")
    if content is None and not (role == "assistant" and calls):
        raise refuse(f"{where}.content", "is missing")
    message["content"] = text_of(f"{where}.content", "" if content is None else content)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise refuse(f"{where}.tool_calls", "must be a list in an assistant message", calls)
        message["tool_calls"] = [call_of(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    for name, value in raw.items():
        if name in ("name", "tool_call_id", "reasoning_content") and value is not None:
            if not is_text(value):
                raise refuse(f"{where}.{name}", "must be a text", value)
            message[name] = value
        elif name not in ("role", "content", "tool_calls") and value not in (None, "", [], {}):
            raise refuse(f"{where}.{name}", "is not supported; leave it out", value)
    return message


def text_of(where: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """Return a text, or the texts of a list of parts, whose `type` is one of `kinds`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(where, "must be a text or a list of text parts", content)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in kinds or not is_text(part.get("text")):
            form = f'{{"type": "{kinds[0]}", "text": ...}}'
            raise refuse(f"{where}[{i}]", f"must be {form}: this model reads text only", part)
    return "\n".join(part["text"] for part in content)


def call_of(where: str, call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object if they are one in JSON (templates write them as JSON
    themselves), without the `index` that clients keep when they put a stream together."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise refuse(where, 'must be {"type": "function", "function": {"name": ..., "arguments": ...}}', call)
    arguments: Any = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ApiError):
            arguments = parse_json(arguments.encode())
    kept = {name: value for name, value in call.items() if name != "index"}
    return kept | {"function": function | {"arguments": arguments}}


def tool_of(where: str, tool: dict[str, Any], schema: str) -> dict[str, Any]:
    """Return a function, whose JSON schema is the field `schema`, as chat templates take it."""
    name, description, parameters = tool.get("name"), tool.get("description"), tool.get(schema)
    if not is_text(name) or not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise refuse(
            where, f'must be {{"name": ..., "description": ..., "{schema}": ...}}, the last a JSON schema', tool
        )
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def is_text(value: Any) -> bool:
    """Return whether a JSON value is a text."""
    return isinstance(value, str)
