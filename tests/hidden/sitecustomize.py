"""Makes a process one of a machine without these packages: Python runs this file at its start where this folder is on
`PYTHONPATH`. Processes that it starts inherit that."""

import builtins
import sys

HIDDEN = {
    "ray", "grain", "gin", "reasoning_gym", "gymnasium", "jetstream", "cloudpickle", "math_verify", "re2", "httpx2", "starlette",
    "uvicorn", "httptools", "pydantic", "websockets", "sympy",
}  # fmt: skip
FOR_OTHERS = {"httpx2", "pydantic", "sympy"}
"""Libraries of transformers import these where they are installed (another version of theirs might not): only rolljax,
its benchmarks and what was given by `-c` find none."""
OURS = ("rolljax", "common", "learning", "__main__")

sys.modules.update(dict.fromkeys(HIDDEN - FOR_OTHERS))
_import = builtins.__import__


def _checked(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "").partition(".")[0]
    if level == 0 and importer in OURS and name.partition(".")[0] in HIDDEN:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _checked
