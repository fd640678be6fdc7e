"""Chat templates that anybody may have written: rendered as `transformers` does, and never without end."""

import os

import pytest

from rolljax.errors import ConfigError
from rolljax.model import template_worker, templates
from rolljax.model.tokenizer import BYTE_TEMPLATE, Chat, byte_tokenizer
from rolljax.types import Message

TOOL = {"type": "function", "function": {"name": "add", "description": "é <&>", "parameters": {"type": "object"}}}
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  what\n is {{ 1 }} \U0001f600 \ud800 \ufdd00\ufdd1?"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1.5}}}]},
    {"role": "tool", "content": "3", "name": None},
]  # fmt: skip
ORDINARY = {
    "bytes": BYTE_TEMPLATE,
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
    "namespace": (
        "{%- set ns = namespace(n=0, last='') %}\n{%- for m in messages[::-1] %}\n"
        "{%- set ns.n = ns.n + 1 %}\n{%- if loop.first or not m.content %}{% continue %}{% endif %}\n"
        "{{- ns.n ~ m.content | trim }}\n{%- endfor %}{{ bos_token }}{{ undefined_thing }}"
    ),
    "macro": "{% macro line(x) %}[{{ x | upper }}]{% endmacro %}{% for m in messages %}{{ line(m.role) }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}",
    "thought": "{% for m in messages if m.thinking %}{{ m.thinking }}{{ m.reasoning_content.split('h')[-1] }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dict": "{% set d = dict(a=1, b=2) %}{{ d.items() | list }}{{ dict.fromkeys(['x']) }}{% if enable_thinking %}yes{% endif %}",
    "blocks": "  {% if add_generation_prompt %}\n  a\n  {% endif %}\n  b\n\n",
}


def variables(messages=TALK, **more):
    found = {"messages": messages, "tools": [TOOL], "documents": None, "add_generation_prompt": True}
    return found | {"bos_token": "<s>", "enable_thinking": True} | more


@pytest.mark.parametrize("name", ORDINARY)
def test_templates_say_what_they_say_in_transformers(name):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<s>"
    want = tokenizer.apply_chat_template(
        TALK, [TOOL], chat_template=ORDINARY[name], add_generation_prompt=True, tokenize=False, enable_thinking=True
    )
    assert want
    for trusted in (False, True):
        got = templates.render(ORDINARY[name], variables(**tokenizer.special_tokens_map), trusted=trusted)
        assert got == want


def test_some_tokenizers_have_a_template_of_their_own_for_tools():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | tojson }}"}
    chat = Chat(tokenizer)
    assert chat._render(TALK).startswith("plain") and chat._render(TALK, tools=[TOOL]).startswith("tools [")
    tokenizer.chat_template = {"rag": "x"}
    with pytest.raises(ConfigError, match="no default"):
        Chat(tokenizer).prompt_ids([Message("user", "q")])


LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}"
ENDS = "{% endfor %}" * 3
HOSTILE = {
    "loops without a word": LOOPS + ENDS,
    "loops with one": LOOPS + "x" + ENDS,
    "a long range": "{% for a in range(10**9) %}x{% endfor %}",
    "a bomb of words": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "too much in the end": "{% for a in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
    "one large word": "{{ 'a' * 10**10 }}",
    "one large list": "{{ ([0] * 10**10) | length }}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
    "a large power, not shown": "{% set x = 7 ** (7 ** 12) % 2 %}{{ x }}",
    "doubling": "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a wide format": "{{ '{:>10000000000}'.format(1) }}",
    "a wide percent": "{{ '%10000000000d' % 1 }}",
    "a wide filter": "{{ 'x' | center(10**10) }}",
    "a wide replace": "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
    "text without sense": "{{ lipsum(n=10**7) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "nesting": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a nested expression": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "no template": "{% for %}",
    "its own words": "{{ raise_exception('only users speak') }}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "files": "{% include '/etc/passwd' %}",
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_is_an_error_in_time(case):
    """Independent of the machine's load: an ordinary template has two minutes, and the hostile ones never end."""
    with pytest.raises(ConfigError, match="the chat template failed"):
        templates.render(HOSTILE[case], variables(), deadline_s=0.5)
    assert templates.render("{{ messages[0].content }}", variables(), deadline_s=120) == "be brief"


def test_what_a_template_may_write_grows_with_what_it_is_given():
    long = [{"role": "user", "content": "x" * 2**20}]
    template = "{{ messages[0].content * n }}"
    assert len(templates.render(template, variables(long, n=5))) == 5 * 2**20
    with pytest.raises(ConfigError, match="more than"):
        templates.render(template, variables(long, n=12))


def test_the_process_is_begun_again_when_it_is_lost():
    renderer = templates._Renderer()
    request = {"template": "{{ messages | length }}", "variables": {"messages": []}}
    assert renderer.ask(request, 120) == "0"
    first = renderer._child
    assert renderer.ask(request, 120) == "0" and renderer._child is first
    os.kill(first.pid, 9)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert renderer.ask(request, 120) == "0" and renderer._child is not first
    renderer.close()
    renderer.close()


def test_what_is_rendered_in_a_process_is_limited_in_memory():
    """The limit, not the machine, ends a large word: it is reported, and the process continues."""
    with pytest.raises(ConfigError, match=f"more than {template_worker.MEMORY_BYTES >> 20} MiB"):
        templates.render("{{ 'a' * 10**10 }}", variables(), deadline_s=120)
