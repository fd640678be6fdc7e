"""GEM (arXiv 2510.01051): its environments, and ReBN."""
