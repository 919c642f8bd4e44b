"""`python -m benchmarks.relay`."""
