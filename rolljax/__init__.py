"""rolljax: reinforcement-learning post-training of language models in JAX.

`train`, `evaluate`, `export` and `load` are the verbs as functions (docs/library.md); on the command line they are
`python -m rolljax.train` and so on. Everything is imported when it is first used. A name is never a function and a
module by turns: `rolljax/train.py` and `rolljax/export.py` can be run and not imported, as importing a module would
bind its name in this package over the function.
"""

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
"""Public name -> the module from which it is imported at its first use."""
__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rolljax' has no attribute {name!r}")
    import importlib

    found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
