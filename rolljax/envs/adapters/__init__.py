"""Adapters for environments of other libraries and of servers. docs/environments.md explains the mapping of each."""
