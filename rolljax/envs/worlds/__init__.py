"""Worlds: a shop, a travel desk, word problems from a file."""
