"""rolljax from Python: the verbs as functions, their result objects, and their progress in a notebook
(docs/library.md)."""
