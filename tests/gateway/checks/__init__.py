"""Tests of what requests may ask for."""
