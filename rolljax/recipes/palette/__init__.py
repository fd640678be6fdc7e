"""Reasoning Palette (arXiv 2512.17206): latents, decoded to prefixes, that vary the strategy of answers."""

ENVIRONMENTS = {"styled_words": "rolljax.recipes.palette.styled_words.StyledWords"}
