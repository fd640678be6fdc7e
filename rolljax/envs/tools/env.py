"""An environment with tools: it wraps another one, runs the calls in the policy's answers and passes the rest on.

The semantics are those of GEM's tool wrapper: an answer with a call is executed and its result returned, and the inner
environment is not stepped; an answer without one, and every answer after the last allowed use, is the inner one's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from collections.abc import Sequence
from typing import Any, Literal

from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.run_limits import RunLimits
from rolljax.envs.tools.base import ToolCall, ToolLimits, ToolResult, Tools, ToolSet, ToolSpec
from rolljax.envs.tools.parsers import PARSERS, Parser
from rolljax.envs.tools.repeats import repeated
from rolljax.errors import ConfigError, EnvError
from rolljax.types import Key, Message, Task


@dataclasses.dataclass(frozen=True)
class ToolEnv(EnvSpec):
    """`inner`, with tools."""

    inner: EnvSpec
    """The environment that gets tools."""
    tools: Tools | None = None
    """Source of the tools; None: the inner environment has its own (a method `tools()` of its `Env`, called after
    `reset`, that returns a `ToolSet`)."""
    parser: str = "hermes"
    """Format in which a tool call is written (`rolljax.envs.tools.parsers`)."""
    style: Literal["", "json", "lines", "none"] = ""
    """Form in which the system prompt describes the tools: `json` schemas, `lines` of text, or `none`; empty: the
    parser's default."""
    limits: ToolLimits = ToolLimits()
    """Limits of tool calls (`ToolLimits`)."""
    tool_reward: float = 0.0
    """Reward for each tool use."""
    tool_success_reward: float = 0.0
    """Additional reward for each tool use that succeeded."""
    tool_error_reward: float = 0.0
    """Additional reward for each tool use that failed."""
    last_note: str = "That was the last use of tools. Give the final answer now."
    """Note added to the result of the last allowed tool use."""

    def __post_init__(self) -> None:
        if self.parser not in PARSERS:
            raise ConfigError(
                "is no way to write calls",
                setting="ToolEnv.parser",
                value=self.parser,
                remedy=f"one of {', '.join(PARSERS)}",
            )
        if self.style not in ("", "json", "lines", "none"):
            raise ConfigError(
                "is no way to tell tools", setting="ToolEnv.style", value=self.style, remedy="json, lines or none"
            )

    @property
    def runs(self) -> Runs:  # type: ignore[override]  # it depends on the settings
        """The inner environment's value, if its calls wait or need a process, or if the tools are its own; else a
        thread for tools that wait on something outside, and a worker process for functions, which may do anything with
        a text."""
        if self.inner.runs != "inline" or self.tools is None:
            return self.inner.runs
        return "thread" if self.tools.waits else "process"

    @property
    def needs_worker(self) -> str:
        return self.inner.needs_worker

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def max_turns(self) -> int:
        return self.inner.max_turns + self.limits.calls_per_episode

    def task(self, index: int) -> Task:
        return self.inner.task(index)

    def reference(self, task: Task) -> str | None:
        return self.inner.reference(task)

    def form(self, task: Task, key: Key) -> Task:
        return self.inner.form(task, key)

    def warm(self) -> None:
        self.inner.warm()

    def make(self) -> Env:
        return ToolEpisode(self)

    def run_limits(self) -> RunLimits | None:
        return self.inner.run_limits()

    def bad_actions(self) -> Sequence[str]:
        return (*self.inner.bad_actions(), '<tool_call>{"name": "no such tool"}</tool_call>', "<tool_call>{")


