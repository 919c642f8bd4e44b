"""Tests of the cache rules that serve."""
