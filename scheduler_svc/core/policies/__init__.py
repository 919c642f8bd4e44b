"""Planning of steps, one folder per family of policies."""
