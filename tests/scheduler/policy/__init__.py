"""Tests of policies as operators choose them."""
