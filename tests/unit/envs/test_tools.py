"""Tools as Python functions: schemas, checks, results, limits; repeats; the calculator."""

import json
import pickle
import threading
import time
from typing import Annotated, Any, Literal

import pytest

from rolljax.envs.text import MAX_DEPTH
from rolljax.envs.tools import (
    FunctionToolSet,
    JoinedTools,
    PythonTools,
    SandboxTools,
    ToolError,
    ToolLimits,
    ToolResult,
    ToolSpec,
)
from rolljax.envs.tools.base import clip, plain
from rolljax.envs.tools.calculator import CalculatorTask, calc
from rolljax.envs.tools.repeats import call_hash, repeated
from rolljax.envs.tools.schema import problem_of, schema_of
from rolljax.errors import ConfigError, InfraError

CALC = "rolljax.envs.tools.calculator.calc"


def book(
    city: str,
    nights: int,
    kind: Literal["hotel", "flat"] = "hotel",
    budget: float | None = None,
    guests: list[str] = (),
    notes: dict[str, int] = {},  # noqa: B006
    late: Annotated[bool, "after ten at night"] = False,
) -> dict[str, Any]:
    """Book a place
    to stay.

    More that nobody is told.

    Args:
      city: where to,
        in full
      nights (int): how many
    """
    return {"city": city, "nights": nights, "kind": kind}


# ---- schemas


def test_a_schema_is_read_from_signature_hints_and_docstring():
    told, schema = schema_of(book)
    assert told == "Book a place to stay."
    assert schema["required"] == ["city", "nights"] and schema["additionalProperties"] is False
    assert schema["properties"] == {
        "city": {"type": "string", "description": "where to, in full"},
        "nights": {"type": "integer", "description": "how many"},
        "kind": {"type": "string", "enum": ["hotel", "flat"], "default": "hotel"},
        "budget": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "guests": {"type": "array", "items": {"type": "string"}},
        "notes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "late": {"type": "boolean", "description": "after ten at night", "default": False},
    }
    json.dumps(schema)


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ""),
        ({"budget": 3, "guests": ["a"], "notes": {"x": 1}, "late": True}, ""),
        ({"budget": None}, ""),
        ({"city": 3}, "argument 'city' must be a string"),
        ({"nights": "3"}, "argument 'nights' must be an integer"),
        ({"nights": True}, "argument 'nights' must be an integer"),
        ({"nights": 3.0}, "argument 'nights' must be an integer"),
        ({"nights": None}, "argument 'nights' must be an integer"),
        ({"kind": "tent"}, 'argument \'kind\' must be one of ["hotel", "flat"]'),
        ({"budget": "low"}, "argument 'budget' must be a number or argument 'budget' must be a null"),
        ({"budget": float("inf")}, "argument 'budget' must be a number or argument 'budget' must be a null"),
        ({"guests": ["a", 1]}, "argument 'guests[1]' must be a string"),
        ({"notes": {"x": "y"}}, "argument 'notes.x' must be an integer"),
        ({"late": 1}, "argument 'late' must be a boolean"),
        (
            {"colour": "red"},
            "there is no argument 'colour'; arguments: city, nights, kind, budget, guests, notes, late",
        ),
        (
            {"x" * 1000: 1},
            f"there is no argument '{'x' * 80}'; arguments: city, nights, kind, budget, guests, notes, late",
        ),
    ],
)
def test_arguments_are_checked(change, said):
    assert problem_of(schema_of(book)[1], {"city": "Rome", "nights": 2} | change) == said


def test_what_a_schema_does_not_say_is_allowed():
    assert problem_of({"type": "object", "properties": {"a": {}}}, {"a": [1], "b": 2}) == ""
    assert problem_of({"type": ["string", "null"], "pattern": "(a+)+$"}, "a" * 40 + "!") == ""
    assert problem_of({"type": "object"}, []) == "the arguments must be an object"
    assert problem_of({"enum": [1]}, True) == "the arguments must be one of [1]"


