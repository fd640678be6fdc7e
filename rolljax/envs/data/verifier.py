r"""Compares two formulas with math-verify, in a forked child.

The text is parsed by a grammar and simplified by SymPy, which a short text can keep busy for ever: processor time and
memory are bounded, and an answer that passes the bounds is wrong. Neither of the library's two other readers is used:
one executes what it reads, the other guesses where the answer is.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from rolljax.envs.bounded import TooMuch, or_default, scored
from rolljax.errors import needed

CPU_S = 3.0
MEMORY_GIB = 0.5
_USUAL = (
    ("2\\sqrt{2}", "\\sqrt{8}"), ("[0,1)", "(0, 1]"), ("\\{1,2\\}", "2,1,3"), ("x=\\frac{1}{2}", "y=0.5"), ("5", "5 x"),
    ("x^2+1", "(x+1)^2"), ("\\pi", "3.14"), ("(1,2)", "(2,1)"), ("10^3", "1.5\\times 10^{3}"),
    ("\\text{5 cm}", "\\ln 5"),
)  # fmt: skip


def equal(reference: str, answer: str) -> bool | TooMuch:
    """Return whether `answer` is equal to `reference_answer`, both in LaTeX without a box; `TooMuch`: undecided within
    the bounds.

    Raises:
      EnvError: `reference_answer` itself passes the bounds. InfraError: the child was lost.
    """
    _library()
    return scored(lambda text: _equal(reference, text), answer, reference, cpu_s=CPU_S, memory_gib=MEMORY_GIB)


def warm() -> None:
    """Load the modules of a child, and warm up the grammar with usual formulas."""
    for reference, answer in _USUAL:
        _equal(reference, answer)


@functools.cache
def _library() -> Any:
    """Import math-verify, and silence its warning that it sets no time limit."""
    with needed("math_verify", "comparing formulas", install="math-verify"):
        import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _equal(reference: str, answer: str) -> bool:
    def verify() -> bool:
        found = _library().verify(
            _parsed(reference), _parsed(answer), timeout_seconds=None, allow_set_relation_comp=True
        )
        return bool(found)

    return or_default(verify, False, raises=(MemoryError,))


def _parsed(text: str) -> list[Any]:
    how = [_library().LatexExtractionConfig(boxed_match_priority=0)]
    boxed = "\\boxed{" + text.replace("\n", " ") + "}"
    # its other mode looks for a fraction anywhere in a text that it cannot read
    return _library().parse(
        boxed, how, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