class ToolEpisode(Env):
    """An episode of the inner environment, with uses of tools between its steps."""

    def __init__(self, spec: ToolEnv) -> None:
        self._spec = spec
        self._parser: Parser = PARSERS[spec.parser]
        self._inner = spec.inner.make()
        self._tools: ToolSet | None = None
        self._specs: tuple[ToolSpec, ...] = ()
        self._uses: list[tuple[ToolCall, ToolResult]] = []
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        messages = self._inner.reset(task)
        self._open()
        self._uses, self._over = [], False
        told = tell(self._specs, self._parser, self._spec.style or self._parser.style)
        if not told:
            return messages
        head = messages[:1] if messages[0].role == "system" else ()
        text = "\n\n".join([*(m.content for m in head), told])
        return (Message("system", text), *messages[len(head) :])

    def step(self, action: str) -> StepResult:
        if self._over or self._tools is None:
            raise EnvError("step before reset, or after the episode's end")
        told = self.use_tools(action)
        if told is not None:
            return told
        self._inner.run_limit_s = self.run_limit_s
        result = self._inner.step(action)
        self._over = result.terminated or result.truncated
        return result

    def use_tools(self, action: str) -> StepResult | None:
        """Return the tools' replies to the calls in `action`; None if it has no calls, or no uses are left."""
        limits = self._spec.limits
        left = limits.calls_per_episode - len(self._uses)
        calls: list[ToolCall] = []
        if left:
            calls = [*itertools.islice(self._parser.parse(action, self._specs), limits.calls_per_turn + 1)]
        if not calls or self._tools is None:
            return None
        allowed = min(left, limits.calls_per_turn)
        results = [self._use(self._tools, call) for call in calls[:allowed]]
        self._uses += zip(calls, results, strict=False)
        texts = [r.told(limits) for r in results]
        if len(calls) > allowed:
            texts.append(f"not run: all calls after the first {allowed} of this answer")
        if len(results) == left and self._spec.last_note:
            texts[-1] += "\n\n" + self._spec.last_note
        return self._told(results, texts)

    def allow_uses_again(self) -> None:
        """Reset the count against `ToolLimits.calls_per_episode`; the tools keep their state."""
        self._uses = []

    def _use(self, tools: ToolSet, call: ToolCall) -> ToolResult:
        if call.problem:
            return ToolResult.error("unparsed", f"this call cannot be read: {call.problem}")
        return tools.call(call.name, call.arguments, self._spec.limits)

    def _told(self, results: Sequence[ToolResult], texts: Sequence[str]) -> StepResult:
        num_errors = sum(r.is_error for r in results)
        again = repeated((call.name, call.arguments, result.text) for call, result in self._uses)
        rewards = (
            self._spec.tool_reward * len(results)
            + self._spec.tool_success_reward * (len(results) - num_errors)
            + self._spec.tool_error_reward * num_errors
        )
        return StepResult(
            tuple(Message("tool", text) for text in texts),
            rewards,
            terminated=False,
            reward_parts={"tools": rewards} if rewards else {},
            metrics={
                "tool_calls_n": len(results),
                "tool_errors_n": num_errors,
                "tool_unparsed_n": sum(r.kind == "unparsed" for r in results),
                "tool_timeouts_n": sum(r.kind == "timeout" for r in results),
                "tool_repeats_n": sum(again[-len(results) :]),
                "tool_shown_bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
            },
        )

    def reference_answer(self) -> str:
        """Return the call from the inner environment's `reference_call(results)` in this parser's format; without such
        a method or call, the inner environment's `reference_answer`."""
        hook = getattr(self._inner, "reference_call", None)
        if hook is not None and len(self._uses) < self._spec.limits.calls_per_episode:
            call = hook(tuple(result for _, result in self._uses))
            if call is not None:
                return self._parser.write(call[0], call[1], self._specs)
        return self._inner.reference_answer()

    def rejected(self) -> str:
        return self._inner.rejected()

    def snapshot(self) -> bytes:
        if self._tools is None or self._tools.stateful:
            raise EnvError("these tools hold a state that cannot be copied; replay the episode's actions instead")
        return pickle.dumps((self._inner.snapshot(), self._uses, self._over))

    def restore(self, state: bytes) -> None:
        inner, self._uses, self._over = pickle.loads(state)
        self._inner.restore(inner)
        self._open()

    def close(self) -> None:
        try:
            if self._tools is not None:
                self._tools.close()
        finally:
            self._inner.close()

    def _open(self) -> None:
        if self._tools is not None:
            self._tools.close()
        if self._spec.tools is not None:
            self._tools = self._spec.tools.open()
        else:
            own: Any = getattr(self._inner, "tools", None)
            if own is None:
                raise ConfigError(
                    f"is empty, and {self._spec.inner.name} has no tools of its own",
                    setting="ToolEnv.tools",
                    remedy="name the tools, or give the environment a method tools()",
                )
            self._tools = own()
        self._specs = self._tools.list()


def tell(specs: Sequence[ToolSpec], parser: Parser, style: str) -> str:
    """Return the part of a system prompt about the tools and how to call them."""
    if style == "none" or not specs:
        return ""
    if style == "json":
        listed = "\n".join(json.dumps(_function(spec), ensure_ascii=False) for spec in specs)
        return f"These tools can be called:\n<tools>\n{listed}\n</tools>\n{parser.how}\nIts result is told next."
    listed = "\n".join(_line(spec) for spec in specs)
    return f"These tools can be called:\n{listed}\n{parser.how}\nIts result is told next."


def _function(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": dict(spec.input_schema)}
    return {"type": "function", "function": function}


def _line(spec: ToolSpec) -> str:
    required = spec.input_schema.get("required") or ()
    kinds = [f"{k}: {v.get('type', 'any')}{'' if k in required else ' (optional)'}" for k, v in spec.parameters.items()]
    told = " ".join(spec.description.split())
    return f"{spec.name}({', '.join(kinds)})" + (f": {told}" if told else "")
