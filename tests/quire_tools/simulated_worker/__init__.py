"""Tests of the simulated worker."""
