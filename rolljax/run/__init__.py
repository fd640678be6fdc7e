"""The parts of a run."""
