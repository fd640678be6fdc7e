"""Environments of other libraries and other machines, in rolljax's terms. docs/adapters.md says what each maps."""
