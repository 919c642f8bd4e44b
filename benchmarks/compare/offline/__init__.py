"""Programs that run inside a peer's own environment, with nothing but its library and Python's own."""
