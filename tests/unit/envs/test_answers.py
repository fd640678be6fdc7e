"""Final answers: finding them in a text, and comparing two of them."""

import json
import os
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolljax.envs.bounded import TooMuch
from rolljax.envs.data import verifier
from rolljax.envs.data.answers import ANSWER_FORMATS, canonical, compare, find, is_number, split_recorded, to_verify
from rolljax.envs.questions import is_right, is_same
from tests.data.answer_pairs import OURS, THEIRS

FORMATS_AND_TAGS = (*ANSWER_FORMATS, "Answer: {answer}", "<answer>{answer}</answer>")

SAME = [
    ("18", ["18.0", "18.", "$18", "\\$18.00", "18 dollars", "18 \\text{ dollars}", "x = 18", "36/2", "\\frac{36}{2}"]),
    ("-3", ["\u22123", "- 3", "-3.00", "-6/2", "-$3", "-\\frac{6}{2}"]),
    ("1000", ["1,000", "1{,}000", "1\\,000", "1e3", "1,000.00", "1000 km/h"]),
    ("1/2", ["0.5", ".5", "\\frac12", "\\dfrac{1}{2}", "2/4", "50%", "50\\%", "50 percent"]),
    ("50\\%", ["0.5", "50", "50%", "\\frac{1}{2}"]),
    ("3/2", ["1.5", "1 1/2", "1\\frac{1}{2}", "1\\frac12"]),
    ("90^\\circ", ["90", "90°", "90^{\\circ}", "90 degrees"]),
    ("[0,1)", ["[0, 1)", "\\left[0, 1\\right)"]),
    ("B", ["(B)", "B.", "\\text{(B)}", "B) 12 meters", "B: a dog", "\\textbf{(B)}"]),
    ("\\text{Evelyn}", ["Evelyn", "evelyn", "\\text{ Evelyn. }"]),
    ("Yes", ["yes", "\\text{Yes}", "YES."]),
    ("x+1", ["x + 1", "$x+1$", "x+\\,1"]),
    ("12:30", ["12:30"]),
]
"""Gold, and what plain rules say is the same."""
DIFFERENT = [
    ("18", ["19", "18.01", "-18", "180", "five", "x", "nan", "inf", "١٨", "", " "]),
    ("1/2", ["2", "0.50001", "5%", "1/3"]),
    ("50\\%", ["5", "500", "0.05"]),
    ("11/2", ["1 1/2"]),
    ("1 1/2", ["11/2", "1/2"]),
    ("B", ["A", "A dog", "AB", "b", "Both", "12", "nan"]),
    ("Yes", ["No", "sey", "eyes"]),
    ("stop", ["pots", "spot", "s t o p"]),
]
"""Gold, and what plain rules say is something else."""
FORMULAS_SAME = [
    ("2\\sqrt{2}", "\\sqrt{8}"), ("2\\sqrt2", "\\sqrt 8"), ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"), ("5", "\\sqrt{25}"),
    ("1000", "10^3"), ("1500", "1.5 \\times 10^3"), ("-3/4", "\\frac{-3}{4}"), ("\\{1,2\\}", "\\{2, 1\\}"), ("1, 2", "2, 1"),
    ("x^2+2x+1", "(x+1)^2"), ("\\frac{\\pi}{2}", "\\pi/2"), ("y = 2x+3", "2x+3"), ("x \\in [1,2]", "[1,2]"), ("5", "5\\text{ cm}^2"),
    ("x+y", "y+x"), ("\\sqrt{2}", "1.41421356"), ("2", "\\boxed{2}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
]  # fmt: skip
FORMULAS_DIFFERENT = [
    ("25", "\\sqrt{25}"), ("10", "10^2"), ("5", "5x"), ("5", "5 \\pi"), ("5", "5i"), ("5", "5!"), ("5", "5 million"),
    ("5", "5 minus 1"), ("2", "2 dozen"), ("3", "3 or 4"), ("3", "3, 4"), ("3", "3-5"), ("12", "1,2"), ("(0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"), ("\\{1,2\\}", "\\{1,2,3\\}"), ("\\{1,2\\}", "\\mathbb{R}"), ("[0,1]", "\\mathbb{R}"), ("\\pi", "3.14"),
    ("x^2+2x+1", "(x+1)^3"), ("5", "\\infty"), ("5", "\\frac{5}{0}"), ("x+1", "\\frac{0}{0}"), ("5", "(-\\infty,\\infty)"),
    ("x", "nan"), ("x", "__import__('os').getcwd()"), ("512", "5 12"),
]  # fmt: skip


def flat(table):
    return [(reference, given) for reference, many in table for given in many]


@pytest.mark.parametrize("reference, given", flat(SAME))
def test_the_same_answer_written_otherwise(reference, given):
    assert compare(reference, given) is True


@pytest.mark.parametrize("reference, given", flat(DIFFERENT))
def test_other_answers(reference, given):
    assert compare(reference, given) is False


def test_formulas_are_compared_by_the_verifier():
    """In this process; the children that it runs in are below."""
    wrong = []
    for want, pairs in ((True, FORMULAS_SAME), (False, FORMULAS_DIFFERENT)):
        for reference, answer in pairs:
            if judged_here(reference, answer) is not want:
                wrong.append((reference, answer))
    assert not wrong


def judged_here(reference, answer):
    """Compute `is_same` without a child process for the verifier."""
    plainly = compare(reference, answer)
    if plainly is not None:
        return plainly
    verdicts = [(compare(want, got), want, got) for want, got in to_verify(reference, answer)]
    return all(verifier._equal(want, got) if plainly is None else plainly for plainly, want, got in verdicts)


# ---- pairs from the test suites of others ---------------------------------------------------------------------------


def test_pairs_from_outside():
    """Every verdict is that of the source, or `OURS` has another one with the rule that it follows from."""
    ours = {(reference, answer): right for reference, answer, right, _ in OURS}
    theirs = {(reference, answer): right for pairs in THEIRS.values() for reference, answer, right in pairs}
    assert len(theirs) >= 300 and ours.keys() <= theirs.keys()
    assert [pair for pair, right in ours.items() if theirs[pair] is right] == [], "these do not differ"
    verifier.warm()
    found = {pair: judged_here(*pair) for pair in theirs}
    assert {pair: right for pair, right in found.items() if right is not (theirs | ours)[pair]} == {}


RULES = [
    # (recorded, answer, verdict): docs/my_model.md
    ("8", "2**3", True), ("23", "2**3", False), ("1024", "2**10", True), 
    ("999", "9**9**9", False), ("512", "2^{3^2}", True), ("512", "2^3^2", True), ("1", "1^{9^9}", True), ("0", "9**9**9", False),
    ("5", "**5**", True), ("5", "**x** = 5", True), ("30", "3**0**", False), ("10^{-2}", "10^-2", True),
    ("34", "34 \\approx 33", True), ("33", "34 \\approx 33", False), ("33", "x \\approx 33", True), ("34", "≈ 34", True),
    ("\\frac{1}{3}", "x = \\frac{1}{3} \\approx 0.333", True), ("0.333", "\\frac{1}{3} \\approx 0.333", False),
    ("34", "33 = 34", False), ("33", "33 = 34", False), ("34", "34 = 33", False), ("18", "36/2 = 18", True),
    ("18", "x = 36/2 = 18", True), ("18", "x = 17 = 18", False), ("5", "x + y = 5", True), ("x+2", "x+1 = x+2", False),
    ("5", "= 5", True), ("5", "5 =", False), ("x+2", "f(x) = x+2", True), ("y = 2x+3", "2x - y + 3 = 0", True),
    ("5", "5 cm = 5", True), ("5", "5" + " = 5" * 5, True), ("5", "5" + " = 5" * 6, False),
    ("\\frac{4}{3}", "\\frac{4}{3} \\cup \\frac{3}{4}", False), ("\\frac{3}{4}", "\\frac{4}{3} \\cup \\frac{3}{4}", False),
    ("1,2", "2,1", True), ("1,2", "x=2 or x=1", True), ("1,2", "1,2,3", False), ("1", "1,2", False), ("2,2,1", "1,2", True),
    ("\\pm 3", "3, -3", True), ("3", "\\pm 3", False), ("x=4, y=3", "x=3, y=4", False), ("x=4, y=3", "y=3, x=4", True),
    ("1000", "1 000", True), ("1234567", "1 234 567.0", True), ("1234", "12 34", False), ("2 100/3", "2100/3", False),
    ("4210_5", "4210_{5}", True), ("4210_5", "4210_6", False), ("4210", "4210_6", False),
    ("5", "5 \\text{ (or 6)}", False), ("5", "5 \\text{ 6}", False), ("5", "5 } 6", False), ("5", "5\\text{ units}", True),
    ("5", "\\boxed{5}6", False), ("5", "5 > 4", False), ("(-\\infty, 5)", "x < 5", True), ("x < 5", "(-\\infty, 5)", True),
    ("B", "(B) or (C)", False), ("B", "B, C", False), ("B", "B. I am sure", True),
]  # fmt: skip


@pytest.mark.parametrize("reference, answer, right", RULES)
def test_rules_of_answers(reference, answer, right):
    assert judged_here(reference, answer) is right


@pytest.mark.parametrize(
    "text, reference, right",
    [
        ("2**3", "8", True), ("2**3", "23", False), ("2**3", "3", False), ("9**9**9", "999", False), ("9**9**9", "9", False),
        ("1 000", "1000", True), ("1,2", "2,1", True), ("34 \\approx 33", "34", True), ("34 \\approx 33", "33", False),
        ("33 = 34", "34", False), ("7 9", "9", False), ("3 + 4 = 7", "7", True), ("So 3 + 4 = 7", "7", True),
        ("The answer is \\boxed{1 000}.", "1000", True),
    ],
)  # fmt: skip
def test_texts_that_are_right(text, reference, right):
    assert is_right(text, reference) is right


def test_the_table_of_rules_in_the_docs_is_true():
    page = (Path(__file__).parents[3] / "docs" / "my_model.md").read_text()
    table = page.split("## When two answers are the same")[1].split("\n## ")[0]
    rows = [re.split(r" \| ", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 17
    verifier.warm()
    for _, _, recorded, *verdicts in rows:
        (reference,) = re.findall("`([^`]+)`", recorded)
        for want, cell in zip((True, False), verdicts, strict=True):
            assert {
                answer: judged_here(reference, answer) for answer in re.findall("`([^`]+)`", cell)
            } == dict.fromkeys(re.findall("`([^`]+)`", cell), want)


JOINERS = r"""
, ; : / | \| & + - * ^ _ ! ? \ne \neq < > \le \ge \leq \geq \lt \gt \equiv \propto = == \to \rightarrow \Rightarrow \implies \iff
\leftrightarrow \mapsto \in \notin \ni \subset \supset \mid \nmid \parallel \perp \vee \wedge \lor \land \cup \cap \setminus \oplus
\otimes \odot \circ \star \bullet \times \div \pm \mp \quad \qquad \\ \text{or} \text{and} or and vs \text{versus} (or) to
\text{to} -> => := \choose \atop \over \bmod \gcd \& \# \% \, \; ~ \ldots \dots ... \because \therefore \neg \ast \wr \dagger
\bigcup \sqcup \asymp \models \prec \xrightarrow{} \overset{} \newline \hline \hspace{1cm} \phantom{x} \boxed{} \text{,} \text{;}
i.e. not maybe \mathrm{or} \operatorname{or} \textbf{or} \lvert \rvert } { \} \{ $ $$ \) \( \] \[ % || // .
""".split()
FORMS = r"""
A~\text{(or~B)} A~(B) A~\text{B} A~[B] \{A,B\} (A,B) [A,B] [A,B) A_{B} A^{B} \overset{A}{B} \underset{A}{B} \stackrel{A}{B}
\boxed{A}\boxed{B} \boxed{A}B \boxed{B}A $A$~$B$ \begin{cases}A\\B\end{cases} \begin{array}{c}A\\B\end{array}
\begin{pmatrix}A\\B\end{pmatrix} \cancel{A}B \not~A~B \underline{A}B \color{red}{A}B \textcolor{red}{A}B \phantom{A}B \tag{A}B
\label{A}B x=A,x=B x=A,y=B x\in\{A,B\} A\le~x\le~B x=A=B x=A~\text{or}~x=B \text{A~or~B} A~\text{but}~B A\text{units},B\text{units}
""".split()
VALUES = [
    ("34", "33"),
    ("\\frac{4}{3}", "\\frac{3}{4}"),
    ("2\\sqrt{3}", "3\\sqrt{2}"),
    ("x+1", "x+2"),
    ("(1,2)", "(2,3)"),
]


def hedges(values):
    """Yield two values in one answer, with everything that LaTeX can put between or around them."""
    for a, b in values:
        for joiner in JOINERS:
            yield a, b, f"{a} {joiner} {b}"
        for form in FORMS:
            yield a, b, re.sub("[AB]", lambda m, a=a, b=b: a if m[0] == "A" else b, form).replace("~", " ")


HONEST = {"x+1^x+2", "x+1 ^ x+2", "x+1^{x+2}"}
"""What has the value of one of the two: `1` to any power."""


def wins_one(values):
    return [
        (reference, text)
        for a, b, text in hedges(values)
        if text not in HONEST
        for reference in (a, b)
        if judged_here(reference, text)
    ]


def test_no_answer_that_states_two_values_earns_the_reward_of_one():
    verifier.warm()
    assert wins_one(VALUES[:2]) == []


@pytest.mark.slow
def test_no_answer_that_states_two_formulas_earns_the_reward_of_one():
    verifier.warm()
    assert wins_one(VALUES[2:]) == []


def test_the_verifier_runs_in_a_child(monkeypatch):
    assert is_same("2\\sqrt{2}", "\\sqrt{8}") is True and is_same("2\\sqrt{2}", "\\sqrt{7}") is False
    here = os.getpid()
    monkeypatch.setattr(verifier, "_equal", lambda reference, given: os.getpid() != here)
    assert is_same("x+1", "x-1") is True


def test_what_the_verifier_chokes_on_is_wrong_and_no_fault(monkeypatch):
    monkeypatch.setattr(verifier, "_parsed", lambda text: [][1])
    assert is_same("x+1", "1+x") is False


HOSTILE = [
    "9^{9^{9^{9^{9}}}}", "99999999999!", "\\sum_{i=1}^{10^{12}} i^i", "(x+1)^{99999}(x+2)^{99999}", "(" * 29 + "x" + ")" * 29,
    "\\int_0^{10} x^{x^{x}} dx", "9**9**9**9", "\\frac{" * 60 + "1" + "}{2}" * 60, "{" * 400, "1/" * 200 + "1", "\\sqrt" * 80 + "{2}",
    "\\binom{10^9}{10^8}", "2^{2^{2^{2^{2^{2}}}}}", "x" * 400, "+".join("x" * 200), "\\left(" * 60, "\\lim_{x\\to 0} x^x^x^x",
]  # fmt: skip


def test_an_answer_that_keeps_the_verifier_busy_is_wrong(monkeypatch):
    monkeypatch.setattr(verifier, "CPU_S", 1.0)
    verifier.warm()
    assert is_same("5", HOSTILE[0]) == TooMuch("time")


@pytest.mark.sweep
@pytest.mark.parametrize("reference", ["5", "x^2+1", "(1,2)"])
def test_no_hostile_answer_is_right_or_holds_anybody_up(reference):
    verifier.warm()
    for answer in HOSTILE:
        found = is_same(reference, answer)
        assert found is False or isinstance(found, TooMuch), answer


CONSTANTS = [
    "", " ", "0", "1", "-1", "nan", "inf", "-inf", "\\infty", "1e308", "x", "e", "i", "\\pi", "True", "None", "A", "yes", "?", "()", "[]",
    "\\{\\}", "\\emptyset", "\\mathbb{R}", "(-\\infty,\\infty)", "\\frac{0}{0}", "0/0", "\\text{}", "\\boxed{}", "\\forall x", "x=x", "=", ",",
    "\\text{the answer}", "x \\in \\mathbb{R}", "\\begin{pmatrix}\\end{pmatrix}", "\\sum", "\\int", "{}", "%",
]  # fmt: skip


@pytest.mark.sweep
def test_no_constant_answers_every_question():
    labels = [
        "7",
        "-2.5",
        "\\frac{3}{8}",
        "x^2+3",
        "(2,5)",
        "[2,5)",
        "\\{2,3\\}",
        "D",
        "Monday",
        "3\\sqrt{7}",
        "2\\pi",
        "x=4",
        "y<3",
    ]
    verifier.warm()
    for constant in CONSTANTS:
        assert [reference for reference in labels if is_same(reference, constant) is True] == [], constant


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_any_way_to_write_a_number_reads_back(n, zeros):
    tail = "." + "0" * zeros if zeros else ""
    for text in (f"{n}{tail}", f"so \\boxed{{{n:,}}}", f"{2 * n}/2", f"#### {n}", f"**Answer:** ${n:,}$"):
        assert compare(str(n), find(text)) is True
        assert compare(str(n + 1), find(text)) is False


@given(st.fractions(max_denominator=1000))
def test_fractions_are_exact(x):
    top, bottom = x.numerator, x.denominator
    for text in (f"{top}/{bottom}", f"{'-' * (x < 0)}\\frac{{{abs(top)}}}{{{bottom}}}", f"{3 * top}/{3 * bottom}"):
        assert compare(str(x), text) is True
        assert compare(str(x + Fraction(1, 10**9)), text) is False


@given(st.text(max_size=300), st.text(max_size=60))
def test_no_text_is_too_strange(text, reference):
    for where in FORMATS_AND_TAGS:
        found = find(text, where)
        assert found is None or compare(reference, found) in (True, False, None)
    json.dumps(split_recorded(text))


@pytest.mark.parametrize(
    "text, any_, boxed, last, line, tag",
    [
        ("so \\boxed{18} eggs", "18", "18", "18", None, None),
        ("\\boxed{3}, no: \\boxed{\\frac{8}{4}}", "\\frac{8}{4}", "\\frac{8}{4}", "8/4", None, None),
        ("1 + 1 = 2\n#### 5", "5", None, "5", None, None),
        ("#### 5\n#### 6 eggs\nand 7", "6 eggs", None, "7", None, None),
        ("\\boxed{4}\nAnswer: 5", "4", "4", "5", "5", None),
        ("12 - 3 = 9 eggs.", "9", None, "9", None, None),
        ("\\boxed{7", "7", None, "7", None, None),
        ("no number", None, None, None, None, None),
        ("2**3", "2**3", None, "3", None, None),
        (" 1 000 ", "1 000", None, "000", None, None),
        ("12 - 3 = 9", "12 - 3 = 9", None, "9", None, None),
        ("12 - 3\n= 9", "9", None, "9", None, None),
        ("\\boxed{}5", "", "", "5", None, None),
        ("**Answer:** $x+1$", "$x+1$", None, "1", "$x+1$", None),
        ("Answer: 3\nAnswer: 4\nnot 5", "4", None, "5", "4", None),
        ("<answer>1</answer> <answer> 2 </answer>", "2", None, "2", None, "2"),
        ("<answer>1", "1", None, "1", None, None),
        ("\\boxed{\\text{a {b} c}}", "\\text{a {b} c}", "\\text{a {b} c}", None, None, None),
    ],
)
def test_where_the_answer_is_read(text, any_, boxed, last, line, tag):
    where = ("any", "boxed", "last", "Answer: {answer}", "<answer>{answer}</answer>")
    assert [find(text, w) for w in where] == [any_, boxed, last, line, tag]


def test_without_a_number_the_last_line_counts():
    assert find("I think\nthat it is\nEvelyn.\n\n", number=False) == "Evelyn."
    assert find("Paris", "full") == "Paris" and find(" \n", "full") is None


@pytest.mark.parametrize(
    "recorded, steps, answer",
    [
        ("4*12=<<4*12=48>>48 rolls.\n#### 48", "4*12=48 rolls.", "48"),
        ("So $x = \\boxed{\\frac{1}{2}}$.", "So $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\frac{1}{2}", "", "\\frac{1}{2}"),
        ("34", "", "34"),
    ],
)
def test_recorded_answers(recorded, steps, answer):
    assert split_recorded(recorded) == (steps, answer)


@pytest.mark.parametrize(
    "text, want", [("1,200", True), ("2 apples", True), ("x", False), ("\\sqrt{2}", False), ("9" * 61, False)]
)
def test_what_is_a_number(text, want):
    assert is_number(text) is want


UNITS = [
    "9",
    "\\boxed{",
    "{",
    "1/",
    "1,",
    "1,111",
    "1 ",
    "\\frac{",
    "\\frac{1}",
    "-",
    "\x00",
    "\\text{",
    "#### ",
    "Answer:",
    "<answer>",
    "\\,",
    "A ",
]


@pytest.mark.parametrize("unit", UNITS)
def test_huge_answers_are_read_to_their_end_only(unit):
    text = unit * (10**6 // len(unit))
    for where in FORMATS_AND_TAGS:
        found = find(text, where)
        assert found is None or compare("17", found) is not True
    assert find(text + "\n#### 12\n") == "12"


def test_equal_answers_are_counted_as_one():
    for answers in (
        ("18", "18.0", "$18", "18 dollars", "x = 18", "36/2", "\\frac{36}{2}"), ("B", "(B)"), ("Paris", " paris. "),
        ("2\\sqrt{2}", "2 \\sqrt {2}"), ("1,200", "1200", "1.2e3", "x = 1 200", "600 + 600 = 1200", "1200 \\approx 1000"),
    ):  # fmt: skip
        assert len({canonical(answer) for answer in answers}) == 1, answers
    assert (
        len({canonical(answer) for answer in ("18", "-18", "1.8", "B", "A", "Paris", "London", "x+1", "x+y=3", "")})
        == 10
    )
