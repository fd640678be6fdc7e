"""From trajectories to advantages, in NumPy on the host."""
