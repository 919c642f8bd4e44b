"""What the scheduler measures of itself: /metrics, the line of statistics, the log of failed steps."""
