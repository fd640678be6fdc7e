"""Threads and processes: named waits with deadlines, one event loop, and processes that make the same calls in step."""
