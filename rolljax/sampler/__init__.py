"""The sampler room: the engine (pure device programs over KV pages), the scheduler that feeds it, the client."""
