"""Threads and processes: named waits with deadlines, one event loop, child processes, and processes that make the same
calls in step."""
