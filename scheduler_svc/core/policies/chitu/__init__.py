"""Chitu's planning: ranks, slots, task scores, skew control."""
