"""`python -m benchmarks.memory`."""
