"""Renders chat templates; a template that came with a folder is rendered in a process of its own
(`rolljax.model.templates`).

Needs jinja2 and nothing else, so that the process starts in a tenth of a second and its memory can be limited. The
template gets the same variables and functions as in `transformers`; `tests/unit/model/test_templates.py` compares the
two.

    request   {"template": ..., "variables": {...}, "day": ...}    a line of JSON on standard input
    response  {"text": ...} or {"error": ...}                      a line of JSON on standard output
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

MEMORY_BYTES = 2**30
"""Most bytes of the address space of the process."""
FREE_CHARS, CHARS_PER_BYTE = 2**20, 8
"""Maximum number of characters that a template may write, and additional ones for each byte of its request."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in a message, in order of precedence."""


def render(template: str, variables: Mapping[str, Any], day: str | None = None) -> str:
    """Render a template with `messages`, `tools` and further variables.

    Args:
      day: the date that the template gets, in ISO 8601; None: today.
    """
    clock = {} if day is None else {"strftime_now": datetime.fromisoformat(day).strftime}
    return _compiled(template).render({**clock, **variables, "messages": [_message(m) for m in variables["messages"]]})


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without empty fields, with its reasoning under each name that templates look for."""
    found = {name: value for name, value in message.items() if value is not None}
    thought = next((found[name] for name in REASONING if name in found), None)
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: marks the text to train on; it has no effect on rendering."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return env.from_string(template)


def answer(request: bytes) -> bytes:
    """Return the response to a request."""
    try:
        asked = json.loads(request)
        text = render(asked["template"], asked["variables"], asked.get("day"))
        limit = FREE_CHARS + CHARS_PER_BYTE * len(request)
        if len(text) > limit:
            return json.dumps({"error": f"it writes {len(text):,} characters, more than {limit:,}"}).encode()
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return json.dumps({"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}).encode()
    except Exception as e:  # border: a template may raise anything
        return json.dumps({"error": f"{type(e).__name__}: {e}"[:2000]}).encode()


def limit_memory() -> None:
    """Limit the memory of this process, and make it the first that the kernel kills when memory runs out."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)


def main() -> None:
    """Render the templates that come in, within limits, until the input ends."""
    sys.path[:] = json.loads(sys.argv[1])
    _compiled("")
    limit_memory()
    for request in sys.stdin.buffer:
        sys.stdout.buffer.write(answer(request) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
