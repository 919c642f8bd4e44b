"""`python -m benchmarks.growth`."""
