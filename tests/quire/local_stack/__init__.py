"""Tests of stacks of local processes."""
