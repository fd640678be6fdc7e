"""ROME (arXiv 2512.24873): an agent trained by IPA, and masks of turns for supervised data."""

ENVIRONMENTS = {"key_door_chain": "rolljax.recipes.rome.key_door_chain.KeyDoorChain"}
