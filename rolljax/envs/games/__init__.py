"""Games of our own: pure Python, deterministic, with observations of tens of bytes."""
