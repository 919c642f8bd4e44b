"""Chitu's planning: task scores, cache slots, data-parallel ranks."""
