"""rolljax: reinforcement-learning post-training of language models in JAX.

`train`, `evaluate`, `export` and `load` are the verbs as functions (docs/library.md); on the command line they are
`python -m rolljax.train` and so on. Everything is imported when it is first used.
"""

from types import ModuleType

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rolljax.library.run import Run as Run
    from rolljax.library.verbs import evaluate as evaluate
    from rolljax.library.verbs import export as export
    from rolljax.library.verbs import load as load
    from rolljax.library.verbs import train as train
    from rolljax.recipe import Phase as Phase
    from rolljax.recipe import Recipe as Recipe

_HOME = dict.fromkeys(("train", "evaluate", "export", "load"), "rolljax.library.verbs") | {
    "Run": "rolljax.library.run",
    "Recipe": "rolljax.recipe",
    "Phase": "rolljax.recipe",
}
"""Public name -> the module it is imported from when it is first asked for."""
__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rolljax' has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


class _Package(ModuleType):
    """`rolljax.train` is the function, also where the module of that name, which the command line runs, was imported:
    `from rolljax.train import main` finds the module, and leaves the function where it is."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


__import__("sys").modules[__name__].__class__ = _Package
