"""RecGPT (arXiv 2507.22879): tags of what users want next, fused with retrieval."""
