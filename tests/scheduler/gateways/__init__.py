"""Tests of what gateways get."""
