"""`python -m benchmarks.tracing`."""
