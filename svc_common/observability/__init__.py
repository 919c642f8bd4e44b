"""Traces, metrics and logs: one set-up for all services."""
