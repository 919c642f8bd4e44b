"""Tests of tokenizers, templates and stop strings."""
