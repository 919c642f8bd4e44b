"""What-if replays of recordings, and the reports and plots of `quire replay`."""
