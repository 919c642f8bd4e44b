"""Tests of the scheduler's side of workers."""
