"""Tests of the comparison with peers."""
