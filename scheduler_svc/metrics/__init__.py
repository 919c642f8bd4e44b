"""What the scheduler measures of itself, and how it is told: /metrics, the line of statistics, the log of failed steps."""
