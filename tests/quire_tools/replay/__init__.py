"""Tests of replays and what-ifs."""
