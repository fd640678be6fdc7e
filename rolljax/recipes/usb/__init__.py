"""USB (arXiv 2505.23793): safety and refusal rates, text part."""
