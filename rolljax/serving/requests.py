"""Convert the checked fields of an OpenAI request to a sampler request: token ids and sampling settings."""

from __future__ import annotations

import contextlib
import dataclasses
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
    ServedModel,
    TokenizedPrompt,
    check_body,
    parse_json,
    refuse,
    short,
)
from rolljax.types import SamplingParams

MAX_CHOICES = 4096
"""Most prompts times `n` of one request."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_OWN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not variables of the template."""


def read_completion(raw: dict[str, Any], served: ServedModel) -> Job:
    """Return the job of a `/v1/completions` body."""
    body = check_body(CompletionBody, raw)
    prompts = _prompts(body.prompt, served)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise refuse("max_tokens", "must be at least 1 (0 only scores the prompt, with echo)", 0)
    return _job(body, served, prompts, max_tokens, body.logprobs, echo=bool(body.echo))


def conversation_ids(chat: Chat, conversation: Conversation) -> np.ndarray:
    """Tokenize a conversation's text to ids."""
    return chat.conversation_ids(conversation.messages, conversation.tools, conversation.options)


def read_chat(
    raw: dict[str, Any], served: ServedModel, prompt_ids: Callable[[Chat, Conversation], np.ndarray] = conversation_ids
) -> Job:
    """Return the job of a `/v1/chat/completions` body, whose prompt is made by `prompt_ids` from the conversation."""
    body = check_body(ChatBody, raw)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true", body.top_logprobs)
    if body.tool_choice not in (None, "auto", "none"):
        raise refuse("tool_choice", "only 'auto' and 'none' are supported", body.tool_choice)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise refuse("max_tokens", "differs from max_completion_tokens; leave it out", body.max_tokens)
    if body.max_tokens == 0:
        raise refuse("max_tokens", "must be at least 1", 0)
    if served.chat is None:
        raise ApiError(400, "messages: this model has no chat template; use /v1/completions", param="messages")
    if len(body.messages) > served.max_context:
        raise _too_long("messages", f"{len(body.messages)} messages", served)
    conversation = _conversation(body)
    _check_size("messages", "".join(_texts([conversation.messages, conversation.tools, conversation.options])), served)
    try:
        ids = prompt_ids(served.chat, conversation)
    except ConfigError as e:
        raise refuse("tools" if conversation.tools else "messages", str(e).replace("\n", " ")) from None
    ids = _check_length("messages", ids, served)
    max_tokens = body.max_completion_tokens or body.max_tokens or served.max_context
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    job = _job(body, served, (TokenizedPrompt(ids, ""),), max_tokens, alternatives, chat=True)
    return dataclasses.replace(job, conversation=conversation)


def _job(
    body: Body,
    served: ServedModel,
    prompts: tuple[TokenizedPrompt, ...],
    max_tokens: int,
    alternatives: int | None,
    *,
    chat: bool = False,
    echo: bool = False,
) -> Job:
    if body.model not in (None, served.name):
        message = f"model: {short(body.model)} is not served here; the model is {served.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    temperature = 1.0 if body.temperature is None else body.temperature
    if 0 < temperature < 1e-3:
        raise refuse("temperature", "is too small to divide by; 0 is greedy", temperature)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise refuse("best_of", f"must equal n = {n}; choose among the answers yourself", body.best_of)
    if len(prompts) * n > MAX_CHOICES:
        raise refuse("n", f"{len(prompts)} prompts x {n} are more than {MAX_CHOICES} answers; send several requests")
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "needs stream: true")
    params = SamplingParams(
        temperature=temperature,
        max_tokens=min(max_tokens, served.max_context),
        stop_ids=_stop_ids(body, served),
        stop=body.stop,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        top_logprobs=alternatives or 0,
    )
    return Job(
        chat=chat,
        prompts=prompts,
        params=params,
        n=n,
        seed=body.seed,
        priority=body.priority or 0,
        alternatives=alternatives,
        raw_logprobs=body.logprobs_mode == "raw_logprobs",
        echo=echo,
        return_token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _stop_ids(body: Body, served: ServedModel) -> tuple[int, ...]:
    asked = body.stop_token_ids or []
    _check_ids("stop_token_ids", asked, served)
    ids = {*asked, *(() if body.ignore_eos else served.stop_ids)}
    if len(ids) > MAX_STOP_IDS:
        own = f"; the model's own are {list(served.stop_ids)} (ignore_eos leaves them out)"
        raise refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids can end an answer{own}", asked)
    return tuple(sorted(ids))


def _check_ids(where: str, ids: list[Any], served: ServedModel) -> None:
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < served.vocab_size:
            raise refuse(f"{where}[{i}]", f"must be a token id from 0 to {served.vocab_size - 1}", token)


def _check_length(where: str, ids: Sequence[int] | np.ndarray, served: ServedModel) -> np.ndarray:
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
            return TokenizedPrompt(_check_length(where, ids, served), prompt)
        if not isinstance(prompt, list):
            raise refuse(where, "must be a text, a list of texts, a list of token ids or a list of such lists", prompt)
        if len(prompt) < served.max_context:
            _check_ids(where, prompt, served)
        return TokenizedPrompt(_check_length(where, prompt, served), served.vocabulary.text(prompt))

    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > MAX_CHOICES:
            raise refuse("prompt", f"holds {len(value)} prompts, at most {MAX_CHOICES}; send several requests")
        return tuple(one(f"prompt[{i}]", prompt) for i, prompt in enumerate(value))
    return (one("prompt", value),)


def _conversation(body: ChatBody) -> Conversation:
    messages = [_message(f"messages[{i}]", m) for i, m in enumerate(body.messages)]
    tools = [] if body.tool_choice == "none" else body.tools or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not _is_text(function.get("name")):
            raise refuse(f"tools[{i}]", 'must be {"type": "function", "function": {"name": ..., ...}}', tool)
    options = body.chat_template_kwargs or {}
    taken = TEMPLATE_OWN & options.keys()
    if taken:
        raise refuse(f"chat_template_kwargs.{min(taken)}", "cannot be set here")
    return Conversation(messages, tools, options)


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
    message["content"] = _content(f"{where}.content", "" if content is None else content)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise refuse(f"{where}.tool_calls", "must be a list in an assistant message", calls)
        message["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    for name, value in raw.items():
        if name in ("name", "tool_call_id", "reasoning_content") and value is not None:
            if not _is_text(value):
                raise refuse(f"{where}.{name}", "must be a text", value)
            message[name] = value
        elif name not in ("role", "content", "tool_calls") and value not in (None, "", [], {}):
            raise refuse(f"{where}.{name}", "is not supported; leave it out", value)
    return message


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(where, "must be a text or a list of text parts", content)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not _is_text(part.get("text")):
            raise refuse(f"{where}[{i}]", 'must be {"type": "text", "text": ...}: this model reads text only', part)
    return "\n".join(part["text"] for part in content)


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object if they are one in JSON (templates write them as JSON
    themselves)."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_text(function.get("name")):
        raise refuse(where, 'must be {"type": "function", "function": {"name": ..., "arguments": ...}}', call)
    arguments: Any = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ApiError):
            arguments = parse_json(arguments.encode())
    return call | {"function": function | {"arguments": arguments}}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
