"""`python -m benchmarks.mixtures`."""
