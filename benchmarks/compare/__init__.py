"""Compares Quire with its peers on one CPU: same model and workloads, in turn, in one run (`python -m benchmarks.compare`)."""
