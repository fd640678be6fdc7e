"""Texts that may reach a computer algebra system, and exact arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.adapters.expressions import exact, is_plain


@pytest.mark.parametrize(
    "text",
    [
        "-2*x**3*cos(x) + 6*x**2*sin(x) + C",
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "exp(x)*sin(x)/2",
        "E**x + 2**(-x)",
        "1.5*x - +3",
        "sqrt(1 - x**2) + pi",
        "((x + 1)**2)**3",
    ],
)
def test_plain_expressions(text):
    assert is_plain(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x y",
        "foo",
        "x_1",
        "x.real",
        "f(x)(x)",
        "S('x')",
        "lambda: 1",
        "[x]",
        "x if x else 1",
        "x := 1",
        "x < 1",
        "x // 1",
        "x % 2",
        "~1",
        "1j",
        "True",
        "__import__('os')",
        "sin(x, evaluate=True)",
        "sin(*x)",
        "sin()",
        "factorial(9)",
        "9**9**9",
        "((9**99)**99)**99",
        "(x**9)**(9**9)",
        "2**(3**x)",
        "x**1000",
        "1e400",
        "1e999999999",
        "9" * 50,
        "x+" * 1500 + "x",
        "(" * 300 + "x" + ")" * 300,
        "-" * 1999 + "1",
        "٣ + x",
        "ｓin(x)",
        "x\x00",
        "\ud800",
    ],
)
def test_what_is_not_plain(text):
    assert not is_plain(text)


def test_names_and_functions_may_be_left_out():
    assert is_plain("(1 + 2)*3", (), names=False)
    assert not is_plain("x", (), names=False) and not is_plain("sin(1)", (), names=False)


@pytest.mark.parametrize(
    "text, value, numbers",
    [
        ("6*(98 - 54) - 34 - 66", 164, [6, 98, 54, 34, 66]),
        ("9*3*8/9", 24, [9, 3, 8, 9]),
        ("-1/3", Fraction(-1, 3), [1, 3]),
        (" 7 ", 7, [7]),
    ],
)
def test_exact_values(text, value, numbers):
    assert exact(text) == (value, numbers)


@pytest.mark.parametrize("text", ["1/0", "1/(2-2)", "x", "1.5", "2**2", "sin(1)", "", "1 2", "=5", "9**9**9"])
def test_what_has_no_exact_value(text):
    assert exact(text) is None


@given(st.text(alphabet="0123456789+-*/(). x^e_", max_size=40))
def test_any_text_is_judged(text):
    plain, found = is_plain(text), exact(text)
    assert plain or found is None
    if found is not None:
        assert found[0] == pytest.approx(float(eval(text)))
