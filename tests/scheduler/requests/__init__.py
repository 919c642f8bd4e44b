"""Tests of what the scheduler takes in."""
