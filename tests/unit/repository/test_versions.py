"""docs/versions.md lists every unstable interface of JAX that the package imports, with the file that imports it."""

import ast
import re
from pathlib import Path

import rolljax

PACKAGE = Path(rolljax.__file__).parent
PAGE = PACKAGE.parent / "docs/versions.md"
UNSTABLE = ("jax.experimental", "jax.extend", "jax._src")


def unstable_imports():
    """Return (module, file) for each import of an unstable module; `from jax.experimental import x` is `jax.experimental.x`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE.parent).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from ((name, file) for name in names if name.startswith(UNSTABLE))


def listed():
    """Return (module, files) for each row of the table."""
    for row in PAGE.read_text().split("\n## ")[1].splitlines():
        cells = [re.findall(r"`([^`]+)`", cell) for cell in row.split("|")]
        if len(cells) > 3 and cells[1]:
            yield cells[1][0], cells[2]


def test_every_unstable_import_is_listed_with_its_file():
    rows = dict(listed())
    used = {module: set() for module in rows}
    for name, file in unstable_imports():
        rows_of_name = [module for module in rows if f"{name}.".startswith(f"{module}.")]
        assert rows_of_name, f"{file} imports {name}: add it to docs/versions.md with the plan for it"
        used[max(rows_of_name, key=len)].add(file)
    assert used == {module: set(files) for module, files in rows.items()}
