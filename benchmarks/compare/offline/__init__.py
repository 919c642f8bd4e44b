"""Programs that run inside a peer's own environment, using only its library and Python's standard library."""
