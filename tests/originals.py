"""Chat templates as they were published. They come with TRL, which the tests install; none is kept in this repository."""

import functools
import importlib.util
from pathlib import Path

from rolljax.model.training_templates import fingerprint

# what the first release of Qwen3 said where later ones say something else: (later, first)
OF_FIRST_RELEASE = (
    ('message.role == "user" and message.content is string and not(', 'message.role == "user" and not('),
    (
        "    {%- if message.content is string %}\n        {%- set content = message.content %}\n    {%- else %}\n"
        "        {%- set content = '' %}\n    {%- endif %}\n",
        "",
    ),
    ("message.role + '\\n' + content + '<|im_end|>' + '\\n'", "message.role + '\\n' + message.content + '<|im_end|>' + '\\n'"),
    (
        "        {%- set reasoning_content = '' %}\n",
        "        {%- set content = message.content %}\n        {%- set reasoning_content = '' %}\n",
    ),
    ("message.reasoning_content is string", "message.reasoning_content is defined and message.reasoning_content is not none"),
    (
        "            {%- if '</think>' in content %}\n"
        "                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n",
        "            {%- if '</think>' in message.content %}\n"
        "                {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\n"
        "                {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n",
    ),
    ("        {{- content }}\n        {{- '\\n</tool_response>' }}", "        {{- message.content }}\n        {{- '\\n</tool_response>' }}"),
)  # fmt: skip


@functools.cache
def published():
    """Return the templates that TRL has, by name, and the first release of Qwen3's."""
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    found = {f.stem: f.read_text(encoding="utf-8") for f in folder.glob("*.jinja") if not f.stem.endswith("_training")}
    first = found["qwen3"]
    for later, earlier in OF_FIRST_RELEASE:
        assert first.count(later) == 1, later
        first = first.replace(later, earlier)
    return found | {"qwen3_first": first}


@functools.cache
def by_fingerprint():
    """Return the same by their SHA-256."""
    return {fingerprint(text): text for text in published().values()}
