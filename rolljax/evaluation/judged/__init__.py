"""Evaluations by judges: answers to items of a file, verdicts of chat models about them, tables of these."""
