"""The sampler behind JetStream's engine interface."""
