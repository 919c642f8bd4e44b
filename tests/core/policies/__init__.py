"""Tests of scheduler_svc/core/policies."""
