"""Decides which texts a computer algebra system may parse as an expression: small, plain and bounded in size.

SymPy's parser executes what it parses. Only numbers, names, `+ - * / **` and calls of elementary functions pass here,
so there is nothing left to execute but arithmetic, and powers are bounded, so the arithmetic is small.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from fractions import Fraction

FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs".split()
)
MAX_CHARS = 2000
MAX_NUMBER_CHARS = 40
MAX_POWER = 200
"""Largest product of nested exponents."""

_NAME = re.compile(r"[A-Za-z]|pi")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


def is_plain(text: str, functions: Collection[str] = FUNCTIONS, names: bool = True) -> bool:
    """Return whether `text` is such an expression. names: allow single letters and `pi`."""
    tree = _parse(text)
    return tree is not None and _power(tree, functions, names, depth=0) is not None


def exact(text: str) -> tuple[Fraction, list[int]] | None:
    """Return the exact value of an expression of whole numbers and `+ - * /`, and its numbers in order; None for
    anything else, a division by zero included."""
    tree = _parse(text)
    numbers: list[int] = []
    if tree is None or _power(tree, (), False, 0) is None:
        return None
    try:
        return _value(tree, numbers), numbers
    except (ZeroDivisionError, ValueError):
        return None


def _parse(text: str) -> ast.expr | None:
    text = text.strip()
    if not text or len(text) > MAX_CHARS or not text.isascii() or "_" in text:
        return None
    if any(len(n) > MAX_NUMBER_CHARS for n in re.findall(r"[\d.eE]+", text)):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _power(node: ast.expr, functions: Collection[str], names: bool, depth: int) -> int | None:
    """Return the largest product of exponents in a branch of the expression; None where it is not plain."""
    if depth > 60:
        return None
    if isinstance(node, ast.Constant):
        plain = type(node.value) is int or (type(node.value) is float and 1e-9 < abs(node.value) < 1e9)
        return 1 if plain or node.value == 0.0 else None
    if isinstance(node, ast.Name):
        return 1 if names and _NAME.fullmatch(node.id) else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return _power(node.operand, functions, names, depth + 1)
    if isinstance(node, ast.Call):
        if not (isinstance(node.func, ast.Name) and node.func.id in functions and len(node.args) == 1):
            return None
        return None if node.keywords else _power(node.args[0], functions, names, depth + 1)
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS)):
        return None
    left = _power(node.left, functions, names, depth + 1)
    if left is None:
        return None
    if isinstance(node.op, ast.Pow):
        exponent = _exponent(node.right)
        if exponent is None:
            # a number to the power of something with a name in it, such as E**x or 2**(-x)
            parts = list(ast.walk(node.right))
            named = any(isinstance(part, ast.Name) and part.id not in functions for part in parts)
            powers = any(isinstance(part, ast.Pow) for part in parts)
            right = _power(node.right, functions, names, depth + 1)
            return left if right is not None and named and not powers else None
        left *= max(1, exponent)
        return left if left <= MAX_POWER else None
    right = _power(node.right, functions, names, depth + 1)
    return None if right is None else max(left, right)


def _exponent(node: ast.expr) -> int | None:
    """Return the size of an exponent that is a number or a ratio of two, rounded up; None for other exponents."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return _exponent(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        size = abs(float(node.value)) if abs(node.value) <= MAX_POWER else MAX_POWER + 1  # type: ignore[arg-type]
        return int(size) + (size != int(size))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        over, under = _exponent(node.left), _exponent(node.right)
        return None if over is None or not under else over
    return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Pow):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        return left * right if isinstance(node.op, ast.Mult) else left / right
    raise ValueError("not exact")
