"""Quire and its peers on one CPU: same model, same work, in turn, in one run (`python -m benchmarks.compare`)."""
