"""The scheduler's self-measurement: /metrics, the statistics log line, the log of failed steps."""
