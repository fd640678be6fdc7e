"""Compiles programs ahead of time, and reads memory, work and time from their compiled text."""
