"""Tests of the tour."""
