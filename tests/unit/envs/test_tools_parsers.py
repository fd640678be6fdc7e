"""Tool calls in text, in every format, and what is done with texts that are out to break them."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax.envs.text import MAX_ANSWER_CHARS
from rolljax.envs.tools import PARSERS, ToolCall, ToolSpec
from rolljax.envs.tools.parsers import MAX_CALL


def spec(name, required, **kinds):
    return ToolSpec(name, "", {"properties": {k: {"type": v} for k, v in kinds.items()}, "required": required})


SPECS = (
    spec("calc", ["expression"], expression="string"),
    spec("search", ["city"], city="string", nights="integer", cheap="boolean", tags="array"),
    spec("python", ["code"], code="string"),
    spec("bash", ["command"], command="string"),
    spec("now", []),
)


def parse(name, text):
    return list(PARSERS[name].parse(text, SPECS))


def good(*calls):
    return [ToolCall(name, arguments) for name, arguments in calls]


CALC = ("calc", {"expression": "17*3"})
TWO = '<tool_call>{"name":"calc","arguments":{"expression":"17*3"}}</tool_call>'
READ = [
    # hermes
    ("hermes", TWO, good(CALC)),
    ("hermes", f"Let me see.\n{TWO}\n\nAnd:\n{TWO} done", good(CALC, CALC)),
    ("hermes", '<tool_call>\n {"name" : "now"}\n\n</tool_call>', good(("now", {}))),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}', good(("now", {}))),
    ("hermes", '<tool_call>{"name":"calc","parameters":{"expression":"17*3"}}</tool_call>', good(CALC)),
    ("hermes", '<tool_call>{"name":"calc","arguments":"{\\"expression\\": \\"17*3\\"}"}</tool_call>', good(CALC)),
    ("hermes", '<tool_call>{"name":"calc","arguments":{"expression":"</tool_call>\n"}}</tool_call>',
     good(("calc", {"expression": "</tool_call>\n"}))),
    ("hermes", f"<think>{TWO}</think>{TWO}", good(CALC)),
    ("hermes", f"{TWO}</think>{TWO}", good(CALC)),
    ("hermes", f"<think>a</think>{TWO}<think>{TWO}</think>{TWO}", good(CALC, CALC)),
    ("hermes", '<tool_call>{"name":"calc","arguments":{"expression":"<think>"}}</tool_call>',
     good(("calc", {"expression": "<think>"}))),
    ("hermes", f"<think>{TWO}", []),
    ("hermes", "51", []),
    ("hermes", "", []),
    ("hermes", "tool_call calc(1) ```python\n1\n``` <python>1</python>", []),
    # fenced
    ("fenced", "```python\nprint(1)\n```", good(("python", {"code": "print(1)"}))),
    ("fenced", "so:\n  ```py  \n\nif x:\n    y\n```\nthen ```bash\n```sh\nls\n```", good(("python", {"code": "\nif x:\n    y"}), ("bash", {"command": "ls"}))),
    ("fenced", "```python\nprint('```')\n```", good(("python", {"code": "print('```')"}))),
    ("fenced", "```json\n{}\n```\n```\nplain\n```", []),
    ("fenced", "```calc\n17*3\n```", good(CALC)),
    ("fenced", "```python\n```", good(("python", {"code": ""}))),
    ("fenced", "<think>\n```python\n1\n```\n</think>\n42", []),
    ("fenced", "```python\nx = '<think>'\n```\n", good(("python", {"code": "x = '<think>'"}))),
    # tags
    ("tags", "a <python>print(1)</python> b", good(("python", {"code": "print(1)"}))),
    ("tags", "<python>\nprint(1)\n</python><bash>ls</bash>", good(("python", {"code": "print(1)"}), ("bash", {"command": "ls"}))),
    ("tags", "<python>a<b</python>", good(("python", {"code": "a<b"}))),
    ("tags", "<html><b>x</b></html><search>x</search>", good(("search", {"city": "x"}))),
    ("tags", "<now></now>", []),
    # compact
    ("compact", "calc(17*3)", good(CALC)),
    ("compact", "  calc ( 17*3 ) \n", good(CALC)),
    ("compact", "calc('17*3')", good(CALC)),
    ("compact", 'calc("17*3")', good(CALC)),
    ("compact", "calc(expression=17*3)", good(CALC)),
    ("compact", "calc((1+2)*3)", good(("calc", {"expression": "(1+2)*3"}))),
    ("compact", "I ask:\ncalc(1)\nnow()\nend", good(("calc", {"expression": "1"}), ("now", {}))),
    ("compact", 'search("Rome, Italy", nights=2, cheap=true)', good(("search", {"city": "Rome, Italy", "nights": 2, "cheap": True}))),
    ("compact", "search(Rome, 2, True, [1, \"a,b\", {\"c\": null}])", good(("search", {"city": "Rome", "nights": 2, "cheap": True, "tags": [1, "a,b", {"c": None}]}))),
    ("compact", "search(12)", good(("search", {"city": "12"}))),
    ("compact", r"search('it\'s \"x\"')", good(("search", {"city": 'it\'s "x"'}))),
    ("compact", "search(nights=2.5)", good(("search", {"nights": 2.5}))),
    ("compact", "calc()", good(("calc", {}))),
    ("compact", "calc('')", good(("calc", {"expression": ""}))),
    ("compact", "the calc(1) is", []),
    ("compact", "calculate(1)", []),
    ("compact", "calc 1", []),
    ("compact", "move(1)", []),
]  # fmt: skip


@pytest.mark.parametrize("name, text, calls", READ, ids=range(len(READ)))
def test_calls_are_read(name, text, calls):
    assert parse(name, text) == calls


PROBLEMS = [
    ("hermes", "<tool_call>calc(1)</tool_call>", "not a JSON object"),
    ("hermes", '<tool_call>{"name": "calc", }</tool_call>', "at character"),
    ("hermes", "<tool_call>", "not a JSON object"),
    ("hermes", "</tool_call>", "without <tool_call>"),
    ("hermes", '<tool_call>{"name":"now"} x</tool_call>', "must be </tool_call>"),
    ("hermes", '<tool_call>{"name":"now"}{"name":"now"}</tool_call>', "must be </tool_call>"),
    ("hermes", '<tool_call>["now"]</tool_call>', "like {"),
    ("hermes", '<tool_call>{"name":3}</tool_call>', "like {"),
    ("hermes", '<tool_call>{"name":"calc","arguments":[1]}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>{"name":"calc","arguments":"x"}</tool_call>', "not a JSON object"),
    ("hermes", '<tool_call>{"name":"calc","arguments":{"a":NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name":"calc","arguments":{"a":' + "9" * 10000 + "}}</tool_call>", "digits"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
    ("hermes", '<tool_call>{"a":"' + "x" * MAX_CALL + '"}</tool_call>', "longer than"),
    ("fenced", "```python\nprint(1)", "```python is not closed"),
    ("tags", "<python>print(1)", "<python> is not closed"),
    ("tags", "<python>" + "x" * (MAX_CALL + 1) + "</python>", "longer than"),
    ("compact", "calc(17*3", "not closed"),
    ("compact", "calc(17*3) ok", "not closed"),
    ("compact", "calc(" + "1+" * 10_000 + "1)", "longer than"),
    ("compact", "now(3)", "takes 0 arguments"),
    ("compact", "search(a, 1, true, [], 5)", "takes 4 arguments"),
    ("compact", "search(a, city=b)", "twice"),
    ("compact", "search(nights=1, Rome)", "without a name"),
    ("compact", "search(Rome, nights=[1)", "at character"),
    ("compact", "search(Rome, tags=" + "[" * 8000 + ")", "nested too deeply|at character"),
    ("compact", "search(Rome, nights=" + "9" * 9000 + ")", "digits"),
]  # fmt: skip


@pytest.mark.parametrize("name, text, said", PROBLEMS, ids=range(len(PROBLEMS)))
def test_what_cannot_be_read_says_why(name, text, said):
    (call,) = parse(name, text)
    assert call.problem and not call.arguments
    assert re.search(said, call.problem), call.problem
    assert len(call.problem) < 300


BLOCKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "```python\n", "```\n", "<python>", "</python>", "calc(", ")",
          "search(", "[", "{", '"', "'", "\\", ",", "=", "\n", " ", "\t", "`", "<", "٣", "\x00", "\ud800", "a", '{"name":"calc","arguments":']  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_megabyte_of_anything_is_read_to_its_end(name, block):
    """All of these end in well under a second; a quadratic reader would take hours."""
    opening = {"fenced": "```python\n", "tags": "<python>", "compact": "search("}.get(name, PARSERS[name].tag)
    for text in (block * (MAX_ANSWER_CHARS // len(block)), opening + block * (MAX_ANSWER_CHARS // len(block))):
        for call in itertools.islice(PARSERS[name].parse(text, SPECS), 5):
            assert len(call.problem) < 300


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(BLOCKS), max_size=25))
def test_no_text_raises_and_thoughts_are_never_calls(name, parts):
    text = "".join(parts)
    for call in PARSERS[name].parse(text, SPECS):
        assert isinstance(call.name, str) and isinstance(call.arguments, dict)
    thought = text.replace("</think>", "")
    assert list(PARSERS[name].parse(f"<think>{thought}</think>42", SPECS)) == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=100, deadline=None)
@given(
    city=TEXTS,
    nights=st.integers(-(10**9), 10**9),
    cheap=st.booleans(),
    tags=st.lists(st.one_of(TEXTS, st.integers(), st.none()), max_size=3),
)
@pytest.mark.parametrize("name", ["hermes", "compact"])
def test_written_calls_are_read_back(name, city, nights, cheap, tags):
    arguments = {"city": city, "nights": nights, "cheap": cheap, "tags": tags}
    parser = PARSERS[name]
    try:
        text = parser.write("search", arguments, SPECS)
    except ValueError:
        assert "think>" in city + json.dumps(tags) or (name == "compact" and len(text_of(arguments)) > 2**14)
        return
    assert parse(name, text) == good(("search", arguments))


def text_of(arguments):
    return json.dumps(arguments)


@pytest.mark.parametrize("name", ["fenced", "tags", "compact"])
def test_formats_say_what_they_cannot_write(name):
    assert parse(name, PARSERS[name].write("calc", {"expression": "17*3"}, SPECS)) == good(CALC)
    assert PARSERS["compact"].write("calc", {"expression": "17*3"}, SPECS) == "calc(17*3)"
    if name != "compact":
        with pytest.raises(ValueError, match="more than one"):
            PARSERS[name].write("search", {"city": "Rome", "nights": 2}, SPECS)
        with pytest.raises(ValueError, match="cannot write"):
            PARSERS[name].write("python", {"code": "</python>\n```\n"}, SPECS)
