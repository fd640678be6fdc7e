"""Beyond Safe Answers (arXiv 2505.19690): answers and reasoning judged for safety."""
