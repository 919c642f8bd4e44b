"""Is this installation, this machine, this model, this service as it should be? One finding per check."""
