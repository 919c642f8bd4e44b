"""Gateways and schedulers in the test's process, and what they are given."""
