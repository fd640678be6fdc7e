"""Evaluation: models on the tasks of environments, several attempts each, with intervals and comparisons."""
