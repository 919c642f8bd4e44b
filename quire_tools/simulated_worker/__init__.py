"""The worker with a cost model instead of a model, behind the same protocol."""
