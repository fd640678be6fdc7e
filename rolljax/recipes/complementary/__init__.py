"""Complementary RL (arXiv 2603.17621): an actor that is shown experiences, and an extractor that learns to write
them."""

ENVIRONMENTS = {
    "key_rules": "rolljax.recipes.complementary.key_rules.KeyRules",
    "with_experience": "rolljax.recipes.complementary.experience.WithExperience",
    "extraction": "rolljax.recipes.complementary.extraction.Extraction",
}
