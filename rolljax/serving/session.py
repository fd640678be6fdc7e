"""A session: the calls that one agent program makes of the model, kept as the token streams they really were.

    body -> Session.read (the trainer's settings over the program's) -> Session.begin (address, record) -> sampler

A program sends the whole conversation with every call, as text. If it were tokenised again, the model's own words might
become other tokens than the sampled ones. If a conversation begins with the messages and the answer of an earlier call,
the prompt is therefore that call's prompt and sampled ids, followed by the chat template's text for the new messages
alone. The record then holds the tokens that were sampled, and the calls of one conversation are one growing stream.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import Any

import numpy as np

from rolljax.errors import ConfigError
from rolljax.model.tokenizer import Chat
from rolljax.sampler.arrays import MAX_STOP_IDS
from rolljax.serving.requests import Reader, conversation_ids
from rolljax.serving.schema import ApiError, Conversation, Job, ServedModel, refuse
from rolljax.types import Completion, SamplingParams

ENDED_KEPT = 4096
"""Ended sessions that are remembered, to refuse their calls as ended; earlier ones are unknown."""
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Fields of a request that shape the sampling distribution, which is the trainer's."""


@dataclasses.dataclass(frozen=True)
class SessionRules:
    """The trainer's settings for a session."""

    params: SamplingParams
    """The sampling distribution, the ids that end an answer, and the most tokens of one."""
    address: tuple[int, ...]
    """Address of the session's randomness, up to 4 integers; the number of the call is the next integer."""
    max_calls: int
    """Calls that are answered."""
    max_restarts: int
    """Maximum number of conversations that may start without continuing another one."""
    min_version: int = 0
    """Policy version with which the session's group began."""


class Call:
    """One call, from its arrival until it is answered.

    index: its number in the session. prompt_ids `[P]`. before: the call whose stream the prompt continues.
    overridden: fields of the request that had no effect. completion, text, message: its answer, what the model wrote,
    and the message that the program gets; None and empty until then.
    """

    def __init__(self, session: Session, index: int, job: Job, before: Call | None) -> None:
        self.session, self.index, self.before = session, index, before
        self.prompt_ids, self.conversation, self.overridden = job.prompts[0].ids, job.conversation, job.overridden
        self.completion: Completion | None = None
        self.text = ""
        self.message: dict[str, Any] = {}
        self._sampling = True

    @property
    def stream(self) -> np.ndarray:
        """Prompt and sampled ids."""
        assert self.completion is not None
        return np.concatenate([self.prompt_ids, self.completion.tokens])

    @property
    def new_ids(self) -> np.ndarray:
        """Return the part of the prompt that is new to the stream it continues; all of it if it continues none."""
        return self.prompt_ids if self.before is None else self.prompt_ids[len(self.before.stream) :]

    def sampled(self) -> None:
        """Note that the sampler has finished, with or without success: from now on the time is the program's own."""
        if self._sampling:
            self._sampling = False
            self.session._sampling(-1)

    def answered(self, completion: Completion, text: str, message: dict[str, Any]) -> None:
        """Record the answer: what the model wrote, and the message that the program is about to receive."""
        self.completion, self.text, self.message = completion, text, message
        self.session._answered()

    def close(self) -> None:
        """End the request. One that was not answered leaves nothing but its number."""
        self.sampled()
        if self.completion is None:
            self.session._drop(self)


