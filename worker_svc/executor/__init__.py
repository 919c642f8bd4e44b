"""Step execution on the model: launch, asynchronous results and the profile run."""
