"""Traces of all three services: what is in them, beside the step log; which are recorded; what an ill collector costs."""
