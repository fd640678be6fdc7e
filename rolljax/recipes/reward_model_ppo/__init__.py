"""InstructGPT (arXiv 2203.02155): a reward model from pairs, then PPO."""
