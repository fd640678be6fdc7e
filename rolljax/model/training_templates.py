"""Training templates: chat templates under which a token stream can grow, made of published ones that rewrite history.

Templates of models that think write an assistant message in one way while it is the last, and in another way later on:
without its thoughts, or closed by another token. A token stream keeps what was sampled, so an episode of several turns
cannot be rendered with them. The training template of such an original writes every assistant message as the original
writes the last one. For one turn both write the same; for several turns the tokens of earlier turns stay. Two originals
refuse results of tools in conversations without recorded calls; their training templates write them.

An original is recognised by the SHA-256 of its text. This module holds only the edits that turn it into its training
template.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

from rolljax.errors import ConfigError

Edit = tuple[str, str]
"""A text that occurs once in the original, and its replacement in the training template."""
PLAIN = "plain"
"""The value of `Recipe.chat_template` for models without a chat template."""
MAX_BYTES = 2**20
"""Most bytes of a file with a template."""
SETTING = "Recipe.chat_template"
DOCS = "docs/my_model.md, Chat templates"


@dataclasses.dataclass(frozen=True)
class Original:
    """A chat template as it was published."""

    models: str
    """Name of the models that have this chat template."""
    edits: tuple[Edit, ...]
    """Edits that turn the original template into its training template."""


_KEEP_THOUGHTS: Edit = ("loop.index0 > ns.last_query_index", "true")
_KEEP_EMPTY_THOUGHTS: Edit = ("loop.last or (not loop.last and reasoning_content)", "true")
_GPT_OSS: tuple[Edit, ...] = (
    ("elif loop.last and not add_generation_prompt", "elif true"),
    ("set future_final_message.found = true", "set future_final_message.found = false"),
    (
        '{{- raise_exception("Message has tool role, but there was no previous assistant message with a tool call!")'
        " }}",
        '{%- set last_tool_call.name = message.name or "tool" %}',
    ),
)
_GEMMA_3: tuple[Edit, ...] = (
    ("(message['role'] == 'user') != (loop.index0 % 2 == 0)", "false"),
    ("set role = message['role']", 'set role = "user"'),
)
ORIGINALS: Mapping[str, Original] = {
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8": Original(
        "Qwen3", (_KEEP_THOUGHTS, _KEEP_EMPTY_THOUGHTS)
    ),
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": Original(
        "Qwen3, first release", (_KEEP_THOUGHTS, _KEEP_EMPTY_THOUGHTS)
    ),
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": Original(
        "Qwen3.5, 4B and larger", (_KEEP_THOUGHTS,)
    ),
    "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80": Original(
        "Qwen3.5, 2B and smaller", (_KEEP_THOUGHTS,)
    ),
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259": Original("Qwen3.6", (_KEEP_THOUGHTS,)),
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": Original("gpt-oss", _GPT_OSS),
    "8d9e3a3c114fb2053ec500184677af4f7e5f8ec2582443cd535834e68b3ade29": Original("Gemma 3", _GEMMA_3),
}
"""Known originals by `fingerprint`."""


def fingerprint(template: str) -> str:
    """Return the SHA-256 of a template, in hexadecimal digits; a line break at its end does not count."""
    return hashlib.sha256(template.removesuffix("\n").encode("utf-8", "surrogatepass")).hexdigest()


def training_template(template: str) -> str:
    """Return the training template of a known original; every other template unchanged."""
    original = ORIGINALS.get(fingerprint(template))
    for before, after in original.edits if original else ():
        template = template.replace(before, after)
    return template


def refusal(template: str) -> ConfigError:
    """Return the error for a template that rewrites earlier turns and is no known original."""
    known = ", ".join(dict.fromkeys(original.models.partition(",")[0] for original in ORIGINALS.values()))
    return ConfigError(
        "rewrites earlier turns when the conversation grows, so the tokens of an episode cannot be kept. rolljax has "
        f"training templates for the published ones of {known}; this one (SHA-256 {fingerprint(template)[:12]}...) is "
        "none of them",
        setting="chat template",
        remedy="restore the original template of the model, or write one that renders every assistant message in the "
        f"same way wherever it stands and set {SETTING} to its path ({DOCS})",
    )


def plain_template(*, begins: bool) -> str:
    """Return a template for models without one: the unmodified texts, each answer closed by the end-of-text token.

    Args:
      begins: put the beginning-of-text token in front.
    """
    return (
        "{{ bos_token }}" * begins
        + "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
        + "{% elif not loop.last and loop.nextitem['role'] != 'assistant' %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
    )


def read_template(path: str) -> str:
    """Return the chat template in a file.

    Raises:
      ConfigError: there is no such file, or it is no text of at most `MAX_BYTES`.
    """
    problem = ""
    try:
        content = Path(path).read_bytes() if Path(path).is_file() else b""
        text = content.decode()
        if not Path(path).is_file():
            problem = "is not the path of a file"
        elif len(content) > MAX_BYTES:
            problem = f"has {len(content):,} bytes, more than {MAX_BYTES:,}"
    except OSError as e:
        problem = f"cannot be read: {e.strerror or e}"
    except UnicodeDecodeError as e:
        problem = f"is not UTF-8 text: {e}"
    if problem:
        remedy = f"name a file with a Jinja template, or set {PLAIN!r} for a model without one ({DOCS})"
        raise ConfigError(problem, setting=SETTING, value=path, remedy=remedy)
    return text.replace("\r\n", "\n")
