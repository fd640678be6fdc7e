"""The loop on a virtual clock: an engine, environments and a trainer that only take time."""
