"""What the pages say of the code is so: links, paths, names, settings; and words that were given up stay away."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

import rolljax
from rolljax.metrics import is_known

PACKAGE = Path(rolljax.__file__).parent
ROOT = PACKAGE.parent
TOP = [ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md")), *sorted((PACKAGE / "recipes").glob("*/README.md"))]
LINKED = [*PAGES, ROOT / "CHANGELOG.md"]
OTHERS = {"Class.field", "Grpo.clip_hihg", "Request.TextContent", "tests/test.sh"}
"""Names that are not the code's: stand-ins, a mistake that is shown, JetStream's, a path inside a task's folder."""


def title(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    """Return the text of a page without its fenced blocks."""
    return re.sub(r"^( *)(`{3,}).*?^\1\2$", "", page.read_text(), flags=re.S | re.M)


def spans(page):
    """Return the texts in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


# ---- links ----------------------------------------------------------------------------------------------------------


def anchor(heading):
    """Return GitHub's anchor of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@functools.cache
def anchors(page):
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(page), re.M)}


@pytest.mark.parametrize("page", LINKED, ids=title)
def test_links_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or name and target.suffix == ".md" and name not in anchors(target):
            wrong.append(link)
    assert not wrong


# ---- names of the code ----------------------------------------------------------------------------------------------


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def assigned(node):
    """Return the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    found = [n for t in targets for n in ([t] if isinstance(t, (ast.Name, ast.Attribute)) else ast.walk(t))]
    found_names = [
        n.id if isinstance(n, ast.Name) else n.attr for n in found if isinstance(n, (ast.Name, ast.Attribute))
    ]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        found_names += [(a.asname or a.name).partition(".")[0] for a in node.names]
    return found_names


@functools.cache
def classes():
    """Return every class of ours by name: the names in its body and methods, and those of its bases."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                names, bases = found.setdefault(node.name, (set(), []))
                names |= {name for statement in ast.walk(node) for name in assigned(statement)}
                bases += [
                    b.id if isinstance(b, ast.Name) else b.attr
                    for b in node.bases
                    if isinstance(b, (ast.Name, ast.Attribute))
                ]
    return found


def members(name):
    """Return the names of a class and its bases; None if a base is not ours."""
    names, bases = classes()[name]
    inherited = [
        members(base) if base in classes() else None for base in bases if base not in ("Protocol", "ABC", "Generic")
    ]
    return None if None in inherited else names.union(*inherited)


