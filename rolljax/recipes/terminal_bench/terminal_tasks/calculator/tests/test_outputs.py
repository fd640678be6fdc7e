"""The calculator on expressions it has not seen."""

import subprocess
import sys


def values(*lines):
    done = subprocess.run(
        [sys.executable, "-I", "/work/calc.py"],
        input="".join(line + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=10,
        env={},
    )
    assert done.returncode == 0
    return done.stdout.split("\n")[:-1]


def test_order_of_operations():
    assert values("1+2*3", "(1+2)*3", "10-4-3", "2*3*4-1", " 7 ") == ["7", "9", "3", "23", "7"]


def test_minus_signs():
    assert values("-3", "--3", "2*-(1+1)", "5--2", "-(-(-1))", "-2*-2") == ["-3", "3", "-4", "7", "-1", "4"]


def test_division():
    assert values("7/2", "-7/2", "7/-2", "100/10/5", "2*7/4") == ["3", "-4", "-4", "2", "3"]
    assert values("1/0", "1/(2-2)") == ["error", "error"]


def test_large_numbers():
    assert values("99999999999999999999*99999999999999999999") == [str(99999999999999999999**2)]
    assert values("1234567890123456789012/7") == [str(1234567890123456789012 // 7)]


def test_what_is_not_an_expression():
    bad = ["", "   ", "2**3", "1_000", "1 2", "(1", "1)", "()", "+", "1+", "*2", "7//2", "1.5", "0x10", "a", "1,2", "+3"]
    assert values(*bad) == ["error"] * len(bad)


def test_other_digits_and_python_are_errors():
    assert values("\u0663+1", "__import__('os').getpid()", "1 if 1 else 2", "[1][0]") == ["error"] * 4


def test_deep_brackets():
    assert values("(" * 500 + "1" + ")" * 500, "1+1") == ["1", "2"]
