"""Programs compiled ahead of time, and what their compiled text says of memory, work and time."""
