"""What threads of this process share: queues, waits, an event loop."""
