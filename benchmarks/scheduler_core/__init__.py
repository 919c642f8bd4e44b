"""`python -m benchmarks.scheduler_core`."""
