"""Tests of vLLM's V0 scheduler."""
