"""Build the site into build/site: `make docs`, or `python docs/make_site.py`.

The site has four kinds of pages. Hand-written pages are in docs/ and at the root of the repository. The README of each
recipe is a page. Generated pages (settings, metrics, algorithms, papers, the API) are made from the code here and are
not committed. Files of code that a page links to become pages too.

Links on hand-written pages work in the repository: a link to the source of a generated page (`rolljax/metrics.py`,
`docs/make_settings_page.py`, an algorithm's file) leads on the site to the generated page. The staged pages in
build/docs are plain Markdown; building and reading the site needs no network.
"""

from __future__ import annotations

import functools
import importlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "BUILD.md": "map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages at the root of the repository, and where the site has them."""
MADE_FROM = {
    "docs/make_settings_page.py": "settings.md",
    "docs/make_papers_page.py": "papers.md",
    "docs/make_algorithm_pages.py": "algorithms/index.md",
    "rolljax/trainer/paper.py": "algorithms/defaults.md",
    "rolljax/metrics.py": "metrics.md",
}
"""Generated pages, by the source that a page of the repository links to instead. `made_from` adds the algorithms."""
LANGUAGES = {".py": "python", ".gin": "python", ".sh": "bash", ".json": "json"}
"""Languages for highlighting code; gin's syntax is Python's."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2$", re.S | re.M)


def outside_of_fences(change: Callable[[str], str], text: str) -> str:
    """Return the text with everything but its fenced blocks changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


# ---- links ----------------------------------------------------------------------------------------------------------


@functools.cache
def generators() -> ModuleType:
    """Import and return the module that makes the pages of algorithms."""
    return importlib.import_module("make_algorithm_pages")


@functools.cache
def made_from() -> dict[str, str]:
    """Return the generated pages by the source that they are made from."""
    names = generators().algorithm_classes()
    return MADE_FROM | {f"rolljax/trainer/algorithms/{name}.py": f"algorithms/{name}.md" for name in names}


def in_repo(page: str) -> str:
    """Return the file of the repository that a page of the site is made from; its links are relative to this file."""
    if recipe := re.fullmatch(r"recipes/(\w+)\.md", page):
        return f"rolljax/recipes/{recipe[1]}/README.md"
    root = {site: path for path, site in ROOT_PAGES.items()}
    return root.get(page) or f"docs/{page}"


def site_path(path: str) -> str:
    """Return where the site has a file of the repository."""
    if recipe := re.fullmatch(r"rolljax/recipes/(\w+)/(?:README\.md|(\w+\.(?:png|svg)))", path):
        return f"recipes/{recipe[2] or recipe[1] + '.md'}"
    if page := ROOT_PAGES.get(path) or made_from().get(path):
        return page
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def target(page: str, link: str) -> str | None:
    """Return the file of the repository that a link on a page of the site leads to; None for links elsewhere or within
    the page."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repo(page)), path))


def relinked(page: str, text: str) -> str:
    """Return a page's text with the links of the site."""

    def new(m: re.Match[str]) -> str:
        path = target(page, m[2])
        if path is None:
            return m[0]
        anchor = m[2].partition("#")[1:]
        return m[1] + posixpath.relpath(site_path(path), posixpath.dirname(page) or ".") + "".join(anchor) + m[3]

    return outside_of_fences(lambda prose: LINK.sub(new, prose), text)


