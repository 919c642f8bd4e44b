"""Accepted requests of the service, from a `Submit` to their single terminal message."""
