"""`python -m benchmarks.call_path`."""
