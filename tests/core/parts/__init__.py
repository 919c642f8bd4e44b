"""Tests of scheduler_svc/core/parts."""
