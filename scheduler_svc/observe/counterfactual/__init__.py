"""Counterfactuals of waits: which values of which knobs would have let a request in."""