def resolves(dotted):
    """Return whether `rolljax.a.b.C.d` exists: a module by its file, the rest by the text of the file."""
    parts = dotted.split(".")[1:]
    if parts[:1] and parts[0] in rolljax.__all__:
        return True
    here = PACKAGE
    while parts and (here / parts[0]).is_dir():
        here /= parts.pop(0)
    if parts and (here / f"{parts[0]}.py").is_file():
        here /= f"{parts.pop(0)}.py"
    if not parts:
        return True
    module = here if here.is_file() else here / "__init__.py"
    if not module.is_file() or parts[0] not in {name for node in tree(module).body for name in assigned(node)}:
        return False
    known = members(parts[0]) if len(parts) > 1 and parts[0] in classes() else None
    return known is None or parts[1] in known


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_names_of_modules_are_right(page):
    """In blocks too: `python -m rolljax.train`, `from rolljax.model import hf`."""
    text = page.read_text()
    named = set(re.findall(r"(?<![\w/.-])rolljax(?:\.\w+)+", text))
    for module, names in re.findall(r"^ *from (rolljax[\w.]*) import ([\w, ]+)", text, re.M):
        named |= {f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
    assert sorted(name for name in named if not resolves(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_paths_are_right(page):
    """Paths that start with a folder of the repository, and paths that start with a room."""
    first = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - {"runs", "build"}
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    wrong = []
    for span in spans(page):
        path = re.match(r"[\w./-]+", span)
        if not path or path[0] != span or "/" not in span:
            continue
        room = span.split("/")[0]
        here = ROOT if room in first else PACKAGE if room in rooms else None
        shipped = ROOT / "configs" / f"{span}.gin"
        if (
            here
            and not any(p.exists() for p in (here / span, ROOT / "tests" / span, shipped))
            and span not in OTHERS
            and not is_known(span)
        ):
            wrong.append(span)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_settings_are_right(page):
    """`Class.field`, in prose and in blocks, where the class is ours and all its bases are."""
    wrong = set()
    for name, field in re.findall(r"(?<![\w.])([A-Z]\w+)\.(\w+)", page.read_text()):
        if name in classes() and f"{name}.{field}" not in OTHERS and field not in ("md", "gin", "py", "jsonl"):
            known = members(name)
            if known is not None and field not in known:
                wrong.add(f"{name}.{field}")
    assert sorted(wrong) == []


# ---- the map --------------------------------------------------------------------------------------------------------


def section(page, heading):
    """Return the text below a heading, up to the next of its level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page.read_text(), re.S | re.M)
    assert found, f"{page.name} has no section {heading!r}"
    return found[1]


def table(text):
    """Return the cells of a table's rows, without its head."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_map_names_files_where_they_are():
    rows = table(section(ROOT / "BUILD.md", "Where things are"))
    wrong, room = [], ROOT
    for cell, told in rows:
        if cell:
            room = PACKAGE / cell.strip("`") if (PACKAGE / cell.strip("`")).exists() else ROOT / cell.strip("`")
        for name in re.findall(r"`([\w/]+\.py|\w+/)`", told):
            if not (list(room.rglob(name)) or (room / name).is_dir()):
                wrong.append(f"{cell or room.name}: {name}")
    assert len(rows) > 15 and not wrong


def test_the_map_tells_the_import_rules(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from test_structure import LEFT

    told = {
        row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1]))
        for row in table(section(ROOT / "BUILD.md", "Who may import whom"))
    }
    assert told == LEFT


def test_the_walk_names_at_most_twelve_files_each_once():
    walk = re.findall(r"`(rolljax/[\w/]+\.py)`", section(ROOT / "BUILD.md", "A walk: from a task to published weights"))
    assert 6 <= len(walk) <= 12 and len(set(walk)) == len(walk)


def test_every_invariant_names_tests_that_are_there():
    rows = table(section(ROOT / "BUILD.md", "Invariants and their tests"))
    assert len(rows) > 40
    wrong = [
        row[0]
        for row in rows
        for name in re.findall(r"`((?:unit|e2e|contract|recipes)/[\w.]+)`", row[1])
        if not (ROOT / "tests" / name).is_file()
    ]
    heads = [row for row in rows if re.fullmatch(r"\*\*[\w ,]+\*\*", row[0])]
    assert not wrong and all("`" in row[1] for row in rows if row not in heads) and not any(row[1] for row in heads)


def test_concepts_list_at_most_forty_words_of_ours():
    rows = table(section(ROOT / "docs" / "concepts.md", "Words"))
    words = [row[0] for row in rows]
    assert 20 <= len(words) <= 40 and words == sorted(words, key=str.lower) and len(set(words)) == len(words)
    assert all(len(row) == 3 and row[1] and "`" in row[2] for row in rows)


# ---- words ----------------------------------------------------------------------------------------------------------

GIVEN_UP = {
    "geometry": "runtime, resolved recipe, batch shape",
    "greet": "handshake",
    "keeper": "supervisor",
    "law": "sampling distribution, divergence",
    "laws": "sampling distribution, divergence",
    "learned": "param state, optimizer state",
    "learner": "trainer, phase trainer",
    "lots": "micro-batches",
    "nursery": "fork server",
    "refills": "dynamic_sampling_rounds",
    "seat": "slot",
    "surviving": "filtered",
    "teaches": "has_signal",
    "unstart": "what is done: put back into the queue",
}
"""Words of identifiers (parts between `_`, or of CamelCase) that were given up, and what stands for them now."""
LEANING = re.compile(r"[Ll]ikewise the next|[Aa]s (?:the )?(?:one )?above\b|\b[Tt]he same as the last\b")
"""In docstrings: `help()` shows them without their neighbours."""


def words(name):
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def identifiers(path):
    """Yield the names that a file defines: of classes, functions, arguments, variables, fields."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def sources():
    return [p for p in PACKAGE.rglob("*.py") if "terminal_tasks" not in p.parts]


def test_words_that_were_given_up_stay_away():
    named = [(path.stem, path, 0) for path in sources()]
    named += [(name, path, line) for path in sources() for name, line in identifiers(path)]
    wrong = [
        f"{title(path)}:{line}: {name} (write {', '.join(GIVEN_UP[w] for w in words(name) & GIVEN_UP.keys())})"
        for name, path, line in named
        if words(name) & GIVEN_UP.keys()
    ]
    assert not wrong


def test_docstrings_stand_alone():
    wrong = []
    for path in sources():
        for node in ast.walk(tree(path)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if " " in text and LEANING.search(text):
                wrong.append(f"{title(path)}:{node.lineno}: {text[:60]!r}")
    assert not wrong


def test_the_check_finds_what_it_is_for(tmp_path):
    assert words("_make_LearnerState") == {"make", "learner", "state"} and words("tokens_BT") == {"tokens", "bt"}
    assert anchor("## `plan`: [HBM](x.md), and more".removeprefix("## ")) == "plan-hbm-and-more"
    assert resolves("rolljax.model.decoder.Model.full_params") and resolves("rolljax.train")
    assert not resolves("rolljax.model.decoder.Model.whole") and not resolves("rolljax.rooms")
    page = tmp_path / "page.md"
    page.write_text("```python\n`not/this`\n```\n`this`")
    assert spans(page) == ["this"]
    assert sys.version_info >= (3, 11)
