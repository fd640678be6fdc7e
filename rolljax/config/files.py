"""gin files by their names: a path, or the name of a file that comes with rolljax."""

from __future__ import annotations

import functools
from pathlib import Path

from rolljax.config import check
from rolljax.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
CONFIGS = (PACKAGE / "configs", PACKAGE.parent / "configs", PACKAGE / "recipes")
"""Folders of the configs that come with rolljax: in the installed package, in a checkout, one folder per paper."""


def find_config(name: str) -> str:
    """Return the path of a gin file: `name` is a path, or names a file that comes with rolljax, with its folder
    (`quickstart`, `algorithms/topr`, `dlcot/data`) or, where no other file has this name, without it (`think_j`)."""
    if Path(name).exists() and not Path(name).is_dir():
        return name
    inside = Path(name.removeprefix("configs/").removesuffix(".gin") + ".gin")
    for folder in CONFIGS:
        if not inside.is_absolute() and ".." not in inside.parts and (folder / inside).is_file():
            return str(folder / inside)
    same = [path for path in _shipped().values() if path.stem == name.removesuffix(".gin")]
    return str(same[0]) if len(same) == 1 else name


def include_path(path: str, name: str) -> str:
    """Return the path of the included file `name`: next to the including file, else as `find_config` finds it."""
    beside = Path(path).parent / name
    found = find_config(name)
    return found if Path(found).is_file() and not beside.is_file() else str(beside)


def read(path: str, included_at: str) -> str:
    """Return the text of a gin file. Raise `ConfigError` with the file:line that includes it, if there is one."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("does not exist", setting=path, remedy=_files_near(path), where=included_at) from None
    except IsADirectoryError:
        remedy = _files_near(str(Path(path, "x.gin")))
        raise ConfigError("is a folder, not a gin file", setting=path, remedy=remedy, where=included_at) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot be read: {e}", setting=path, where=included_at) from None


def _files_near(path: str) -> str:
    """Return a hint for a gin file that does not exist: the closest name there or in rolljax, else all names."""
    folder, name = Path(path).parent, Path(path).stem
    beside = {p.stem: p.name for p in folder.glob("*.gin")}
    shipped = _shipped()
    if near := check.near(name, beside):
        return f"did you mean '{folder / beside[near]}'?"
    if near := check.near(path.removeprefix("configs/").removesuffix(".gin"), shipped) or check.near(name, shipped):
        return f"did you mean '{near}', which comes with rolljax?"
    here = f"gin files in {folder}: {', '.join(sorted(beside.values()))}; " if beside else ""
    return f"{here}files that come with rolljax: {', '.join(n for n in shipped if '/' not in n)}"


@functools.cache
def _shipped() -> dict[str, Path]:
    """Return the configs that come with rolljax by the names under which users know them, sorted."""
    found = [(folder, path) for folder in CONFIGS for path in folder.rglob("*.gin")]
    stems = [path.stem for _, path in found]
    named = {
        path.stem
        if folder.name == "recipes" and stems.count(path.stem) == 1
        else path.relative_to(folder).with_suffix("").as_posix(): path
        for folder, path in found
    }
    return dict(sorted(named.items()))
