"""More than one process."""