@pytest.mark.parametrize(
    "make, said",
    [
        ("def f(x): ...", "parameter 'x'"),
        ("def f(*xs: int): ...", "parameter 'xs'"),
        ("def f(x: int, /): ...", "parameter 'x'"),
        ("def f(x: complex): ...", "JSON has no word"),
        ("def f(x: 'Nowhere'): ...", "cannot be read"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(make, said):
    space: dict[str, Any] = {}
    exec(make, space)
    with pytest.raises(ConfigError, match=said):
        PythonTools((space["f"],))


# ---- calls


def fails(text: str) -> str:
    raise ToolError(text)


def breaks(text: str) -> str:
    raise KeyError(text)


def gives(kind: str) -> Any:
    """Something of each kind."""
    return {
        "list": [1, "é"],
        "none": None,
        "odd": {"when": object},
        "half": "a\ud800b",
        "result": ToolResult("r", is_error=True),
    }[kind]


def machine(why: str) -> str:
    raise InfraError(why)


TOOLS = PythonTools((book, fails, breaks, gives, machine, CALC))


def call(name, /, limits=ToolLimits(), **arguments):  # noqa: B008
    return TOOLS.open().call(name, arguments, limits)


def test_what_a_call_gives():
    result = call("book", city="Rome", nights=2)
    assert json.loads(result.text) == result.structured == {"city": "Rome", "nights": 2, "kind": "hotel"}
    assert (result.kind, result.is_error, result.truncated) == ("ok", False, False)
    assert result.bytes == len(result.text) and result.ms >= 0
    assert call("calc", expression="17*3").text == "51"
    assert call("gives", kind="list").text == '[1, "é"]'
    assert call("gives", kind="list").bytes == 9
    assert call("gives", kind="none").text == "null"
    assert "object" in call("gives", kind="odd").text
    assert call("gives", kind="half").text == "a?b"
    assert call("gives", kind="result").is_error


@pytest.mark.parametrize(
    "name, arguments, kind, text",
    [
        ("nope", {}, "unknown_tool", "unknown tool 'nope'; tools: book, fails, breaks, gives, machine, calc"),
        (
            "x" * 10**6,
            {},
            "unknown_tool",
            f"unknown tool '{'x' * 80}'; tools: book, fails, breaks, gives, machine, calc",
        ),
        ("book", {"city": "Rome"}, "bad_arguments", "book: argument 'nights' is missing"),
        ("fails", {"text": "no such thing"}, "exception", "no such thing"),
        ("fails", {"text": ""}, "exception", "fails failed"),
        ("breaks", {"text": "key"}, "exception", "KeyError: 'key'"),
    ],
)
def test_what_goes_wrong_is_a_result(name, arguments, kind, text):
    result = TOOLS.open().call(name, arguments)
    assert (result.is_error, result.kind, result.text) == (True, kind, text)


def test_a_failing_machine_is_not_the_policys_fault():
    with pytest.raises(InfraError, match="disk"):
        call("machine", why="disk")


def shout(times: int) -> str:
    return "é" * times


def test_long_results_keep_their_ends():
    tools = PythonTools((shout,)).open()
    limits = ToolLimits(shown_bytes=100, kept_bytes=1000)
    for times in range(40, 600, 7):
        result = tools.call("shout", {"times": times}, limits)
        assert result.bytes == 2 * times and result.truncated == (2 * times > 1000)
        assert len(result.text.encode()) <= 1000 and len(result.told(limits).encode()) <= 100
        assert result.told(limits).strip("é") == ("" if times <= 50 else result.told(limits).strip("é"))
    text, size = clip("a" * 500 + "b" * 500, 200)
    assert size == 1000 and text.startswith("aaaa") and text.endswith("bbbb") and "1000 bytes" in text
    assert 150 < len(text) <= 200
    assert clip("abc", 3) == ("abc", 3) and clip("é", 2) == ("é", 2)


def test_arguments_are_made_plain():
    assert plain({"a\ud800": ["\udfffé", 1, None, True, 1.5]}) == {"a?": ["?é", 1, None, True, 1.5]}
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert plain(value) == value
    with pytest.raises(ValueError, match="nested"):
        plain([value])
    with pytest.raises(ValueError, match="too large"):
        plain({"a": float("inf")})
    assert call("calc", expression=[value]).kind == "bad_arguments"


def test_tools_that_wait_have_a_deadline():
    gone = threading.Event()

    def hang() -> str:
        gone.wait(60)
        return "late"

    def late() -> str:
        raise TimeoutError("its own")

    tools = FunctionToolSet([hang, late, calc], waits=True)
    limits = ToolLimits(call_s=0.2, concurrency=1)
    result = tools.call("hang", {}, limits)
    assert (result.kind, result.text) == ("timeout", "hang gave no result within 0.2 s")
    with pytest.raises(InfraError, match="1 calls of hang are running"):
        tools.call("hang", {}, limits)
    assert tools.call("calc", {"expression": "1+1"}, limits).text == "2"
    assert tools.call("late", {}, limits).text == "TimeoutError: its own"
    gone.set()
    deadline = time.monotonic() + 30
    while tools.call("hang", {}, ToolLimits(call_s=20, concurrency=1)).is_error:
        assert time.monotonic() < deadline


def test_settings_are_hashable_and_travel():
    tools = PythonTools((CALC, book))
    assert pickle.loads(pickle.dumps(tools)) == tools and hash(tools) == hash(PythonTools((CALC, book)))
    assert not tools.waits and PythonTools((CALC,), waits=True).waits
    assert not tools.open().stateful


def test_joined_tools():
    joined = JoinedTools((PythonTools((book,)), PythonTools((CALC,), waits=True)))
    with_close = joined.open()
    assert [s.name for s in with_close.list()] == ["book", "calc"] and joined.waits
    assert with_close.call("calc", {"expression": "2*3"}).text == "6"
    assert with_close.call("calc", {}).kind == "bad_arguments"
    assert with_close.call("nope", {}).kind == "unknown_tool"
    with_close.close()
    with pytest.raises(ConfigError, match="two tools"):
        JoinedTools((PythonTools((CALC,)), PythonTools((CALC,)))).open()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ToolLimits(calls_per_turn=0),
        lambda: ToolLimits(shown_bytes=3),
        lambda: ToolLimits(kept_bytes=100),
        lambda: ToolLimits(call_s=0),
        lambda: PythonTools(("no.such.function",)),
        lambda: PythonTools(("nodots",)),
        lambda: PythonTools(("rolljax.envs.tools.calculator.MAX_CHARS",)),
        lambda: PythonTools((book, book)),
        lambda: SandboxTools(verbs=("bash", "sudo")),
        lambda: CalculatorTask(via="abacus"),
        lambda: CalculatorTask(digits=1),
        lambda: CalculatorTask(operators="/"),
    ],
)
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_the_text_argument():
    def spec(required, **kinds):
        return ToolSpec("t", "", {"properties": {k: {"type": v} for k, v in kinds.items()}, "required": required})

    assert spec(["a"], a="string", b="integer").text_parameter == "a"
    assert spec([], a="string").text_parameter == "a"
    assert spec([], a="string", b="string").text_parameter is None
    assert spec(["a"], a="integer").text_parameter is None
    assert spec(["a", "b"], a="string", b="string").text_parameter is None
    assert ToolSpec("t").text_parameter is None


# ---- the calculator


@pytest.mark.parametrize(
    "question, answer",
    [
        ("4817*93+55", "448036"),
        ("1-2-3", "-4"),
        ("2*(3+4)*5", "70"),
        ("-3*-3", "9"),
        ("7//2*2", "6"),
        ("-7//2", "-4"),
        ("((((1))))", "1"),
        (" 1 + 1 ", "2"),
        ("0012", "12"),
        ("9" * 200 + "+1", "1" + "0" * 200),
    ],
)
def test_the_calculator_is_right(question, answer):
    assert calc(question) == answer


@pytest.mark.parametrize(
    "question",
    [
        "", " ", "1+", "(1", "1)", "()", "1 1", "2**3", "9**9**9", "1//0", "1/2", "abs(1)", "__import__('os')", "1.5", "1e9",
        "²", "٣+1", "\x00", "(" * 100 + "1" + ")" * 100, "-" * 100 + "1", "1" * 257, "1+" * 10**6,
    ],
)  # fmt: skip
def test_the_calculator_refuses(question):
    with pytest.raises(ToolError):
        calc(question)


# ---- repeats


def test_repeats():
    same = ("f", {"a": 1, "b": 2}, "r")
    turned = ("f", {"b": 2, "a": 1}, "r")
    assert repeated([same, turned, same]) == [False, False, True]
    assert repeated([same, turned]) == [False, False] and repeated([]) == []
    assert repeated([same, ("g", {}, "r"), turned, ("f", {}, "r"), same, same]) == [False] * 4 + [True, True]
    assert not any(repeated([same, same, ("f", same[1], "new"), same, same]))
    assert repeated([same, same, ("f", same[1], "new"), same, same, same]) == [False] * 5 + [True]
    assert repeated([same, same, ("g", {}, "r"), same, same]) == [False, False, False, True, True]
    assert repeated([same, same], times=2) == [False, True] and repeated([same], times=1) == [True]
    assert call_hash("f", {"a": 1}) == call_hash("f", {"a": 1}) != call_hash("f", {"a": "1"})
    assert call_hash("f", {"a": "\ud800", "b": object}) and len(call_hash("f", {})) == 16
