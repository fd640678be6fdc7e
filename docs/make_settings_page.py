"""Make the settings reference, a page of the site: `make docs` writes it into build/docs/settings.md.

The page has every field of every class that a config can name: classes that a field of `Recipe` mentions, at any depth,
and classes that derive from them. Names, types, defaults and meanings come from the code. Settings of algorithms have
pages of their own (docs/make_algorithm_pages.py). `python docs/make_settings_page.py` prints the page.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from docstrings import cell, field_default, linked, meanings_of, paragraphs_of, shown

from rolljax.config import check
from rolljax.config.classes import closure, default_classes, fields, is_config
from rolljax.data.pipeline import Pipeline
from rolljax.envs.base import EnvSpec
from rolljax.envs.tools.base import Tools
from rolljax.evaluation.judged.base import JudgedEvaluation
from rolljax.recipe import Recipe
from rolljax.simulation.timings import Timings
from rolljax.trainer.algorithms.base import Algorithm

NOTICE = "<!-- made by docs/make_settings_page.py from the code: do not edit -->"
ROOTS = (Recipe, Timings, Pipeline, JudgedEvaluation)
"""Of runs, of simulations (`rolljax.simulate` takes both), of data pipelines (`rolljax.data`), and of evaluations by
judges."""
ROOMS = (
    "chat_models",
    "data",
    "envs",
    "evaluation",
    "model",
    "recipes",
    "rewards",
    "rollout",
    "sampler",
    "trackers",
    "trainer",
)
"""Where classes stand that may be given although no annotation names them: all that derive from one that it names."""
GROUPS = {
    "recipe": "The run",
    "trainer.mesh": "Devices",
    "cluster.placement": "Samplers in other processes",
    "model": "Models",
    "sampler": "The sampler",
    "rollout": "Episodes",
    "envs.pool": "The pool of environments",
    "sandbox": "Sandboxes",
    "trainer.optimizer": "Optimizers",
    "trainer": "Parts of algorithms",
    "envs": "Environments",
    "envs.tools": "Tools",
    "rewards": "Rewards",
    "judging": "Calls to judges",
    "trackers": "Trackers",
    "simulation": "Simulations",
    "data": "Data pipelines",
    "chat_models": "Chat models",
    "evaluation.judged": "Evaluations by judges",
    "recipes": "Recipes",
}
"""Sections of the page, by the longest beginning of a module's name."""
FAMILIES: dict[type, str] = {EnvSpec: "#environments", Algorithm: "#algorithms", Tools: "#tools"}
"""Classes without settings, of which many derive, and where these are."""
INTRO = f"""{NOTICE}

# Settings reference

Everything that a gin file or `--set` can set: `--set 'Phase.steps = 300'`, and in one phase of several
`--set 'rl/Phase.steps = 300'`. [Settings](config.md) says how files are written and what is refused. This page is made
from the dataclasses.

A type that is a class takes an object: `Recipe.lora = @lora.Lora()`, with its own settings beside it
(`lora.Lora.rank = 16`). `required`: there is no default.
"""


