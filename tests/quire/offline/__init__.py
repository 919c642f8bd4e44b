"""Tests of `LLM` in one process."""
