"""A step or a trajectory as one HTML file: the viewer's own page, with the answers of its server inside.

The file loads nothing. Its content security policy admits only the package's scripts and styles, by their hashes. The
run's data is a JSON block, which browsers do not execute, and `<` is escaped in it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from rolljax.fields import Json
from rolljax.viewer import answers
from rolljax.viewer.filters import Filter
from rolljax.viewer.runs import NotThere, ViewedRun

ASSETS = Path(__file__).parent / "assets"
ENTRY = "main.js"
_IMPORT = re.compile(r"^import \{([^}]*)\} from '\./([\w]+\.js)';\n", re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.M)


def page_of(run: ViewedRun, step: int | str, line: int | None) -> bytes:
    """Return the page of a step, or of one of its trajectories.

    Args:
      step: number of a step, or the name of a held-out evaluation. line: the trajectory's; None: all.

    Raises:
      NotThere: there is no such step or trajectory.
    """
    frozen = _frozen(run, step, line)
    start = f"#/{run.name}/{_address(step)}" + ("" if line is None else f"/{line}")
    script, style = bundle(), (ASSETS / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = json.dumps(answers.finite({"start": start, "answers": frozen}), separators=(",", ":"))
    data = data.replace("<", r"\u003c")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = (ASSETS / "index.html").read_text().replace("<meta charset", f"{meta}\n<meta charset")
    html = html.replace('<link rel="icon" href="/assets/icon.svg">\n', "")
    html = html.replace('<link rel="stylesheet" href="/assets/style.css">', f"<style>{style}</style>")
    block = f'<script type="application/json" id="frozen">{data}</script>\n<script>{script}</script>'
    return html.replace('<script type="module" src="/assets/main.js"></script>', block).encode()


def _frozen(run: ViewedRun, step: int | str, line: int | None) -> Json:
    """Return the server's answers to the requests of the page, by address."""
    overview = run.overview()
    private = ("path", "environment")  # about the machine, not about the shown step
    here = f"api/runs/{run.name}/steps/{_address(step)}"
    shown = {k: v for k, v in overview.items() if k not in private} | {
        "evaluations": [],
        "rollout_steps": [],
        "damaged": [],
    }
    found: dict[str, Any] = {"api/runs": {"runs": [shown], "metrics": answers.metric_table()}}
    if line is not None:
        found[f"{here}/{line}"] = answers.trajectory(run, step, line)
    elif not isinstance(step, int):
        raise NotThere(f"an export of {step} is of one of its trajectories: its line is missing")
    if isinstance(step, int):
        whole = answers.step(run, step, Filter())
        found[here] = whole if line is None else _group_of(whole, line)
        for one in run.records(step).found if line is None else ():
            with contextlib.suppress(NotThere):  # damaged: the list has what can be read of it
                found[f"{here}/{one}"] = answers.trajectory(run, step, one)
    return found


def _group_of(whole: Json, line: int) -> Json:
    """Return a step reduced to one trajectory."""
    groups = [g for g in whole["groups"] if any(t["line"] == line for t in g["trajectories"])]
    alone = [g | {"trajectories": [t for t in g["trajectories"] if t["line"] == line]} for g in groups]
    return whole | {"groups": alone, "found": len(alone)}


def _address(step: int | str) -> str:
    return str(step) if isinstance(step, int) else f"heldout:{step}"


def bundle() -> str:
    """Join the page's modules into one script, in which each is a function that returns its exports."""
    order: list[str] = []
    _visit(ENTRY, order, ())
    script = "'use strict';\n" + "".join(_as_function(name) for name in order)
    assert "</script" not in script and "<!--" not in script
    return script


def _visit(name: str, order: list[str], above: tuple[str, ...]) -> None:
    """Put a module after the modules that it imports."""
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
    if name not in order:
        for found in _IMPORT.finditer((ASSETS / name).read_text()):
            _visit(found[2], order, (*above, name))
        order.append(name)


def _as_function(name: str) -> str:
    text = (ASSETS / name).read_text()
    names = _EXPORT.findall(text)
    text = _IMPORT.sub(lambda m: f"const {{{m[1].replace(' as ', ': ')}}} = {_variable(m[2])};\n", text)
    return f"const {_variable(name)} = (() => {{\n{_EXPORT.sub('', text)}return {{{', '.join(names)}}};\n}})();\n"


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js')}"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
