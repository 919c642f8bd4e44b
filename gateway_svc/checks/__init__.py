"""Validation of requests, and all defaults. Pure."""
