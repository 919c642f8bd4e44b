"""Towards the scheduler: one stream, all requests of this gateway on it."""
