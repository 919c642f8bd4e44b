"""Counterfactuals of waits: which values of which policy keys would have let a request in."""
