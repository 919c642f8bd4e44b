"""`python -m benchmarks.streams`."""
