"""Tests of who may call."""
