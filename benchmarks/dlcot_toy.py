"""Chains of thought about sums of two-digit numbers, with attempts that are wrong or repeat themselves; and a rule that
answers the questions of DLCoT's stages about them, as a model would, with some slips of its own.

A trace: the question repeated, a plan, attempts by one of two methods (some wrong, the last one right), checks, a boxed
answer. Each attempt has its own line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

ATTEMPT = re.compile(r"^(Or |Again )?(digits|steps|stuck) .*$", re.M)
SUMS = [(a, b) for a in range(10, 60) for b in range(10, 60)]
NEW = [pair for pair in SUMS if max(pair) >= 40]
"""Sums that a student of `short` chains has not seen: it has numbers below 40 only."""


def trace(a: int, b: int, rng: random.Random, only: str = "") -> str:
    """Return a long chain of thought about a + b: one or two attempts fail or stop, the right one is repeated.

    only: the method of all attempts; empty: both.
    """
    lines = [f"Add {a}, {b}.", "Plan."]
    methods = [("digits", rng.random() < 0.25), ("digits", False), (rng.choice(["digits", "steps"]), False)]
    if rng.random() < 0.5:
        methods.insert(1, ("steps", rng.random() < 0.3))
    if rng.random() < 0.3:
        methods.insert(0, ("stuck", False))
    if only:
        methods = [(only, wrong) for method, wrong in methods if method != "stuck"]
    for i, (method, wrong) in enumerate(methods):
        lines.append(("" if not i else rng.choice(["Or ", "Again "])) + attempt(a, b, method, wrong))
    lines.append(f"Check: {a + b}-{b}={a}.")
    if rng.random() < 0.6:
        lines += ["Yes.", f"Check again: {a + b}-{b}={a}."]
    return "\n".join([*lines, f"\\boxed{{{a + b}}}"])


def attempt(a: int, b: int, method: str, wrong: bool) -> str:
    """Return one attempt, on one line."""
    slip = 10 * wrong
    if method == "stuck":
        return f"stuck {a % 10}+{b % 10}={a % 10 + b % 10}."
    if method == "digits":
        tens, ones = a // 10 + b // 10, a % 10 + b % 10
        return f"digits {a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}={tens} so {10 * tens + ones + slip}."
    return f"steps {a}+{b // 10 * 10}={a + b // 10 * 10 + slip} so {a + b + slip}."


def records(num: int, seed: int, only: str = "") -> list[dict[str, Any]]:
    """Return `num` different sums, each with its trace; those of one method are about `NEW` sums."""
    rng = random.Random(seed)
    return [_record(a, b, trace(a, b, rng, only)) for a, b in rng.sample(NEW if only else SUMS, num)]


def short(method: str) -> list[dict[str, Any]]:
    """Return the sums that are not `NEW`, each with one attempt."""
    chain = "Add {0}, {1}.\nPlan.\n{2}\n\\boxed{{{3}}}"
    known = [(a, b) for a, b in SUMS if max(a, b) < 40]
    return [_record(a, b, chain.format(a, b, attempt(a, b, method, False), a + b)) for a, b in known]


def _record(a: int, b: int, text: str) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=?", "answer": str(a + b), "trace": text}


# ---- the model that takes them apart --------------------------------------------------------------------------------


def rule(messages: Sequence[dict[str, str]], rng: random.Random) -> str:
    """Return the answer of a model; one answer in ten is useless."""
    prompt = messages[-1]["content"]
    if rng.random() < 0.1:
        return "I cannot say."
    body = prompt.split("\n\n")
    if prompt.startswith("Split the solution"):
        return _parts(prompt.split("# Solution\n")[1])
    if prompt.startswith("Split the text"):
        return _listed("solution", [m[0] for m in ATTEMPT.finditer(prompt.split("# Text\n")[1])])
    if prompt.startswith("Split the verification"):
        return _listed("step", prompt.split("# Verification\n")[1].strip().splitlines())
    if prompt.startswith("From the text"):
        return prompt.split("the text alone.\n\n")[1].replace("Again ", "And ", 1)
    told = [part.split("\n", 1)[1] for part in _numbered(body)]
    if "how many of the first steps" in " ".join(prompt.split()):
        return json.dumps({"steps": 0})
    if "Correct, Incorrect" in prompt:
        reference = re.search(r"Answer: (\d+)", prompt)
        return json.dumps({"solutions": [_label(text, reference[1] if reference else "") for text in told]})
    kinds: dict[str, list[int]] = {}
    for i, text in enumerate(told, 1):
        kind = "steps" if "steps" in text else "check" if "heck" in text else "yes" if "Yes" in text else "digits"
        kinds.setdefault(kind, []).append(i)
    return "Clusters: " + json.dumps({"clusters": list(kinds.values())})


def _numbered(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if re.match(r"\[\d+\]\n", part)]


def _label(text: str, reference: str) -> dict[str, Any]:
    said = re.search(r"so (\d+)\.", text)
    label = "Incomplete" if said is None else "Correct" if said[1] == reference else "Incorrect"
    return {"label": label, "error": label == "Incorrect", "spans": [text.strip()] if label == "Incorrect" else []}


def _parts(text: str) -> str:
    lines = text.strip().splitlines()
    checks = [line for line in lines if line.startswith(("Check", "Yes"))]
    attempts = [line for line in lines if ATTEMPT.match(line)]
    found = {
        "question_repeat": lines[:1],
        "problem_understanding": lines[1:2],
        "exploration": attempts,
        "verification": checks,
        "conclusion": lines[-1:],
    }
    return "\n".join(f"## {name}\n" + "\n".join(part) for name, part in found.items())


def _listed(name: str, texts: Sequence[str]) -> str:
    return "\n".join(f"## {name}_{i}\n{text}" for i, text in enumerate(texts, 1))
