"""Tests of the lab of a recording."""
