"""`python -m benchmarks.overlap`."""
