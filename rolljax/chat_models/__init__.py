"""Chat models that answer conversations with text: on a server, or in this process."""
