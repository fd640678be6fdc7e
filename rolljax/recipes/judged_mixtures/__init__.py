"""A mixture of verifiable tasks and open ones that a judge scores, and a judge trained for it."""
