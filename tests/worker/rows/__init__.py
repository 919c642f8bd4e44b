"""Tests of the persistent batch."""
