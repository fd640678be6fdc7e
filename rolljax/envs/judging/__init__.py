"""Preference pairs as an environment: the policy thinks about two answers and says which is better (Think-J)."""
