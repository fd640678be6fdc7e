"""Environments whose actions run as programs, in sandboxes: coding problems and tasks at a terminal."""
