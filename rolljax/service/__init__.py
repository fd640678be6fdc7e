"""A training service: Tinker's API over this machine's model. See docs/service.md."""
