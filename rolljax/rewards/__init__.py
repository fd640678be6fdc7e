"""What episodes are worth: rewards that are worked out beside the environment's own, when an episode has ended."""
