"""Shared tools for threads of this process: queues, waits, an event loop."""
