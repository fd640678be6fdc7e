"""Generated pages explain every setting and metric, every page is in the site's navigation, and public names have
docstrings."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import posixpath
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

import rolljax
from rolljax.config.foreign import NAMES

ROOT = Path(rolljax.__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
make_papers_page, make_settings_page, make_site = (
    importlib.import_module(name) for name in ("make_papers_page", "make_settings_page", "make_site")
)
sys.path.remove(str(DOCS))
GENERATED = make_site.generated()
CLASSES = {cls.__name__: cls for cls in make_settings_page.setting_classes()}


def table_rows(text):
    """Return the cells of every table row of a page, heads included."""
    lines = [line.replace(r"\|", "\0") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("\0", "|") for cell in line.strip("|").split("|")] for line in lines]


# ---- settings -------------------------------------------------------------------------------------------------------


def told_settings():
    """Return the documented settings by class: of its section, and of the sections that it points to."""
    pages = [text for page, text in GENERATED.items() if page == "settings.md" or page.startswith("algorithms/")]
    own, more = {}, {}
    for page in pages:
        for heading, body in re.findall(
            r"^##+ (?:\w+\.)?(\w+)\n(.*?)(?=^## |^### [A-Z]\w+\n\n`rolljax|\Z)", page, re.S | re.M
        ):
            own[heading] = {
                m: row for row in table_rows(body) if len(row) == 4 for m in re.findall(r"^`(\w+)`$", row[0])
            }
            more[heading] = re.findall(r"^It has the settings of \[(\w+)\]", body, re.M)

    def told(name):
        return {k: v for base in more[name] for k, v in told(base).items()} | own[name]

    return {name: told(name) for name in own}


def test_the_reference_has_every_setting():
    """Of every class that a config can name, with type, default and meaning."""
    told = told_settings()
    lacking = [
        f"{name}.{field.name}"
        for name, cls in CLASSES.items()
        if name != "PolicyGradient"  # those of its subclasses: each page has them
        for field in dataclasses.fields(cls)
        if field.init and not all(told.get(name, {}).get(field.name, [""]))
    ]
    assert lacking == [] and sum(len(dataclasses.fields(c)) for c in CLASSES.values()) > 1000


def test_generated_pages_explain_every_metric_and_are_not_committed():
    metrics = importlib.import_module("rolljax.metrics")
    explained = {row[0]: row for row in table_rows(GENERATED["metrics.md"])}
    assert all(all(explained[f"`{name}`"][1:]) for name in metrics.NAMES)
    assert GENERATED.keys() >= {"settings.md", "papers.md", "algorithms/index.md", "algorithms/defaults.md"}
    assert [page for page in GENERATED if (DOCS / page).exists()] == []


def test_a_setting_without_a_docstring_is_an_error():
    @dataclasses.dataclass(frozen=True)
    class Made:
        """Something."""

        first: int = 0
        """Explained."""
        second: int = 0

    with pytest.raises(KeyError, match="Made: no string under second"):
        make_settings_page.meanings_of(Made)


def test_every_paper_of_the_code_is_on_the_page():
    told = set(re.findall(r"arxiv\.org/abs/([\d.]+)", GENERATED["papers.md"]))
    assert make_papers_page.named_in_code() | {r.paper for r in make_papers_page.reproductions() if r.paper} == told


REPRODUCED = """2506.06122 2510.11345 2509.21009 2512.22560 2605.06534 2406.04594 2512.24873 2510.01656 2508.08221 2510.13554
2512.17206 2510.01051 2603.17621 2411.00809 2505.14268 2503.16385 2407.16154 2512.24957 2510.07685 2507.22879 2601.18225
2505.19690 2505.23793 2503.09527"""
"""Papers that rolljax was written to reproduce."""


def test_every_paper_says_how_far_it_is_shown():
    rows = make_papers_page.reproductions()
    numbers = [r.paper for r in rows if r.paper]
    assert set(REPRODUCED.split()) <= set(numbers) and len(numbers) == len(set(numbers))
    for r in rows:
        assert r.state == "shown" or r.why, f"{r.name}: what is not shown, and why?"
        assert r.state != "shown" or (r.seeds >= 3 and r.figure and r.here and r.config), f"{r.name} is not shown"
        assert not r.figure or (DOCS.parent / r.figure).is_file(), f"{r.name}: no {r.figure}"


def test_recipes_of_more_than_15_minutes_say_so():
    for row in make_papers_page.results():
        if row["minutes"] > 15 and make_papers_page.minutes_of(row["config"]):
            comment = Path(make_papers_page.find_config(row["config"])).read_text().partition("\nfrom ")[0]
            assert re.search(r"minutes? on two cores", comment), f"{row['config']}: {row['minutes']} minutes"


def test_minutes_of_other_settings_are_not_shown(tmp_path, monkeypatch):
    config, results = tmp_path / "made.gin", tmp_path / "recipes.jsonl"
    config.write_text("include 'quickstart.gin'\nrl/Phase.steps = 5\n")
    row = {"config": str(config), "minutes": 7.0, "settings": make_papers_page.fingerprint(str(config))}
    results.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(make_papers_page, "RESULTS", results)
    config.write_text("# A comment.\n" + config.read_text())
    assert make_papers_page.minutes_of(str(config)) == 7.0
    config.write_text(config.read_text().replace("5", "6"))
    assert make_papers_page.minutes_of(str(config)) is None


# ---- coming from elsewhere ------------------------------------------------------------------------------------------


def test_settings_that_others_are_led_to_are_there():
    rows = [row for row in table_rows((DOCS / "coming_from.md").read_text()) if len(row) == 3 and "`" in row[1]]
    assert len(rows) > 80
    wrong = []
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[1]):
            cls, _, field = name.partition(".")
            known = (
                name in ("--run_dir", "--fresh")
                or cls in CLASSES
                and field in {f.name for f in dataclasses.fields(CLASSES[cls])}
            )
            wrong += [] if known else [name]
    assert wrong == []


def test_a_setting_of_theirs_is_answered_as_the_page_says():
    told = {}
    for section in (DOCS / "coming_from.md").read_text().split("\n## ")[1:]:
        table = told.setdefault(section.partition("\n")[0], {})
        for row in table_rows(section)[2:]:
            theirs, ours = [], re.findall(r"`([^`]+)`", row[1])
            for name in re.findall(r"`([\w.]+)(?: = [^`]*)?`", row[0]):
                theirs.append(theirs[-1].rpartition(".")[0] + name if name.startswith(".") else name)
            for i, name in enumerate(theirs):  # as many of each: one for one
                pair = ours[i : i + 1] if len(theirs) == len(ours) else ours
                table[name] = " ".join([*table.get(name, "").split(), *pair])
    assert told == NAMES


def test_trls_settings_are_trls():
    trl = importlib.util.find_spec("trl")
    folder = Path(trl.origin).parent / "trainer"
    text = "".join(p.read_text() for p in (folder / "grpo_config.py", folder / "base_config.py") if p.exists())
    trainer = Path(importlib.util.find_spec("transformers").origin).parent / "training_args.py"
    fields = set(re.findall(r"^    (\w+): ", text + trainer.read_text(), re.M))
    section = (DOCS / "coming_from.md").read_text().split("## TRL\n")[1].split("\n## ")[0]
    for row in table_rows(section)[2:]:
        for part in row[0].split(","):
            for name in re.findall(r"`(\w+)[^`]*`(?! \(argument\))", part):
                assert name in fields or name in ("tools",) or "loss_type" in row[0], name


# ---- troubleshooting ------------------------------------------------------------------------------------------------


def said_by_the_code():
    """Yield every text of the package, with a blank for each filled-in value."""
    for path in (ROOT / "rolljax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_are_explained_are_the_codes():
    said = "\n".join(said_by_the_code())
    rows = table_rows((DOCS / "troubleshooting.md").read_text())
    messages = [m for row in rows for m in re.findall(r"^`(.+)`$", row[0]) if " " in m]
    assert len(messages) > 35
    patterns = {m: r"[^\n]*?".join(map(re.escape, m.split("..."))) for m in messages}
    assert [m for m, pattern in patterns.items() if not re.search(pattern, said)] == []


# ---- docstrings -----------------------------------------------------------------------------------------------------

THEIRS = ("rolljax.sampler.jetstream.compat",)
"""Whose names and meanings are another project's."""
MADE = re.compile(r"^\w+\(.*\)$", re.S)
"""What `dataclass` writes where there is no docstring."""


