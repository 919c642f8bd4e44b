"""The worker with a cost model instead of a model: the same protocol."""
