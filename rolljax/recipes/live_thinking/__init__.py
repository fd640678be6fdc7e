"""LiveThinking (arXiv 2510.07685): short reasoning by a reward for lengths within a band."""
