"""RecGPT (arXiv 2507.22879): a model predicts tags for a user's next item, which are fused with retrieval."""
