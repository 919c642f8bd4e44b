"""Tests of what would have ended a wait."""
