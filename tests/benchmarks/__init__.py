"""Tests of the benchmarks: their arithmetic, and small runs."""
