"""DLCoT (arXiv 2503.16385): long chains of thought, taken apart, pruned and rewritten."""
