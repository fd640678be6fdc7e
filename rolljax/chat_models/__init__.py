"""Chat models that answer conversations with text: behind a server, or in this process."""
