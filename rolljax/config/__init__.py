"""Settings: gin files and --set to one checked tree of frozen dataclasses."""
