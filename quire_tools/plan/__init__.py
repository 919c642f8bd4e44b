"""What fits into a memory, and why, from a model's configuration alone."""
