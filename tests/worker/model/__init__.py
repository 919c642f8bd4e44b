"""Tests of weights that are not stored or kept as they are computed with."""
