"""Gateway's connection to the scheduler: one stream that carries all requests of this gateway."""
