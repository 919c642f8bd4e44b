"""Gateway's connection to the scheduler: one stream that carries the messages of all its requests."""
