"""rolljax from Python: the verbs as functions, what they return, and their progress in a notebook (docs/library.md)."""