class Session:
    """The calls of one run of a program. Everything but `read` belongs to the server's event loop.

    key: the program's secret. calls: in the order of their arrival; dropped: calls that the program hung up on, or that
    failed. limit: the limit that the last refused call reached, until another is answered.
    """

    def __init__(self, rules: SessionRules) -> None:
        self.key = f"session-{secrets.token_urlsafe(18)}"
        self.rules = rules
        self.calls: list[Call] = []
        self.dropped = 0
        self.limit = ""
        self.ended = False
        self._open = 0
        self._busy_s = 0.0
        self._since_s = 0.0

    def read(self, raw: dict[str, Any], reader: Reader, served: ServedModel) -> Job:
        """Return the job of a body, under the rules of the session. The model's name is ignored.

        Raises:
          ApiError: a body that would be refused anywhere; more than one prompt or answer; an echoed prompt.
        """
        body = raw | {"model": None} if isinstance(raw.get("model"), str) else raw
        try:
            job = reader(body, served, self._prompt_ids)
        except ApiError as e:
            if e.code == "context_length_exceeded":
                self.limit = f"the context of {served.max_context} tokens"
            raise
        if len(job.prompts) * job.n > 1:
            raise refuse("n" if job.n > 1 else "prompt", "a session samples one answer a call; send several calls")
        if job.echo:
            raise refuse("echo", "is not for sessions; leave it out", True)
        rules, asked = self.rules.params, job.params
        stop_ids = tuple(sorted({*asked.stop_ids, *rules.stop_ids}))
        if len(stop_ids) > MAX_STOP_IDS:
            raise refuse("stop_token_ids", f"at most {MAX_STOP_IDS} ids, with the session's own, can end an answer")
        params = dataclasses.replace(
            rules,
            max_tokens=min(asked.max_tokens, rules.max_tokens),
            stop_ids=stop_ids,
            stop=asked.stop,
            top_logprobs=asked.top_logprobs,
        )
        said = raw.get("sampling_params") or raw
        overridden = [n for n in SAMPLING_FIELDS if said.get(n) is not None and getattr(asked, n) != getattr(rules, n)]
        overridden += [n for n in ("seed", "ignore_eos") if said.get(n) not in (None, False)]
        return dataclasses.replace(job, params=params, seed=None, priority=0, overridden=tuple(overridden))

    def begin(self, job: Job) -> Job:
        """Accept a call: the job with its address and its record.

        Raises:
          ApiError: the session has ended, or its calls or conversations are used up.
        """
        if self.ended:
            raise ended()
        rules, before = self.rules, self._goes_on_with(job.prompts[0].ids)
        taken = len(self.calls) + self.dropped
        if taken >= rules.max_calls:
            raise self._limited("max_calls", f"{rules.max_calls} calls")
        if before is None and sum(c.before is None for c in self.calls) > rules.max_restarts:
            raise self._limited("max_restarts", f"{rules.max_restarts + 1} conversations")
        call = Call(self, taken, job, before)
        self.calls.append(call)
        self._sampling(1)
        return dataclasses.replace(job, call=call, address=(*rules.address, call.index), min_version=rules.min_version)

    def streams(self) -> list[list[Call]]:
        """Return the answered calls by token stream, each in order; streams by their first call."""
        answered = [c for c in self.calls if c.completion is not None]
        after = {id(c.before): c for c in answered if c.before is not None}
        streams = []
        for first in (c for c in answered if c.before is None):
            stream = [first]
            while id(stream[-1]) in after:
                stream.append(after[id(stream[-1])])
            streams.append(stream)
        return streams

    def busy_s(self) -> float:
        """Return the seconds in which the sampler worked for the session."""
        return self._busy_s + (time.monotonic() - self._since_s if self._open else 0.0)

    # ---- token-exact prompts

    def _prompt_ids(self, chat: Chat, conversation: Conversation) -> np.ndarray:
        """Return the ids of a conversation; an earlier call and its answer keep the ids that were sampled."""
        fresh = conversation_ids(chat, conversation)
        for call in sorted(self.calls, key=lambda c: (len(c.prompt_ids), c.index), reverse=True):
            if (
                call.completion is None
                or call.conversation is None
                or not _continues(conversation, call.conversation, call.message)
            ):
                continue
            new = conversation.messages[len(call.conversation.messages) + 1 :]
            closed = int(call.completion.tokens[-1]) in chat.stop_ids
            try:
                delta = chat.delta_ids(new, closed=closed, tools=conversation.tools, options=conversation.options)
            except ConfigError:  # a template that rewrites earlier turns
                return fresh
            if np.array_equal(fresh[len(fresh) - len(delta) :], delta):
                return np.concatenate([call.stream, delta])
        return fresh

    def _goes_on_with(self, ids: np.ndarray) -> Call | None:
        """Return the call with the longest stream that is a prefix of `ids` and that no other call continues."""
        taken = {id(c.before) for c in self.calls}
        free = [c for c in self.calls if c.completion is not None and id(c) not in taken]
        longest = sorted(free, key=lambda c: len(c.stream), reverse=True)
        return next((c for c in longest if np.array_equal(ids[: len(c.stream)], c.stream)), None)

    # ---- what calls report

    def _answered(self) -> None:
        self.limit = ""

    def _drop(self, call: Call) -> None:
        self.calls.remove(call)
        self.dropped += 1

    def _sampling(self, change: int) -> None:
        now = time.monotonic()
        if self._open:
            self._busy_s += now - self._since_s
        self._open, self._since_s = self._open + change, now

    def _limited(self, code: str, what: str) -> ApiError:
        self.limit = what
        return ApiError(403, f"this session has had its {what}; finish with what you have", code=code)


class Sessions:
    """Sessions by their key."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._ended: dict[str, None] = {}

    def open(self, rules: SessionRules) -> Session:
        """Open a new session."""
        session = Session(rules)
        self._open[session.key] = session
        return session

    def end(self, session: Session) -> None:
        """Accept no more calls of it."""
        session.ended = True
        del self._open[session.key]
        self._ended[session.key] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def find(self, key: str) -> Session | None:
        """Return the session of a key; None if there is none.

        Raises:
          ApiError: the session has ended.
        """
        if key in self._ended:
            raise ended()
        return self._open.get(key)


def ended() -> ApiError:
    """Return the error for a call in a session that has ended."""
    return ApiError(410, "this session has ended: its program has answered, failed or run out of time", code="ended")


def _continues(conversation: Conversation, before: Conversation, answer: dict[str, Any]) -> bool:
    """Return whether a conversation is an earlier one, the answer to it, and more."""
    n = len(before.messages)
    return (
        conversation.messages[:n] == before.messages
        and conversation.messages[n : n + 1] == [answer]
        and (conversation.tools, conversation.options) == (before.tools, before.options)
    )
