"""DDK (arXiv 2407.16154): distillation with shares of domains by how far the student lags behind."""
