"""The environment room: tasks, environments, the host pool. Nothing here imports jax."""
