"""Tests of what the scheduler tells about its steps."""
