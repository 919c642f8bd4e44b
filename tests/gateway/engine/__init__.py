"""Tests of the gateway's side of the scheduler."""
