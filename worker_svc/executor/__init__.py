"""Runs steps on the model: launch, asynchronous results, profile run."""
