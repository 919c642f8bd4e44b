"""Streams of gateways: submitted requests in, outputs out, detached and resubmitted requests."""
