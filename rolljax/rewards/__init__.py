"""Rewards of finished episodes, computed in addition to the environment's own reward."""
