"""What fits into a memory, and why, from a configuration alone."""
