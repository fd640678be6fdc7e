"""Computes advantages from trajectories, in NumPy on the host."""