def links(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return [m[2] for m in LINK.finditer(FENCE.sub("", text))]


def linked_code(page: str, text: str) -> Iterator[str]:
    """Yield the files of code that a page links to and that have no page of their own."""
    for link in links(text):
        path = target(page, link)
        if path and site_path(path).startswith("source/") and (ROOT / path).is_file():
            yield path


def code_page(path: str) -> str:
    """Return a file of code as a page."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n`````{language}\n{(ROOT / path).read_text()}\n`````\n"


# ---- the API reference ----------------------------------------------------------------------------------------------

WITHOUT = {"terminal_tasks", "inside", "supervisor", "__main__"}
"""Folders and modules that are not imported: programs that run in sandboxes and other processes."""


@functools.cache
def modules() -> dict[str, list[str]]:
    """Return the names of modules with public parts, by room; the room of modules at the root is `rolljax`."""
    found: dict[str, list[str]] = {"rolljax": []}
    for path in sorted((ROOT / "rolljax").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        only_runs = parts[:-1] == ("rolljax",) and (ROOT / "rolljax" / "commands" / path.name).is_file()
        if not WITHOUT & set(parts) and "__init__" not in parts and not only_runs:
            found.setdefault(parts[1] if len(parts) > 2 else "rolljax", []).append(".".join(parts))
    return found


def api_page(room: str, names: list[str]) -> str:
    """Return the reference page of a room: everything public in its modules."""
    title = f"# {room if room == 'rolljax' else f'rolljax.{room}'}\n"
    return "\n".join([title, *(f"::: {name}\n" for name in names)])


# ---- the site -------------------------------------------------------------------------------------------------------


def as_markdown(page: str, text: str) -> str:
    """Convert a page to the site's Markdown, which does not know gin and is stricter than GitHub about tables and
    fences."""
    text = re.sub(r"\A<!--.*?-->\s*", "", text)  # a page's title is its first line
    if not text.startswith("#"):
        text = f"# {Path(page).stem.capitalize()}\n\n{text}"
    text = re.sub(r"^( *`{3,})gin\b", r"\1python", text, flags=re.M)
    text = re.sub(r"^(<!--.*-->)\n(?=\|)", r"\1\n\n", text, flags=re.M)
    indented = re.compile(r"^  ```\w*\n.*?^  ```$", re.S | re.M)
    text = indented.sub(lambda m: re.sub(r"^(?=.)", "  ", m[0], flags=re.M), text)
    return relinked(page, text)


def generated() -> dict[str, str]:
    """Make the pages that the code has: settings, metrics, papers, algorithms. Links are relative to docs/."""
    settings, papers = (importlib.import_module(f"make_{name}_page") for name in ("settings", "papers"))
    made = {"settings.md": settings.page(), "papers.md": papers.page(), "metrics.md": metrics_page()}
    return made | {f"algorithms/{name}": text for name, text in generators().pages().items()}


def metrics_page() -> str:
    """Return the table of every metric."""
    table = importlib.import_module("rolljax.metrics").markdown()
    return f"# Metrics\n\nEvery number that a run may write. The source is `rolljax/metrics.py`.\n\n{table}"


def hand_written() -> dict[str, Path]:
    """Return the hand-written pages by their path on the site."""
    paths = [*DOCS.glob("*.md"), *(ROOT / name for name in ROOT_PAGES), *ROOT.glob("rolljax/recipes/*/README.md")]
    return {site_path(p.relative_to(ROOT).as_posix()): p for p in sorted(paths)}


def pages() -> dict[str, str]:
    """Return every page of the site by its path there."""
    texts = {page: path.read_text() for page, path in hand_written().items()} | generated()
    linked = {path for page, text in texts.items() for path in linked_code(page, text)}
    made = {page: as_markdown(page, text) for page, text in texts.items()}
    made |= {f"api/{room}.md": api_page(room, names) for room, names in modules().items()}
    return made | {site_path(path): code_page(path) for path in sorted(linked)}


def pictures() -> list[Path]:
    """Return the pictures in docs/ and in the folders of recipes."""
    folders = (DOCS.rglob, (ROOT / "rolljax" / "recipes").rglob)
    return [path for find in folders for kind in ("*.png", "*.svg") for path in find(kind)]


def with_folders(config: str, found: Iterable[str]) -> str:
    """Replace each folder in the navigation (`- algorithms/`) by the pages in it, its index first."""

    def lines(m: re.Match[str]) -> str:
        inside = sorted((p for p in found if p.startswith(m[2])), key=lambda p: (not p.endswith("index.md"), p))
        return "".join(f"{m[1]}- {page}\n" for page in inside)

    return re.sub(r"^( +)- (\w+/)\n", lines, config, flags=re.M)


def stage(folder: Path) -> None:
    """Write the parts that the site is built from: its pages, the pictures, and a script for its search."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "assets").mkdir(parents=True)
    shutil.copy(DOCS / "iframe-worker.js", folder / "assets")
    for picture in pictures():
        target_file = folder / site_path(picture.relative_to(ROOT).as_posix())
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target_file)
    generators().draw(folder / "algorithms" / "curves")
    for page, text in pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)


def build(folder: Path) -> int:
    """Stage into `folder`/docs, build `folder`/site from it, and return mkdocs' exit code; a warning is an error."""
    stage(folder / "docs")
    found = [p.relative_to(folder / "docs").as_posix() for p in (folder / "docs").rglob("*.md")]
    config = with_folders((ROOT / "mkdocs.yml").read_text(), found)
    moved = config.replace("docs_dir: build/docs", f"docs_dir: {folder / 'docs'}")
    moved = moved.replace("site_dir: build/site", f"site_dir: {folder / 'site'}").replace(
        "paths: [.]", f"paths: [{ROOT}]"
    )
    (folder / "mkdocs.yml").write_text(moved)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(folder / "mkdocs.yml"),
    ]
    return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(build(ROOT / "build"))