def imported_by_pages():
    """Yield the modules that pages and examples import from: the public interface."""
    texts = [p.read_text() for p in (*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py"))]
    for module, names in (m for t in texts for m in re.findall(r"^ *from (rolljax[\w.]*) import ([\w, ]+)", t, re.M)):
        yield module
        yield from (f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(","))


def public(names, module):
    """Yield the public names of a namespace that the module itself defines."""
    for name, value in names.items():
        found = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if not name.startswith("_") and getattr(found, "__module__", None) == module:
            yield name, found


def undocumented(name):
    """Yield the public names of a module without a docstring; methods only in modules that pages import from."""
    module = importlib.import_module(name)
    if not module.__doc__:
        yield name
    for attribute, value in public(vars(module), name):
        if inspect.isclass(value) or inspect.isfunction(value):
            doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
            if not doc or MADE.match(doc) and dataclasses.is_dataclass(value):
                yield f"{name}.{attribute}"
        if inspect.isclass(value) and name in WRITTEN_AGAINST:
            for method, _ in public(vars(value), name):
                if not inspect.getdoc(getattr(value, method)):
                    yield f"{name}.{attribute}.{method}"


WRITTEN_AGAINST = {*imported_by_pages(), "rolljax.recipe", "rolljax.metrics", "rolljax.errors", "rolljax.types"}
MODULES = [name for names in make_site.modules().values() for name in names if name not in THEIRS]


def test_public_names_have_docstrings():
    """Every module, class and function; every method of what users write against."""
    assert len(MODULES) > 200 and "rolljax.trainer.algorithms.base" in WRITTEN_AGAINST
    assert [found for name in MODULES for found in undocumented(name)] == []


def test_a_docstring_that_is_missing_is_found(monkeypatch):
    monkeypatch.setitem(sys.modules, "made", types.ModuleType("made"))
    code = "class Bare:\n  def told(self):\n    'Told.'\n  def silent(self): pass\n  def _own(self): pass"
    exec(code, vars(sys.modules["made"]))
    monkeypatch.setitem(globals(), "WRITTEN_AGAINST", {"made"})
    assert list(undocumented("made")) == ["made", "made.Bare", "made.Bare.silent"]


# ---- navigation -----------------------------------------------------------------------------------------------------


class Loader(yaml.SafeLoader):
    """YAML in which tags of Python are text: nothing is run."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def leaves(nav):
    """Yield the pages of a navigation, at any depth."""
    for item in nav:
        values = item.values() if isinstance(item, dict) else [item]
        for value in values:
            yield from [value] if isinstance(value, str) else leaves(value)


def test_every_page_is_in_the_navigation():
    """A new page: one line below `nav` in mkdocs.yml."""
    pages = {page for page in make_site.pages() if not page.startswith("source/")}
    config = make_site.with_folders((ROOT / "mkdocs.yml").read_text(), pages)
    listed = list(leaves(yaml.load(config, Loader)["nav"]))
    assert pages - set(listed) == set() and set(listed) - pages == set()
    assert len(listed) == len(set(listed))


def test_links_lead_to_pages_of_the_site():
    pages = make_site.pages()
    pictures = {make_site.site_path(p.relative_to(ROOT).as_posix()) for p in make_site.pictures()}
    pictures |= {f"algorithms/curves/{name}" for name in make_site.generators().curves()}
    assert "source/configs/algorithms/grpo.gin.md" in pages
    for page, text in pages.items():
        if page.startswith(("api/", "source/")):
            continue
        for link in make_site.links(text):
            path = link.partition("#")[0]
            to = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            outside = re.match(r"[a-z]+:", link) or not path
            assert outside or to in pages or to in pictures, f"{page}: {link}"


def test_links_to_the_source_of_a_generated_page_lead_to_the_page():
    links = {
        "[metrics](../rolljax/metrics.py)": "[metrics](metrics.md)",
        "[the reference](make_settings_page.py#phase)": "[the reference](settings.md#phase)",
        "[GRPO](../rolljax/trainer/algorithms/grpo.py)": "[GRPO](algorithms/grpo.md)",
        "[the base](../rolljax/trainer/algorithms/base.py)": "[the base](source/rolljax/trainer/algorithms/base.py.md)",
    }
    assert [make_site.relinked("async.md", link) for link in links] == list(links.values())


def test_a_recipe_is_a_page_next_to_its_pictures():
    assert make_site.site_path("rolljax/recipes/ddk/README.md") == "recipes/ddk.md"
    text = make_site.relinked("recipes/ddk.md", "![curve](ddk.png) [settings](../../../docs/make_settings_page.py)")
    assert text == "![curve](ddk.png) [settings](../settings.md)"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path):
    assert make_site.build(tmp_path) == 0
    elsewhere = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
    site = tmp_path / "site"
    pages = list(site.rglob("*.html"))
    assert {m for page in pages for m in elsewhere.findall(page.read_text())} == set() and len(pages) > 100
    assert (site / "search" / "search_index.js").is_file() and (site / "assets" / "iframe-worker.js").is_file()
    assert "A run as a tree of settings" in (site / "api" / "rolljax.html").read_text()
