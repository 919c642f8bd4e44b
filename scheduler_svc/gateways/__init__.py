"""Gateway streams: submitted requests in, outputs out; detached and resubmitted requests."""
