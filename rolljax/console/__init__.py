"""Output for people: progress, foreign text made safe for a terminal, curves of characters."""
