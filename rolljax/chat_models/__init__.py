"""Models that are asked by messages and answer by text: behind a server, or in this process."""
