"""`python -m benchmarks.gpu`."""
