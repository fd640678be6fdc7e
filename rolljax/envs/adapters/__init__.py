"""Environments of other libraries and other machines, in rolljax's terms. docs/environments.md says what each maps."""
