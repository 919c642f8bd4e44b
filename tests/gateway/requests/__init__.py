"""Tests of the gateway's requests at the scheduler."""
