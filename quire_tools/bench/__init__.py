"""Load tests of a running service: workloads, targets, and measurement of the responses."""
