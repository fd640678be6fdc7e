"""Episodes: environment and policy taking turns."""
