"""Tests of Chitu's schedulers."""
