"""Builds the site into build/site: `make docs`, or `python docs/make_site.py`.

Pages in docs/ are written for a reader of the repository. Links that lead out of docs/ lead there to files; on the site
they lead to pages that are made of them here, as is the API reference. What is staged in build/docs is plain Markdown,
which mkdocs.yml says how to build; nothing is loaded from elsewhere, then or by a reader.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ROOT_PAGES = {
    "README.md": "index.md",
    "BUILD.md": "map.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages at the root of the repository, and where the site has them."""
LANGUAGES = {".py": "python", ".gin": "python", ".sh": "bash", ".json": "json"}
"""What code is highlighted as; gin's syntax is Python's."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2$", re.S | re.M)


def outside_of_fences(change: Callable[[str], str], text: str) -> str:
    """The text with everything but its fenced blocks changed."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


# ---- links ----------------------------------------------------------------------------------------------------------


def in_repo(page: str) -> str:
    """Where a page of the site stands in the repository."""
    root = {site: path for path, site in ROOT_PAGES.items()}
    return root.get(page) or f"docs/{page}"


def site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    return ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md")


def target(page: str, link: str) -> str | None:
    """The file of the repository that a link on a page of the site leads to; None for what is elsewhere or here."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repo(page)), path))


def relinked(page: str, text: str) -> str:
    """A page's text, its links those of the site."""

    def new(m: re.Match[str]) -> str:
        path = target(page, m[2])
        if path is None:
            return m[0]
        anchor = m[2].partition("#")[1:]
        return m[1] + posixpath.relpath(site_path(path), posixpath.dirname(page) or ".") + "".join(anchor) + m[3]

    return outside_of_fences(lambda prose: LINK.sub(new, prose), text)


def links(text: str) -> list[str]:
    """What a page links to."""
    return [m[2] for m in LINK.finditer(FENCE.sub("", text))]


def linked_code(page: str, text: str) -> Iterator[str]:
    """Files of the repository, neither in docs/ nor a page, that a page links to."""
    for link in links(text):
        path = target(page, link)
        if path and not path.startswith("docs/") and path not in ROOT_PAGES and (ROOT / path).is_file():
            yield path


def code_page(path: str) -> str:
    """A file of code as a page."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n`````{language}\n{(ROOT / path).read_text()}\n`````\n"


# ---- the API reference ----------------------------------------------------------------------------------------------

WITHOUT = {"terminal_tasks", "inside", "supervisor", "__main__"}
"""Folders and modules that nobody imports: what runs in sandboxes and other processes."""


@functools.cache
def modules() -> dict[str, list[str]]:
    """Names of modules with public parts, by room; those at the root under `rolljax`."""
    found: dict[str, list[str]] = {"rolljax": []}
    for path in sorted((ROOT / "rolljax").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not WITHOUT & set(parts) and "__init__" not in parts:
            found.setdefault(parts[1] if len(parts) > 2 else "rolljax", []).append(".".join(parts))
    return found


def api_page(room: str, names: list[str]) -> str:
    """The reference of a room: what stands in its modules."""
    title = f"# {room if room == 'rolljax' else f'rolljax.{room}'}\n"
    return "\n".join([title, *(f"::: {name}\n" for name in names)])


# ---- the site -------------------------------------------------------------------------------------------------------


def as_markdown(page: str, text: str) -> str:
    """A page as the site's Markdown has it, which knows no gin, and tables and fences by stricter rules than GitHub."""
    text = re.sub(r"\A<!--.*?-->\s*", "", text)  # a page's title is its first line
    if not text.startswith("#"):
        text = f"# {Path(page).stem.capitalize()}\n\n{text}"
    text = re.sub(r"^( *`{3,})gin\b", r"\1python", text, flags=re.M)
    text = re.sub(r"^(<!--.*-->)\n(?=\|)", r"\1\n\n", text, flags=re.M)
    indented = re.compile(r"^  ```\w*\n.*?^  ```$", re.S | re.M)
    text = indented.sub(lambda m: re.sub(r"^(?=.)", "  ", m[0], flags=re.M), text)
    return relinked(page, text)


def pages() -> dict[str, str]:
    """Every page of the site by its path there."""
    written = {f"docs/{p.relative_to(DOCS).as_posix()}": p for p in sorted(DOCS.rglob("*.md"))}
    written |= {name: ROOT / name for name in ROOT_PAGES}
    texts = {site_path(path): p.read_text() for path, p in written.items()}
    linked = {path for page, text in texts.items() for path in linked_code(page, text)}
    made = {page: as_markdown(page, text) for page, text in texts.items()}
    made |= {f"api/{room}.md": api_page(room, names) for room, names in modules().items()}
    return made | {site_path(path): code_page(path) for path in sorted(linked)}


def stage(folder: Path) -> None:
    """Write what the site is built from: its pages, the pictures in docs/, and a script for its search."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "assets").mkdir(parents=True)
    shutil.copy(DOCS / "iframe-worker.js", folder / "assets")
    for picture in [*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")]:
        target_file = folder / picture.relative_to(DOCS)
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target_file)
    for page, text in pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)


def build(folder: Path) -> int:
    """Stage into `folder`/docs and build `folder`/site of it; the exit code is mkdocs', which warns of nothing."""
    stage(folder / "docs")
    config = (ROOT / "mkdocs.yml").read_text()
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
