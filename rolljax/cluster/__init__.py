"""Samplers in other processes: the channel to them, snapshots of weights that they fetch, who gets which request."""
