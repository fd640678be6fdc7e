"""Constants that the host and its supervisor share."""

MAX_MESSAGE = 256 << 10
"""Maximum size of a message, in bytes."""
STATUS_FD = 3
"""Descriptor of bubblewrap's status inside the forked child; data descriptors follow from here on."""
