"""`python -m benchmarks.policies`."""
