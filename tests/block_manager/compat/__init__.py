"""Tests of the cache rules of other systems."""
