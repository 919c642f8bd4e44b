"""Tests of what becomes of a request's tokens."""
