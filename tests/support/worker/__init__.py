"""Engines and workers in the test's process, their steps, rows and checkpoints."""