def load_rooms() -> None:
    """Import every module that may define a class of settings; what runs inside a sandbox has none."""
    for room in ROOMS:
        package = importlib.import_module(f"rolljax.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not {"terminal_tasks", "__main__"} & set(info.name.split(".")):
                importlib.import_module(info.name)


def derived(cls: type) -> Iterator[type]:
    """Yield the classes of rolljax that derive from one, at any depth, without classes that a test or a page made."""
    for sub in cls.__subclasses__():
        if sub.__module__.startswith("rolljax."):
            yield sub
            yield from derived(sub)


def ours_in(annotation: Any) -> Iterator[type]:
    """Yield our classes in an annotation, at any depth."""
    if isinstance(annotation, type) and annotation.__module__.startswith("rolljax."):
        yield annotation
    for arg in typing.get_args(annotation):
        yield from ours_in(arg)


def _named_by(cls: type) -> list[type]:
    """Return the classes that the fields of a class may hold."""
    if not is_config(cls):
        return []
    named = [c for annotation in check.hints(cls).values() for c in ours_in(annotation)]
    return [*default_classes(cls), *named, *(sub for c in named for sub in derived(c))]


def setting_classes() -> list[type]:
    """Return every class whose fields a config can set, by its place on the page. Abstract classes without settings of
    their own are left out."""
    load_rooms()
    found = [c for c in closure(ROOTS, _named_by) if is_config(c) and not c.__name__.startswith("_")]
    return sorted(found, key=_place)


def _place(cls: type) -> tuple[Any, ...]:
    """Return the sort key of a class: roots and bases come before the classes that depend on them."""
    return (
        list(GROUPS).index(group_of(cls)),
        cls not in ROOTS,
        cls.__module__,
        not inspect.isabstract(cls),
        cls.__name__,
    )


def group_of(cls: type) -> str:
    """Return the key of `GROUPS` whose section has a class.

    Raises:
      ValueError: there is none.
    """
    module = cls.__module__.removeprefix("rolljax.")
    fitting = [g for g in GROUPS if f"{module}.".startswith(f"{g}.")]
    if not fitting:
        raise ValueError(f"{cls.__module__}.{cls.__name__} can be set: which section of GROUPS is it in?")
    return max(fitting, key=len)


# ---- tables ---------------------------------------------------------------------------------------------------------


def has_page(cls: type) -> bool:
    """Return whether a class is an algorithm with a page; a recipe's own is on the page of settings."""
    return issubclass(cls, Algorithm) and not cls.__module__.startswith("rolljax.recipes.")


def page_of(cls: type) -> str:
    """Return the link to the settings of a class, relative to the page."""
    if cls in FAMILIES:
        return FAMILIES[cls]
    if has_page(cls):
        module = cls.__module__.rpartition(".")[2]
        return f"algorithms/{module}.md#{module}{cls.__name__}".lower()
    return f"#{cls.__name__.lower()}"


def type_text(annotation: Any, known: set[type]) -> str:
    """Format an annotation for users; classes that have settings are links."""
    text = cell(check.describe(annotation))
    for cls in {c for c in ours_in(annotation) if c in known or c in FAMILIES}:
        text = re.sub(rf"\b{cls.__name__}\b", f"[{cls.__name__}]({page_of(cls)})", text)
    return text


def own_fields(cls: type, known: set[type]) -> list[dataclasses.Field]:
    """Return the fields that a class declares, or that no base with its own section has."""
    declared = inspect.get_annotations(cls)
    return [f for name, f in fields(cls).items() if name in declared or not _base_with(cls, name, known)]


def _base_with(cls: type, name: str, known: set[type]) -> type | None:
    """Return the nearest base with its own section that has this field."""
    return next((b for b in cls.__mro__[1:] if b in known and name in fields(b)), None)


def paged(text: str) -> str:
    """Replace pages of the docs by links."""
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def default_text(field: dataclasses.Field) -> str:
    """Format a default as code."""
    default = field_default(field)
    return "required" if default is dataclasses.MISSING else f"`{cell(shown(default))}`"


def section(cls: type, known: set[type]) -> list[str]:
    """Describe a class and its settings."""
    meanings, hints = meanings_of(cls), check.hints(cls)
    lines = ["", f"### {cls.__name__}", "", f"`{cls.__module__}.{cls.__name__}`", ""]
    if prose := paragraphs_of(cls):
        lines += [linked(prose[0]), ""]
    if own := own_fields(cls, known):
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for field in own:
        row = (f"`{field.name}`", type_text(hints[field.name], known), default_text(field))
        lines.append(f"| {' | '.join(row)} | {cell(paged(linked(meanings[field.name])))} |")
    bases = {_base_with(cls, name, known): None for name in fields(cls) if name not in {f.name for f in own}}
    lines += [f"{chr(10) if own else ''}It has the settings of [{b.__name__}]({page_of(b)}) too." for b in bases if b]
    return lines if fields(cls) else [*lines, "It has no settings."]


def algorithms_index(classes: list[type]) -> list[str]:
    """Return links to the settings of each algorithm."""
    links = [f"[{c.__name__}]({page_of(c)})" for c in classes if not inspect.isabstract(c)]
    return ["", "## Algorithms", "", "Each has a page with its settings: " + ", ".join(links) + "."]


def page() -> str:
    """Return the page."""
    classes = setting_classes()
    known = {c for c in classes if not (issubclass(c, Algorithm) and inspect.isabstract(c))}
    lines, group = [INTRO.rstrip()], ""
    for cls in classes:
        if has_page(cls):
            continue
        if group != (group := group_of(cls)):
            lines += ["", f"## {GROUPS[group]}"]
        lines += section(cls, known)
    lines += algorithms_index([c for c in classes if has_page(c)])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
